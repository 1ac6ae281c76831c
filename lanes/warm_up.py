"""Does every kind of work once before anybody waits for it.

On CUDA MLX compiles each kernel at its first use, some seconds each, and keeps it in a file for the next start; those
of ours take a fraction of a second at every start (lanes.cuda_kernel). It plans attention for each new pair of lengths,
and a step's shape is traced when it has come a few times. Whoever sends the first request would take it for a hang.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from itertools import count
from typing import Final

from lanes.forward import COMPILE_AFTER
from lanes.lane import Chunk, Engine, Freeze, Grammar, RowSpec, Sampling, Step, StepResult

logger = logging.getLogger(__name__)

PHASE: Final = "warming up"
# How many rows at once: each a shape of its own; more of them run the same kernels.
ROWS: Final = (1, 2, 4, 8)
STEPS: Final = COMPILE_AFTER + 2
# A prompt of one large chunk, and of one that is not as long as a chunk is best.
LONG_TOKENS, SHORT_TOKENS = 2048, 300
# How the rows draw, in turns.
SAMPLINGS: Final = (
    Sampling(),
    Sampling(grammar=Grammar("regex", r"(.|\n)*")),
    Sampling(temperature=0.7, top_p=0.9, top_k=40, min_p=0.02, num_top_logprobs=2),
    Sampling(temperature=0.7, repetition_penalty=1.1, presence_penalty=0.1, frequency_penalty=0.1),
    Sampling(temperature=0.7, xtc_probability=0.1, logit_bias=((1, 0.5),)),
)


def warm_up(engine: Engine, progress: Callable[[int, int, str], None], *, has_grammars: bool) -> None:
    """On an engine without rows, which has none afterwards. progress: see lanes.load; it may raise to end this.
    has_grammars: whether rows may have one."""
    logger.info("warming up; at the first start this device's kernels are compiled, which takes a minute or two")
    began_s = time.perf_counter()

    def report() -> None:
        progress(0, 0, PHASE)

    most_tokens = (engine.info.context_tokens or math.inf) - STEPS
    long, short = (int(min(tokens, most_tokens - 1)) for tokens in (LONG_TOKENS, SHORT_TOKENS))
    row_ids = count(-1, -1)  # no request has these
    multiple = engine.info.chunk_multiple
    if multiple > 1:  # the lengths that a short prompt's only chunk may have: each is planned
        for tokens in range(multiple, long + 1, multiple):
            if not _play(engine, [RowSpec(next(row_ids), (1,) * (1 + tokens), Sampling())], report, steps=0):
                return
    samplings = [sampling for sampling in SAMPLINGS if has_grammars or sampling.grammar is None]
    for num_rows in ROWS:
        if num_rows > engine.info.max_rows:
            break
        specs = [
            RowSpec(next(row_ids), (1,) * (1 + (long if index == 0 else short)), samplings[index % len(samplings)])
            for index in range(num_rows)
        ]
        if not _play(engine, specs, report, STEPS):
            return
    logger.info("warmed up in %.1f s", time.perf_counter() - began_s)


def _play(engine: Engine, specs: list[RowSpec], report: Callable[[], None], steps: int) -> bool:
    """From the prompts to where all rows have left, after so many steps frozen; whether nothing failed."""
    rows = tuple(spec.row_id for spec in specs)

    def turn(step: Step) -> StepResult:
        report()
        result = engine.step(step)
        for row_id, reason in result.failures:
            logger.warning("the warm-up fails: row %d: %s", row_id, reason)
        failed.update(row_id for row_id, _ in result.failures)
        return result

    failed: set[int] = set()
    turn(Step(admit=tuple(specs)))
    for spec in specs:
        turn(Step(chunk=Chunk(spec.row_id, 0, len(spec.prompt) - 1)))
    is_frozen = steps > 0 and not failed and engine.info.remembers != "nothing"
    if steps and not failed:
        turn(Step(merge=rows))
        for _ in range(steps - 1):
            turn(Step())
    freeze = tuple(Freeze(spec.row_id, 0, len(spec.prompt) - 1 + steps) for spec in specs if is_frozen)
    result = turn(Step(freeze=freeze, leave=tuple(row_id for row_id in rows if row_id not in failed)))
    while result.in_flight:
        result = turn(Step())
    return not failed
