"""The lane is chosen by what the caches are, and by what comes out."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import RotatingKVCache
from mlx_lm.models.rope_utils import DynamicNTKScalingRoPE

from lanes.choice import choose_lane, probe
from lanes.solo import RowMaker
from tests.lanes.tiny import tiny_llama


def test_plain_attention_is_batched() -> None:
    choice = choose_lane(RowMaker(tiny_llama()))
    assert choice.lane == "batch"
    assert choice.cache_kinds == ("kv",) * 4
    assert probe(RowMaker(tiny_llama())) == 0.0


def test_a_cache_that_nobody_registered_is_named() -> None:
    class OddCache(RotatingKVCache):
        pass

    model = tiny_llama()
    model.make_cache = lambda: [OddCache(max_size=8) for _ in model.layers]
    choice = choose_lane(RowMaker(model))
    assert choice.lane == "serial"
    assert "OddCache" in choice.reason


def test_a_rope_that_takes_no_vector_is_found() -> None:
    model = tiny_llama()
    for layer in model.layers:
        layer.self_attn.rope = DynamicNTKScalingRoPE(8, 16, False, 10000.0, 2.0)
    choice = choose_lane(RowMaker(model))
    assert choice.lane == "serial"
    assert "fail" in choice.reason


def test_a_model_that_is_silently_wrong_is_found() -> None:
    class WidthRope(nn.Module):
        """Rotates every row by the longest one's position, as if rows were padded to one width."""

        def __call__(self, x: mx.array, offset: Any = 0) -> mx.array:
            if isinstance(offset, mx.array):
                offset = mx.full(offset.shape, mx.max(offset), offset.dtype)
            return mx.fast.rope(x, 8, traditional=False, base=10000.0, scale=1.0, offset=offset)

    model = tiny_llama()
    for layer in model.layers:
        layer.self_attn.rope = WidthRope()
        # Larger queries and keys: with random weights attention hardly looks at positions.
        layer.self_attn.q_proj.weight *= 20
        layer.self_attn.k_proj.weight *= 20
    choice = choose_lane(RowMaker(model))
    assert choice.lane == "serial"
    assert "off by" in choice.reason
