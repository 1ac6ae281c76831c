"""The tokenizer in a real Gemma file is SentencePiece's own, with its 262,144 pieces."""

import inspect
import random
import textwrap
from functools import cache
from typing import Any

import pytest
import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from lanes.gguf.blocks import TYPES
from lanes.gguf.header import Header, read_header
from lanes.gguf.vocabulary import end_ids, read_tokenizer
from lanes.tokenizer import ChatTemplateError, Tokenizer
from tests.lanes.gemma_model import gemma_file

pytestmark = pytest.mark.slow

# What is a piece of its own, and what looks like it or touches it.
PARTS = (
    "<table>",
    "<b>",
    "</b>",
    "  ",
    "\n\n",
    "\t",
    "[multimodal]",
    " the",
    "ing",
    "\u2581",
    "\u2581\u2581",
    "x",
    "Ü",
)
LETTERS = " \n\tab<>/trhe\u2581Üé中🙂1=-."


@cache
def header() -> Header:
    return read_header(gemma_file())


@cache
def tokenizer() -> Any:
    return read_tokenizer(header())


@cache
def processor() -> Any:
    """SentencePiece with the file's pieces, told how Gemma was trained: no space in front, bytes for the unknown."""
    model, metadata = sentencepiece_model_pb2.ModelProto(), header().metadata
    columns = [metadata[f"tokenizer.ggml.{key}"] for key in ("tokens", "scores", "token_type")]
    for text, score, kind in zip(*columns, strict=True):
        piece = model.pieces.add()
        piece.piece = text.replace(" ", "\u2581") if kind == 4 else text
        piece.score = score
        piece.type = 2 if text == "<unk>" else kind
    model.trainer_spec.model_type = 2  # BPE
    model.trainer_spec.byte_fallback = True
    for name, key in (("unk", "unknown"), ("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        setattr(model.trainer_spec, f"{name}_id", metadata[f"tokenizer.ggml.{key}_token_id"])
    model.normalizer_spec.add_dummy_prefix = False
    model.normalizer_spec.remove_extra_whitespaces = False
    return sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())


def texts() -> list[str]:
    draw = random.Random(7)
    source = inspect.getsource(textwrap)
    cuts = (draw.randrange(len(source)) for _ in range(300))
    return [
        *(source[cut : cut + draw.randint(1, 400)] for cut in cuts),
        *("".join(draw.choices(PARTS, k=draw.randint(0, 20))) for _ in range(300)),
        *("".join(draw.choices(LETTERS, k=draw.randint(0, 60))) for _ in range(600)),
        " " * 70,
        "\n" * 70,
    ]


def test_texts_are_cut_as_sentencepiece_cuts_them() -> None:
    theirs = [processor().encode(text) for text in texts()]
    assert [tokenizer().encode(text, add_special_tokens=False) for text in texts()] == theirs
    assert [tokenizer().decode(tokens) for tokens in theirs] == [processor().decode(tokens) for tokens in theirs]


def test_texts_stream_as_they_are() -> None:
    ours = Tokenizer(tokenizer(), end_ids(header()))
    for text in texts()[::9]:
        stream = ours.stream()
        pieces = [stream.push(token) for token in ours.encode(text)[1:]]
        assert "".join([*pieces, stream.flush()]) == text.replace("\u2581", " ")


def test_a_text_begins_and_an_answer_ends() -> None:
    ours = Tokenizer(tokenizer(), end_ids(header()))
    assert ours.encode("Hi")[0] == ours.encode("<bos>Hi")[0] == 2
    assert ours.encode("<bos>Hi")[1:2] != [2]
    assert ours.eos_token_ids == {1, 106}
    assert tokenizer().convert_ids_to_tokens([1, 106]) == ["<eos>", "<end_of_turn>"]
    with pytest.raises(ChatTemplateError, match="no chat template"):
        ours.encode_chat([{"role": "user", "content": "Hi"}])


def test_the_types_of_its_tensors_are_mixed() -> None:
    assert {TYPES[info.type_id].name for info in header().tensors.values()} == {"F32", "Q8_0", "Q5_0", "Q4_K", "Q6_K"}
