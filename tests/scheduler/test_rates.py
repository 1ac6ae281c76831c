"""The chunk size finds what fits into the stall, on any machine whose chunk of n tokens takes a + b n seconds."""

from dataclasses import dataclass, field

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from lanes.lane import StepResult
from scheduler.rates import ALONE_S, SMALLEST_CHUNK_TOKENS, STEPS_WORTH, ChunkSize, make_chunk_size

STALL_S = 0.05
LARGEST = 4096
# So close to the stall the size need not come any nearer.
NEAR = 0.02


@dataclass
class Machine:
    """decode_s for a decode step, base_s + per_token_s * n for a chunk of n tokens on top."""

    decode_s: float
    base_s: float
    per_token_s: float
    size: ChunkSize = field(default_factory=lambda: ChunkSize(LARGEST, STALL_S))

    @property
    def stall_s(self) -> float:
        """What a chunk may take: the set time, or several steps where those are longer."""
        return max(STALL_S, STEPS_WORTH * self.decode_s)

    def chunk_s(self, tokens: int) -> float:
        return self.base_s + self.per_token_s * tokens

    def decode(self, slower: float = 1.0) -> None:
        self.size.observe(StepResult(seconds=self.decode_s * slower, rows_decoded=3))

    def chunk(self, tokens: int | None = None, slower: float = 1.0) -> int:
        """A step behind a chunk of so many tokens, or as many as the size allows; returns how many."""
        tokens = self.tokens if tokens is None else tokens
        seconds = (self.decode_s + self.chunk_s(tokens)) * slower
        self.size.observe(StepResult(seconds=seconds, rows_decoded=3, chunk_tokens=tokens))
        return tokens

    @property
    def tokens(self) -> int:
        return self.size.tokens(rows_decoding=True)

    def settle(self) -> list[int]:
        """The sizes that it goes on to use."""
        self.decode()
        return [self.chunk() for _ in range(400)][-40:]


machines = st.builds(
    Machine,
    decode_s=st.floats(0.0005, 0.3),
    base_s=st.floats(0.0, 0.06),
    per_token_s=st.floats(3e-6, 3e-3),
)


@settings(max_examples=300)
@given(machine=machines)
def test_rows_never_wait_much_longer_than_the_stall(machine: Machine) -> None:
    """Once settled, at most by what one step of the size takes; the smallest size is used whatever it takes."""
    for tokens in machine.settle():
        assert SMALLEST_CHUNK_TOKENS <= tokens <= LARGEST
        if tokens > SMALLEST_CHUNK_TOKENS:
            assert machine.chunk_s(tokens - SMALLEST_CHUNK_TOKENS) <= machine.stall_s * (1 + NEAR)


@settings(max_examples=300)
@given(machine=machines)
@example(machine=Machine(decode_s=0.01, base_s=0.005, per_token_s=2e-5))
@example(machine=Machine(decode_s=0.04, base_s=0.038, per_token_s=8e-6))
def test_chunks_are_as_large_as_the_stall_allows(machine: Machine) -> None:
    """Once settled, two steps of the size more would be too much. Much prefill is lost where a chunk costs most of the
    stall whatever its size, and the size stays small."""
    for tokens in machine.settle():
        larger = tokens + 2 * SMALLEST_CHUNK_TOKENS
        assert larger > LARGEST or machine.chunk_s(larger) > machine.stall_s * (1 - NEAR), (
            f"{tokens} tokens, {larger} would fit"
        )


@settings(max_examples=60)
@given(
    base_s=st.floats(0.0, 0.02),
    per_token_s=st.floats(1e-5, 3e-3),
    slower=st.sampled_from([0.0, 0.01, 100.0, 10_000.0]),
    kind=st.sampled_from(["decode", "chunk"]),
)
def test_one_odd_measurement_moves_the_size_little_and_is_forgotten(
    base_s: float, per_token_s: float, slower: float, kind: str
) -> None:
    machine = Machine(0.02, base_s, per_token_s)
    settled = machine.settle()
    before = machine.tokens
    getattr(machine, kind)(slower=slower)
    assert before * 0.75 - SMALLEST_CHUNK_TOKENS <= machine.tokens <= before * 1.25 + SMALLEST_CHUNK_TOKENS
    for _ in range(60):
        machine.decode()
    again = machine.settle()
    assert abs(max(again) - max(settled)) <= 2 * SMALLEST_CHUNK_TOKENS


@given(machine=machines, ends=st.lists(st.integers(1, 63), min_size=20, max_size=40))
def test_the_short_end_of_a_prompt_does_not_shrink_the_chunks(machine: Machine, ends: list[int]) -> None:
    """What a few tokens take, well within the stall, is no reason to make larger chunks smaller."""
    settled = min(machine.settle())
    assume(machine.chunk_s(settled) <= machine.stall_s)
    for tokens in ends:
        machine.chunk(tokens)
    assert machine.tokens >= settled - SMALLEST_CHUNK_TOKENS


@given(machine=machines, largest=st.integers(1, 5000))
def test_sizes_repeat_and_keep_to_the_limit(machine: Machine, largest: int) -> None:
    machine.size = ChunkSize(largest, STALL_S)
    machine.decode()
    for _ in range(30):
        tokens = machine.chunk()
        assert 1 <= tokens <= largest
        assert tokens == largest or tokens % SMALLEST_CHUNK_TOKENS == 0
        alone = machine.size.tokens(rows_decoding=False)
        assert alone == largest or alone in [SMALLEST_CHUNK_TOKENS << power for power in range(7)]


def test_nobody_waits_then_chunks_are_as_large_as_they_may_be() -> None:
    size = ChunkSize(2048, STALL_S)
    assert size.tokens(rows_decoding=False) == 2048
    assert size.tokens(rows_decoding=True) < 2048


@pytest.mark.parametrize(
    "result",
    [
        StepResult(),
        StepResult(seconds=5.0, chunk_tokens=512),
        # A chunk before any decode step was seen alone: what of it is the chunk's is not known.
        StepResult(seconds=5.0, chunk_tokens=512, rows_decoded=1),
    ],
)
def test_what_tells_nothing_changes_nothing(result: StepResult) -> None:
    size = ChunkSize(2048, STALL_S)
    before = size.tokens(rows_decoding=True)
    for _ in range(20):
        size.observe(result)
    assert size.tokens(rows_decoding=True) == before


def test_a_slower_decode_step_is_not_taken_for_a_slower_chunk() -> None:
    """As rows join, the step itself takes longer."""
    machine = Machine(decode_s=0.001, base_s=0.0, per_token_s=1e-4)
    settled = machine.settle()
    machine.decode_s = 0.006
    for _ in range(30):
        machine.decode()
    again = [machine.chunk() for _ in range(50)][-10:]
    assert abs(again[-1] - settled[-1]) <= SMALLEST_CHUNK_TOKENS


@pytest.mark.parametrize("token_s", [1e-6, 1e-4, 0.0015, 0.01, 0.1])
@pytest.mark.parametrize("multiple", [1, 256])
def test_a_chunk_that_is_alone_takes_a_bounded_time(token_s: float, multiple: int) -> None:
    """Whoever comes meanwhile waits for its end. Not less than the smallest, whatever it takes."""
    size = make_chunk_size(2048, STALL_S, multiple)
    assert size.tokens(rows_decoding=False) == 2048
    for _ in range(30):
        tokens = size.tokens(rows_decoding=False)
        size.observe(StepResult(seconds=tokens * token_s, chunk_tokens=tokens))
    smallest = max(multiple, SMALLEST_CHUNK_TOKENS)
    assert tokens == smallest or tokens * token_s <= ALONE_S
    assert tokens == 2048 or 2 * tokens * token_s > ALONE_S
