"""A prompt takes no more from those that decode than one more row would, and a newcomer waits for no long prompt."""

import pytest

from lanes.lane import Chunk, Sampling, StepResult
from scheduler.chunks import SHARE, ChunkPlan
from scheduler.rates import ChunkSize, make_chunk_size
from scheduler.request import Request, State, Wish
from scheduler.text import TextStream
from scheduler.transcript import Transcript
from tests.scheduler.bytes_tokenizer import ByteStream

STEP_S = 0.01
CHUNK_S_PER_TOKEN = 0.0005


class Device:
    """Steps of a fixed time, chunks of a fixed time for each token; what it did is told a turn later."""

    def __init__(
        self, num_decoding: int, chunk_s_per_token: float = CHUNK_S_PER_TOKEN, one_step_s: float = STEP_S
    ) -> None:
        self.num_decoding = num_decoding
        self.one_step_s = one_step_s
        self.chunk_s_per_token = chunk_s_per_token
        self.plan = ChunkPlan(ChunkSize(2048, 0.05), shared_prompt_tokens=0)
        self.prompts: list[Request] = []
        self.step_s = self.chunk_s = 0.0
        self.plan.chunk_size.observe(StepResult(seconds=one_step_s, rows_decoded=num_decoding))

    @property
    def share(self) -> float:
        """Of the time, what steps have had."""
        return self.step_s / (self.step_s + self.chunk_s)

    def share_of(self, turns: int, after: int) -> float:
        """In so many turns, the first ones left out."""
        for _ in range(after):
            self.turn()
        self.step_s = self.chunk_s = 0.0
        for _ in range(turns):
            self.turn()
        return self.share

    def submit(self, tokens: int) -> Request:
        row_id = len(self.prompts) + 1
        wish = Wish(row_id, (1,) * tokens, 4, Sampling())
        request = Request(row_id, wish, Transcript(TextStream(ByteStream())), lambda said: None, 0.0)
        request.advance(State.PREFILLING)
        self.prompts.append(request)
        return request

    def extra_s(self, length: int, stop: int) -> float:
        """What a chunk of such lengths takes on top."""
        return 0.0

    def told(self, begun: Chunk | None) -> tuple[int, float]:
        """Tokens that the turn tells of, and what chunks took of it, in seconds."""
        if begun is None:
            return 0, 0.0
        tokens = begun.stop - begun.start
        return tokens, tokens * self.chunk_s_per_token + self.extra_s(tokens, begun.stop)

    def turn(self) -> Request | None:
        """Returns whose prompt got a chunk."""
        left = [request for request in self.prompts if request.num_prompt_left]
        chunk, _ = self.plan.next(left, self.num_decoding)
        tokens, chunk_s = self.told(chunk)
        seconds = self.one_step_s + chunk_s
        self.plan.observe(StepResult(seconds=seconds, rows_decoded=self.num_decoding, chunk_tokens=tokens))
        self.step_s += self.one_step_s
        self.chunk_s += chunk_s
        if chunk is None:
            return None
        request = self.prompts[chunk.row_id - 1]
        request.process(chunk.stop)
        return request


class TellingLate(Device):
    """A chunk is told two turns after its own, as on CUDA; the step of the turn between waits for a part of it."""

    HELD_UP = 0.4

    def __init__(self, num_decoding: int) -> None:
        super().__init__(num_decoding)
        self.begun = [(0, 0.0), (0, 0.0)]

    def told(self, begun: Chunk | None) -> tuple[int, float]:
        self.begun.append(super().told(begun))
        (tokens, told_s), (_, between_s), _ = self.begun[-3:]
        return tokens, (1 - self.HELD_UP) * told_s + self.HELD_UP * between_s


def test_a_step_that_a_chunk_holds_up_is_the_prompts_time_too() -> None:
    device = TellingLate(4)
    device.submit(1_000_000)
    assert device.share_of(4000, after=200) == pytest.approx(4 / (4 + SHARE), abs=0.01)


def test_a_step_that_a_chunk_holds_up_does_not_tell_what_steps_take() -> None:
    device = TellingLate(4)
    device.submit(20_000)
    for _ in range(300):
        device.turn()
        assert device.plan.chunk_size.decode_s == pytest.approx(STEP_S)


@pytest.mark.parametrize("tokens", [2000, 5000, 20_000])
def test_a_prompt_that_has_taken_long_owes_nothing_at_its_end(tokens: int) -> None:
    device = Device(4)
    prompt = device.submit(tokens)
    while prompt.num_prompt_left:
        device.turn()
    assert prompt.credit_s == pytest.approx(0, abs=0.005)


def test_a_chunk_that_is_never_told_holds_up_no_step() -> None:
    """Its row has left."""
    device = Device(4)
    assert device.plan.next([device.submit(1000)], 4)[0] is not None
    for _ in range(20):
        assert device.plan.next([], 4)[0] is None
        device.plan.observe(StepResult(seconds=2 * STEP_S, rows_decoded=4))
    assert device.plan.chunk_size.decode_s == pytest.approx(2 * STEP_S, rel=0.05)


@pytest.mark.parametrize("kind", [Device, TellingLate])
def test_a_long_prompt_has_its_share_to_the_end(kind: type[Device]) -> None:
    device = kind(4)
    prompt = device.submit(20_000)
    while prompt.num_prompt_left:
        device.turn()
    for _ in range(2):  # until the last chunk is told
        device.turn()
    assert device.share == pytest.approx(4 / (4 + SHARE), abs=0.005)


def test_where_chunks_leave_no_step_alone_one_of_many_tells_what_steps_take() -> None:
    device = TellingLate(1)
    for _ in range(16):
        device.submit(1_000_000)
    for _ in range(200):
        device.turn()
    device.one_step_s = 2 * STEP_S
    for _ in range(600):
        device.turn()
    assert device.plan.chunk_size.decode_s > 1.5 * STEP_S


@pytest.mark.parametrize("num_prompts", [1, 3])
@pytest.mark.parametrize("num_decoding", [1, 4, 16])
def test_every_prompt_has_nearly_the_share_of_a_row(num_decoding: int, num_prompts: int) -> None:
    device = Device(num_decoding)
    for _ in range(num_prompts):
        device.submit(1_000_000)
    assert device.share_of(5000, after=0) == pytest.approx(num_decoding / (num_decoding + SHARE * num_prompts), rel=0.1)


@pytest.mark.parametrize(("step_s", "token_s"), [(0.1, 1 / 157), (0.012, 50e-6)], ids=["cpu", "gpu"])
@pytest.mark.parametrize("tokens", [30, 64, 128, 129, 200, 500, 1000])
def test_short_prompts_one_after_another_leave_the_rows_nearly_half_of_the_time(
    step_s: float, token_s: float, tokens: int
) -> None:
    device = Device(4, token_s, step_s)
    for _ in range(2000):
        if not device.prompts or device.prompts[-1].num_prompt_left == 0:
            device.submit(tokens)
        device.turn()
    # As much as the steps for all short prompts, and a quarter of that for this one.
    assert device.share >= 1 / (1 + 1 + 1 / 4) - 0.02


def test_a_few_short_prompts_that_come_together_are_served_at_once() -> None:
    """Behind others that were served so."""
    device = Device(4)
    for _ in range(8):
        device.submit(50)
        device.turn()
    assert all(prompt.num_prompt_left == 0 for prompt in device.prompts)


def test_where_nothing_decodes_nothing_is_owed_any_more() -> None:
    device = Device(4)
    while device.submit(400) and device.turn():  # until one has to wait
        pass
    device.num_decoding = 0
    assert device.turn() is not None
    device.num_decoding = 4
    newcomer = device.submit(50)
    assert device.turn() is newcomer


class Attending(Device):
    """A token takes longer the more are before it."""

    def extra_s(self, length: int, stop: int) -> float:
        return length * stop * 4e-7


def test_what_chunks_take_is_paid_also_where_each_takes_longer_than_the_one_before() -> None:
    device = Attending(4)
    device.plan = ChunkPlan(ChunkSize(2048, 0.5), shared_prompt_tokens=0)
    device.plan.observe(StepResult(seconds=STEP_S, rows_decoded=4))
    prompt = device.submit(6000)
    while prompt.num_prompt_left:
        device.turn()
    assert device.share == pytest.approx(4 / (4 + SHARE), rel=0.03)


def test_two_steps_that_are_told_at_once_are_two() -> None:
    device = Device(4)
    device.plan.observe(StepResult(seconds=2 * STEP_S, steps=2, rows_decoded=4))
    assert device.plan.chunk_size.decode_s == pytest.approx(STEP_S)
    tokens = 100
    chunk_s = tokens * CHUNK_S_PER_TOKEN
    device.plan.observe(StepResult(seconds=2 * STEP_S + chunk_s, steps=2, rows_decoded=4, chunk_tokens=tokens))
    assert device.plan.chunk_size.seconds(tokens) == pytest.approx(chunk_s)


def test_one_odd_step_changes_no_share() -> None:
    """As where a kernel is compiled at its first use; though from then on there may be a chunk beside every step."""
    device = Device(4)
    device.submit(1_000_000)
    for _ in range(100):
        device.turn()
    device.plan.chunk_size.observe(StepResult(seconds=500 * STEP_S, rows_decoded=4))
    assert device.share_of(1000, after=0) == pytest.approx(4 / (4 + SHARE), rel=0.1)


def test_one_odd_chunk_is_not_paid_for() -> None:
    """A kernel is compiled at its first use: the rows have waited for that, but need not be paid for it four times."""

    class Compiling(Device):
        def extra_s(self, length: int, stop: int) -> float:
            return 9.0 if stop - length <= 5000 < stop else 0.0

    waited_s = {}
    for device in (Device(4), Compiling(4)):
        prompt = device.submit(20_000)
        while prompt.num_prompt_left:
            device.turn()
        waited_s[type(device)] = device.step_s + device.chunk_s
    assert 9.0 < waited_s[Compiling] - waited_s[Device] < 10.0


def test_an_odd_first_step_is_forgotten_beside_chunks() -> None:
    device = Device(4)
    device.plan.chunk_size = ChunkSize(2048, 0.05)
    device.plan.chunk_size.observe(StepResult(seconds=500 * STEP_S, rows_decoded=4))
    device.submit(10_000_000)
    assert device.share_of(1000, after=300) == pytest.approx(4 / (4 + SHARE), rel=0.1)


def test_a_short_newcomer_is_next_although_a_long_prompt_owes() -> None:
    device = Device(4)
    long = device.submit(100_000)
    assert [device.turn() for _ in range(4)][-1] is None, "the first chunks tell what chunks take"
    assert long.num_prompt_left
    short = device.submit(50)
    assert device.turn() is short


def test_where_nothing_decodes_nothing_is_owed() -> None:
    device = Device(0)
    long = device.submit(10_000)
    assert [device.turn() for _ in range(5)] == [long] * 5


def test_before_a_step_was_measured_no_prompt_waits() -> None:
    device = Device(4)
    device.plan = ChunkPlan(ChunkSize(64, 0.05), shared_prompt_tokens=0)
    long = device.submit(1000)
    assert device.plan.next([long], 4)[0] is not None
    long.process(64)
    assert device.plan.next([long], 4)[0] is not None


def test_a_chunk_ends_at_a_multiple_where_it_can() -> None:
    device = Device(num_decoding=0)
    device.plan = ChunkPlan(make_chunk_size(600, 0.05, multiple=256), shared_prompt_tokens=0)
    prompt = device.submit(1201)  # of a prompt the last token is the first step's
    prompt.process(70)  # known of old
    stops = []
    while device.turn():
        stops.append(prompt.num_processed)
    assert stops == [512, 1024, 1200]


class Planning(Device):
    """Lengths of attention that are new to it take it a while more, as on CUDA."""

    PLAN_S = 0.07

    def __init__(self, num_decoding: int) -> None:
        super().__init__(num_decoding, chunk_s_per_token=6e-5)
        self.plan = ChunkPlan(make_chunk_size(2048, 0.05, multiple=256), shared_prompt_tokens=0)
        self.planned: set[tuple[int, int]] = set()

    def extra_s(self, length: int, stop: int) -> float:
        is_new = (length, stop) not in self.planned
        self.planned.add((length, stop))
        return self.PLAN_S * is_new


def test_where_new_lengths_have_to_be_planned_they_are_few_and_come_again() -> None:
    device = Planning(num_decoding=4)
    counts, shares = [], []
    for _ in range(3):
        before = len(device.planned), device.step_s, device.chunk_s
        prompt = device.submit(30_000)
        while prompt.num_prompt_left:
            device.turn()
        counts.append(len(device.planned) - before[0])
        step_s, chunk_s = device.step_s - before[1], device.chunk_s - before[2]
        shares.append(step_s / (step_s + chunk_s))
    assert shares == [pytest.approx(4 / (4 + SHARE), rel=0.1)] * 3
    assert counts[0] < 45, "256 at a time it would be 118"
    assert counts[1] < 10
    assert counts[2] == 0


def test_where_no_multiple_is_in_reach_a_chunk_is_as_long_as_it_may_be() -> None:
    device = Device(num_decoding=0)
    device.plan = ChunkPlan(make_chunk_size(100, 0.05, multiple=256), shared_prompt_tokens=0)
    prompt = device.submit(401)
    stops = []
    while device.turn():
        stops.append(prompt.num_processed)
    assert stops == [100, 200, 300, 400]
