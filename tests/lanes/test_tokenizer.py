"""Tokenizer and detokenizers: what comes in pieces is what comes at once, for each kind of tokenizer."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from lanes.detokenize import ByteDetokenizer, PairwiseDetokenizer
from lanes.gguf.header import Header
from lanes.gguf.vocabulary import read_tokenizer
from lanes.tokenizer import RESERVED, ChatTemplateError, Tokenizer
from tests.lanes.demo_model import demo_backend, demo_tokenizer
from tests.lanes.gguf import models as small_models
from tests.lanes.gguf import sentences

# Not timed: the first example reads the model's vocabulary.
untimed = settings(deadline=None)


@cache
def sentencepiece() -> Tokenizer:
    """Spaces spelled in pieces, bytes as <0x00>; one special and one other added token."""
    backend = read_tokenizer(Header(Path("some.gguf"), sentences.metadata(), {}))
    backend.add_tokens([AddedToken("<|x|>", special=True), AddedToken("<tool>", special=False)])
    return Tokenizer(backend, {2})


@cache
def byte_level_with_additions() -> Tokenizer:
    """Added tokens that are spelled with letters that otherwise stand for bytes, with others, and with spaces."""
    backend = read_tokenizer(Header(Path("some.gguf"), small_models.VOCABULARY, {}))
    backend.add_tokens([AddedToken(text, special=False) for text in ("<tool>", "é", "日本", "a b")])
    return Tokenizer(backend, ())


@cache
def word_pieces() -> Tokenizer:
    """Neither bytes nor spaces in the tokens: the decoder puts the spaces."""
    vocabulary = {"[UNK]": 0, "un": 1, "##able": 2, "##s": 3, "word": 4, ".": 5, ",": 6, "'": 7, "[SEP]": 8}
    backend = Backend(models.WordPiece(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece(cleanup=False)
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, sep_token="[SEP]"), {8})


class Slow:
    """A tokenizer without a fast backend, such as models bring as Python code: single bytes and a special token."""

    all_special_ids = (256,)
    bos_token = bos_token_id = None

    def __len__(self) -> int:
        return 257

    def get_vocab(self) -> dict[str, int]:
        return {str(token): token for token in range(257)}

    def decode(self, tokens: list[int], **options: Any) -> str:
        return bytes(token for token in tokens if token < 256).decode("utf-8", "replace")


KINDS = {
    "demo": demo_tokenizer,
    "sentencepiece": sentencepiece,
    "additions": byte_level_with_additions,
    "word pieces": word_pieces,
}


def in_pieces(tokenizer: Tokenizer, tokens: list[int]) -> list[str]:
    stream = tokenizer.stream()
    return [stream.push(token) for token in tokens] + [stream.flush()]


@pytest.mark.parametrize("kind", KINDS)
@untimed
@given(data=st.data())
def test_pieces_make_the_whole(kind: str, data: st.DataObject) -> None:
    """Ids of the whole vocabulary, some beyond it, and often of its first part, where the bytes and special ids are."""
    tokenizer = KINDS[kind]()
    size = tokenizer.vocab_size
    ids = st.one_of(st.integers(0, size + 3), st.integers(0, min(size, 350)))
    tokens = data.draw(st.lists(ids, max_size=40))
    assert "".join(in_pieces(tokenizer, tokens)) == tokenizer.decode(tokens)


# Without what the vocabularies cannot spell (some control characters, empty planes, SentencePiece's sign for a space),
# and without "<", with which special tokens begin.
SPELLABLE = st.characters(codec="utf-8", max_codepoint=0x3FFFF, exclude_categories=["Cc"], exclude_characters="\u2581<")


@pytest.mark.parametrize("kind", ["demo", "sentencepiece"])
@untimed
@given(text=st.text(SPELLABLE, max_size=40))
@example(text="🦙🦙 é日本 y")
def test_no_piece_has_half_a_character(kind: str, text: str) -> None:
    """Text without replacement characters gives pieces without them, and each piece is a stretch of the text."""
    assume("\ufffd" not in text)
    tokenizer = KINDS[kind]()
    pieces = in_pieces(tokenizer, tokenizer.encode(text))
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) == text


def test_pieces_come_with_their_tokens() -> None:
    """Words are said as soon as their token is there; an emoji of several tokens with its last one."""
    tokenizer = demo_tokenizer()
    tokens = tokenizer.encode("The capital 🦙!")
    pieces = in_pieces(tokenizer, tokens)
    assert pieces[:2] == ["The", " capital"]
    assert pieces[-2:] == ["!", ""]
    assert [piece for piece in pieces[2:-2] if piece] == [" ", "🦙"]


def test_a_cut_character_is_replaced_at_the_end() -> None:
    tokenizer = demo_tokenizer()
    tokens = tokenizer.encode("x🦙")[:-1]
    pieces = in_pieces(tokenizer, tokens)
    assert "".join(pieces[:-1]) == "x"
    assert pieces[-1] == "\ufffd"


def test_the_right_detokenizer_is_taken() -> None:
    assert isinstance(demo_tokenizer().stream(), ByteDetokenizer)
    assert isinstance(sentencepiece().stream(), PairwiseDetokenizer)
    assert isinstance(word_pieces().stream(), PairwiseDetokenizer)


@given(st.text(max_size=30), st.integers(0, 30))
def test_tokenizers_without_a_backend(text: str, place: int) -> None:
    tokenizer = Tokenizer(Slow(), {256})
    tokens = list(text.encode("utf-8", "replace"))
    tokens.insert(place % (len(tokens) + 1), 256)
    pieces = in_pieces(tokenizer, tokens)
    assert "".join(pieces) == tokenizer.decode(tokens)
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text


def test_endless_garbage_is_said_some_time() -> None:
    """A tokenizer without a backend that never completes a character is not held back for ever."""
    stream = Tokenizer(Slow(), ()).stream()
    assert any(stream.push(0xF0) for _ in range(12))


def test_encode_adds_what_the_tokenizer_adds_and_once() -> None:
    plain, spelled = sentencepiece().encode("row"), sentencepiece().encode("<s>row")
    assert plain[0] == 1
    assert plain.count(1) == 1
    assert spelled.count(1) == 1
    assert sentencepiece().encode("<s><s>row").count(1) == 2
    # A text may begin with a token that the tokenizer does not add: it stays.
    assert demo_tokenizer().encode("<|im_start|>x")[0] == 1


def test_decode_leaves_special_tokens_out_and_tidies_nothing() -> None:
    tokenizer = demo_tokenizer()
    text = "<|im_start|>It 's , they say , 1 . 2 !<|im_end|>"
    assert tokenizer.decode(tokenizer.encode(text)) == "It 's , they say , 1 . 2 !"


def test_sizes_and_ends() -> None:
    assert demo_tokenizer().vocab_size == 49152
    assert demo_tokenizer().eos_token_ids == {0, 2}


def chat(*contents: str) -> list[dict[str, str]]:
    return [{"role": "assistant" if at % 2 else "user", "content": content} for at, content in enumerate(contents)]


def test_a_chat_is_laid_out_by_the_model() -> None:
    tokens = demo_tokenizer().encode_chat(chat("Hi"))
    text = demo_backend().decode(tokens)
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    closed = demo_backend().decode(demo_tokenizer().encode_chat(chat("Hi"), add_generation_prompt=False))
    assert closed.endswith("Hi<|im_end|>\n")


def with_template(template: str | None) -> Tokenizer:
    backend = read_tokenizer(Header(Path("some.gguf"), small_models.VOCABULARY, {}))
    backend.chat_template = template
    return Tokenizer(backend, ())


def test_template_variables_reach_the_template() -> None:
    tokenizer = with_template("{{ mood }}{% for m in messages %}{{ m.content }}{% endfor %}")
    assert tokenizer.decode(tokenizer.encode_chat(chat("Hi"), mood="calm")) == "calmHi"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (None, "no chat template"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[3].content }}", "does not accept these messages"),
        ("{{ messages[0].content.nothing.more }}", "does not accept these messages"),
        ("{% for %}", "does not accept these messages"),
        ("{{ ''.__class__.__mro__ }}", "does not accept these messages"),
    ],
)
def test_templates_that_fail_say_so(template: str | None, words: str) -> None:
    with pytest.raises(ChatTemplateError, match=words):
        with_template(template).encode_chat(chat("Hi"))


@pytest.mark.parametrize("name", sorted(RESERVED))
def test_a_client_cannot_bring_a_template(name: str) -> None:
    with pytest.raises(ChatTemplateError, match=name):
        demo_tokenizer().encode_chat(chat("Hi"), **{name: "{{ 1 }}"})


def test_imports_no_mlx() -> None:
    import subprocess
    import sys

    code = "import sys, lanes.tokenizer, lanes.detokenize, lanes.blas, lanes.sources; print('mlx.core' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
