"""The gated delta rule in chunks, with gradients and few launches: what mlx-lm computes token by token.

A head keeps a matrix S [Dv, Dk]. Token t decays it by g_t, writes a correction and reads it:

    S <- g_t S;  u_t = beta_t (v_t - S k_t);  S <- S + u_t k_t^T;  y_t = S q_t

Within a chunk whose first state is S0, and with G_t = log g_1 + ... + log g_t, the corrections solve a system that is
triangular, so all tokens of the chunk are had at once by products of matrices (Yang, Kautz, Hatamizadeh, "Gated Delta
Networks", 2024, section 3.3):

    (I + L) U = beta (V - e^G K S0^T),       L_ti = beta_t e^(G_t - G_i) (k_t . k_i)  for i < t
    Y = e^G Q S0^T + A U,                    A_ti = e^(G_t - G_i) (q_t . k_i)         for i <= t
    S = e^(G_C) S0 + sum_i e^(G_C - G_i) u_i k_i^T

The inverse of I + L is built by halves: of two neighbouring diagonal blocks with inverses X and Z and the block C below
the first, the inverse has -Z C X there. That is log2(chunk) times two products, and as stable as substitution.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models import qwen3_5, qwen3_next

# A GPU waits for launches, of which long chunks need fewer; a CPU for products, which are smaller in short ones.
CHUNK = 16 if mx.default_device() == mx.Device(mx.cpu) else 64


# The masks are arrays, not computed in the step: compiled, one kernel serves all of a kind then.


@cache
def lower_mask(n: int, diagonal: int) -> mx.array:
    """bool [n, n]: the diagonal (0) and what is below it, or only that (-1)."""
    return mx.array(np.tri(n, k=diagonal, dtype=bool))


@cache
def below_mask(n: int, size: int) -> mx.array:
    """bool [n, n]: in each pair of neighbouring diagonal blocks of this size, the block below the first."""
    block = np.arange(n) // size
    return mx.array((block[:, None] % 2 == 1) & (block[None, :] == block[:, None] - 1))


def unit_lower_inverse(lower: mx.array) -> mx.array:
    """(I + lower)^-1 of strictly lower triangular matrices [..., n, n], n a power of two."""
    n = lower.shape[-1]
    inverse = mx.eye(n, dtype=lower.dtype) - mx.where(below_mask(n, 1), lower, 0.0)
    size = 2
    while size < n:
        inverse = inverse - inverse @ mx.where(below_mask(n, size), lower, 0.0) @ inverse
        size *= 2
    return inverse


def chunked_delta(
    q: mx.array, k: mx.array, v: mx.array, log_g: mx.array, beta: mx.array, state: mx.array | None = None
) -> tuple[mx.array, mx.array]:
    """q, k [B, T, Hk, Dk], v [B, T, Hv, Dv], log_g and beta [B, T, Hv], state [B, Hv, Dv, Dk] or None for zeros; Hv a
    multiple of Hk. Returns y [B, T, Hv, Dv] and the last state. T may be anything."""
    batch, length, heads, dim_v = v.shape
    group = heads // k.shape[2]
    chunk = min(CHUNK, 1 << (length - 1).bit_length())
    # A token added with k = 0, beta = 0 and no decay changes nothing.
    chunks = -(-length // chunk)

    def cut(array: mx.array) -> mx.array:
        """[B, T, H, ...] -> [B, H, chunks, chunk, ...]"""
        short = chunks * chunk - length
        if short:
            array = mx.pad(array, [(0, 0), (0, short)] + [(0, 0)] * (array.ndim - 2))
        return mx.moveaxis(array.reshape(batch, chunks, chunk, *array.shape[2:]), 3, 1)

    if group > 1:
        q, k = mx.repeat(q, group, axis=2), mx.repeat(k, group, axis=2)
    q, k, v, beta = cut(q), cut(k), cut(v), cut(beta)[..., None]
    total = mx.cumsum(cut(log_g), axis=-1)
    decay = mx.exp(mx.where(lower_mask(chunk, 0), total[..., :, None] - total[..., None, :], -1e9))
    keys_t = mx.swapaxes(k, -1, -2)
    lower = mx.where(lower_mask(chunk, -1), beta * decay * (k @ keys_t), 0.0)
    inverse = unit_lower_inverse(lower)
    from_start = mx.exp(total)[..., None]
    written = inverse @ (beta * v)  # what U would be were S0 zero
    erased = inverse @ (beta * from_start * k)  # and what S0 takes from it: erased @ S0^T
    scores = decay * (q @ keys_t)
    reading = from_start * q
    writing = mx.exp(total[..., -1:] - total)[..., None] * k
    kept = from_start[..., -1, :][..., None]
    state = mx.zeros((batch, heads, dim_v, k.shape[-1])) if state is None else state
    # Split, not indexed: the gradient of a part is then joined with the others' instead of being added to zeros.
    parts = zip(
        *(mx.split(each, chunks, axis=2) for each in (written, erased, scores, reading, writing, kept)), strict=True
    )
    rows = []
    for written_in, erased_in, scores_in, reading_in, writing_in, kept_in in parts:
        state_t = mx.swapaxes(state, -1, -2)
        corrections = written_in[:, :, 0] - erased_in[:, :, 0] @ state_t
        rows.append(reading_in[:, :, 0] @ state_t + scores_in[:, :, 0] @ corrections)
        state = kept_in[:, :, 0] * state + mx.swapaxes(corrections, -1, -2) @ writing_in[:, :, 0]
    y = mx.concatenate(rows, axis=2)[:, :, :length]
    return mx.moveaxis(y, 1, 2), state


def _update(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    a: mx.array,
    b: mx.array,
    a_log: mx.array,
    dt_bias: mx.array,
    state: mx.array | None = None,
    mask: mx.array | None = None,
    **_: Any,
) -> tuple[mx.array, mx.array]:
    """In the place of mlx-lm's gated_delta_update."""
    assert mask is None, "training has no padding"
    log_g = -mx.exp(a_log) * nn.softplus(a + dt_bias)
    return chunked_delta(q, k, v, log_g, mx.sigmoid(b), state)


def _depthwise(layer: Any, x: mx.array) -> mx.array:
    """A convolution of each channel alone, as a sum of shifted products: its gradient needs no convolution either."""
    width = layer.weight.shape[1]
    length = x.shape[1] - width + 1
    terms = [x[:, shift : shift + length] * layer.weight[:, shift, 0] for shift in range(width)]
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def _attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    cache: object = None,
    *,
    scale: float,
    mask: Any = None,
    **_: Any,
) -> mx.array:
    """[B, heads, T, D] by [B, key heads, T, D], causal, without a cache."""
    batch, heads, length, dim = queries.shape
    grouped = (queries * scale).reshape(batch, keys.shape[1], -1, length, dim)
    scores = grouped @ mx.swapaxes(keys, -1, -2)[:, :, None]
    scores = mx.where(lower_mask(length, 0), scores, -1e9)
    weights = mx.softmax(scores, axis=-1, precise=True)
    return (weights @ values[:, :, None]).reshape(batch, heads, length, dim)


@contextmanager
def differentiable() -> Iterator[None]:
    """Let mlx-lm's qwen3_5 run on operations that have gradients on every backend, for as long as the block runs."""
    kept = qwen3_5.gated_delta_update, qwen3_next.scaled_dot_product_attention, nn.Conv1d.__call__
    qwen3_5.gated_delta_update, qwen3_next.scaled_dot_product_attention = _update, _attention
    nn.Conv1d.__call__ = _depthwise
    try:
        yield
    finally:
        qwen3_5.gated_delta_update, qwen3_next.scaled_dot_product_attention, nn.Conv1d.__call__ = kept
