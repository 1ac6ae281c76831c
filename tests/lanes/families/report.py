"""The table of families: `uv run python -m tests.lanes.families.report --output docs/families.md`. Takes minutes."""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
from collections.abc import Sequence
from pathlib import Path

from lanes.choice import choose_lane
from lanes.solo import CannotQuantize, RowMaker
from tests.lanes.families import FAMILIES, UNMADE, make_model
from tests.lanes.families.check import ROWS, Difference, alone, difference, together

BITS, GROUP_SIZE = 8, 32

HEAD = """# Model families

Made by `uv run python -m tests.lanes.families.report --output docs/families.md` with mlx-lm {mlx_lm} and MLX {mlx}; the
same comparison is a test, `tests/lanes/test_families.py`.

For every family a tiny model with random weights runs {rows} rows, with prompts of {prompts} tokens and a window of 8,
that come and leave at different times. *Difference* is the largest between two logits of a row in the lane and of the
row alone in mlx-lm's own caches (logits of such models have a standard deviation of about 1). A ring of ours turns at
other columns than mlx-lm's, so sums are taken in another order there. *Quantized* is the same with keys and values in
{bits} bits, against a row alone whose keys and values are quantized in the same way; where a rounding moves a key to
another code, the difference is that of the codes.

A family is a module of `mlx_lm.models`; a second word names a variant of its config.

| family | caches | lane | difference | quantized | difference |
| --- | --- | --- | --- | --- | --- |
"""


def line(family: str) -> tuple[str, list[str]]:
    """The family's line in the table, and notes on what it cannot do."""
    make_row = RowMaker(make_model(family))
    choice = choose_lane(make_row)
    found = difference(together(make_row, choice.lane), alone(make_row))
    notes = [f"serial lane: {choice.reason}"] if choice.lane == "serial" else []
    quantized = ["no", ""]
    try:
        quantized = [*_quantized(make_row)]
    except CannotQuantize as error:
        notes.append(f"not quantized: {error}")
    kinds = ", ".join(dict.fromkeys(choice.cache_kinds))
    cells = [family, kinds, choice.lane, _shown(found), *quantized]
    return f"| {' | '.join(cells)} |", notes


def _quantized(plain: RowMaker) -> tuple[str, str]:
    make_row = RowMaker(plain.model, BITS, GROUP_SIZE)
    choice = choose_lane(make_row)
    if not any("qkv" in kind for kind in choice.cache_kinds):
        return "nothing to", ""
    return "yes", _shown(difference(together(make_row, choice.lane), alone(make_row)))


def _shown(found: Difference) -> str:
    wrong = f", {found.rows} rows drew other tokens" if found.rows else ""
    return f"{found.logits:.0e}{wrong}" if found.logits else f"0{wrong}"


def report() -> str:
    prompts = ", ".join(str(length) for length in sorted(length for _, length, _ in ROWS))
    versions = {name.replace("-", "_"): importlib.metadata.version(name) for name in ("mlx", "mlx-lm")}
    text = [HEAD.format(rows=len(ROWS), prompts=prompts, bits=BITS, **versions)]
    cannot = []
    for number, family in enumerate(FAMILIES, 1):
        print(f"\r{number} of {len(FAMILIES)}: {family:<30}", end="", file=sys.stderr, flush=True)
        made, notes = line(family)
        text.append(f"{made}\n")
        cannot += [f"- {family}, {note}\n" for note in notes]
    print(file=sys.stderr)
    text += ["\n## What they cannot do\n\n", *cannot, "\n## Not run\n\n"]
    text += [f"- {family} {reason}\n" for family, reason in UNMADE.items()]
    return "".join(text)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, help="file to write; standard output if not given")
    output: Path | None = parser.parse_args(arguments).output
    if output is None:
        sys.stdout.write(report())
    else:
        output.write_text(report())


if __name__ == "__main__":
    main()
