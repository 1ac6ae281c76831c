"""Trains the demonstration's hybrid: `python3 -m tests.hybrid.train --data FOLDER --out FOLDER --minutes N`.

--data is what tests.hybrid.tokens made. --out gets the model's folder as `laned serve` takes it (config.json, weights
in float16, the tokenizer) and train.json with what happened, every half a minute and at the end, each file whole: a run
that is cut off leaves a model. The learning rate's cosine goes to the end of the time, so a run of any length ends with
a finished model; the same seed draws the same batches, but how many there are depends on the machine.

On an NVIDIA GPU, with MLX's CUDA build, the defaults are right. On a CPU take `--batch 16 --length 128`, and before it
`nice -n 19 env OPENBLAS_NUM_THREADS=1` where others use the machine.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    from lanes import blas

    print(blas.preload().sentence, flush=True)

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten
from tokenizers import Tokenizer

from tests.hybrid.delta import differentiable
from tests.hybrid.shape import CONFIG, new_model

Arrays = dict[str, mx.array]
Step = Callable[[Arrays, Arrays, Arrays, mx.array, mx.array, mx.array], tuple[mx.array, Arrays, Arrays, Arrays]]

SAVE_EVERY_S = 30.0
REPORT_EVERY_S = 10.0
PEAK_RATE = 3e-3
LAST_RATE = 0.02  # of the peak
WARMUP = 0.03  # of the time
BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1
LARGEST_NORM = 1.0
VALID_ROWS = 128
PROMPTS = ("# Reading a file\n\n", "# How to sort a list\n\n", "# Exceptions\n\n", "# Path.exists\n\n")


@dataclass(slots=True)
class Story:
    """What happened, for train.json. Losses in nats a token; history: seconds, steps, both losses."""

    device: str
    arguments: dict[str, float]
    parameters: int
    train_tokens: int
    steps: int = 0
    seconds: float = 0.0
    train_loss: float = 0.0
    valid_loss: float = 0.0
    history: list[tuple[float, int, float, float]] = field(default_factory=list)
    samples: list[str] = field(default_factory=list)


def rate(done: float) -> float:
    """The learning rate after this part of the time."""
    if done < WARMUP:
        return PEAK_RATE * (0.01 + 0.99 * done / WARMUP)
    cosine = 0.5 * (1 + np.cos(np.pi * min(1.0, (done - WARMUP) / (1 - WARMUP))))
    return float(PEAK_RATE * (LAST_RATE + (1 - LAST_RATE) * cosine))


def loss_of(model: Any, rows: mx.array) -> mx.array:
    """rows int32 [B, T + 1] -> the mean over the T tokens that are to be guessed."""
    return nn.losses.cross_entropy(model(rows[:, :-1]), rows[:, 1:], reduction="mean")


def step_of(model: Any, tokens: mx.array, length: int) -> Step:
    """AdamW. step(weights, first and second moments, starts of rows int32 [B], number from 1, learning rate) gives the
    loss before it and the three anew. Weight decay is for matrices, not for norms, biases, decays and taps."""
    columns = mx.arange(length + 1)

    def loss_with(weights: Arrays, rows: mx.array) -> mx.array:
        model.update(tree_unflatten(list(weights.items())))
        return loss_of(model, rows)

    def step(
        weights: Arrays, means: Arrays, squares: Arrays, starts: mx.array, number: mx.array, learning_rate: mx.array
    ) -> tuple[mx.array, Arrays, Arrays, Arrays]:
        loss, gradients = mx.value_and_grad(loss_with)(weights, tokens[starts[:, None] + columns])
        norm = mx.sqrt(sum((mx.square(each).sum() for each in gradients.values()), mx.array(0.0)))
        scale = mx.minimum(LARGEST_NORM / (norm + 1e-6), 1.0)
        bias_mean, bias_square = 1 - BETAS[0] ** number, 1 - BETAS[1] ** number
        new: tuple[Arrays, Arrays, Arrays] = ({}, {}, {})
        for name, weight in weights.items():
            gradient = gradients[name] * scale
            mean = BETAS[0] * means[name] + (1 - BETAS[0]) * gradient
            square = BETAS[1] * squares[name] + (1 - BETAS[1]) * mx.square(gradient)
            change = (mean / bias_mean) / (mx.sqrt(square / bias_square) + 1e-8)
            if weight.ndim == 2:
                change = change + WEIGHT_DECAY * weight
            new[0][name], new[1][name], new[2][name] = weight - learning_rate * change, mean, square
        return loss, *new

    return step


def valid_loss(model: Any, valid: np.ndarray, length: int) -> float:
    """Over the sections that training does not see, or as many of them as VALID_ROWS rows hold."""
    rows = valid[: len(valid) // length * length].reshape(-1, length)[:VALID_ROWS].astype(np.int32)
    losses = [(loss_of(model, mx.array(part)).item(), len(part)) for part in np.array_split(rows, -(-len(rows) // 32))]
    return float(sum(loss * count for loss, count in losses) / len(rows))


def sample(model: Any, tokenizer: Tokenizer, prompt: str, seed: int = 1, count: int = 48) -> str:
    """A continuation at a temperature of 0.7. Each token is had from the whole text anew: training keeps no caches."""
    ids = [CONFIG["eos_token_id"], *tokenizer.encode(prompt).ids]
    width = len(ids) + count
    for place in range(len(ids) - 1, width - 1):
        logits = model(mx.array([ids + [0] * (width - len(ids))]))[0, place]
        ids.append(int(mx.random.categorical(logits / 0.7, key=mx.random.key(seed * 1000 + place)).item()))
        if ids[-1] == CONFIG["eos_token_id"]:
            break
    return str(tokenizer.decode(ids[1:], skip_special_tokens=True))


def save(model: Any, story: Story, data: Path, out: Path) -> None:
    """The model's folder; a file that is there is replaced in one go."""
    out.mkdir(parents=True, exist_ok=True)
    stored = {
        name: array if name.endswith("A_log") else array.astype(mx.float16)
        for name, array in tree_flatten(model.parameters())
    }
    mx.save_safetensors(str(out / "new.safetensors"), stored, {"format": "mlx"})
    os.replace(out / "new.safetensors", out / "model.safetensors")
    for name, content in (("config.json", CONFIG), ("train.json", asdict(story))):
        (out / f"{name}.new").write_text(json.dumps(content, indent=1) + "\n")
        os.replace(out / f"{name}.new", out / name)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(data / "tokenizer" / name, out / name)


def compiled_if_it_works(step: Step, *arguments: Any) -> Step:
    """The step compiled, tried once; what a device's compiler cannot do runs operation by operation. On the CPU each
    kernel would go through a C++ compiler, which takes longer than it saves."""
    if mx.default_device() == mx.Device(mx.cpu):
        return step
    compiled: Step = mx.compile(step)
    try:
        mx.eval(compiled(*arguments))
    except Exception as error:
        print(f"not compiled: {type(error).__name__}: {str(error)[:300]}", flush=True)
        return step
    return compiled


class Run:
    """One training: what it was told, its model, and how far it is."""

    def __init__(self, chosen: argparse.Namespace) -> None:
        self.begun_s = time.monotonic()
        self.end_s = self.begun_s + 60 * chosen.minutes
        self.chosen = chosen
        loaded = np.load(chosen.data / "tokens.npz")
        self.tokens, self.valid = mx.array(loaded["train"].astype(np.int32)), loaded["valid"]
        self.tokenizer = Tokenizer.from_file(str(chosen.data / "tokenizer" / "tokenizer.json"))
        self.model = new_model(chosen.seed)
        weights = dict(tree_flatten(self.model.parameters()))
        zeros = {name: mx.zeros_like(weight) for name, weight in weights.items()}
        self.state: tuple[Arrays, Arrays, Arrays] = (weights, zeros, dict(zeros))
        self.losses: list[mx.array] = []
        self.draw = np.random.default_rng(chosen.seed)
        told = {name: getattr(chosen, name) for name in ("minutes", "batch", "length", "seed")}
        size = sum(weight.size for weight in weights.values())
        device = str(mx.device_info().get("device_name", mx.default_device()))
        self.story = Story(device, told, size, self.tokens.size)
        print(f"{size} parameters, {self.tokens.size} tokens, on {self.story.device}", flush=True)

    def train(self) -> None:
        story = self.story
        step = step_of(self.model, self.tokens, self.chosen.length)
        step = compiled_if_it_works(step, *self.state, self.starts(), mx.array(1.0), mx.array(0.0))
        if mx.default_device() != mx.Device(mx.cpu):  # kernels are compiled at their first use: no look is to take that
            self.take_weights()
            valid_loss(self.model, self.valid, self.chosen.length)
            sample(self.model, self.tokenizer, PROMPTS[0])
        trained_s = reported_s = saved_s = now_s = time.monotonic()
        print(f"the first step took {now_s - self.begun_s:.1f} s with all that comes before", flush=True)
        look_s = 0.0  # the end keeps what a look with all prompts will take, as those before it tell
        while now_s < self.end_s - len(PROMPTS) * look_s:
            story.steps += 1
            done = (now_s - trained_s) / (self.end_s - trained_s)
            loss, *new = step(*self.state, self.starts(), mx.array(float(story.steps)), mx.array(rate(done)))
            self.state = (new[0], new[1], new[2])
            mx.async_eval(loss, *self.state)
            self.losses = [*self.losses[-49:], loss]
            if len(self.losses) > 1:
                mx.eval(self.losses[-2])  # one step computes while the next is being built, and no more
            now_s = time.monotonic()
            story.seconds = now_s - trained_s
            if now_s - reported_s > REPORT_EVERY_S:
                reported_s = now_s
                pace = f"{story.seconds / story.steps:.3f} s/step"
                print(f"{story.seconds:6.0f} s  step {story.steps}  {pace}  loss {self.loss():.3f}", flush=True)
            if now_s - saved_s > max(SAVE_EVERY_S, 10 * look_s):  # on a CPU looking takes long
                self.look(PROMPTS[story.steps % len(PROMPTS) :][:1])
                saved_s = time.monotonic()
                look_s, now_s = saved_s - now_s, saved_s
        self.look(PROMPTS)
        print(f"{story.steps} steps in {story.seconds:.0f} s", flush=True)

    def starts(self) -> mx.array:
        """Where the rows of the next batch begin."""
        last = self.tokens.size - self.chosen.length - 1
        return mx.array(self.draw.integers(0, last, self.chosen.batch).astype(np.int32))

    def loss(self) -> float:
        """The mean of the last steps' losses."""
        return float(mx.mean(mx.stack(self.losses)).item())

    def take_weights(self) -> None:
        """Give the model what training has come to: a step leaves its own arrays in it."""
        self.model.update(tree_unflatten(list(self.state[0].items())))

    def look(self, prompts: tuple[str, ...]) -> None:
        """Measure, write a sample for each prompt, and save."""
        story = self.story
        self.take_weights()
        story.train_loss = self.loss()
        story.valid_loss = valid_loss(self.model, self.valid, self.chosen.length)
        if not math.isfinite(story.valid_loss):
            raise SystemExit(f"the loss is {story.valid_loss} after {story.steps} steps; what was saved before stays")
        story.history.append((round(story.seconds, 1), story.steps, story.train_loss, story.valid_loss))
        story.samples = [sample(self.model, self.tokenizer, prompt) for prompt in prompts]
        save(self.model, story, self.chosen.data, self.chosen.out)
        print(f"saved: loss {story.train_loss:.3f}, of what it has not seen {story.valid_loss:.3f}", flush=True)
        print(*(f"  {text!r}" for text in story.samples), sep="\n", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, required=True, help="from the start of the program to its end")
    parser.add_argument("--batch", type=int, default=96)
    parser.add_argument("--length", type=int, default=256, help="tokens of a row, best a multiple of 64")
    parser.add_argument("--seed", type=int, default=7)
    with differentiable():
        Run(parser.parse_args()).train()


if __name__ == "__main__":
    main()
