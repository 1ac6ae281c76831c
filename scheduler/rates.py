"""How large a chunk of a prompt may be, so that rows which decode do not wait too long for it: from measured rates."""

from itertools import pairwise

from lanes.lane import StepResult

# Below this a chunk costs about as much as one of this size: the weights are read once whatever its size.
SMALLEST_CHUNK_TOKENS = 64
# Where a step itself takes long, as on a CPU, chunks that kept to --max-stall-ms would be small, and each is followed
# by a step of few rows, which costs as much as one of many. So a chunk may take as long as so many steps.
STEPS_WORTH = 8
# Where nothing decodes a chunk may take so long: whoever comes or goes meanwhile waits for its end.
ALONE_S = 1.0
# How much a new measurement counts against the ones before it.
WEIGHT = 0.2
# One odd measurement, another program on the machine or a kernel that is compiled at its first use, may not move a mean
# far: it counts as so many times the mean at most.
ODD = 2.0
# A chunk of twice the tokens takes hardly longer than the smaller one, up to so many times as long.
HARDLY_LONGER = 1.5


def _moved(before: float | None, measured: float) -> float:
    """A running mean after one more measurement."""
    return measured if before is None else before + WEIGHT * (min(measured, ODD * before) - before)


def _doubled(size: int, limit: int) -> int:
    """The largest of size, twice, four times ... that is within a limit; size itself if it is not."""
    return size << max(limit // size, 1).bit_length() - 1


class PromptRate:
    """How fast prompts are processed, from chunks that no step ran beside. tokens_per_s: None before the first."""

    def __init__(self) -> None:
        self.tokens_per_s: float | None = None

    def observe(self, result: StepResult) -> None:
        if result.rows_decoded or result.chunk_tokens < SMALLEST_CHUNK_TOKENS or not result.seconds:
            return
        self.tokens_per_s = _moved(self.tokens_per_s, result.chunk_tokens / result.seconds)


class ChunkSize:
    """Tokens of prompt to process between two decode steps.

    Each measured chunk corrects the size by what it took over what it may take; its own rate changes with the size,
    so the size is the thing that is steered, not a rate computed once. Sizes repeat, so that shapes do.
    """

    def __init__(self, largest_tokens: int, max_stall_s: float) -> None:
        self.largest_tokens = largest_tokens
        self.max_stall_s = max_stall_s
        self._tokens = float(min(largest_tokens, 256))
        self._decode_s: float | None = None
        self._token_s: float | None = None

    @property
    def decode_s(self) -> float:
        """What a decode step takes; 0 as long as none was measured."""
        return self._decode_s or 0.0

    @property
    def stall_s(self) -> float:
        """What a chunk of `tokens` may take."""
        return max(self.max_stall_s, STEPS_WORTH * self.decode_s)

    def seconds(self, tokens: int) -> float:
        """What a chunk of so many takes beside a step; 0 as long as none was measured."""
        return tokens * (self._token_s or 0.0)

    def chunk_s(self, result: StepResult) -> float:
        """What the chunks of a turn took beside its steps."""
        return max(result.seconds - result.steps * self.decode_s, 1e-4)

    def observe(self, result: StepResult) -> None:
        """Learn from a turn: a decode step alone tells its own cost, one behind a chunk the chunk's."""
        if not result.rows_decoded:
            if result.chunk_tokens >= SMALLEST_CHUNK_TOKENS or (result.chunk_tokens and self._token_s is None):
                self._token_s = _moved(self._token_s, result.seconds / result.chunk_tokens)
            return
        if not result.chunk_tokens:
            self._decode_s = _moved(self._decode_s, result.seconds / result.steps)
        elif self._decode_s is not None and result.seconds < self._decode_s:
            # So a step takes less than that; the first of all may have been an odd one. It says nothing of the chunk.
            self._decode_s = _moved(self._decode_s, result.seconds)
        elif self._decode_s is not None:
            chunk_s = self.chunk_s(result)
            self._token_s = _moved(self._token_s, chunk_s / result.chunk_tokens)
            self._learn(result.chunk_tokens, chunk_s)

    def tokens(self, *, rows_decoding: bool) -> int:
        """The largest chunk for the next turn."""
        if not rows_decoding:
            return self._alone_tokens(SMALLEST_CHUNK_TOKENS)
        size = int(self._tokens)
        return size - size % SMALLEST_CHUNK_TOKENS or size

    def stop(self, start: int, tokens: int) -> int:
        """Where a chunk ends that begins at `start` and may have so many tokens."""
        return start + tokens

    def _alone_tokens(self, smallest: int) -> int:
        """The largest size that is processed in ALONE_S where no step is beside: all, or a power of two times the
        smallest, so that a prompt that is alone is cut alike each time."""
        if not self._token_s or self._token_s * self.largest_tokens <= ALONE_S:
            return self.largest_tokens
        return min(_doubled(smallest, int(ALONE_S / self._token_s)), self.largest_tokens)

    def _learn(self, chunk_tokens: int, chunk_s: float) -> None:
        """A chunk beside a step took so long."""
        if chunk_tokens < self.tokens(rows_decoding=True) and chunk_s <= self.stall_s:
            return  # the end of a prompt, in time: it says nothing of a whole chunk
        fitting = self._tokens * self.stall_s / chunk_s
        fitting = min(max(fitting, self._tokens / ODD), self._tokens * ODD)
        self._tokens += WEIGHT * (fitting - self._tokens)
        self._tokens = min(max(self._tokens, SMALLEST_CHUNK_TOKENS), self.largest_tokens)


class DoublingChunkSize(ChunkSize):
    """For devices that make a plan for each new pair of lengths: the size is one of few, each double the one before,
    and chunks end at multiples of it. So those of one prompt have lengths that those of another had, whatever was
    measured meanwhile.
    """

    def __init__(self, largest_tokens: int, max_stall_s: float, multiple: int) -> None:
        """multiple: the smallest size; see lanes.lane.ModelInfo.chunk_multiple."""
        super().__init__(largest_tokens, max_stall_s)
        self.multiple = multiple
        # What a chunk of each size takes, as far as one has been measured.
        self._seconds: dict[int, float] = {}

    @property
    def sizes(self) -> list[int]:
        count = max(self.largest_tokens // self.multiple, 1).bit_length()
        return [min(self.multiple << power, self.largest_tokens) for power in range(count)]

    def tokens(self, *, rows_decoding: bool) -> int:
        """The largest size that is known to fit; or the next, once, where it may. What takes hardly longer than half as
        many may take longer than it should: the plan is most of it, and is made half as often."""
        if not rows_decoding:
            return _doubled(self.sizes[0], self._alone_tokens(self.multiple))
        fitting = self.sizes[0]
        for size, larger in pairwise(self.sizes):
            took_s = self._seconds.get(size)
            if took_s is None:
                break
            # Twice as many take twice as long at most, whatever was measured.
            takes_s = min(self._seconds.get(larger, took_s), 2 * took_s)
            if takes_s > (2 * self.stall_s if takes_s <= HARDLY_LONGER * took_s else self.stall_s):
                break
            fitting = larger
        return fitting

    def stop(self, start: int, tokens: int) -> int:
        return start + tokens - start % tokens

    def _learn(self, chunk_tokens: int, chunk_s: float) -> None:
        size = next((size for size in self.sizes if chunk_tokens <= size), self.sizes[-1])
        self._seconds[size] = _moved(self._seconds.get(size), chunk_s)


def make_chunk_size(largest_tokens: int, max_stall_s: float, multiple: int) -> ChunkSize:
    """multiple: see lanes.lane.ModelInfo.chunk_multiple."""
    if multiple > 1:
        return DoublingChunkSize(largest_tokens, max_stall_s, multiple)
    return ChunkSize(largest_tokens, max_stall_s)
