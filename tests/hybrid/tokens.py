"""Trains the tokenizer and turns text.jsonl.xz in FOLDER into tokens: `python -m tests.hybrid.tokens FOLDER`.

FOLDER gets tokens.npz (uint16 `train` and `valid`, every hundredth section) and the model's tokenizer in tokenizer/.
A section is "# title", an empty line, its paragraphs, and the end token. A chat's question is taken for a title: the
model answers it with a section.
"""

from __future__ import annotations

import argparse
import json
import lzma
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers.models.qwen3_5.tokenization_qwen3_5 import Qwen3_5Tokenizer

from tests.hybrid.shape import CONFIG

END = "<|endoftext|>"
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'assistant' %}{{ message.content }}"
    f"{{% elif message.role == 'user' %}}{END}# {{{{ message.content | trim }}}}\n\n{{% endif %}}{{% endfor %}}"
)
SETTINGS = {
    "tokenizer_class": "Qwen3_5Tokenizer",
    "bos_token": END,
    "eos_token": END,
    "clean_up_tokenization_spaces": False,
    "model_max_length": CONFIG["max_position_embeddings"],
    "chat_template": TEMPLATE,
}


def documents(folder: Path) -> list[str]:
    with lzma.open(folder / "text.jsonl.xz", "rt", encoding="utf-8") as file:
        return [f"# {title}\n\n{text}" for title, text in map(json.loads, file)]


def train(texts: list[str]) -> Tokenizer:
    """Byte pairs, on bytes, so that every text has tokens. Cut into words as transformers does for models of this type,
    whatever tokenizer.json says."""
    tokenizer = Tokenizer(models.BPE())
    usual = Qwen3_5Tokenizer().backend_tokenizer
    tokenizer.normalizer, tokenizer.pre_tokenizer = usual.normalizer, usual.pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=CONFIG["vocab_size"],
        special_tokens=[AddedToken(END, special=True)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encoded(tokenizer: Tokenizer, texts: list[str]) -> np.ndarray:
    end = tokenizer.token_to_id(END)

    def ids() -> Iterator[int]:
        for encoding in tokenizer.encode_batch(texts):
            yield from encoding.ids
            yield end

    return np.fromiter(ids(), np.uint16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    texts = documents(folder)
    tokenizer = train(texts)
    (folder / "tokenizer").mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(SETTINGS, indent=1) + "\n")
    valid, rest = texts[::100], [text for number, text in enumerate(texts) if number % 100]
    parts = {"train": encoded(tokenizer, rest), "valid": encoded(tokenizer, valid)}
    np.savez_compressed(folder / "tokens.npz", **parts)
    characters = sum(map(len, texts))
    tokens = sum(part.size for part in parts.values())
    print(f"{len(texts)} sections, {tokens} tokens, {characters / tokens:.2f} characters a token")


if __name__ == "__main__":
    main()
