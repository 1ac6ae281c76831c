"""From tokens to the text that a client may see: whole characters only, and nothing of a stop string, ever."""

from collections.abc import Sequence
from typing import Protocol


class Decoder(Protocol):
    """Turns one request's tokens into text piece by piece; see lanes.tokenizer."""

    def push(self, token_id: int) -> str:
        """The text that is certain now; half a character is held back."""
        ...

    def flush(self) -> str:
        """What was held back; no token follows."""
        ...


class TextStream:
    """The text of one request, cut before the first stop string.

    The end of the text that could still become a stop string is held back until more of it is known.
    """

    def __init__(self, decoder: Decoder, stops: Sequence[str] = ()) -> None:
        assert all(stops), "an empty stop string stops nothing"
        self._decoder = decoder
        self._stops = tuple(stops)
        self._held = ""
        self.stopped_by: str | None = None

    def push(self, token_id: int, may_stop: bool = True) -> str:
        """The text that may be shown after this token. Once stopped_by is set, the text has ended.

        may_stop False: no stop string ends in what this token adds, nor begins in it.
        """
        piece = self._decoder.push(token_id)
        if may_stop:
            return self._release(piece)
        piece, self._held = self._held + piece, ""
        return piece

    def flush(self) -> str:
        """The rest, when no token follows."""
        text = self._release(self._decoder.flush())
        text, self._held = text + self._held, ""
        return text

    def _release(self, piece: str) -> str:
        if self.stopped_by is not None:
            return ""
        if not self._stops:
            return piece
        text = self._held + piece
        found = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            # The one that was complete first has stopped the text, however it was cut into pieces.
            at, self.stopped_by = min(found, key=lambda pair: (pair[0] + len(pair[1]), pair[0]))
            self._held = ""
            return text[:at]
        held = max(overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def overlap(text: str, stop: str) -> int:
    """The length of the longest end of the text that is a beginning of the stop string."""
    longest = min(len(text), len(stop) - 1)
    return next((length for length in range(longest, 0, -1) if stop.startswith(text[len(text) - length :])), 0)
