"""Tokenizers out of GGUF files: the demonstration's, SentencePiece's beside SentencePiece itself, and refusals."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from lanes.gguf.header import GgufError, Header
from lanes.gguf.vocabulary import PIPELINES, end_ids, read_tokenizer
from tests.lanes.demo_model import demo_backend, demo_header
from tests.lanes.gguf import models, sentences

# Without "<", with which special tokens begin: those are found in a text, which SentencePiece itself does not do.
texts = st.text(st.characters(codec="utf-8", exclude_characters="<"), max_size=60)
# Texts in which merges overlap and compete.
dense_texts = st.text(alphabet="ab -=.0\nThe rowÜé", max_size=40)


def header(metadata: dict[str, Any]) -> Header:
    return Header(Path("some.gguf"), metadata, {})


def small(**changed: Any) -> Header:
    """The vocabulary of the small models, changed; None takes a key away."""
    changes = {f"tokenizer.ggml.{key}": value for key, value in changed.items()}
    whole = {**models.VOCABULARY, **changes}
    return header({key: value for key, value in whole.items() if value is not None})


# SmolLM2 has no tokens for some bytes, and drops them: those that begin characters of planes that are empty still, and
# a few control characters.
SPELLABLE = st.characters(codec="utf-8", max_codepoint=0x3FFFF, exclude_characters="\x04\x06\x13\x14\x16\x1d")


@settings(deadline=None)
@given(st.text(SPELLABLE, max_size=60))
def test_the_demonstrations_text_comes_back(text: str) -> None:
    tokens = demo_backend().encode(text)
    assert demo_backend().decode(tokens) == text


def test_the_demonstrations_tokens() -> None:
    """Known ids of SmolLM2: its special tokens come first, digits are single, words carry their space."""
    encode = demo_backend().encode
    assert encode("<|im_start|>user\nHi<|im_end|>")[0] == 1
    assert encode("<|im_start|>user\nHi<|im_end|>")[-1] == 2
    assert len(encode("1234567")) == 7
    assert demo_backend().convert_ids_to_tokens(encode("The capital of France")) == [
        "The",
        "Ġcapital",
        "Ġof",
        "ĠFrance",
    ]
    assert end_ids(demo_header()) == {0, 2}


def test_the_demonstrations_chat_template() -> None:
    laid_out = demo_backend().apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert laid_out.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


@given(st.one_of(texts, dense_texts))
def test_sentencepiece_is_followed_exactly(text: str) -> None:
    tokenizer = SENTENCES
    assert tokenizer.encode(text, add_special_tokens=False) == sentences.processor().encode(text)


@given(st.lists(st.integers(3, 519), max_size=30))
def test_sentencepiece_decodes_alike(tokens: list[int]) -> None:
    """Where the bytes are a text; of a run that is none SentencePiece replaces single bytes, tokenizers all of them. A
    space at the start is left out by both, by tokenizers also if it is spelled as a byte."""
    expected = sentences.processor().decode(tokens)
    assume("\ufffd" not in expected and tokens[:1] != [sentences.processor().piece_to_id("<0x20>")])
    assert SENTENCES.decode(tokens, skip_special_tokens=True) == expected


SENTENCES = read_tokenizer(header(sentences.metadata()))


# Texts in which the pieces that a user has defined touch each other, begin, and are spelled with their own space.
defined_texts = st.lists(
    st.sampled_from([*sentences.USER_DEFINED, " ", "\u2581", "<", "b", "[x", " row", "The", "aa", "\t", "Ü"]),
    max_size=20,
).map("".join)
LIKE_GEMMA = read_tokenizer(header(sentences.metadata(like_gemma=True)))


@given(st.one_of(texts, dense_texts, defined_texts))
def test_pieces_that_a_user_defined_are_found_as_sentencepiece_does(text: str) -> None:
    trained = sentences.processor(like_gemma=True)
    tokens = LIKE_GEMMA.encode(text, add_special_tokens=False)
    assert tokens == trained.encode(text)
    assert LIKE_GEMMA.decode(tokens) == trained.decode(tokens)


def test_sentencepieces_special_tokens() -> None:
    trained = sentences.processor()
    assert SENTENCES.encode("row") == [trained.bos_id(), *trained.encode("row")]
    assert SENTENCES.encode("a</s>b", add_special_tokens=False).count(trained.eos_id()) == 1
    plain = read_tokenizer(
        header({**sentences.metadata(), "tokenizer.ggml.add_bos_token": False, "tokenizer.ggml.add_eos_token": True})
    )
    assert plain.encode("row") == [*trained.encode("row"), trained.eos_id()]
    bare = read_tokenizer(header({**sentences.metadata(), "tokenizer.ggml.add_space_prefix": False}))
    assert bare.decode(bare.encode(" row"), skip_special_tokens=True) == " row"


@pytest.mark.parametrize("name", [name for name, pipeline in PIPELINES.items() if pipeline.pattern is None])
@given(text=texts)
def test_byte_level_is_its_trainers_tokenizer(name: str, text: str) -> None:
    trained, read = _trained(name)
    assert read.encode(text, add_special_tokens=False) == trained.encode(text).ids


_known: dict[str, tuple[Tokenizer, Any]] = {}


def _trained(name: str) -> tuple[Tokenizer, Any]:
    """A byte-level BPE trained on the sentences, and the same through a GGUF file's metadata."""
    if name not in _known:
        trained = Tokenizer(BPE())
        cut = pre_tokenizers.ByteLevel(add_prefix_space=False)
        digits = pre_tokenizers.Digits(individual_digits=True)
        trained.pre_tokenizer = pre_tokenizers.Sequence([digits, cut]) if PIPELINES[name].digits else cut
        trained.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trained.train_from_iterator(
            sentences.TEXT.splitlines() * 3, BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
        )
        # The merges in their order: what was trained is told by the tokens that are no single byte.
        state = json.loads(trained.to_str())["model"]
        pieces = sorted(state["vocab"], key=state["vocab"].__getitem__)
        merges = [" ".join(pair) for pair in state["merges"]]
        read = read_tokenizer(
            small(pre=name, tokens=pieces, token_type=[1] * len(pieces), merges=merges, eos_token_id=None)
        )
        _known[name] = trained, read
    return _known[name]


@pytest.mark.parametrize(
    ("name", "text", "cuts"),
    [
        ("gpt-2", "I'm 1234 ok\n\n  x", ["I", "'m", " 1234", " ok", "\n\n ", " x"]),
        ("smollm", "a12 b3", ["a", "1", "2", " b", "3"]),
        ("llama-bpe", "I'M 12345 ok!\n\n  x", ["I", "'M", " ", "123", "45", " ok", "!\n\n", " ", " x"]),
        ("qwen2", "I'M 123 (ok)\n  x", ["I", "'M", " ", "1", "2", "3", " (", "ok", ")\n", " ", " x"]),
    ],
)
def test_where_text_is_cut(name: str, text: str, cuts: list[str]) -> None:
    backend = read_tokenizer(small(pre=name)).backend_tokenizer
    found = [text[start:end] for _, (start, end) in backend.pre_tokenizer.pre_tokenize_str(text)]
    assert found == cuts


def test_whole_words_and_composition() -> None:
    """Llama 3 takes a word that is a piece as it is, although its merges would not make it; Qwen composes accents."""
    pieces = [*models.PIECES[:-1], "xyz", "<|end|>"]
    kinds = [1] * (len(pieces) - 1) + [3]
    changed = {"tokens": pieces, "token_type": kinds, "eos_token_id": len(pieces) - 1}
    assert len(read_tokenizer(small(pre="llama-bpe", **changed)).encode("xyz")) == 1
    assert len(read_tokenizer(small(pre="gpt-2", **changed)).encode("xyz")) == 3
    assert len(read_tokenizer(small(pre="qwen2")).encode("e\u0301")) == 2
    assert len(read_tokenizer(small(pre="gpt-2")).encode("e\u0301")) == 3


def test_begin_of_text_is_the_files_or_the_kinds_choice() -> None:
    start = len(models.PIECES) - 1
    assert read_tokenizer(small(pre="llama-bpe", bos_token_id=start)).encode("x")[0] == start
    assert read_tokenizer(small(pre="llama-bpe", bos_token_id=start, add_bos_token=False)).encode("x")[0] != start
    assert read_tokenizer(small(pre="gpt-2", bos_token_id=start)).encode("x")[0] != start
    assert read_tokenizer(small(pre="gpt-2", bos_token_id=start, add_bos_token=True)).encode("x")[0] == start


def test_all_ends_are_known() -> None:
    pieces = [*models.PIECES, "<|im_end|>", "<end_of_turn>", "<|eot_id|>"]
    kinds = [1] * (len(pieces) - 3) + [3, 3, 1]
    found = end_ids(small(tokens=pieces, token_type=kinds, eot_token_id=5, eom_token_id=10**6))
    assert found == {5, len(models.PIECES) - 1, len(models.PIECES), len(models.PIECES) + 1}


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"model": "bert"}, "tokenizer of the kind 'bert'"),
        ({"model": None}, "tokenizer of the kind None"),
        ({"pre": "tekken"}, r"cuts text by 'tekken' \(tokenizer\.ggml\.pre\)"),
        ({"pre": None}, "cuts text by None"),
        ({"tokens": None}, "no vocabulary"),
        ({"tokens": [1, 2]}, "no vocabulary"),
        ({"token_type": [1, 1]}, "another number of token types"),
        ({"tokens": ["x"] * len(models.PIECES)}, "two tokens of the same text"),
        ({"merges": ["qq ww"]}, "merges that do not fit"),
        ({"merges": ["alone"]}, "merges that do not fit"),
        ({"model": "llama"}, "no score for each piece"),
        ({"model": "llama", "scores": [0.0] * len(models.PIECES)}, "pieces of equal score"),
    ],
)
def test_refused_by_name(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(GgufError, match=words):
        read_tokenizer(small(**changed))


def test_runs_of_spaces_in_an_unknown_order_are_refused() -> None:
    """Pieces for runs share a score; with pieces for 2 and 3 only, five spaces are 3 + 2 by SentencePiece's rule."""
    pieces = ["<unk>", "\u2581", "\u2581\u2581", "\u2581\u2581\u2581", "a"]
    metadata = {
        "model": "llama",
        "tokens": pieces,
        "token_type": [2, 1, 1, 1, 1],
        "scores": [0.0, 0.0, -5.0, -5.0, -1.0],
    }
    with pytest.raises(GgufError, match="runs of spaces"):
        read_tokenizer(small(**metadata, merges=None, eos_token_id=None))
