"""Batched equals alone, whatever rows join and leave beside a row."""

from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lanes.lane import Chunk, EngineFailed, RowSpec, Sampling, Step
from tests.lanes.driver import Driver, engine_for
from tests.lanes.tiny import alone, prompt_of, tiny_llama

MODEL = tiny_llama()
# One token, a few, the edges of a bucket of 256 columns, beyond two.
LENGTHS = st.one_of(st.integers(1, 40), st.sampled_from([254, 255, 256, 257, 258, 300, 511, 513, 600]))
CUTS = st.dictionaries(st.integers(0, 6), st.integers(0, 40), max_size=3)
rows = st.lists(st.tuples(st.integers(0, 30), LENGTHS, st.integers(1, 20)), min_size=1, max_size=7)


@settings(max_examples=25, deadline=None)
@given(rows=rows, cut=CUTS, chunk=st.sampled_from([8, 64]), early_reads=st.booleans())
def test_batched_equals_alone(
    rows: list[tuple[int, int, int]], cut: dict[int, int], chunk: int, early_reads: bool
) -> None:
    specs = [(at, RowSpec(i, prompt_of(n, i), Sampling()), tokens) for i, (at, n, tokens) in enumerate(rows)]
    engine = engine_for(MODEL, early_reads=early_reads)
    answers = Driver(engine, chunk).run(specs, cut)
    for _, spec, tokens in specs:
        expected, _ = alone(MODEL, spec.prompt, tokens)
        answer = answers.get(spec.row_id, [])
        if spec.row_id not in cut:
            assert answer == expected
        assert answer == expected[: len(answer)]
    assert len(engine.decoder) == 0
    assert engine.gauges().cache_bytes == 0


class Recording:
    """A model that keeps the logits of each of its steps of one token."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.logits: list[mx.array] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def __call__(self, tokens: mx.array, cache: Any) -> mx.array:
        out: mx.array = self.model(tokens, cache=cache)
        if tokens.shape[1] == 1:
            self.logits.append(out[:, -1])
        return out


def test_logits_are_equal_to_the_last_bit() -> None:
    """All rows enter in the first turn, so slot i is row i throughout. The reference BLAS computes each row alike."""
    lengths, steps = [1, 2, 5, 37, 255, 256, 300], 12
    recording = Recording(MODEL)
    engine = engine_for(recording)
    prompts = [prompt_of(n, 50 + n) for n in lengths]
    for i, prompt in enumerate(prompts):
        chunk = Chunk(i, 0, len(prompt) - 1) if len(prompt) > 1 else None
        engine.step(Step(admit=(RowSpec(i, prompt, Sampling()),), chunk=chunk))
    recording.logits.clear()
    engine.step(Step(merge=tuple(range(len(lengths)))))
    for _ in range(steps - 1):
        engine.step(Step())
    for i, prompt in enumerate(prompts):
        _, expected = alone(MODEL, prompt, steps)
        for step in range(steps):
            assert mx.array_equal(recording.logits[step][i], expected[step]), f"row {i}, step {step}"


def test_a_seeded_row_draws_alike_in_any_company() -> None:
    sampling = Sampling(temperature=1.0, top_p=0.9, seed=1234)
    spec = RowSpec(0, prompt_of(9), sampling)
    solo = Driver(engine_for(MODEL)).run([(0, spec, 20)])[0]
    others = [(i, RowSpec(i, prompt_of(10 + 7 * i), Sampling(temperature=1.5, seed=i)), 5 + i) for i in range(1, 6)]
    for arrival in (0, 3, 8):
        assert Driver(engine_for(MODEL)).run([(arrival, spec, 20), *others])[0] == solo
    other_seed = RowSpec(0, spec.prompt, Sampling(temperature=1.0, top_p=0.9, seed=1235))
    assert Driver(engine_for(MODEL)).run([(0, other_seed, 20)])[0] != solo


class Failing:
    """A model whose steps of one token fail while `broken` is set."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.broken = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def __call__(self, tokens: mx.array, cache: Any) -> Any:
        if self.broken and tokens.shape[1] == 1:
            raise RuntimeError("out of memory")
        return self.model(tokens, cache=cache)


def test_a_failing_step_ends_its_rows_and_a_second_the_engine() -> None:
    model = Failing(MODEL)
    engine = engine_for(model)
    first, second = (RowSpec(i, prompt_of(1, i), Sampling()) for i in (1, 2))
    engine.step(Step(admit=(first,), merge=(1,)))
    model.broken = True
    # Row 2 enters in the step that fails; row 1's token from the step before is still told.
    result = engine.step(Step(admit=(second,), merge=(2,)))
    assert [row for row, _ in result.failures] == [1, 2]
    assert all("out of memory" in reason for _, reason in result.failures)
    assert [row for row, _ in result.tokens] == [1]
    engine.check()
    assert engine.gauges().cache_bytes == 0
    model.broken = False
    third = RowSpec(3, prompt_of(4, 3), Sampling())
    assert Driver(engine).run([(0, third, 5)])[3] == alone(MODEL, third.prompt, 5)[0]
    model.broken = True
    engine.step(Step(admit=(RowSpec(4, (1,), Sampling()),), merge=(4,)))
    with pytest.raises(EngineFailed, match="out of memory"):
        engine.step(Step(admit=(RowSpec(5, (1,), Sampling()),), merge=(5,)))


def test_a_failing_prompt_ends_alone() -> None:
    class FailingPrompt(Failing):
        def __call__(self, tokens: mx.array, cache: Any) -> Any:
            if tokens.shape[1] == 6:
                raise RuntimeError("this chunk fails")
            return self.model(tokens, cache=cache)

    driver = Driver(engine_for(FailingPrompt(MODEL)))
    good, bad = RowSpec(1, prompt_of(20), Sampling()), RowSpec(2, prompt_of(7), Sampling())
    answers = driver.run([(0, good, 8), (2, bad, 8)])
    assert answers[1] == alone(MODEL, good.prompt, 8)[0]
    assert 2 not in answers
    assert "this chunk fails" in driver.failures[2]


def test_chunk_time_is_booked_with_the_step_that_waited_for_it() -> None:
    engine = engine_for(MODEL)
    long = RowSpec(1, prompt_of(50), Sampling())
    idle = engine.step(Step(admit=(long,), chunk=Chunk(1, 0, 10)))
    assert (idle.chunk_tokens, idle.rows_decoded) == (10, 0)
    engine.step(Step(admit=(RowSpec(2, (5,), Sampling()),), merge=(2,), chunk=Chunk(1, 10, 30)))
    without = engine.step(Step())
    assert (without.chunk_tokens, without.rows_decoded) == (0, 1)
    behind = engine.step(Step())
    assert (behind.chunk_tokens, behind.rows_decoded) == (20, 1)


def test_freed_memory_is_let_go_of_as_when_nobody_is_there_once_the_last_row_has_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = engine_for(MODEL)
    told: list[bool] = []
    monkeypatch.setattr(engine._kept_memory, "let_go", lambda *, is_idle: told.append(is_idle))
    engine.step(Step(admit=(RowSpec(1, prompt_of(5), Sampling()),)))
    engine.step(Step(chunk=Chunk(1, 0, 4)))
    engine.step(Step(merge=(1,)))
    engine.step(Step(set_aside=(1,)))
    engine.step(Step(bring_back=(1,)))
    engine.step(Step(leave=(1,)))
    assert told == [False] * 5 + [True]
