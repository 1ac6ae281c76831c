"""Several answers to one prompt: it is processed once, and each goes on as if it had been alone."""

from dataclasses import replace

import pytest

from lanes.lane import Chunk, RowSpec, Sampling, Step
from tests.lanes.driver import Driver, engine_for
from tests.lanes.tiny import prompt_of, tiny_llama

MODEL = tiny_llama()
PROMPT = prompt_of(40)
SAMPLINGS = (
    Sampling(temperature=1.0, seed=1),
    Sampling(temperature=1.0, seed=2),
    Sampling(),
    Sampling(repetition_penalty=1.5),
)


@pytest.mark.parametrize("chunk_tokens", [39, 16])
def test_rows_that_take_over_a_prompt_answer_as_each_alone(chunk_tokens: int) -> None:
    engine = engine_for(MODEL)
    specs = [RowSpec(i, PROMPT, sampling) for i, sampling in enumerate(SAMPLINGS)]
    for start in range(0, 39, chunk_tokens):
        chunk = Chunk(0, start, min(start + chunk_tokens, 39))
        engine.step(Step(admit=tuple(specs) if start == 0 else (), chunk=chunk))
    rows = tuple(range(len(specs)))
    answers: dict[int, list[int]] = {row: [] for row in rows}
    result = engine.step(Step(fork=tuple((0, row) for row in rows[1:]), merge=rows))
    assert not result.failures
    # One that leaves at once takes nothing of the others with it.
    for turn in range(9):
        for row, token in result.tokens:
            answers[row].append(token)
        result = engine.step(Step(leave=(0,) if turn == 2 else ()))
        engine.check()
    for spec in specs:
        expected = Driver(engine_for(MODEL)).run([(0, replace(spec), 9)])[spec.row_id]
        answer = answers[spec.row_id]
        assert len(answer) >= (3 if spec.row_id == 0 else 8)
        assert answer == expected[: len(answer)]


def test_a_row_whose_source_has_failed_fails_with_it() -> None:
    engine = engine_for(MODEL)
    engine.step(Step(admit=(RowSpec(1, PROMPT, Sampling()), RowSpec(2, PROMPT, Sampling())), chunk=Chunk(1, 0, 39)))
    del engine._prompts[1]  # as a chunk that was held back leaves it when it fails
    result = engine.step(Step(fork=((1, 2),), merge=(1, 2)))
    assert [row for row, _ in result.failures] == [2]
    assert len(engine.decoder) == 0
    engine.check()
