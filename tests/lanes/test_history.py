"""Penalties see each row's own last tokens, wherever the row is and whoever is beside it, as mlx-lm's see them alone;
and log-probabilities are mlx-lm's."""

from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.generate import generate_step

from lanes.engine import MlxEngine
from lanes.history import NOTHING, History
from lanes.lane import Chunk, RowSpec, Sampling, Step
from tests.lanes.driver import Driver, engine_for
from tests.lanes.mlx_lms_processors import mlx_lms_processors
from tests.lanes.tiny import VOCABULARY, prompt_of, tiny_llama

MODEL = tiny_llama()
PENALTIES = (
    Sampling(),
    Sampling(repetition_penalty=1.8, repetition_context_size=4),
    Sampling(presence_penalty=0.9, presence_context_size=40),
    Sampling(frequency_penalty=0.5, frequency_context_size=7, logit_bias=((3, 1.5), (90, -0.5))),
    Sampling(repetition_penalty=1.3, presence_penalty=0.3, frequency_penalty=0.2, presence_context_size=1),
)


def by_mlx_lm(spec: RowSpec, num_tokens: int) -> tuple[list[int], list[mx.array]]:
    """The greedy answer of mlx-lm's generator for one row, with the log-probabilities [vocabulary] of each token."""
    processors = mlx_lms_processors(spec.sampling)
    prompt = mx.array(spec.prompt)
    steps = list(generate_step(prompt, MODEL, max_tokens=num_tokens, logits_processors=processors))
    return [int(token) for token, _ in steps], [logprobs for _, logprobs in steps]


rows = st.lists(
    st.tuples(st.integers(0, 12), st.integers(1, 30), st.integers(1, 14), st.integers(0, len(PENALTIES) - 1)),
    min_size=1,
    max_size=6,
)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(rows=rows, cut=st.dictionaries(st.integers(0, 5), st.integers(0, 20), max_size=3))
def test_rows_that_come_go_and_move_are_penalized_as_alone(
    rows: list[tuple[int, int, int, int]], cut: dict[int, int]
) -> None:
    specs = [(at, RowSpec(i, prompt_of(n, i), PENALTIES[which]), num) for i, (at, n, num, which) in enumerate(rows)]
    answers = Driver(engine_for(MODEL)).run(specs, cut)
    for _, spec, num_tokens in specs:
        answer = answers.get(spec.row_id, [])
        expected, _ = by_mlx_lm(spec, num_tokens)
        assert answer == (expected[: len(answer)] if spec.row_id in cut else expected)


def set_aside_run(engine: MlxEngine, specs: list[RowSpec], away: dict[int, tuple[int, int]]) -> dict[int, list[int]]:
    """20 turns of rows that all enter first. away: row id to the turns in which it is set aside and comes back."""
    for spec in specs:
        engine.step(Step(admit=(spec,), chunk=Chunk(spec.row_id, 0, len(spec.prompt) - 1)))
    answers: dict[int, list[int]] = {spec.row_id: [] for spec in specs}
    merge = tuple(spec.row_id for spec in specs)
    for turn in range(20):
        out = tuple(row for row, (at, _) in away.items() if at == turn)
        back = tuple(row for row, (_, at) in away.items() if at == turn)
        result = engine.step(Step(set_aside=out, merge=merge, bring_back=back))
        assert not result.failures
        merge = ()
        engine.check()
        for row, token in result.tokens:
            answers[row].append(token)
    return answers


@pytest.mark.parametrize("gap", [1, 2, 5])
def test_a_row_that_was_set_aside_remembers_its_tokens(gap: int) -> None:
    specs = [RowSpec(i, prompt_of(9 + i, i), PENALTIES[1 + i]) for i in range(4)]
    answers = set_aside_run(engine_for(MODEL), specs, {1: (3, 3 + gap), 3: (4, 4 + gap)})
    for spec in specs:
        answer = answers[spec.row_id]
        assert len(answer) >= 13
        assert answer == by_mlx_lm(spec, len(answer))[0]


def test_a_penalty_alone_in_a_lane_that_changes_widths() -> None:
    """A wide window comes beside a narrow one and goes again; a row without any never gets one."""
    narrow = RowSpec(1, prompt_of(12, 1), Sampling(repetition_penalty=2.0, repetition_context_size=3))
    wide = RowSpec(2, prompt_of(60, 2), Sampling(presence_penalty=2.0, presence_context_size=100))
    answers = Driver(engine_for(MODEL)).run([(0, narrow, 30), (6, wide, 9), (0, RowSpec(3, (5,), Sampling()), 25)])
    for spec, num_tokens in ((narrow, 30), (wide, 9), (RowSpec(3, (5,), Sampling()), 25)):
        assert answers[spec.row_id] == by_mlx_lm(spec, num_tokens)[0]


def test_windows_hold_the_newest_tokens_last() -> None:
    history = History()
    history.enter(7, mx.array([1, 2, 3, 4, 5], dtype=mx.int32))
    history.enter(8, mx.array([], dtype=mx.int32))
    first = history.push((None, 7, 8), mx.array([0, 6, 20], dtype=mx.int32), 4)
    assert first.tolist() == [[NOTHING, NOTHING, NOTHING, 0], [3, 4, 5, 6], [NOTHING, NOTHING, NOTHING, 20]]
    moved = history.push((8, 7), mx.array([21, 7], dtype=mx.int32), 2)
    assert moved.tolist() == [[20, 21], [6, 7]]
    assert history.take(8).tolist() == [20, 21]
    wider = history.push((8, 7), mx.array([22, 8], dtype=mx.int32), 4)
    assert wider.tolist() == [[NOTHING, 20, 21, 22], [NOTHING, 6, 7, 8]]
    history.clear()
    history.enter(9, mx.array([1], dtype=mx.int32))
    assert history.take(9).tolist() == [1]
    history.leave(9)
    assert history.push((9,), mx.array([4], dtype=mx.int32), 2).tolist() == [[NOTHING, 4]]


LOGPROBS: list[dict[str, Any]] = [
    {"num_top_logprobs": 0},
    {"num_top_logprobs": 5, "frequency_penalty": 0.5},
    {},
    {"num_top_logprobs": 20, "logit_bias": ((3, 1.5),)},
    {"num_top_logprobs": VOCABULARY + 9},
]


def test_logprobs_are_those_of_mlx_lm_after_its_processors() -> None:
    specs = [RowSpec(i, prompt_of(5 + i, i), Sampling(**asked)) for i, asked in enumerate(LOGPROBS)]
    driver = Driver(engine_for(MODEL))
    answers = driver.run([(i, spec, 8) for i, spec in enumerate(specs)])
    assert set(driver.logprobs) == {0, 1, 3, 4}
    for spec in specs:
        tokens, expected = by_mlx_lm(spec, 8)
        assert answers[spec.row_id] == tokens
        if spec.sampling.num_top_logprobs is None:
            continue
        told = driver.logprobs[spec.row_id]
        assert len(told) == 8
        for token, logprob, wanted in zip(tokens, told, expected, strict=True):
            assert logprob.logprob == pytest.approx(wanted[token].item(), abs=1e-4)
            likeliest = sorted(enumerate(wanted.tolist()), key=lambda pair: -pair[1])
            best = likeliest[: spec.sampling.num_top_logprobs]
            assert [place for place, _ in logprob.top] == [place for place, _ in best]
            assert [value for _, value in logprob.top] == pytest.approx([value for _, value in best], abs=1e-4)


def test_logprobs_of_a_drawn_token_are_before_temperature_and_filters() -> None:
    spec = RowSpec(1, prompt_of(6), Sampling(temperature=1.5, top_k=4, seed=3, num_top_logprobs=VOCABULARY))
    driver = Driver(engine_for(MODEL))
    answer = driver.run([(0, spec, 6)])[1]
    for token, logprob in zip(answer, driver.logprobs[1], strict=True):
        assert len(logprob.top) == VOCABULARY
        assert sum(2.718281828**value for _, value in logprob.top) == pytest.approx(1, abs=1e-4)
        assert dict(logprob.top)[token] == pytest.approx(logprob.logprob, abs=1e-6)


def test_tokens_that_are_impossible_are_none_of_the_likeliest() -> None:
    ends = tuple(range(VOCABULARY - 2))
    sampling = Sampling(num_top_logprobs=5, earliest_end=100, end_token_ids=ends)
    driver = Driver(engine_for(MODEL))
    driver.run([(0, RowSpec(1, prompt_of(4), sampling), 3)])
    assert [len(logprob.top) for logprob in driver.logprobs[1]] == [2, 2, 2]
