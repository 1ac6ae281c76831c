"""From a request's prompt, as text, chat or token ids, to the tokens that the model is fed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import trio

from lanes.lane import ModelInfo
from scheduler.chat import chat_of, text_size
from scheduler.errors import Refused
from scheduler.protocol import Submit
from scheduler.tokenizer import Tokenizer

# Cut into tokens on Trio's thread, a text of so many characters stops everybody for 2 ms, a million of them for 900.
LONG_TEXT_CHARS = 4096


class Prompts:
    def __init__(self, info: ModelInfo, tokenizer: Tokenizer, context_tokens: int | None) -> None:
        """context_tokens: which a prompt may not fill; None: there is no limit."""
        self.info = info
        self.tokenizer = tokenizer
        self.context_tokens = context_tokens
        self._long_texts = trio.CapacityLimiter(1)

    async def tokenize(
        self, message: Submit, template_args: Mapping[str, Any], is_kept: bool
    ) -> tuple[tuple[int, ...], int | None]:
        """The prompt, and how much of it is the system prompt where that matters. Long texts are cut into tokens beside
        the loop, one after another. template_args: the daemon's own for the chat template. is_kept: whether anything
        is remembered of prompts. Raises Refused."""
        variables = _variables(message, template_args)

        def tokenize() -> tuple[tuple[int, ...], int | None]:
            prompt = self._prompt(message, variables)
            return prompt, self._system_tokens(message, prompt, variables) if is_kept else None

        if text_size(message) < LONG_TEXT_CHARS:
            return tokenize()
        return await trio.to_thread.run_sync(tokenize, limiter=self._long_texts, abandon_on_cancel=True)

    def _prompt(self, message: Submit, variables: dict[str, Any]) -> tuple[int, ...]:
        if message.prompt_token_ids is not None:
            prompt = message.prompt_token_ids
            outside = next((token for token in prompt if not 0 <= token < self.info.vocab_size), None)
            if outside is not None:
                raise Refused(
                    "bad_request",
                    f"prompt_token_ids holds {outside}, but the model's ids are 0 to {self.info.vocab_size - 1}",
                )
        elif message.messages is not None:
            chat = chat_of(message.messages)
            if message.tools and message.tool_choice != "none" and not self.tokenizer.parts.can_call:
                raise Refused("bad_request", "this model calls no functions, or not in a way that mlx-lm can parse")
            try:
                prompt = tuple(self.tokenizer.encode_chat(chat, **variables))
            except ValueError as error:
                raise Refused("bad_request", str(error)) from error
        else:
            assert message.prompt is not None
            prompt = tuple(self.tokenizer.encode(message.prompt))
        if not prompt:
            raise Refused("bad_request", "the prompt has no tokens: send some text")
        if self.context_tokens is not None and len(prompt) >= self.context_tokens:
            raise Refused(
                "context_length_exceeded",
                f"the prompt has {len(prompt)} tokens, which leaves no room for an answer in the model's context of "
                f"{self.context_tokens}",
            )
        return prompt

    def _system_tokens(self, message: Submit, prompt: tuple[int, ...], variables: dict[str, Any]) -> int | None:
        """How many tokens the prompt shares with every other chat that has the same system prompt, for models that
        can be taken up only where their state was saved."""
        turns = message.messages or ()
        if self.info.remembers != "boundaries" or not turns or turns[0].role != "system":
            return None
        chats = [
            [{"role": "system", "content": turns[0].content}, {"role": "user", "content": word}] for word in ("a", "1")
        ]
        try:
            one, other = (self.tokenizer.encode_chat(chat, **variables) for chat in chats)
        except ValueError:
            return None
        parted = (at for at, tokens in enumerate(zip(one, other, prompt, strict=False)) if len(set(tokens)) > 1)
        return next(parted, None)


def _variables(message: Submit, template_args: Mapping[str, Any]) -> dict[str, Any]:
    """The chat template's."""
    variables = {**template_args, **(message.chat_template_kwargs or {})}
    if message.tools and message.tool_choice != "none":
        variables["tools"] = list(message.tools)
    return variables
