"""What one answer says, token by token: text, reasoning, calls and log-probabilities, as its client is told them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from lanes.lane import Logprob
from scheduler.channels import Channels, Piece
from scheduler.protocol import Submit, TokenLogprob, TopLogprob
from scheduler.text import TextStream
from scheduler.tokenizer import Tokenizer


class Transcript:
    """One answer.

    echo: what its text begins with. min_tokens: tokens before which no stop string is looked for. token_text: the text
    of a token alone, for log-probabilities.
    """

    def __init__(
        self,
        text: TextStream,
        channels: Channels | None = None,
        *,
        echo: str = "",
        min_tokens: int = 0,
        token_text: Callable[[int], str] = str,
    ) -> None:
        self._text = text
        self._channels = channels or Channels()
        self._echo = echo
        self._min_tokens = min_tokens
        self._token_text = token_text
        self._num_tokens = 0

    @property
    def stopped_by(self) -> str | None:
        """The stop string that has ended it."""
        return self._text.stopped_by

    @property
    def has_called(self) -> bool:
        """Whether it holds a whole call of a function."""
        return self._channels.num_calls > 0

    def take(self, token: int, logprob: Logprob | None, *, is_end: bool, is_last: bool) -> Piece:
        """What a token adds. is_end: it only ends the answer, and is no part of it. is_last: none follows."""
        text = "" if is_end else self._text.push(token, may_stop=self._num_tokens >= self._min_tokens)
        # What was held back may turn out to be, or to hold, a stop string.
        text += self._text.flush() if is_last else ""
        piece = self._channels.push(text)
        if is_last or self._text.stopped_by is not None:
            piece = Piece.joined([piece, self._channels.flush()])
        if not self._num_tokens:
            piece.text = self._echo + piece.text
        self._num_tokens += 1
        if not is_end:
            piece.token_ids.append(token)
            if logprob is not None:
                piece.logprobs.append(self._told(token, logprob))
        return piece

    def _told(self, token: int, logprob: Logprob) -> TokenLogprob:
        top = tuple(TopLogprob(other, self._token_text(other), value) for other, value in logprob.top)
        return TokenLogprob(token, self._token_text(token), logprob.logprob, top)


def transcript_of(message: Submit, prompt: Sequence[int], tokenizer: Tokenizer) -> Transcript:
    """For one answer to a request, whose prompt is these tokens. Only a chat's is taken apart."""
    is_chat, channels = message.messages is not None, None
    if is_chat:
        parts = tokenizer.parts
        calls = message.tools if parts.can_call and message.tool_choice != "none" else ()
        parse = partial(parts.parse_call, tools=calls) if calls else None
        channels = Channels(parts.transitions, parts.first(prompt), parse)
    return Transcript(
        TextStream(tokenizer.stream(marked=is_chat), message.stop),
        channels,
        echo=(message.prompt or tokenizer.decode(prompt)) if message.echo else "",
        min_tokens=message.min_tokens,
        token_text=tokenizer.token_text,
    )
