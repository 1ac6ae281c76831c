"""How large a chunk of a prompt may be, so that rows which decode do not wait too long for it: from measured rates."""

from lanes.lane import StepResult

# Below this a chunk costs about as much as one of this size: the weights are read once whatever its size.
SMALLEST_CHUNK_TOKENS = 64
# Where a step itself takes long, as on a CPU, chunks that kept to --max-stall-ms would be small, and each is followed
# by a step of few rows, which costs as much as one of many. So a chunk may take as long as so many steps.
STEPS_WORTH = 8
# How much a new measurement counts against the ones before it.
WEIGHT = 0.2


def _moved(before: float | None, measured: float) -> float:
    """A running mean after one more measurement."""
    return measured if before is None else before + WEIGHT * (measured - before)


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
    multiple: see lanes.lane.ModelInfo.chunk_multiple.
    """

    def __init__(self, largest_tokens: int, max_stall_s: float, multiple: int = 1) -> None:
        self.largest_tokens = largest_tokens
        self.max_stall_s = max_stall_s
        self.multiple = multiple
        self._smallest_tokens = max(multiple, SMALLEST_CHUNK_TOKENS)
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

    def observe(self, result: StepResult) -> None:
        """Learn from a turn: a decode step alone tells its own cost, one behind a chunk the chunk's."""
        if not result.rows_decoded:
            if self._token_s is None and result.chunk_tokens:
                self._token_s = result.seconds / result.chunk_tokens
            return
        if not result.chunk_tokens:
            self._decode_s = _moved(self._decode_s, result.seconds)
        elif self._decode_s is not None:
            chunk_s = max(result.seconds - self._decode_s, 1e-4)
            self._token_s = _moved(self._token_s, chunk_s / result.chunk_tokens)
            if result.chunk_tokens < self.tokens(rows_decoding=True) and chunk_s <= self.stall_s:
                return  # the end of a prompt, in time: it says nothing of a whole chunk
            fitting = self._tokens * self.stall_s / chunk_s
            # One odd measurement (another program on the machine) may not move the size far.
            fitting = min(max(fitting, self._tokens / 2), self._tokens * 2)
            self._tokens += WEIGHT * (fitting - self._tokens)
            self._tokens = min(max(self._tokens, self._smallest_tokens), self.largest_tokens)

    def tokens(self, *, rows_decoding: bool) -> int:
        """The largest chunk for the next turn."""
        if not rows_decoding:
            return self.largest_tokens
        size = int(self._tokens)
        return min(self.largest_tokens, size - size % self._smallest_tokens or self._smallest_tokens)
