"""A vocabulary of SentencePiece's BPE, trained here, and the metadata that a GGUF file would have of it."""

import io
from functools import cache
from typing import Any

import sentencepiece

TEXT = """The daemon owns one model and serves it to many clients. A row is one request's place in a lane.
Rows that run together are decoded together, and a row that leaves frees its slot at once.
    indented  code :  if x == 10 and y != 200:
        return [x, y, (x + y) * 3.14159]
Ein Text auf Deutsch, mit Umlauten: Übergröße, Äpfel, Öl. Du texte en français: élève, garçon, naïveté.
aaaa aaaaaa bbbbbb abababab aabbaabb ---- ======== ........ 000000 1234567890
"""


# As in Gemma's vocabulary: line breaks, runs of spaces, words of HTML. They are found before anything is merged.
USER_DEFINED = ("\n", "\n\n", "\u2581\u2581", "\u2581\u2581\u2581\u2581", "<b>", "</b>", "[x]")


@cache
def processor(like_gemma: bool = False) -> Any:
    """Trained on the text above, with bytes for characters that it has no piece for. Like Gemma's it has pieces that
    its user has defined, and puts no space in front of a text."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT.splitlines() * 3),
        model_writer=model,
        model_type="bpe",
        vocab_size=520,
        byte_fallback=True,
        character_coverage=1.0,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        split_digits=True,
        minloglevel=2,
        user_defined_symbols=list(USER_DEFINED) if like_gemma else [],
        add_dummy_prefix=not like_gemma,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def metadata(like_gemma: bool = False) -> dict[str, Any]:
    """As llama.cpp's converter writes it: types 2 unknown, 3 control, 4 defined by the user, 6 byte, 1 any other."""
    trained = processor(like_gemma)
    ids = range(trained.get_piece_size())

    def kind(token: int) -> int:
        if trained.is_unknown(token):
            return 2
        if like_gemma and trained.id_to_piece(token) in USER_DEFINED:
            return 4
        return 3 if trained.is_control(token) else 6 if trained.is_byte(token) else 1

    def text(token: int) -> str:
        piece: str = trained.id_to_piece(token)
        return piece.replace("\u2581", " ") if kind(token) == 4 else piece

    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [text(token) for token in ids],
        "tokenizer.ggml.scores": [trained.get_score(token) for token in ids],
        "tokenizer.ggml.token_type": [kind(token) for token in ids],
        "tokenizer.ggml.bos_token_id": trained.bos_id(),
        "tokenizer.ggml.eos_token_id": trained.eos_id(),
        "tokenizer.ggml.unknown_token_id": trained.unk_id(),
        **({"tokenizer.ggml.add_space_prefix": False} if like_gemma else {}),
    }
