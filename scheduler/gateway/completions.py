"""OpenAI's completions of plain text: POST /v1/completions."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field

from scheduler.gateway import logprobs as forms
from scheduler.gateway.dialect import Event, Order, given
from scheduler.gateway.faults import bad
from scheduler.gateway.formats import Format, structure_of
from scheduler.gateway.openai_reply import OpenAIReply
from scheduler.gateway.sampling import UNSUPPORTED, Drawing, Size, drawing_of
from scheduler.gateway.usage import counted
from scheduler.protocol import Delta, Done

# Each is a request of its own to the daemon, which has a queue for more.
MAX_PROMPTS = 128

Text = Annotated[str, Field(min_length=1)]
Tokens = Annotated[list[Size], Field(min_length=1)]
Prompts = Annotated[list[Text], Field(min_length=1, max_length=MAX_PROMPTS)]
TokenPrompts = Annotated[list[Tokens], Field(min_length=1, max_length=MAX_PROMPTS)]


class CompletionBody(Drawing):
    REFUSED: ClassVar[Mapping[str, str]] = UNSUPPORTED | {"suffix": "the models served here continue text"}

    prompt: Text | Prompts | Tokens | TokenPrompts
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | bool | None = None
    top_logprobs: Annotated[int, Field(ge=-1, le=20)] | None = None
    best_of: Annotated[int, Field(ge=1, le=128)] | None = None
    response_format: Format | None = None


def order(body: CompletionBody, model: str) -> Order:
    """Raises Fault."""
    n = body.n or 1
    if body.best_of not in (None, n):
        raise bad("best_of is not supported: n answers are given, and none is left out", param="best_of")
    structure = given(structured_outputs=structure_of(body.response_format, "response_format"))
    options = {**drawing_of(body), **structure, **_logprobs_of(body), **given(echo=body.echo or None)}
    prompts = _prompts_of(body.prompt)
    if len(prompts) * n > MAX_PROMPTS:
        raise bad(f"{len(prompts)} prompts with {n} answers each are over {MAX_PROMPTS}: send fewer", param="prompt")
    stops = body.stop_token_ids or ()
    reply = CompletionReply(model, len(prompts), n, body.wants_usage, "logprobs" in options, stops)
    return Order([{**prompt, **options} for prompt in prompts], n, bool(body.stream), reply)


def _prompts_of(prompt: str | list[str] | list[int] | list[list[int]]) -> list[dict[str, Any]]:
    if isinstance(prompt, str):
        return [{"prompt": prompt}]
    if isinstance(prompt[0], int):
        return [{"prompt_token_ids": prompt}]
    return [{"prompt": each} if isinstance(each, str) else {"prompt_token_ids": each} for each in prompt]


def _logprobs_of(body: CompletionBody) -> dict[str, Any]:
    """OpenAI's logprobs is how many of the likeliest; mlx_lm.server's a flag, with top_logprobs beside it."""
    if body.logprobs is None or body.logprobs is False:
        return {}
    num_top = max(body.top_logprobs or 0, 0) if body.logprobs is True else body.logprobs
    return {"logprobs": True, **given(top_logprobs=num_top or None)}


class CompletionReply(OpenAIReply):
    """Answers are numbered through: the n of the first prompt, those of the second, and so on."""

    ID, CHUNK = "cmpl-", "text_completion"

    def __init__(
        self,
        model: str,
        num_prompts: int,
        n: int,
        wants_usage: bool,
        wants_logprobs: bool,
        stop_token_ids: Collection[int] = (),
    ) -> None:
        super().__init__(model, n, wants_usage, wants_logprobs, stop_token_ids)
        # Characters before the next token of each answer.
        self._offsets: list[int | None] = [None] * (num_prompts * n)

    def begin(self) -> Iterable[Event]:
        return []

    def delta(self, answer: int, delta: Delta) -> Iterable[Event]:
        # What a model thinks is told apart only in chats.
        if not delta.text and not delta.logprobs:
            return
        yield self._chunk_of(self._choice(answer, delta.text, self._logprobs(answer, delta.text, delta)))

    def done(self, answer: int, done: Done) -> Iterable[Event]:
        self._count.take(answer, done)
        yield self._chunk_of(self._choice(answer, "", None, done))

    def whole(self, dones: Sequence[Done]) -> dict[str, Any]:
        count = counted(self._n, dones)
        choices = []
        for answer, done in enumerate(dones):
            text = done.text or ""
            choices.append(self._choice(answer, text, self._logprobs(answer, text, done), done))
        body = {**self._head, "object": self.CHUNK, "choices": choices, "usage": count.openai()}
        return body | given(timings=count.timings())

    def _choice(
        self, answer: int, text: str, logprobs: Mapping[str, Any] | None, done: Done | None = None
    ) -> dict[str, Any]:
        """done: how the answer has ended, if it has."""
        return {"index": answer, "text": text, "logprobs": logprobs, **self._ending(done)}

    def _logprobs(self, answer: int, text: str, said: Delta | Done) -> dict[str, Any] | None:
        if not self._wants_logprobs:
            return None
        num_chars = sum(len(each.token) for each in said.logprobs)
        at = self._offsets[answer]
        if at is None:
            # An echo comes with the first token.
            at = max(0, len(text) - num_chars)
        self._offsets[answer] = at + num_chars
        return forms.of_completion(said.logprobs, at)
