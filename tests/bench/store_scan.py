"""How long a start takes to find what is kept, and a prompt its beginning: `python -m tests.bench.store_scan`.

The segments have headers of a real size and no bytes behind them: 30 layers, 256 tokens each, chains of ten.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from array import array
from pathlib import Path
from random import Random

import trio

from store.checkpoint import TensorSpec
from store.format import aligned, encode, layout
from store.keeper import KeeperSettings, open_keeper
from store.names import segment_path
from store.segment import Segment, root_id, segment_id

ROOT = root_id("model", "")


def make(folder: Path, num_segments: int, num_tokens: int, num_layers: int, chain: int) -> list[int]:
    """Returns the tokens of a whole chain."""
    random = Random(1)
    parent: Segment | None = None
    whole: list[int] = []
    for number in range(num_segments):
        if number % chain == 0:
            parent, whole = None, []
        own = array("I", (random.randrange(49_000) for _ in range(num_tokens)))
        above, start = (None, 0) if parent is None else (parent.id, parent.stop)
        shape = (3, num_tokens, 64)
        tensors = tuple(
            TensorSpec(f"{layer}.{part}", "bfloat16", shape, ((start, start + num_tokens),))
            for layer in range(num_layers)
            for part in range(2)
        )
        parent = Segment(segment_id(ROOT, above, start, own, None), ROOT, "model", above, start, own, None, tensors)
        whole += own
        head = encode(parent, ["0" * 16] * len(tensors))
        path = segment_path(folder, parent.id)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(head)
        os.truncate(path, aligned(len(head)) + layout(tensors)[1])
    return whole


async def measure(folder: Path, tokens: list[int]) -> dict[str, float]:
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    async with open_keeper(KeeperSettings(folder)) as keeper:
        figures = {"open_s": time.perf_counter() - began_s, "open_cpu_s": time.process_time() - began_cpu_s}
        for name in ("find_first_s", "find_again_s"):
            began_s = time.perf_counter()
            chain = await keeper.find(ROOT, tokens, len(tokens))
            figures[name] = time.perf_counter() - began_s
            assert chain.tokens == len(tokens)
            await keeper.release(chain.pin)
        return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--segments", type=int, default=10_000)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--folder", help="on the disk to measure (default: where temporary files are)")
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=chosen.folder) as name:
        tokens = make(Path(name), chosen.segments, chosen.tokens, chosen.layers, 10)
        for _ in range(chosen.rounds):
            print(json.dumps(trio.run(measure, Path(name), tokens)))


if __name__ == "__main__":
    main()
