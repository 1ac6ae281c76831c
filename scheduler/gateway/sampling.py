"""How answers are drawn and when they end: the fields that chats and completions share, under the names that OpenAI,
vLLM and mlx_lm.server have for them. Where those differ, all of their spellings of "off" are understood."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from scheduler.gateway.dialect import Body, given
from scheduler.gateway.faults import bad

_MAX = 2**31 - 1

Count = Annotated[int, Field(ge=1, le=_MAX)]
Size = Annotated[int, Field(ge=0, le=_MAX)]
Share = Annotated[float, Field(ge=0, le=1)]
Penalty = Annotated[float, Field(ge=-100, le=100)]
Temperature = Annotated[float, Field(ge=0, le=100)]
Seed = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
StopText = Annotated[str, Field(min_length=1, max_length=256)]
Stop = StopText | Annotated[list[StopText], Field(max_length=32)]

# Of OpenAI's chats and completions: what is for OpenAI's own books, or a hint that nothing here needs.
HINTS = frozenset(
    [
        *("user", "metadata", "store", "service_tier", "prompt_cache_key", "prompt_cache_retention"),
        *("safety_identifier", "verbosity", "prediction", "parallel_tool_calls", "request_id", "include_reasoning"),
        *("draft_model", "num_draft_tokens", "role_mapping", "add_special_tokens"),
        *("skip_special_tokens", "spaces_between_special_tokens", "return_tokens_as_token_ids"),
    ]
)
UNSUPPORTED = {
    "use_beam_search": "answers are drawn token by token",
    "length_penalty": "it belongs to beam search",
    "prompt_logprobs": "prompts are processed without their log-probabilities",
    "truncate_prompt_tokens": "shorten the prompt before you send it",
    "allowed_token_ids": "structured_outputs can restrict an answer",
    "bad_words": "logit_bias can keep tokens out",
    "logits_processors": "they would be code in the server",
    "include_stop_str_in_output": "a stop string is told as stop_reason and is no part of the text",
    "return_token_ids": "the socket tells token ids, HTTP does not",
}


class StreamOptions(BaseModel):
    """include_usage: a last event has the usage, and the others have it as null."""

    model_config = ConfigDict(strict=True, extra="ignore")

    include_usage: bool | None = False


class StructuredOutputs(BaseModel):
    """vLLM's: one of these, which the answer then keeps to."""

    model_config = ConfigDict(strict=True, extra="ignore")

    json_: dict[str, Any] | None = Field(default=None, alias="json")
    json_object: Literal[True] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class Drawing(Body):
    """What OpenAI's chats and completions both take."""

    IGNORED: ClassVar[frozenset[str]] = HINTS
    REFUSED: ClassVar[Mapping[str, str]] = UNSUPPORTED

    stream: bool | None = False
    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = 1
    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Field(ge=-1, le=_MAX)] | None = None
    min_p: Share | None = None
    xtc_probability: Share | None = None
    xtc_threshold: Annotated[float, Field(ge=0, le=0.5)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0, le=100)] | None = None
    repetition_context_size: Size | None = None
    presence_penalty: Penalty | None = None
    presence_context_size: Size | None = None
    frequency_penalty: Penalty | None = None
    frequency_context_size: Size | None = None
    logit_bias: dict[str, Penalty] | None = None
    seed: Seed | None = None
    stop: Stop | None = None
    stop_token_ids: Annotated[list[Size], Field(max_length=128)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Size | None = None
    adapter: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    adapters: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    priority: Annotated[int, Field(ge=-1000, le=1000)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    @property
    def wants_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


def drawing_of(body: Drawing) -> dict[str, Any]:
    """Options of Client.submit. Raises Fault."""
    biases = body.logit_bias or None
    if biases and (wrong := next((token for token in biases if not token.isdecimal()), None)) is not None:
        raise bad(f"logit_bias: {wrong!r} is no token id", param="logit_bias")
    return {
        **top_p_of(body.top_p, body.top_k),
        **given(
            max_tokens=body.max_tokens,
            n=body.n if body.n != 1 else None,
            temperature=body.temperature,
            min_p=body.min_p,
            xtc_probability=body.xtc_probability,
            xtc_threshold=body.xtc_threshold,
            # mlx_lm.server's "off" is 0, vLLM's 1.
            repetition_penalty=body.repetition_penalty or None,
            repetition_context_size=body.repetition_context_size or None,
            presence_penalty=body.presence_penalty,
            presence_context_size=body.presence_context_size or None,
            frequency_penalty=body.frequency_penalty,
            frequency_context_size=body.frequency_context_size or None,
            logit_bias=biases,
            seed=seed_of(body.seed),
            stop=body.stop,
            stop_token_ids=body.stop_token_ids,
            ignore_eos=body.ignore_eos,
            min_tokens=body.min_tokens,
            # mlx_lm.server's name for it is the second.
            adapter=body.adapter or body.adapters,
            priority=body.priority,
            cache_salt=body.cache_salt,
            structured_outputs=_structure_of(body),
        ),
    }


def top_p_of(top_p: float | None, top_k: int | None = None) -> dict[str, Any]:
    """OpenAI's top_p may be 0, which leaves the likeliest token; vLLM's top_k may be -1, which is off."""
    if top_p == 0:
        return {"top_k": 1}
    return given(top_p=top_p, top_k=None if top_k is None else max(top_k, 0))


def seed_of(seed: int | None) -> int | None:
    """The daemon's seeds begin at 0; a negative one stands for one of its own."""
    return None if seed is None else seed & (2**63 - 1)


def _structure_of(body: Drawing) -> dict[str, Any] | None:
    if body.structured_outputs is not None:
        return body.structured_outputs.model_dump(by_alias=True, exclude_none=True)
    guided = given(
        json=body.guided_json, regex=body.guided_regex, choice=body.guided_choice, grammar=body.guided_grammar
    )
    return guided or None
