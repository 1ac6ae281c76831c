"""A prompt takes no more from those that decode than one more row would, and a newcomer waits for no long prompt."""

import pytest

from lanes.lane import Sampling, StepResult
from scheduler.chunks import ChunkPlan
from scheduler.rates import ChunkSize
from scheduler.request import Request, State, Wish
from scheduler.text import TextStream
from scheduler.transcript import Transcript
from tests.scheduler.bytes_tokenizer import ByteStream

STEP_S = 0.01
CHUNK_S_PER_TOKEN = 0.0005


class Device:
    """Steps of a fixed time, chunks of a fixed time for each token; what it did is told a turn later."""

    def __init__(self, num_decoding: int) -> None:
        self.num_decoding = num_decoding
        self.plan = ChunkPlan(ChunkSize(2048, 0.05), shared_prompt_tokens=0)
        self.prompts: list[Request] = []
        self.step_s = self.chunk_s = 0.0
        self.plan.chunk_size.observe(StepResult(seconds=STEP_S, rows_decoded=num_decoding))

    def submit(self, tokens: int) -> Request:
        row_id = len(self.prompts) + 1
        wish = Wish(row_id, (1,) * tokens, 4, Sampling())
        request = Request(row_id, wish, Transcript(TextStream(ByteStream())), lambda said: None, 0.0)
        request.advance(State.PREFILLING)
        self.prompts.append(request)
        return request

    def turn(self) -> Request | None:
        """Returns whose prompt got a chunk."""
        left = [request for request in self.prompts if request.num_prompt_left]
        chunk, _ = self.plan.next(left, self.num_decoding)
        tokens = chunk.stop - chunk.start if chunk else 0
        seconds = STEP_S + tokens * CHUNK_S_PER_TOKEN
        self.plan.chunk_size.observe(StepResult(seconds=seconds, rows_decoded=self.num_decoding, chunk_tokens=tokens))
        self.step_s += STEP_S
        self.chunk_s += seconds - STEP_S
        if chunk is None:
            return None
        request = self.prompts[chunk.row_id - 1]
        request.process(chunk.stop)
        return request


@pytest.mark.parametrize("num_prompts", [1, 3])
@pytest.mark.parametrize("num_decoding", [1, 4, 16])
def test_every_request_has_the_same_share(num_decoding: int, num_prompts: int) -> None:
    device = Device(num_decoding)
    for _ in range(num_prompts):
        device.submit(1_000_000)
    for _ in range(5000):
        device.turn()
    share = device.step_s / (device.step_s + device.chunk_s)
    assert share == pytest.approx(num_decoding / (num_decoding + num_prompts), rel=0.1)


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
    device.plan = ChunkPlan(ChunkSize(600, 0.05, multiple=256), shared_prompt_tokens=0)
    prompt = device.submit(1201)  # of a prompt the last token is the first step's
    prompt.process(70)  # known of old
    stops = []
    while device.turn():
        stops.append(prompt.num_processed)
    assert stops == [512, 1024, 1200]


def test_where_no_multiple_is_in_reach_a_chunk_is_as_long_as_it_may_be() -> None:
    device = Device(num_decoding=0)
    device.plan = ChunkPlan(ChunkSize(100, 0.05, multiple=256), shared_prompt_tokens=0)
    prompt = device.submit(401)
    stops = []
    while device.turn():
        stops.append(prompt.num_processed)
    assert stops == [100, 200, 256, 356, 400]
