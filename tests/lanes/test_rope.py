"""A position for each row: what mlx-lm's rotary embeddings make of a vector equals their scalar calls, bit for bit."""

import ast
import pkgutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.models
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models import (
    deepseek_v2,
    hunyuan,
    hunyuan_v1_dense,
    internlm3,
    ministral3,
    nanochat,
    rope_utils,
    talkie,
)

from lanes.choice import UNFIT_PARTS

HEADS, DIM = 2, 32
YARN = {"scaling_factor": 4.0, "original_max_position_embeddings": 64}
Rope = Callable[..., mx.array]


def of_talkie() -> Rope:
    args = talkie.ModelArgs(hidden_size=DIM, num_attention_heads=1, head_dim=DIM)
    return talkie.Attention(args)._rope


# By module of mlx_lm.models and class or function that calls mx.fast.rope; a few of the ways they are set up.
ROPES: dict[tuple[str, str], list[Callable[[], Rope]]] = {
    ("deepseek_v2", "DeepseekV2YarnRotaryEmbedding"): [
        lambda: deepseek_v2.DeepseekV2YarnRotaryEmbedding(DIM, **YARN, mscale=0.7, mscale_all_dim=0.3)
    ],
    ("hunyuan", "DynamicNTKAlphaRoPE"): [lambda: hunyuan.DynamicNTKAlphaRoPE(DIM, scaling_alpha=1000.0)],
    ("hunyuan_v1_dense", "DynamicNTKAlphaRoPE"): [
        lambda: hunyuan_v1_dense.DynamicNTKAlphaRoPE(DIM, scaling_alpha=1000.0)
    ],
    ("nanochat", "apply_rotary_emb"): [lambda: nanochat.apply_rotary_emb],
    ("rope_utils", "SuScaledRoPE"): [
        lambda: rope_utils.SuScaledRoPE(DIM, long_factor=[1.0 + i / 4 for i in range(DIM // 2)]),
        lambda: rope_utils.SuScaledRoPE(DIM // 2, long_factor=2.0, long_mscale=1.3),
    ],
    ("rope_utils", "Llama3RoPE"): [
        lambda: rope_utils.Llama3RoPE(DIM, scaling_config={"factor": 8.0, "original_max_position_embeddings": 64}),
        lambda: rope_utils.Llama3RoPE(DIM // 2, traditional=True, scaling_config={"factor": 32.0}),
    ],
    ("rope_utils", "YarnRoPE"): [
        lambda: rope_utils.YarnRoPE(DIM, **YARN),
        lambda: rope_utils.YarnRoPE(DIM // 2, traditional=True, **YARN, mscale=0.7, mscale_all_dim=0.3),
    ],
    ("rope_utils", "ProportionalRoPE"): [lambda: rope_utils.ProportionalRoPE(DIM, DIM // 4, factor=2.0)],
    ("talkie", "Attention"): [of_talkie],
    # Of MLX itself, which most models take.
    ("mlx.nn", "RoPE"): [
        lambda: nn.RoPE(DIM),
        lambda: nn.RoPE(DIM // 2, traditional=True),
        lambda: nn.RoPE(DIM, base=1e6, scale=0.25),
    ],
}

# Their base depends on the length of the one row that they are made for.
SCALAR_ONLY: dict[tuple[str, str], Callable[[], Rope]] = {
    ("rope_utils", "DynamicNTKScalingRoPE"): lambda: rope_utils.DynamicNTKScalingRoPE(DIM, 64, False, 1e4, 2.0),
    # No model takes it: internlm3 has the one of rope_utils.
    ("internlm3", "DynamicNTKScalingRoPE"): lambda: internlm3.DynamicNTKScalingRoPE(DIM, 64),
}

positions = st.lists(st.integers(0, 100) | st.integers(0, 1 << 17), min_size=2, max_size=6)


@pytest.mark.parametrize(
    "make",
    [pytest.param(make, id=f"{'.'.join(name)}-{i}") for name, ways in ROPES.items() for i, make in enumerate(ways)],
)
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@settings(deadline=None, max_examples=25)
@given(offsets=positions)
def test_a_vector_of_positions_equals_the_scalar_calls(
    make: Callable[[], Rope], dtype: mx.Dtype, offsets: list[int]
) -> None:
    rope = make()
    tokens = mx.random.normal((len(offsets), 1, HEADS, DIM), key=mx.random.key(0)).astype(dtype)
    queries = tokens.transpose(0, 2, 1, 3)  # as models have them: not contiguous
    together = rope(queries, offset=mx.array(offsets, dtype=mx.int32))
    for row, offset in enumerate(offsets):
        assert mx.array_equal(together[row : row + 1], rope(queries[row : row + 1], offset=offset))


@pytest.mark.parametrize("name", SCALAR_ONLY, ids=".".join)
def test_what_takes_no_vector_says_so(name: tuple[str, str]) -> None:
    queries = mx.zeros((3, HEADS, 1, DIM))
    with pytest.raises((ValueError, TypeError)):
        SCALAR_ONLY[name]()(queries, offset=mx.array([1, 70, 300]))


def test_what_takes_no_vector_is_known_to_the_choice_of_lane() -> None:
    assert ("rope_utils", "DynamicNTKScalingRoPE") in UNFIT_PARTS


def test_every_rotary_embedding_of_mlx_lm_is_here() -> None:
    """Found in the sources: whatever calls mx.fast.rope. A new mlx-lm cannot bring one that is not looked at."""
    sources = {module.name: source_of(module.name) for module in pkgutil.iter_modules(mlx_lm.models.__path__)}
    found = {
        (name, top.name)
        for name, source in sources.items()
        if "mx.fast.rope(" in source
        for top in ast.parse(source).body
        if isinstance(top, ast.ClassDef | ast.FunctionDef) and "mx.fast.rope(" in ast.unparse(top)
    }
    assert found == {*ROPES, *SCALAR_ONLY} - {("mlx.nn", "RoPE")}


def source_of(name: str) -> str:
    spec = find_spec(f"mlx_lm.models.{name}")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).read_text()


@settings(deadline=None, max_examples=25)
@given(offsets=positions)
def test_a_scale_by_position_takes_a_vector(offsets: list[int]) -> None:
    """ministral3 and mistral4 scale their queries by how far along a row is."""

    def scale(offset: Any) -> mx.array:
        made: mx.array = ministral3._get_llama_4_attn_scale(1, offset, 0.1, 64)
        return made

    queries = mx.ones((len(offsets), HEADS, 1, DIM))
    together = queries * scale(mx.array(offsets, dtype=mx.int32))
    for row, offset in enumerate(offsets):
        assert mx.array_equal(together[row], queries[row] * scale(offset))
