"""Puts a trained model in place for `laned serve --model hybrid`: `python -m tests.hybrid.install FOLDER`.

FOLDER is what tests.hybrid.train left. A model that is worse than that in place, by the loss of what training has not
seen, is not installed unless --force says so. The figures in docs/hybrid.md are made from its train.json.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

from lanes.sources import HYBRID_FOLDER

FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "train.json")
LARGEST_BYTES = 6_000_000
PAGE = Path(__file__).parents[2] / "docs" / "hybrid.md"
BEGIN, END = "<!-- figures -->\n", "<!-- end of figures -->\n"


def problem_with(folder: Path) -> str | None:
    """Why the folder's model should not be installed, if it should not."""
    if missing := [name for name in FILES if not (folder / name).is_file()]:
        return f"{folder} lacks {', '.join(missing)}"
    if (size := (folder / "model.safetensors").stat().st_size) > LARGEST_BYTES:
        return f"the weights have {size} bytes, more than {LARGEST_BYTES}"
    new, old = (_loss(each / "train.json") for each in (folder, HYBRID_FOLDER))
    return f"its loss is {new:.3f}, that of the model in place {old:.3f}" if new >= old else None


def figures(folder: Path) -> str:
    """What happened in training, and what the model then wrote, in Markdown."""
    story = json.loads((folder / "train.json").read_text())
    told = story["arguments"]
    tokens = story["steps"] * told["batch"] * told["length"]
    rows = [
        ("device", story["device"]),
        ("time", f"{story['seconds']:.0f} s"),
        ("steps", f"{story['steps']:,} of {told['batch']} rows of {told['length']} tokens, seed {told['seed']}"),
        ("tokens", f"{tokens / 1e6:.1f} million: {tokens / story['train_tokens']:.1f} times those there are"),
        ("loss at the end", f"{story['train_loss']:.2f} nats a token"),
        ("of sections it has not seen", f"{story['valid_loss']:.2f} nats a token"),
    ]
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    samples = "\n\n".join(text.strip() for text in story["samples"])
    return f"\n| | |\n| --- | --- |\n{table}\n\nWhat it wrote then, the titles given:\n\n```text\n{samples}\n```\n"


def _loss(story: Path) -> float:
    return float(json.loads(story.read_text())["valid_loss"]) if story.is_file() else float("inf")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--force", action="store_true", help="install a model with a greater loss, too")
    chosen = parser.parse_args()
    problem = problem_with(chosen.folder)
    if problem and not chosen.force:
        sys.exit(f"not installed: {problem}")
    HYBRID_FOLDER.mkdir(exist_ok=True)
    for name in FILES:
        shutil.copyfile(chosen.folder / name, HYBRID_FOLDER / name)
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    PAGE.write_text(before + BEGIN + figures(chosen.folder) + END + rest.partition(END)[2], encoding="utf-8")
    print(f"installed in {HYBRID_FOLDER}, loss {_loss(HYBRID_FOLDER / 'train.json'):.3f}")


if __name__ == "__main__":
    main()
