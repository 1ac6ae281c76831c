"""A lane whose rows have drafts gives the tokens that it gives without, in fewer turns."""

from dataclasses import replace
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models import llama
from mlx_lm.models.cache import KVCache, QuantizedKVCache

from lanes.batch import SlotCaches
from lanes.build import build_engine
from lanes.decoder import Decoder
from lanes.engine import MlxEngine
from lanes.forward import eager, eager_drafts
from lanes.lane import Chunk, Freeze, LaneSettings, RowSpec, Sampling, Step
from lanes.load import load
from lanes.rounding import capacity_for
from lanes.rows import rows_like
from lanes.rows.positions import Positions
from lanes.solo import RowMaker
from lanes.speculation import Speculation, may_draft, why_none
from lanes.tuning import backend
from tests.lanes.driver import INFO, Driver
from tests.lanes.tiny import alone, prompt_of, tiny_llama

pytestmark = pytest.mark.usefixtures("mlx_lms_attention")

GREEDY = Sampling()


def tiny(bits: int | None) -> RowMaker:
    """Heads of 32 numbers, so that they can be quantized."""
    args = tiny_llama().args
    args.hidden_size = 128
    mx.random.seed(3)
    model = llama.Model(args)
    mx.eval(model.parameters())
    return RowMaker(model, bits, 32)


MAKERS = {None: tiny(None), 8: tiny(8)}


def engine_of(make_row: RowMaker, most_tokens: int, *, early_reads: bool = False) -> MlxEngine:
    """Reading the weights takes long, so that every guess is tried. most_tokens 0: without drafts."""
    caches = SlotCaches(make_row(), 32)
    model = make_row.model
    decoder = Decoder(caches, partial(eager, model, caches), partial(eager_drafts, model, caches))
    speculation = Speculation(most_tokens, 10_000) if most_tokens else None
    return MlxEngine(make_row, INFO, decoder, early_reads=early_reads, speculation=speculation)


def repeating(length: int, seed: int) -> tuple[int, ...]:
    """A prompt that repeats itself, with changes."""
    part = prompt_of(9, seed)
    return tuple(token if i % 23 else seed for i, token in enumerate(part * (1 + length // 9)))[:length]


samplings = st.sampled_from(
    [
        GREEDY,
        GREEDY,
        GREEDY,
        Sampling(temperature=0.8, seed=4),
        Sampling(num_top_logprobs=2),
        Sampling(repetition_penalty=1.2),
        Sampling(logit_bias=((5, 3.0),)),
        Sampling(earliest_end=40, end_token_ids=(1, 2)),
    ]
)
rows = st.lists(st.tuples(st.integers(0, 12), st.integers(1, 60), st.integers(1, 40), samplings), max_size=5)


@settings(max_examples=20, deadline=None)
@given(
    rows, st.dictionaries(st.integers(0, 4), st.integers(0, 20), max_size=2), st.sampled_from([None, 8]), st.booleans()
)
def test_the_answers_are_those_without(
    rows: list[tuple[int, int, int, Sampling]], cut: dict[int, int], bits: int | None, early_reads: bool
) -> None:
    specs = [(at, RowSpec(i, repeating(n, i), sampling), number) for i, (at, n, number, sampling) in enumerate(rows)]
    drafting = Driver(engine_of(MAKERS[bits], 5, early_reads=early_reads))
    drafting.run(specs, cut)
    for _, spec, number in specs:
        plain = Driver(engine_of(MAKERS[bits], 0))
        expected = plain.run([(0, spec, number)])[spec.row_id]
        answer = drafting.answers.get(spec.row_id, [])[:number]
        assert answer == (expected[: len(answer)] if spec.row_id in cut else expected)
        if spec.row_id not in cut:
            assert drafting.logprobs.get(spec.row_id) == pytest.approx(plain.logprobs.get(spec.row_id), abs=1e-4)


def turns_of(engine: MlxEngine, spec: RowSpec, number: int) -> tuple[list[int], int, int, int]:
    """A row's answer, in how many turns, how many tokens were drafted, and how many of those stood."""
    engine.step(Step(admit=(spec,), chunk=Chunk(spec.row_id, 0, len(spec.prompt) - 1)))
    answer: list[int] = []
    turns = drafted = stood = 0
    step = Step(merge=(spec.row_id,))
    while len(answer) < number:
        result = engine.step(step)
        answer += [token for row, token in result.tokens if row == spec.row_id]
        turns, drafted, stood = turns + 1, drafted + result.drafted_tokens, stood + result.accepted_tokens
        step = Step()
    return answer[:number], turns, drafted, stood


@pytest.mark.parametrize("bits", [None, 8])
def test_an_answer_that_repeats_itself_takes_fewer_turns(bits: int | None) -> None:
    """A model of random weights does so soon."""
    spec = RowSpec(1, repeating(30, 2), GREEDY)
    expected, turns, *_ = turns_of(engine_of(MAKERS[bits], 0), spec, 120)
    answer, fewer_turns, drafted, stood = turns_of(engine_of(MAKERS[bits], 6), spec, 120)
    assert answer == expected
    assert turns == 121
    assert fewer_turns < turns / 2
    assert drafted >= stood >= 120 - fewer_turns


def test_a_row_goes_aside_and_comes_back_with_its_drafts() -> None:
    make_row = MAKERS[None]
    engine = engine_of(make_row, 6)
    spec, other = RowSpec(1, repeating(30, 2), GREEDY), RowSpec(2, repeating(25, 3), GREEDY)
    answers: dict[int, list[int]] = {1: [], 2: []}

    def turn(step: Step) -> int:
        result = engine.step(step)
        assert not result.failures
        for row, token in result.tokens:
            answers[row].append(token)
        return result.accepted_tokens

    turn(Step(admit=(spec, other), chunk=Chunk(1, 0, 29)))
    turn(Step(chunk=Chunk(2, 0, 24)))
    turn(Step(merge=(1, 2)))
    for _ in range(4):
        for _ in range(12):
            turn(Step())
        turn(Step(set_aside=(1,)))
        turn(Step())
        assert engine.speculation is not None
        assert engine.speculation.rows == {1, 2}
        turn(Step(bring_back=(1,)))
        engine.check()
    assert sum(turn(Step()) for _ in range(12)) > 0
    for row, spec_of_row in ((1, spec), (2, other)):
        assert answers[row] == alone(make_row.model, spec_of_row.prompt, len(answers[row]))[0]
    turn(Step(leave=(1, 2)))
    assert engine.speculation.rows == set()
    engine.check()


def test_what_is_frozen_of_a_row_is_what_it_has_without() -> None:
    spec = RowSpec(1, repeating(30, 2), GREEDY)
    parts = []
    for most_tokens in (0, 6):
        engine = engine_of(MAKERS[None], most_tokens)
        turns_of(engine, spec, 60)
        ((_, part),) = engine.step(Step(freeze=(Freeze(1, 0, 80),), leave=(1,))).frozen
        assert part is not None
        parts.append(part)
    for plain, drafted in zip(*(part.buffers for part in parts), strict=True):
        assert np.allclose(*(np.frombuffer(buffer, np.float32) for buffer in (plain, drafted)), atol=1e-5)


def test_which_rows_have_drafts() -> None:
    assert may_draft(Sampling(top_p=0.5, seed=9)), "which say nothing at temperature 0"
    changes: list[dict[str, Any]] = [
        {"temperature": 0.1},
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.1},
        {"frequency_penalty": 0.1},
        {"logit_bias": ((1, 1.0),)},
        {"earliest_end": 4},
        {"num_top_logprobs": 0},
    ]
    assert not any(may_draft(replace(GREEDY, **change)) for change in changes)


def test_drafts_let_no_array_grow_and_stay_within_the_context() -> None:
    caches = SlotCaches(MAKERS[None](), 4)
    for length in (200, 254, 255, 256):
        speculation = Speculation(6, 10_000)
        speculation.enter(1, [4] * (length + 1), GREEDY)
        caches.table.claim(1, length)
        draft = speculation.draft(caches.table).get(1, [])
        assert length + 1 + len(draft) <= capacity_for(length + 1)
        assert len(draft) == {200: 6, 254: 1, 255: 0, 256: 6}[length]
        limited = Speculation(6, 10_000, context_tokens=length + 3)
        limited.enter(1, [4] * (length + 1), GREEDY)
        assert len(limited.draft(caches.table).get(1, [])) <= 2
        caches.table.release(1)


def test_no_draft_before_the_last_token_is_known_but_then_it_is_read_at_once() -> None:
    caches = SlotCaches(MAKERS[None](), 4)
    speculation = Speculation(6, 10_000)
    speculation.enter(1, [4] * 10, GREEDY)
    caches.table.claim(1, 10)
    assert speculation.draft(caches.table) == {}
    assert speculation.wants_tokens
    speculation.take([(1, 4), (2, 9)])
    assert list(speculation.draft(caches.table)) == [1]
    speculation.leave(1)
    assert speculation.draft(caches.table) == {}
    assert not speculation.wants_tokens


def test_why_a_model_has_none() -> None:
    make_row = MAKERS[None]
    assert why_none(make_row, ["kv", "qkv", "kv+kv"], 20, compiled=False) is None
    assert why_none(MAKERS[8], ["qkv"], 20, compiled=False) is None
    assert "compiled" in str(why_none(make_row, ["kv"], 20, compiled=True))
    assert "rotating and ssm" in str(why_none(make_row, ["kv", "ssm", "rotating"], 20, compiled=False))
    assert "weights" in str(why_none(make_row, ["kv"], 0, compiled=False))

    class NoSense(llama.Model):  # type: ignore[misc]
        def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
            logits: mx.array = super().__call__(inputs, cache=cache)
            return logits if inputs.shape[1] == 1 or cache[0].offset is None else logits[:, ::-1]

    assert "off by" in str(why_none(RowMaker(NoSense(make_row.model.args)), ["kv"], 20, compiled=False))


@pytest.mark.parametrize("solo", [KVCache, lambda: QuantizedKVCache(32, 8)])
@pytest.mark.parametrize("num_rows", [3, 4])
def test_several_tokens_are_written_as_one_by_one(solo: Any, num_rows: int) -> None:
    """In all four slots or in three of them, which is another form of the write."""
    lengths = [0, 7, 30, 12][:num_rows]
    keys = mx.random.normal((num_rows, 2, 3, 32), key=mx.random.key(1))
    values = mx.random.normal((num_rows, 2, 3, 32), key=mx.random.key(2))
    together, single = rows_like(solo()), rows_like(solo())
    for layer in (together, single):
        layer.resize(4, 64)
    together.positions = Positions.of(lengths, tokens=3)
    mask = together.make_mask(3)  # type: ignore[attr-defined]
    together.update_and_fetch(keys, values)  # type: ignore[attr-defined]
    for place in range(3):
        single.positions = Positions.of([length + place for length in lengths])
        own = single.make_mask(1)  # type: ignore[attr-defined]
        columns = min(own.shape[-1], mask.shape[-1])
        assert mx.array_equal(own[:, :, 0, :columns], mask[:, :, place, :columns])
        single.update_and_fetch(keys[:, :, place : place + 1], values[:, :, place : place + 1])  # type: ignore[attr-defined]
    for ours, theirs in zip(together.state, single.state, strict=True):
        assert mx.array_equal(ours, theirs)


def test_a_ring_takes_one_token_a_step() -> None:
    with pytest.raises(AssertionError, match="could not take them back"):
        Positions.of([4], tokens=2).ring(8, 0)


@pytest.mark.slow
def test_a_real_model_repeats_a_text() -> None:
    """With the BLAS that MLX comes with, where a row's numbers do not depend on how many are computed at once."""
    loaded = load("demo")
    text = "Anna counted eleven boats in March, nine in April, and wrote the numbers into a small blue notebook."
    asked = f"<|im_start|>user\nRepeat: {text}<|im_end|>\n<|im_start|>assistant\n{text[:20]}"
    spec = RowSpec(1, tuple(loaded.tokenizer.encode(asked)), GREEDY)
    expected, *_ = turns_of(engine_of(RowMaker(loaded.model), 0), spec, 12)
    answer, turns, drafted, stood = turns_of(engine_of(RowMaker(loaded.model), 8), spec, 12)
    assert answer == expected
    assert turns < 8
    assert stood > drafted / 2
    mx.clear_cache()


def test_drafts_are_asked_for_or_the_processors_default(caplog: pytest.LogCaptureFixture) -> None:
    """The tiny hybrid cannot have any; the log tells why, where there were to be some."""
    loaded = load("hybrid")
    for num_draft_tokens, says in ((0, False), (None, backend() == "cpu"), (4, True)):
        caplog.clear()
        with caplog.at_level("INFO", "lanes.build"):
            engine = build_engine(loaded, LaneSettings(max_rows=2, num_draft_tokens=num_draft_tokens), "stock")
        assert engine.speculation is None
        assert ("cannot be taken back" in caplog.text) == says
