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


@cache
def processor() -> Any:
    """Trained on the text above, with bytes for characters that it has no piece for."""
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
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def metadata() -> dict[str, Any]:
    """As llama.cpp's converter writes it: types 2 unknown, 3 control, 6 byte, 1 any other."""
    trained = processor()
    ids = range(trained.get_piece_size())

    def kind(token: int) -> int:
        if trained.is_unknown(token):
            return 2
        return 3 if trained.is_control(token) else 6 if trained.is_byte(token) else 1

    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [trained.id_to_piece(token) for token in ids],
        "tokenizer.ggml.scores": [trained.get_score(token) for token in ids],
        "tokenizer.ggml.token_type": [kind(token) for token in ids],
        "tokenizer.ggml.bos_token_id": trained.bos_id(),
        "tokenizer.ggml.eos_token_id": trained.eos_id(),
        "tokenizer.ggml.unknown_token_id": trained.unk_id(),
    }
