"""The promise of seeds: same logits, same seed, same token, whoever else is in the lane."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import mlx.core as mx

from lanes.doctor.verdict import Verdict
from lanes.lane import Sampling
from lanes.sampler import Sampler

SETTINGS = (
    Sampling(temperature=1.0, seed=1),
    Sampling(),
    Sampling(temperature=0.7, top_p=0.9, seed=2),
    Sampling(temperature=1.3, top_k=50, seed=3),
    Sampling(temperature=0.9, min_p=0.05, seed=1),
)
VOCABULARY = 32_000
STEPS = 8

THEN = "the same seed may give another answer here, as other requests come and go; please report it"


def check_draws() -> Iterator[Verdict]:
    together: list[int] = []
    alone: list[int] = []
    for step in range(STEPS):
        logits = 3 * mx.random.normal((len(SETTINGS), VOCABULARY), key=mx.random.key(step))
        positions = [step + 10 * row for row in range(len(SETTINGS))]
        together += _listed(Sampler(SETTINGS)(logits, positions))
        for row, settings in enumerate(SETTINGS):
            alone += _listed(Sampler([settings])(logits[row : row + 1], [positions[row]]))
    differ = sum(a != b for a, b in zip(together, alone, strict=True))
    said = f"{differ} of {len(alone)} draws differ" if differ else f"{len(alone)} draws, side by side as alone"
    figures = {"draws": len(alone), "differ": differ}
    yield Verdict("draws by seed", "wrong" if differ else "right", said, THEN if differ else None, figures)


def _listed(tokens: mx.array) -> list[int]:
    return cast(list[int], tokens.tolist())
