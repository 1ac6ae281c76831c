"""Every family of mlx-lm: rows that come and leave equal themselves alone, in the lane that is chosen for their model.

The reference BLAS computes a row alike in any company, so models without rings have to be equal to the last bit. A ring
of ours turns at other columns than mlx-lm's: sums are taken in another order there.
"""

import pkgutil
import re
from functools import lru_cache

import mlx.core as mx
import mlx_lm.models
import pytest

from lanes.choice import choose_lane
from lanes.lane import RowSpec, Sampling
from lanes.prefill import Prefill, dispatch_together
from lanes.rows import kind_of
from lanes.sharing import shared_prompt_tokens
from lanes.solo import CannotQuantize, RowMaker
from tests.lanes.families import CONFIGS, FAMILIES, UNMADE, import_module, make_model, module_of
from tests.lanes.families.check import Difference, alone, difference, each_in_its_own_lane, together
from tests.lanes.families.expected import ROUNDED, SERIAL, UNQUANTIZED
from tests.lanes.families.facts import WINDOW
from tests.lanes.tiny import prompt_of

pytestmark = pytest.mark.usefixtures("mlx_lms_attention")

ROUNDING = 1e-4
# A key that lies between two codes may get the other one after a rounding in the layer below.
CODE = 2e-2
GROUP_SIZE = 32

QUICK = (
    "afm7",
    "deepseek_v32",
    "falcon_h1",
    "gemma3_text",
    "gemma3n",
    "gpt_bigcode",
    "gpt_oss",
    "kimi_linear",
    "llama",
    "llama4",
    "mamba2",
    "qwen3",
    "qwen3_5",
    "qwen3_next",
    "recurrent_gemma",
)
each = [(name, () if name in QUICK else pytest.mark.slow) for name in FAMILIES]
model_of = lru_cache(make_model)


def allowed(family: str, kinds: set[str]) -> float:
    """The difference of logits that may be between a row in a lane with such caches and alone."""
    if "rotating-qkv" in kinds:
        return CODE
    return ROUNDING if "rotating" in kinds or family in ROUNDED else 0.0


def assert_equals_alone(family: str, make_row: RowMaker) -> None:
    choice = choose_lane(make_row)
    assert choice.lane == ("serial" if family in SERIAL else "batch"), choice.reason
    if family in SERIAL:
        assert re.search(SERIAL[family], choice.reason)
    kinds = {part for kind in choice.cache_kinds for part in kind.split("+")} if choice.lane == "batch" else set()
    answers = together(make_row, choice.lane)
    found = difference(answers, alone(make_row))
    assert found.logits <= allowed(family, kinds)
    assert found.rows == 0
    if {"rotating", "rotating-qkv"} & kinds:
        assert difference(answers, each_in_its_own_lane(make_row)) == Difference(0.0, 0)


@pytest.mark.parametrize("family", [pytest.param(name, marks=marks) for name, marks in each])
def test_rows_together_equal_each_alone(family: str) -> None:
    assert_equals_alone(family, RowMaker(model_of(family)))


# Four bits differ from eight in how a cache packs them, not in what a model does with it: some models will do.
@pytest.mark.parametrize(
    ("bits", "family"),
    [pytest.param(8, name, marks=marks) for name, marks in each]
    + [pytest.param(4, name, marks=() if name in ("llama", "gemma3_text") else pytest.mark.slow) for name in QUICK],
)
def test_quantized_rows_together_equal_each_alone(family: str, bits: int) -> None:
    make_row = RowMaker(model_of(family), bits, GROUP_SIZE)
    if family in UNQUANTIZED:
        with pytest.raises(CannotQuantize, match=UNQUANTIZED[family]):
            choose_lane(make_row)
    else:
        assert_equals_alone(family, make_row)


@pytest.mark.parametrize("family", [pytest.param(name, marks=marks) for name, marks in each if name not in SERIAL])
def test_prompts_that_share_a_pass_equal_each_alone(family: str) -> None:
    """Not in the families whose state would take the padding in."""
    make_row = RowMaker(model_of(family))
    if not all(kind in ("kv", "rotating") for cache in make_row() for kind in str(kind_of(cache)).split("+")):
        assert shared_prompt_tokens(make_row) == 0
        return
    prompts = [Prefill(make_row, RowSpec(i, prompt_of(n, i), Sampling())) for i, n in enumerate((2, WINDOW + 1, 5))]
    dispatch_together(make_row, prompts)
    for prompt in prompts:
        tokens, caches = prompt.spec.prompt, make_row()
        make_row.model(mx.array([tokens[:-1]]), cache=caches)
        for token in (tokens[-1], 5, 6):
            ours, alone = (make_row.model(mx.array([[token]]), cache=row) for row in (prompt.caches, caches))
            assert mx.array_equal(ours, alone)


@pytest.mark.parametrize("family", ["afm7", "recurrent_gemma"])
def test_the_comparison_sees_what_does_not_fit(family: str) -> None:
    """Two that are kept out of the batch lane: put in nevertheless they are off, one of them in one row only."""
    make_row = RowMaker(model_of(family))
    assert difference(together(make_row, "batch"), alone(make_row)).logits > 100 * ROUNDING


def test_every_module_of_mlx_lm_is_here() -> None:
    """A model that a new mlx-lm brings has to get a config, and perhaps a line in the tables of what is expected."""
    names = [module.name for module in pkgutil.iter_modules(mlx_lm.models.__path__)]
    assert {name for name in names if hasattr(import_module(name), "Model")} == {module_of(name) for name in CONFIGS}
    assert set(UNMADE) <= set(CONFIGS)
    assert {*SERIAL, *UNQUANTIZED, *ROUNDED, *QUICK} <= set(FAMILIES)


@pytest.mark.parametrize("family", UNMADE)
def test_what_is_not_made_cannot_be_made(family: str) -> None:
    if "needs Metal" in UNMADE[family] and mx.metal.is_available():
        pytest.skip("this machine has Metal")
    with pytest.raises((RuntimeError, ValueError), match=r"No Metal back-end|inplace addition on an .*array and str"):
        alone(RowMaker(make_model(family)))
