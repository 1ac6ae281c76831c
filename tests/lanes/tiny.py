"""Tiny models with random weights, of mlx-lm's own classes, and the row alone that everything is compared with."""

from typing import Any

import mlx.core as mx
from mlx_lm.models import llama
from mlx_lm.models.cache import make_prompt_cache

VOCABULARY = 97


def tiny_llama() -> Any:
    """Four layers, grouped heads. Seeded: the same weights in every process."""
    args = llama.ModelArgs(
        model_type="llama",
        hidden_size=32,
        num_hidden_layers=4,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        rms_norm_eps=1e-5,
        vocab_size=VOCABULARY,
    )
    mx.random.seed(7)
    model = llama.Model(args)
    mx.eval(model.parameters())
    return model


def prompt_of(length: int, seed: int = 0) -> tuple[int, ...]:
    """A prompt of random tokens."""
    return tuple(mx.random.randint(0, VOCABULARY, (length,), key=mx.random.key(seed * 100_003 + length)).tolist())


def alone(model: Any, prompt: tuple[int, ...], num_tokens: int) -> tuple[list[int], list[mx.array]]:
    """The greedy answer, and the logits [vocabulary] that each token was chosen from, of a row that mlx-lm runs alone:
    its own caches, the whole prompt but the last token at once, then token by token."""
    caches = make_prompt_cache(model)
    if len(prompt) > 1:
        model(mx.array([prompt[:-1]]), cache=caches)
    tokens, logits, last = [], [], prompt[-1]
    for _ in range(num_tokens):
        row = model(mx.array([[last]]), cache=caches)[0, -1]
        last = int(mx.argmax(row).item())
        tokens.append(last)
        logits.append(row)
    mx.eval(logits)
    return tokens, logits
