"""A row that is set aside and brought back answers as if it had never been away."""

import mlx.core as mx
from hypothesis import given, settings
from hypothesis import strategies as st

from lanes.engine import MlxEngine
from lanes.lane import Chunk, RowSpec, Sampling, Step
from tests.lanes.driver import engine_for
from tests.lanes.tiny import alone, prompt_of, tiny_llama

MODEL = tiny_llama()
STEPS = 16
SAMPLINGS = (Sampling(), Sampling(temperature=1.0, seed=5))


def run(engine: MlxEngine, specs: list[RowSpec], away: dict[int, tuple[int, int]]) -> dict[int, list[int]]:
    """All rows enter first. away: row id to the turns in which it is set aside and, later, comes back."""
    for spec in specs:
        chunk = Chunk(spec.row_id, 0, len(spec.prompt) - 1) if len(spec.prompt) > 1 else None
        engine.step(Step(admit=(spec,), chunk=chunk))
    answers: dict[int, list[int]] = {spec.row_id: [] for spec in specs}
    merge = tuple(spec.row_id for spec in specs)
    for turn in range(4 * STEPS):
        leave = tuple(row for row, tokens in answers.items() if len(tokens) >= STEPS)
        out = tuple(row for row, (at, _) in away.items() if at == turn and row not in leave)
        back = tuple(row for row, (_, at) in away.items() if at == turn and row in engine._aside and row not in leave)
        result = engine.step(Step(leave=leave, set_aside=out, merge=merge, bring_back=back))
        assert not result.failures
        merge = ()
        engine.check()
        for row, token in result.tokens:
            answers[row].append(token)
    assert engine.gauges().cache_bytes == 0
    return {row: tokens[:STEPS] for row, tokens in answers.items()}


@settings(max_examples=20, deadline=None)
@given(
    lengths=st.lists(st.sampled_from([1, 2, 7, 250, 256, 300]), min_size=2, max_size=4),
    away=st.dictionaries(st.integers(0, 3), st.tuples(st.integers(1, 10), st.integers(1, 12)), max_size=3),
    early_reads=st.booleans(),
)
def test_a_row_goes_on_where_it_was(lengths: list[int], away: dict[int, tuple[int, int]], early_reads: bool) -> None:
    specs = [RowSpec(i, prompt_of(n, i), SAMPLINGS[i % 2]) for i, n in enumerate(lengths)]
    turns = {row: (at, at + later) for row, (at, later) in away.items() if row < len(specs)}
    apart = run(engine_for(MODEL, early_reads=early_reads), specs, turns)
    assert apart == run(engine_for(MODEL), specs, {})
    for spec in specs:
        if spec.sampling == Sampling():
            assert apart[spec.row_id] == alone(MODEL, spec.prompt, STEPS)[0]


def test_the_memory_of_a_row_that_is_set_aside_is_its_own_length() -> None:
    engine = engine_for(MODEL)
    long, short = RowSpec(1, prompt_of(3000), Sampling()), RowSpec(2, prompt_of(100), Sampling())
    for spec in (long, short):
        engine.step(Step(admit=(spec,), chunk=Chunk(spec.row_id, 0, len(spec.prompt) - 1)))
    engine.step(Step(merge=(1, 2)))
    both = engine.gauges()
    assert (both.slots, both.capacity_tokens) == (2, 4096)
    engine.step(Step(set_aside=(1,)))
    one = engine.gauges()
    assert (one.slots, one.capacity_tokens) == (1, 256)
    token_bytes = engine.decoder.caches.nbytes // 256
    assert one.cache_bytes == token_bytes * (256 + 3000)
    mx.clear_cache()
