"""What guessing from a row's own tokens brings: decode steps of rows that copy a text with a small change, and of rows
that write freely, with and without guesses, in turns, by two engines of one model.

Greedy, with the real SmolLM2-135M on every device: random weights repeat nothing but themselves. Prompts are processed
before the clock starts. A guess is right if the model drew it.
"""

from __future__ import annotations

import time
from collections import Counter
from functools import partial
from itertools import count

from tests.bench.drive import BLAS

# isort: split
from lanes.build import build_engine
from lanes.engine import MlxEngine
from lanes.lane import Chunk, LaneSettings, RowSpec, Sampling, Step
from lanes.load import LoadedModel, load
from tests.bench.harness import bench, interleave

TEXT = """\
The old harbour had been quiet since the ferry stopped. Every morning Anna Lindqvist walked along the stone pier, \
counted the boats that were left, and wrote the number into a small blue notebook. In March there were eleven. In \
April, after the storm, there were nine. The harbour master said that nobody would pay for a new pier, and that the \
fish had gone north anyway. Anna did not answer him. She had been born in the yellow house above the slip, and her \
father had built half of the boats himself, in the long shed that now held nothing but nets, two broken engines and \
the smell of tar. On the first of May a stranger came down the road with a suitcase and asked for the ferry."""
NAMES = ("Berta", "Clara", "Doris", "Emma", "Frida", "Greta", "Hanna", "Ida")
THEMES = ("the sea", "Rome", "the history of bread", "horses", "winter in Norway", "chess", "volcanoes", "the moon")
CASES = ("copy", "free")
# Set by hand where the device has no default.
DRAFT_TOKENS = 10

_numbers = count(1)


def prompts(loaded: LoadedModel, case: str) -> list[tuple[int, ...]]:
    if case == "copy":
        asked = [f"Repeat this text exactly, but write {name} in place of Anna:\n\n{TEXT}" for name in NAMES]
    else:
        asked = [f"Tell me something about {theme}." for theme in THEMES]
    framed = [f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n" for text in asked]
    return [tuple(loaded.tokenizer.encode(text)) for text in framed]


def tokens_per_s(engine: MlxEngine, asked: list[tuple[int, ...]], tokens: int, guesses: Counter[str]) -> float:
    """Of answers of so many tokens each, all begun together; a row leaves when it has its own."""
    numbers = [next(_numbers) for _ in asked]
    for number, prompt in zip(numbers, asked, strict=True):
        engine.step(Step(admit=(RowSpec(number, prompt, Sampling()),), chunk=Chunk(number, 0, len(prompt) - 1)))
    missing, leave, merge = dict.fromkeys(numbers, tokens), (), tuple(numbers)
    began = time.perf_counter()
    while missing:
        result = engine.step(Step(leave=leave, merge=merge))
        assert not result.failures, f"rows failed: {result.failures}"
        guesses.update(drafted=result.drafted_tokens, accepted=result.accepted_tokens)
        for number, _ in result.tokens:
            if number in missing:
                missing[number] -= 1
        leave, merge = tuple(number for number, left in missing.items() if left <= 0), ()
        missing = {number: left for number, left in missing.items() if left > 0}
    seconds = time.perf_counter() - began
    while engine.step(Step(leave=leave)).in_flight:
        leave = ()
    engine.check()
    return len(asked) * tokens / seconds


def main() -> None:
    with bench("speculation", __doc__ or "", CASES) as run:
        run.blas = BLAS.sentence
        loaded = load("demo")
        engines = [
            build_engine(loaded, LaneSettings(8, num_draft_tokens=most), BLAS.kind) for most in (DRAFT_TOKENS, 0)
        ]
        rounds, tokens = (2, 24) if run.quick else (3, 96)
        for case in run.only:
            asked = prompts(loaded, case)
            for rows in (1, 4) if run.quick else (1, 2, 4, 8):
                guesses: Counter[str] = Counter()
                measures = [
                    partial(tokens_per_s, engine, asked[:rows], tokens, counter)
                    for engine, counter in zip(engines, (guesses, Counter()), strict=True)
                ]
                said = f"{case}, {rows} row{'s' * (rows > 1)}"
                run.add(
                    said, "decode with guesses / without", "tokens/s", *interleave(rounds, "speculation", *measures)
                )
                total = rounds * rows * tokens
                run.add(said, "guessed, of all tokens", "%", [100 * guesses["accepted"] / total])
                if guesses["drafted"]:
                    run.add(said, "guesses that were right", "%", [100 * guesses["accepted"] / guesses["drafted"]])


if __name__ == "__main__":
    main()
