"""What mlx-lm knows of a model's way to mark thoughts and calls, and the text that comes with the markers in it."""

import json
from typing import Any

import pytest
from mlx_lm.generate import TextStateMachine, make_text_state_machine
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from lanes.load import wrapped
from lanes.tokenizer import Tokenizer
from scheduler.channels import Channels, Piece

# As Qwen3's template: enough for mlx-lm to know the parser by it.
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}{% for tool_call in m.tool_calls or [] %}<tool_call>"
    "{{ tool_call.name }}</tool_call>{% endfor %};{% endfor %}{{ tools }}{% if think %}<think>{% endif %}"
)
MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": [1, "ü"]}}\n</tool_call>'


def wrapper_of(special: bool) -> TokenizerWrapper:
    """A tokenizer of bytes and the markers, which are special tokens in some models and plain ones in others."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={character: token for token, character in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(marker, special=special) for marker in MARKERS])
    backend.add_special_tokens(["<end>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", chat_template=TEMPLATE)
    made: TokenizerWrapper = wrapped(tokenizer, [backend.token_to_id("<end>")])
    return made


def tokenizer_of(special: bool) -> Tokenizer:
    wrapper = wrapper_of(special)
    return Tokenizer(wrapper, wrapper.eos_token_ids)


def taken_apart(tokenizer: Tokenizer, text: str, tools: tuple[dict[str, Any], ...] = ({"name": "f"},)) -> Piece:
    stream = tokenizer.stream(marked=True)

    def parse(call: str) -> Any:
        return tokenizer.parts.parse_call(call, tools)

    channels = Channels(tokenizer.parts.transitions, "normal", parse)
    pieces = [channels.push(stream.push(token)) for token in tokenizer.encode(text)]
    return Piece.joined([*pieces, channels.push(stream.flush()), channels.flush()])


@pytest.mark.parametrize("special", [True, False])
def test_an_answer_is_taken_apart_by_what_mlx_lm_knows(special: bool) -> None:
    tokenizer = tokenizer_of(special)
    assert tokenizer.parts.can_call
    piece = taken_apart(tokenizer, f"<think>hm, 日本</think>Let me see. {CALL} ok")
    assert (piece.text, piece.reasoning) == ("Let me see.  ok", "hm, 日本")
    (call,) = piece.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("f", {"x": [1, "ü"]})


@pytest.mark.parametrize(
    "text", ["a<think>b</think>c", f"x{CALL}y{CALL}", "<think>b<tool_call>c</tool_call>d", "a<thin"]
)
def test_the_parts_are_those_of_mlx_lms_own_machine(text: str) -> None:
    wrapper = wrapper_of(special=False)
    state = make_text_state_machine(wrapper).make_state()
    state, segments = TextStateMachine.split(state, text)
    _, rest, part = TextStateMachine.flush(state)
    theirs: dict[str, str] = {}
    for name, said in [*segments, (part, rest)]:
        theirs[name] = theirs.get(name, "") + said
    calls: list[str] = []

    def parse(call: str) -> Any:
        calls.append(call)
        return []

    channels = Channels(Tokenizer(wrapper, wrapper.eos_token_ids).parts.transitions, "normal", parse)
    piece = Piece.joined([channels.push(text), channels.flush()])
    assert piece.text == theirs.get("normal", "")
    assert piece.reasoning == theirs.get("reasoning", "")
    assert "".join(calls) == theirs.get("tool", "")


def test_special_markers_are_in_the_text_only_where_they_are_wanted() -> None:
    tokenizer = tokenizer_of(special=True)
    tokens = tokenizer.encode("a<think>b</think><end>")
    plain, marked = tokenizer.stream(), tokenizer.stream(marked=True)
    assert "".join(map(plain.push, tokens)) == "ab"
    assert "".join(map(marked.push, tokens)) == "a<think>b</think>"


def test_an_answer_begins_where_the_template_has_left_it() -> None:
    tokenizer = tokenizer_of(special=False)
    chat = [{"role": "user", "content": "hi"}]
    assert tokenizer.parts.first(tokenizer.encode_chat(chat)) == "normal"
    assert tokenizer.parts.first(tokenizer.encode_chat(chat, think=True)) == "reasoning"
    assert tokenizer.parts.first(tokenizer.encode("<think>a</think>")) == "normal"


def test_what_is_no_call_is_a_value_error_whatever_the_parser_raises() -> None:
    parts = tokenizer_of(special=False).parts
    for text in ("", "{", "[" * 100_000):
        with pytest.raises(ValueError, match="no call of a function"):
            parts.parse_call(text, [])


def test_a_tokenizer_that_mlx_lm_has_not_wrapped_has_one_part() -> None:
    wrapper = wrapper_of(special=False)
    parts = Tokenizer(wrapper._tokenizer, wrapper.eos_token_ids).parts
    assert not parts.can_call
    assert parts.transitions == {}
    assert parts.first([1, 2]) == "normal"


def test_tokens_have_names() -> None:
    tokenizer = tokenizer_of(special=True)
    assert [tokenizer.token_text(token) for token in tokenizer.encode("é<end>")] == ["\ufffd", "\ufffd", "<end>"]
