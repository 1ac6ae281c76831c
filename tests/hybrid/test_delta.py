"""The chunked delta rule is mlx-lm's recurrence, whatever the keys, and so are its gradients."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3_5
from mlx_lm.models.gated_delta import gated_delta_ops, normalize_qk

from tests.hybrid import delta
from tests.hybrid.delta import chunked_delta, differentiable, unit_lower_inverse
from tests.hybrid.shape import CONFIG
from tests.hybrid.train import loss_of

SMALL = {
    "num_hidden_layers": 2,
    "full_attention_interval": 2,
    "hidden_size": 32,
    "vocab_size": 97,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "head_dim": 16,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
}


def inputs(length: int, likeness: float, seed: int) -> tuple[mx.array, ...]:
    """q, k, v, log g, beta of two key heads and four value heads. likeness 1: all keys the same, written in full."""
    mx.random.seed(seed)
    q, k = mx.random.normal((2, length, 2, 32)), mx.random.normal((2, length, 2, 32))
    k = likeness * mx.random.normal((1, 1, 2, 32)) + (1 - likeness) * k
    q, k = normalize_qk(q, k, inv_scale=32**-0.5, eps=1e-6)
    log_g = -mx.abs(mx.random.normal((2, length, 4))) * (0.1 if likeness < 1 else 1e-4)
    beta = mx.sigmoid(mx.random.normal((2, length, 4)) + 8 * likeness)
    return q, k, mx.random.normal((2, length, 4, 24)), log_g, beta


@pytest.mark.parametrize("chunk", [16, 64])
@pytest.mark.parametrize("likeness", [0.0, 0.9, 1.0])
@pytest.mark.parametrize("length", [1, 5, 64, 150])
def test_chunks_give_what_tokens_give(
    chunk: int, likeness: float, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delta, "CHUNK", chunk)
    q, k, v, log_g, beta = inputs(length, likeness, length)
    state = mx.random.normal((2, 4, 24, 32))
    for begin in (None, state):
        expected, expected_state = gated_delta_ops(q, k, v, mx.exp(log_g), beta, begin)
        found, found_state = chunked_delta(q, k, v, log_g, beta, begin)
        assert mx.abs(found - expected).max().item() < 1e-4
        assert mx.abs(found_state - expected_state).max().item() < 1e-4


def test_the_inverse_is_one() -> None:
    lower = np.tril(np.random.default_rng(3).uniform(-1, 1, (5, 64, 64)), -1).astype(np.float32) / 4
    found = np.array(unit_lower_inverse(mx.array(lower)))
    assert np.abs(found @ (np.eye(64) + lower) - np.eye(64)).max() < 1e-3
    assert (np.triu(found, 1) == 0).all()


def small_model() -> Any:
    mx.random.seed(5)
    model = qwen3_5.Model(qwen3_5.ModelArgs.from_dict({**CONFIG, **SMALL}))
    mx.eval(model.parameters())
    return model


def test_the_gradients_are_those_of_mlx_lms_operations() -> None:
    """Which has gradients of its own on the CPU, one token at a time."""
    model = small_model()
    model.train()
    rows = mx.random.randint(0, 97, (2, 41), key=mx.random.key(1))
    expected_loss, expected = nn.value_and_grad(model, loss_of)(model, rows)
    mx.eval(expected)
    with differentiable():
        found_loss, found = nn.value_and_grad(model, loss_of)(model, rows)
        mx.eval(found)
    assert abs(found_loss.item() - expected_loss.item()) < 1e-5
    pairs = dict(tree_flatten(expected))
    assert pairs
    for name, gradient in tree_flatten(found):
        size = mx.abs(pairs[name]).max().item()
        assert size > 0, name
        assert mx.abs(gradient - pairs[name]).max().item() < 1e-3 * size + 1e-7, name


def test_outside_the_block_mlx_lm_is_as_it_was() -> None:
    model, tokens = small_model(), mx.arange(20)[None]
    before = model(tokens)
    with differentiable():
        within = model(tokens)
    assert mx.array_equal(model(tokens), before)
    assert 0 < mx.abs(within - before).max().item() < 1e-4
