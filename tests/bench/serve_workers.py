"""The other processes of tests.bench.serve, each with the same float32 weights and the same BLAS in front of MLX:

python -m tests.bench.serve_workers lane DIR ROWS STEPS   saves the demo's model for mlx_lm and prompts for all in
                                                          DIR, then steps our lane alone when told to
python -m tests.bench.serve_workers peer ARGUMENTS        mlx_lm.server
"""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lanes.blas import preload

if TYPE_CHECKING:  # it imports MLX
    from lanes.load import LoadedModel

PROMPT_TOKENS = 100
NUM_PROMPTS = 256
# A token that text has no use for stands for the end, so that the peer's answers have the wished length: it knows no
# ignore_eos.
UNUSED_TOKEN = "<reponame>"


def save_folder(folder: Path, loaded: LoadedModel) -> None:
    """What mlx_lm.server loads, and prompts.json: texts that are each exactly so many tokens."""
    from mlx_lm.utils import save_config, save_model

    tokenizer: Any = loaded.tokenizer._tokenizer
    save_model(folder, loaded.model)
    (unused,) = tokenizer.convert_tokens_to_ids([UNUSED_TOKEN])
    save_config({**loaded.config, "eos_token_id": unused}, folder / "config.json")
    (folder / "prompts.json").write_text(json.dumps(make_prompts(loaded.tokenizer)))
    tokenizer.eos_token = UNUSED_TOKEN
    tokenizer.save_pretrained(folder)


def make_prompts(tokenizer: Any) -> list[str]:
    """English from Python's own help pages, each piece somewhere else."""
    from pydoc_data.topics import topics

    words = " ".join(topics[name] for name in sorted(topics)).split()
    source = random.Random(5)
    prompts: list[str] = []
    while len(prompts) < NUM_PROMPTS:
        start = source.randrange(len(words) - PROMPT_TOKENS)
        tokens = tokenizer.encode(" ".join(words[start : start + PROMPT_TOKENS]))
        text = tokenizer.decode(tokens[:PROMPT_TOKENS])
        if len(tokenizer.encode(text)) == PROMPT_TOKENS:
            prompts.append(text)
    return prompts


def serve_peer(arguments: list[str]) -> None:
    print(preload().label, file=sys.stderr, flush=True)
    from mlx_lm import server

    sys.argv = ["mlx_lm.server", *arguments]
    server.main()


def step_lane(folder: Path, num_rows: int, num_steps: int) -> None:
    """Says "saved", then "ready"; each line of input is answered by seconds a step, of rows like the daemon's: with
    prompts of PROMPT_TOKENS."""
    report = preload()
    from lanes.build import build_engine
    from lanes.lane import Chunk, LaneSettings, RowSpec, Sampling, Step
    from lanes.load import load

    loaded = load("demo")
    save_folder(folder, loaded)
    print("saved", flush=True)
    engine = build_engine(loaded, LaneSettings(max_rows=num_rows, num_draft_tokens=0), report.kind)
    decoder = engine.decoder
    print("ready", flush=True)
    for turn, _ in enumerate(sys.stdin):
        row_ids = [turn * num_rows + row for row in range(num_rows)]
        for row_id in row_ids:
            source = random.Random(row_id)
            prompt = tuple(source.randrange(100, 20_000) for _ in range(PROMPT_TOKENS))
            engine.step(Step(admit=(RowSpec(row_id, prompt, Sampling()),), chunk=Chunk(row_id, 0, PROMPT_TOKENS - 1)))
        engine.step(Step(merge=tuple(row_ids)))
        engine.step(Step())
        last = decoder.dispatch()
        began = time.perf_counter()
        for _ in range(num_steps):
            dispatched = decoder.dispatch()
            last.read()
            last = dispatched
        print((time.perf_counter() - began) / num_steps, flush=True)
        last.read()
        engine.step(Step(leave=tuple(row_ids)))


def main() -> None:
    match sys.argv[1:]:
        case ["lane", folder, num_rows, num_steps]:
            step_lane(Path(folder), int(num_rows), int(num_steps))
        case ["peer", *arguments]:
            serve_peer(arguments)
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main()
