"""What tests of real and tiny models share."""

import sys

import pytest
from mlx_lm.models import base

from lanes.attention import NAME, LaneAttention
from lanes.tuning import backend


@pytest.fixture
def mlx_lms_attention() -> None:
    """In the modules of models again, whatever form of attention other tests have left there. On CUDA, which has no
    quantized products for it, the form that is nearest."""
    attention = LaneAttention("fused", "cuda") if backend() == "cuda" else base.scaled_dot_product_attention
    for module in [module for key, module in sys.modules.items() if key.startswith("mlx_lm.models.")]:
        if hasattr(module, NAME) and module is not base:
            setattr(module, NAME, attention)
