"""When tokens are known, and before which work: turns that read a step later than they begin it, and early reads."""

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import llama

from lanes.engine import MlxEngine
from lanes.lane import Chunk, RowSpec, Sampling, Step, StepResult
from lanes.prefill import Prefill
from lanes.solo import RowMaker
from lanes.tuning import backend
from tests.lanes.driver import engine_for
from tests.lanes.tiny import alone, prompt_of, tiny_llama

MODEL = tiny_llama()
FIRST, SECOND = RowSpec(1, prompt_of(1, 1), Sampling()), RowSpec(2, prompt_of(21, 2), Sampling())
ANSWER, OTHER_ANSWER = (alone(MODEL, spec.prompt, 8)[0] for spec in (FIRST, SECOND))


class Watched:
    """A model that notes what it is called for: (rows, tokens) of each call."""

    def __init__(self, failing_tokens: int = 0) -> None:
        self.calls: list[tuple[int, ...]] = []
        self.failing_tokens = failing_tokens

    def __getattr__(self, name: str) -> Any:
        return getattr(MODEL, name)

    def __call__(self, tokens: mx.array, cache: Any) -> Any:
        self.calls.append(tokens.shape)
        if tokens.shape[1] == self.failing_tokens:
            raise RuntimeError("this chunk fails")
        return MODEL(tokens, cache=cache)


def begun(early_reads: bool, failing_tokens: int = 0) -> tuple[Watched, MlxEngine, StepResult]:
    """The first row is merged, and the second's prompt begun."""
    model = Watched(failing_tokens)
    engine = engine_for(model, early_reads=early_reads)
    model.calls.clear()
    return model, engine, engine.step(Step(admit=(FIRST, SECOND), merge=(1,), chunk=Chunk(2, 0, 12)))


def test_a_step_is_read_a_turn_later_and_a_chunk_queued_behind_it() -> None:
    model, engine, result = begun(early_reads=False)
    assert model.calls == [(1, 1), (1, 12)]
    assert (result.tokens, result.in_flight) == ((), True)
    result = engine.step(Step(chunk=Chunk(2, 12, 20)))
    assert model.calls[2:] == [(1, 1), (1, 8)]
    assert (result.tokens, result.rows_decoded, result.chunk_tokens) == (((1, ANSWER[0]),), 1, 0)


def test_what_queueing_a_chunk_takes_the_host_is_told_with_the_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA, where attention of new lengths is planned by the host: it is no part of the step before."""
    clock, dispatch = [0.0], Prefill.dispatch

    def slow(self: Prefill, chunk: Chunk) -> list[mx.array]:
        clock[0] += 5.0
        return dispatch(self, chunk)

    monkeypatch.setattr("lanes.engine.time.perf_counter", lambda: clock[0])
    monkeypatch.setattr(Prefill, "dispatch", slow)
    _, engine, result = begun(early_reads=False)
    told = [result]
    for step in (Step(chunk=Chunk(2, 12, 20)), Step(), Step(), Step()):
        clock[0] += 1.0
        told.append(engine.step(step))
    assert [result.chunk_tokens for result in told] == [0, 0, 12, 8, 0]
    assert [result.seconds for result in told[1:]] == [1.0, 6.0, 6.0, 1.0]
    engine = engine_for(Watched(), early_reads=False)
    clock[0] = 0.0
    result = engine.step(Step(admit=(SECOND,), chunk=Chunk(2, 0, 20)))
    assert (result.chunk_tokens, result.seconds) == (20, 5.0), "where no row is stepped it is waited for at once"


def test_an_early_read_tells_the_token_before_the_chunk_begins() -> None:
    model, engine, result = begun(early_reads=True)
    assert model.calls == [(1, 1)], "the chunk is held back"
    assert (result.tokens, result.in_flight, result.chunk_tokens) == (((1, ANSWER[0]),), False, 0)
    result = engine.step(Step(chunk=Chunk(2, 12, 20)))
    assert model.calls[1:] == [(1, 12), (1, 1)]
    assert (result.tokens, result.rows_decoded, result.chunk_tokens) == (((1, ANSWER[1]),), 1, 12)
    result = engine.step(Step(merge=(2,)))
    assert model.calls[3:] == [(1, 8), (2, 1)], "its prompt is whole before it is merged"
    assert result.tokens == ((1, ANSWER[2]), (2, OTHER_ANSWER[0]))
    assert result.chunk_tokens == 8


def test_where_nothing_comes_a_step_is_read_a_turn_later_and_a_newcomer_catches_up() -> None:
    _, engine, _ = begun(early_reads=True)
    assert engine.step(Step(leave=(2,))).tokens == ()
    result = engine.step(Step())
    assert (result.tokens, result.in_flight) == (((1, ANSWER[1]),), True)
    third = RowSpec(3, FIRST.prompt, Sampling())
    result = engine.step(Step(admit=(third,), merge=(3,)))
    assert result.tokens == ((1, ANSWER[2]), (1, ANSWER[3]), (3, ANSWER[0]))
    assert (result.rows_decoded, result.in_flight) == (2, False)


def test_the_last_token_of_a_row_that_has_left_is_told_before_the_chunk_that_follows() -> None:
    model, engine, _ = begun(early_reads=True)
    engine.step(Step())
    calls = len(model.calls)
    result = engine.step(Step(leave=(1,), chunk=Chunk(2, 12, 20)))
    assert (result.tokens, model.calls[calls:]) == (((1, ANSWER[1]),), [])
    assert engine.step(Step(merge=(2,))).tokens == ((2, OTHER_ANSWER[0]),)


def test_a_chunk_without_rows_to_step_is_processed_in_its_turn() -> None:
    model = Watched()
    engine = engine_for(model, early_reads=True)
    result = engine.step(Step(admit=(SECOND,), chunk=Chunk(2, 0, 20)))
    assert (model.calls[-1], result.chunk_tokens) == ((1, 20), 20)
    assert engine.step(Step(merge=(2,))).tokens == ((2, OTHER_ANSWER[0]),)


@pytest.mark.parametrize("merge", [(), (2,)])
def test_a_chunk_that_fails_when_it_was_held_back_ends_its_row_alone(merge: tuple[int, ...]) -> None:
    _, engine, _ = begun(early_reads=True, failing_tokens=8)
    assert not engine.step(Step(chunk=Chunk(2, 12, 20))).failures
    result = engine.step(Step(merge=merge))
    assert [row for row, _ in result.failures] == [2]
    assert "this chunk fails" in result.failures[0][1]
    assert engine.step(Step(leave=(2,))).rows == 1
    engine.check()


def test_a_held_back_chunk_of_a_row_that_leaves_is_nobodys() -> None:
    _, engine, _ = begun(early_reads=True)
    engine.step(Step(leave=(1, 2)))
    assert engine.gauges().cache_bytes == 0
    engine.check()


def test_seconds_of_a_chunk_are_told_with_its_step_also_where_the_turn_between_reads_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The clock goes on by a second with each call of the model, and a turn's seconds are those of what it tells."""
    model, engine, result = begun(early_reads=True)
    monkeypatch.setattr("lanes.engine.time.perf_counter", lambda: float(len(model.calls)))
    engine._untold_since_s = float(len(model.calls))  # the clock has just begun
    told: list[tuple[int, int, float]] = []
    for _ in range(3):
        result = engine.step(Step())
        told.append((result.rows_decoded, result.chunk_tokens, result.seconds))
    assert told[0][:2] == (0, 0), "the chunk and a step are begun, and nothing is read"
    assert told[1] == (1, 12, 3.0), "the chunk, its step and the one that is begun now"
    assert told[2] == (1, 0, 1.0)


@pytest.mark.usefixtures("mlx_lms_attention")
@pytest.mark.parametrize("bits", [None, 8])
def test_a_pass_between_multiples_leaves_what_the_chunk_alone_does(
    bits: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = tiny_llama().args
    args.hidden_size = 128  # heads of a group's size
    mx.random.seed(3)
    model = llama.Model(args)
    seen = record_lengths(model, monkeypatch)
    make_row = RowMaker(model, bits, 32)
    spec = RowSpec(1, prompt_of(300, 5), Sampling())
    rows = [Prefill(make_row, spec, multiple) for multiple in (1, 64)]
    for row in rows:
        for chunk in (Chunk(1, 0, 70), Chunk(1, 70, 200), Chunk(1, 200, 299)):
            mx.eval(row.dispatch(chunk))
    assert seen == [(70, 70), (130, 200), (99, 299), (128, 128), (192, 256), (128, 320)]
    assert [cache.offset for cache in rows[1].caches] == [299] * args.num_hidden_layers
    last = mx.array([spec.prompt[-1:]])
    alone, between = (model(last, cache=row.caches) for row in rows)
    # A GPU multiplies in TF32, and sums in another order for other lengths.
    assert mx.abs(alone - between).max().item() <= (0.0 if backend() == "cpu" else 0.01)


def record_lengths(model: llama.Model, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Queries and keys of each pass of the model from now on."""
    seen: list[tuple[int, int]] = []
    forward = llama.Model.__call__

    def recording(self: llama.Model, tokens: mx.array, cache: list[Any]) -> mx.array:
        seen.append((tokens.shape[1], cache[0].offset + tokens.shape[1]))
        return forward(self, tokens, cache)

    monkeypatch.setattr(llama.Model, "__call__", recording)
    return seen
