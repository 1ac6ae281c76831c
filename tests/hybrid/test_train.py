"""Training: its step learns, its time is divided well, and what it leaves is a model that laned loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_unflatten

from lanes.load import load
from lanes.sources import HYBRID_FOLDER
from tests.hybrid import install, train
from tests.hybrid.delta import differentiable
from tests.hybrid.shape import new_model
from tests.hybrid.test_delta import small_model


def stepped(model: Any, tokens: mx.array, count: int) -> list[float]:
    """The losses of so many steps on rows of one text."""
    weights = dict(tree_flatten(model.parameters()))
    zeros = {name: mx.zeros_like(weight) for name, weight in weights.items()}
    state = (weights, zeros, dict(zeros))
    step = train.step_of(model, tokens, 32)
    losses = []
    with differentiable():
        for number in range(1, count + 1):
            starts = mx.array([number % 7, 3 * number % 11])
            loss, *new = step(*state, starts, mx.array(float(number)), mx.array(1e-2))
            state = (new[0], new[1], new[2])
            losses.append(float(loss.item()))
    model.update(tree_unflatten(list(state[0].items())))
    return losses


def test_a_step_learns() -> None:
    losses = stepped(small_model(), mx.array(np.arange(60) * 5 % 97), 40)
    assert losses[0] > 3.5
    assert losses[-1] < 0.2 * losses[0]


def test_the_rate_rises_and_falls() -> None:
    rates = [train.rate(part / 100) for part in range(101)]
    assert max(rates) == pytest.approx(train.PEAK_RATE)
    peak = rates.index(max(rates))
    assert 0 < peak < 10
    assert rates[: peak + 1] == sorted(rates[: peak + 1])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    assert rates[-1] == pytest.approx(train.LAST_RATE * train.PEAK_RATE)


def left(folder: Path, valid_loss: float) -> Any:
    """A model as training leaves it, that has learned nothing; its tokenizer is that of the model in place."""
    (folder / "tokenizer").mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / "tokenizer" / name).write_bytes((HYBRID_FOLDER / name).read_bytes())
    told = {"minutes": 1, "batch": 2, "length": 32, "seed": 3}
    story = train.Story("a device", told, 0, 1000, 10, 60.0, 5.0, valid_loss, samples=["# One\n\nTwo."])
    model = new_model(3)
    train.save(model, story, folder, folder)
    return model


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    model = left(tmp_path, 5.0)
    loaded = load(str(tmp_path))
    tokens = mx.array([loaded.tokenizer.encode("Return a list of all files.")])
    assert mx.abs(loaded.model(tokens) - model(tokens)).max().item() < 0.02, "float16 in the file"
    assert loaded.tokenizer.eos_token_ids == {0}
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == sorted(install.FILES)


def test_only_a_better_model_is_installed(tmp_path: Path) -> None:
    in_place = json.loads((HYBRID_FOLDER / "train.json").read_text())["valid_loss"]
    left(tmp_path / "worse", in_place + 0.1)
    left(tmp_path / "better", in_place - 0.1)
    assert "loss" in (install.problem_with(tmp_path / "worse") or "")
    assert install.problem_with(tmp_path / "better") is None
    (tmp_path / "better" / "config.json").unlink()
    assert "config.json" in (install.problem_with(tmp_path / "better") or "")


def test_the_figures_are_told(tmp_path: Path) -> None:
    left(tmp_path, 4.321)
    page = install.figures(tmp_path)
    assert "| steps | 10 of 2 rows of 32 tokens, seed 3 |" in page
    assert "| of sections it has not seen | 4.32 nats a token |" in page
    assert "# One\n\nTwo." in page
