"""What tests of real and tiny models share."""

import sys

import pytest
from mlx_lm.models import base


@pytest.fixture
def mlx_lms_attention() -> None:
    """In the modules of models again, whatever form of attention other tests have left there."""
    name = "scaled_dot_product_attention"
    for module in [module for key, module in sys.modules.items() if key.startswith("mlx_lm.models.")]:
        if hasattr(module, name):
            setattr(module, name, getattr(base, name))
