"""mlx-lm's own processors of logits, for one row's settings."""

from collections.abc import Callable

import mlx.core as mx
from mlx_lm.sample_utils import make_logits_processors

from lanes.lane import Sampling


def mlx_lms_processors(sampling: Sampling) -> list[Callable[[mx.array, mx.array], mx.array]]:
    """Each takes the row's tokens and its logits [1, vocabulary]."""
    made: list[Callable[[mx.array, mx.array], mx.array]] = make_logits_processors(
        logit_bias=dict(sampling.logit_bias),
        repetition_penalty=sampling.repetition_penalty,
        repetition_context_size=sampling.repetition_context_size,
        presence_penalty=sampling.presence_penalty,
        presence_context_size=sampling.presence_context_size,
        frequency_penalty=sampling.frequency_penalty,
        frequency_context_size=sampling.frequency_context_size,
    )
    return made
