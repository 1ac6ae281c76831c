"""What one connection has yet to send. Sync: the step loop puts, the connection's sender takes, neither waits.

Deltas of one answer that are not sent yet become one: a client that reads slowly gets fewer and larger frames, and
what waits for it grows with the text it has to get, not with the number of steps. Order is kept among the replies of
each answer, which is all that a client can rely on: a delta may join an older one of its own before others' replies.

All that waits is counted in bytes. Over the limit the outbox is `full`: nothing is refused here, it is time to cut the
connection.
"""

from array import array
from collections import deque
from io import StringIO

from scheduler.codec import encode
from scheduler.protocol import Delta, Done, Error, Reply, RequestId, TokenLogprob, ToolCall
from store.framing import encode_frame

# A request and which of its answers.
_Key = tuple[RequestId, int]

# Enough for a system call to be worth its while, little enough that deltas still gather behind it.
TAKE_BYTES = 64 << 10

# A delta grows no further: far from the frame limit, and a client gets something to work on.
GROWN_BYTES = 256 << 10

# What a delta takes at most: its frame without id, text and tokens; each token id; each field that most lack; each tool
# call and each entry of the log-probabilities without its texts.
_DELTA_BYTES = 64
_TOKEN_BYTES = 5
_FIELD_BYTES = 16
_CALL_BYTES = 96
_LOGPROB_BYTES = 64


class _Growing:
    """Deltas of one answer that wait as one. num_bytes: of its frame, at most; about what it takes here, too."""

    __slots__ = ("key", "logprobs", "num_bytes", "reasoning", "text", "token_ids", "tool_calls")

    def __init__(self, key: _Key) -> None:
        self.key = key
        self.text = StringIO()
        self.reasoning = StringIO()
        self.token_ids = array("i")
        self.tool_calls: list[ToolCall] = []
        self.logprobs: list[TokenLogprob] = []
        self.num_bytes = _DELTA_BYTES + len(str(key[0]).encode()) + (_FIELD_BYTES if key[1] else 0)

    def add(self, delta: Delta) -> int:
        """Returns by how much num_bytes grew."""
        num_bytes = len(delta.text.encode()) + len(delta.reasoning.encode()) + _TOKEN_BYTES * len(delta.token_ids)
        num_bytes += sum(map(_call_bytes, delta.tool_calls)) + sum(map(_logprob_bytes, delta.logprobs))
        num_bytes += _FIELD_BYTES * sum(map(bool, (delta.reasoning, delta.tool_calls, delta.logprobs)))
        self.text.write(delta.text)
        self.reasoning.write(delta.reasoning)
        self.token_ids.extend(delta.token_ids)
        self.tool_calls.extend(delta.tool_calls)
        self.logprobs.extend(delta.logprobs)
        self.num_bytes += num_bytes
        return num_bytes

    def frame(self) -> bytes:
        id, index = self.key
        delta = Delta(
            id,
            self.text.getvalue(),
            tuple(self.token_ids),
            index=index,
            reasoning=self.reasoning.getvalue(),
            tool_calls=tuple(self.tool_calls),
            logprobs=tuple(self.logprobs),
        )
        return encode_frame(encode(delta))


def _call_bytes(call: ToolCall) -> int:
    return _CALL_BYTES + sum(len(said.encode()) for said in (call.id, call.function.name, call.function.arguments))


def _logprob_bytes(logprob: TokenLogprob) -> int:
    texts = (logprob.token, *(top.token for top in logprob.top_logprobs))
    return sum(_LOGPROB_BYTES + len(text.encode()) for text in texts)


class Outbox:
    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._waiting: deque[bytes | _Growing] = deque()
        self._growing: dict[_Key, _Growing] = {}
        self.num_bytes = 0

    @property
    def full(self) -> bool:
        return self.num_bytes > self._limit_bytes

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def put(self, reply: Reply) -> None:
        """Raises ProtocolError if the reply fits in no frame."""
        if isinstance(reply, Delta):
            key = (reply.id, reply.index)
            growing = self._growing.get(key)
            if growing is None or growing.num_bytes > GROWN_BYTES:
                growing = self._growing[key] = _Growing(key)
                self._waiting.append(growing)
                self.num_bytes += growing.num_bytes
            self.num_bytes += growing.add(reply)
            return
        frame = encode_frame(encode(reply))
        if isinstance(reply, Done | Error) and reply.id is not None:
            self._growing.pop((reply.id, reply.index or 0), None)
        self._waiting.append(frame)
        self.num_bytes += len(frame)

    def take(self) -> bytes:
        """The next frames, about TAKE_BYTES of them; empty if nothing waits."""
        frames: list[bytes] = []
        num_taken = 0
        while self._waiting and num_taken < TAKE_BYTES:
            entry = self._waiting.popleft()
            if isinstance(entry, _Growing):
                if self._growing.get(entry.key) is entry:
                    del self._growing[entry.key]
                self.num_bytes -= entry.num_bytes
                entry = entry.frame()
            else:
                self.num_bytes -= len(entry)
            frames.append(entry)
            num_taken += len(entry)
        return b"".join(frames)

    def check(self) -> None:
        """Assert the invariants."""
        sizes = [len(entry) if isinstance(entry, bytes) else entry.num_bytes for entry in self._waiting]
        assert self.num_bytes == sum(sizes), f"{self.num_bytes} bytes counted, {sum(sizes)} wait"
        growing = [entry for entry in self._waiting if isinstance(entry, _Growing)]
        assert all(entry in growing for entry in self._growing.values()), "a delta grows that does not wait"
