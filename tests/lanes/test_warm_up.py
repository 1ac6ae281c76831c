from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from lanes.forward import CompiledForward
from lanes.grammar import Grammars, Mask
from lanes.lane import RowSpec, Sampling, Step, StepResult
from lanes.warm_up import LONG_TOKENS, PHASE, ROWS, warm_up
from tests.lanes.driver import Driver, engine_for
from tests.lanes.test_grammar import engine as engine_with_grammars
from tests.lanes.test_thaw import every_kind, rows_of
from tests.lanes.tiny import alone, prompt_of, tiny_llama


class Stopped(Exception):
    pass


def heard(*said: object) -> None:
    assert said == (0, 0, PHASE)


@every_kind
def test_it_leaves_nothing_behind(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    engine = rows_of(kind).engine
    max_rows = 1 if engine.decoder.caches.lane == "serial" else engine.info.max_rows
    engine.info = replace(engine.info, context_tokens=512, max_rows=max_rows)
    warm_up(engine, heard, has_grammars=False)
    engine.check()
    assert (engine.gauges().slots_used, engine.gauges().cache_bytes) == (0, 0)
    assert not caplog.records, caplog.text


@pytest.mark.parametrize("early_reads", [False, True])
def test_answers_afterwards_are_those_without(early_reads: bool) -> None:
    model = tiny_llama()
    engine = engine_for(model, compiled=True, early_reads=early_reads)
    warm_up(engine, heard, has_grammars=False)
    forward = engine.decoder.forward
    assert isinstance(forward, CompiledForward)
    assert {rows for rows, _, _ in forward._compiled} == set(ROWS)
    specs = [RowSpec(i, prompt_of(n, i), Sampling()) for i, n in enumerate([5, 30, 1])]
    expected = {spec.row_id: alone(model, spec.prompt, 8)[0] for spec in specs}
    assert Driver(engine).run([(0, spec, 8) for spec in specs]) == expected


def test_a_short_context_is_kept_to() -> None:
    engine = engine_for(tiny_llama(), max_rows=2)
    engine.info = replace(engine.info, context_tokens=64, max_rows=2)
    step, lengths = engine.step, []

    def watched(*args: object) -> object:
        result = step(*args)  # type: ignore[arg-type]
        lengths.extend(engine.gauges().lengths)
        return result

    engine.step = watched  # type: ignore[assignment, method-assign]
    warm_up(engine, heard, has_grammars=False)
    assert 32 < max(lengths) <= 64


def test_lengths_that_are_planned_each_come_once(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_for(tiny_llama(), max_rows=1)
    engine.info = replace(engine.info, chunk_multiple=256, max_rows=1)
    step, chunks = engine.step, []

    def watched(planned: Step) -> StepResult:
        if planned.chunk:
            chunks.append(planned.chunk.stop - planned.chunk.start)
        return step(planned)

    monkeypatch.setattr(engine, "step", watched)
    warm_up(engine, heard, has_grammars=False)
    assert chunks == [*range(256, LONG_TOKENS + 1, 256), LONG_TOKENS]
    engine.check()
    assert (engine.gauges().slots_used, engine.gauges().cache_bytes) == (0, 0)


def test_a_row_keeps_to_a_grammar_where_rows_may(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_with_grammars()
    engine.info = replace(engine.info, context_tokens=64, max_rows=8)
    bound: list[int] = []
    masks = Grammars.masks

    def watched(self: Grammars, rows: Sequence[int | None], vocabulary: int) -> Mask:
        bound.append(len(self))
        return masks(self, rows, vocabulary)

    monkeypatch.setattr(Grammars, "masks", watched)
    warm_up(engine, heard, has_grammars=True)
    engine.check()
    assert engine.grammars is not None
    assert len(engine.grammars) == 0
    assert set(bound) == {1, 2}  # of two or four rows one, of eight two


def test_it_can_be_stopped() -> None:
    def stop(*said: object) -> None:
        raise Stopped

    with pytest.raises(Stopped):
        warm_up(engine_for(tiny_llama()), stop, has_grammars=False)


def test_what_fails_ends_it_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    engine = engine_for(tiny_llama())
    forward, calls = engine.decoder.forward, iter([False, True])

    def failing(*args: object) -> object:
        if next(calls, False):
            raise ValueError("no such kernel")
        return forward(*args)  # type: ignore[arg-type]

    engine.decoder.forward = failing  # type: ignore[assignment]
    warm_up(engine, heard, has_grammars=False)
    engine.check()
    assert engine.gauges().slots_used == 0
    assert "the warm-up fails" in caplog.text
