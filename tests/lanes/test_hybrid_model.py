"""The hybrid that comes with laned: gated delta and attention layers in the batch lane, and text that means something.

What it has learned is tested by bounds far from what was measured (docs/hybrid.md), so that it can be trained anew.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from pydoc_data.topics import topics
from typing import Any

import mlx.core as mx
import pytest
import tokenizers
from mlx.utils import tree_flatten
from mlx_lm.models import base, qwen3_5, qwen3_next

from lanes.batch import SlotCaches
from lanes.build import build_engine
from lanes.geometry import RowGeometry
from lanes.lane import LaneSettings, RowSpec, Sampling
from lanes.load import LoadedModel, load
from lanes.solo import RowMaker
from lanes.sources import HYBRID_FOLDER, HYBRID_NAME, locate
from scheduler.commands.demo import HYBRID_PROMPTS
from tests.lanes.driver import Driver, engine_for
from tests.lanes.tiny import alone

KINDS = ("ssm", "ssm", "kv", "ssm", "ssm", "kv")
LARGEST_BYTES = 6_000_000
WORDS, NOISE = 0.8, 0.4
LOSS = 2.6


@cache
def hybrid() -> LoadedModel:
    return load("hybrid")


@pytest.fixture
def mlx_lms_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever form an engine of this process has found to be the fastest."""
    monkeypatch.setattr(qwen3_next, "scaled_dot_product_attention", base.scaled_dot_product_attention)


def prompt_of(title: str) -> tuple[int, ...]:
    return tuple(hybrid().tokenizer.encode_chat([{"role": "user", "content": title}]))


def random_model() -> Any:
    """Of the same shape, with weights that have learned nothing."""
    mx.random.seed(1)
    model = qwen3_5.Model(qwen3_5.ModelArgs.from_dict(dict(hybrid().config)))
    mx.eval(model.parameters())
    return model


def test_it_is_found_by_its_word_and_is_small() -> None:
    source = locate("hybrid")
    assert (source.name, source.path, source.is_gguf) == (HYBRID_NAME, HYBRID_FOLDER, False)
    assert files("lanes").joinpath("hybrid_demo", "config.json").is_file()
    assert sum(path.stat().st_size for path in HYBRID_FOLDER.glob("*.safetensors")) <= LARGEST_BYTES


def test_its_facts() -> None:
    loaded = hybrid()
    assert (loaded.name, loaded.config["model_type"], loaded.dtype) == ("hybrid-3M", "qwen3_5", "float32")
    assert loaded.context_tokens == 2048
    assert loaded.tokenizer.vocab_size == loaded.config["vocab_size"] == 3072
    assert loaded.tokenizer.eos_token_ids == {0}


def test_a_question_is_the_title_of_a_section() -> None:
    tokens = prompt_of("  Reading a file ")
    assert tokens[0] == 0
    assert hybrid().tokenizer.decode(tokens) == "# Reading a file\n\n"


def test_transformers_cuts_text_as_training_did() -> None:
    """It has its own way for models of this type, and training went by tokenizer.json."""
    file = tokenizers.Tokenizer.from_file(str(HYBRID_FOLDER / "tokenizer.json"))
    for text in ("# Path.exists\n\nIt's 1234 bytes; don't.\n\n- read_text()", "  x = 5\n\n\n\ty", "Äpfel, 林檎"):
        assert hybrid().tokenizer.encode(text) == file.encode(text).ids


@pytest.mark.parametrize("text", ["The file could not be opened.", "Äpfel, 林檎\n\tund 🍏 = x ** 2\n"])
def test_every_text_has_tokens(text: str) -> None:
    tokenizer = hybrid().tokenizer
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_it_runs_in_the_batch_lane() -> None:
    info = build_engine(load("hybrid"), LaneSettings(max_rows=4), "stock").info
    assert (info.lane, info.cache_kinds, info.max_rows) == ("batch", KINDS, 4)
    # In four layers three inputs of the convolution and a matrix for each head; in two, keys and values of one head.
    state_bytes = 4 * (3 * 448 + 4 * 48 * 64) * 4
    assert info.geometry == RowGeometry(state_bytes, column_bytes=2 * 2 * 64 * 4)


def test_rows_that_join_and_leave_compute_what_each_computes_alone(mlx_lms_attention: None) -> None:
    """Bit for bit, at every step: prompts of other lengths beside them, slots that others had before."""
    model = hybrid().model
    make_row = RowMaker(model)
    lane = SlotCaches(make_row(), 4)
    beside: dict[int, list[Any]] = {}
    prompts = [prompt_of(title) for title in HYBRID_PROMPTS]
    last = {number: prompt[-1] for number, prompt in enumerate(prompts)}

    def join(row: int) -> None:
        for target in ("lane", "beside"):
            caches = make_row()
            model(mx.array([prompts[row][:-1]]), cache=caches)
            mx.eval([cache.state for cache in caches])
            if target == "lane":
                lane.merge(row, caches, len(prompts[row]) - 1)
            else:
                beside[row] = caches

    def leave(row: int) -> None:
        lane.leave(row)
        del beside[row]

    joins = {0: [0, 1], 3: [2], 7: [3], 12: [4, 5], 20: [6, 7]}
    leaves = {10: [0, 2], 18: [1, 5]}
    for turn in range(30):
        for row in leaves.get(turn, []):
            leave(row)
        for row in joins.get(turn, []):
            join(row)
        slots = lane.table.rows
        tokens = mx.array([[0 if row is None else last[row]] for row in slots])
        logits = model(tokens, cache=lane.begin_step())[:, -1]
        lane.end_step()
        for slot, row in enumerate(slots):
            if row is not None:
                expected = model(mx.array([[last[row]]]), cache=beside[row])[0, -1]
                assert mx.array_equal(logits[slot], expected), f"row {row} in slot {slot}, turn {turn}"
                last[row] = int(mx.argmax(expected).item())
        lane.check()
    assert len({*last.values()}) > 1, "the rows have written different things"


def test_the_engine_answers_as_the_model_alone(mlx_lms_attention: None) -> None:
    engine = engine_for(hybrid().model, max_rows=3)
    prompts = [prompt_of(title) for title in HYBRID_PROMPTS]
    rows = [
        (2 * number, RowSpec(number, prompt, Sampling()), 6 + 3 * number) for number, prompt in enumerate(prompts[:3])
    ]
    answers = Driver(engine).run(rows)
    for _, spec, count in rows:
        assert answers[spec.row_id][:count] == alone(hybrid().model, spec.prompt, count)[0]


def written(model: Any, titles: Sequence[str], count: int = 48) -> list[str]:
    """What a model writes under each title, drawn at a temperature of 0.7; it goes on where a section ends."""
    specs = [RowSpec(row, prompt_of(title), Sampling(temperature=0.7, seed=row)) for row, title in enumerate(titles)]
    answers = Driver(engine_for(model)).run([(0, spec, count) for spec in specs])
    return [hybrid().tokenizer.decode(answers[spec.row_id]) for spec in specs]


def share_of_words(texts: list[str]) -> float:
    """How much of what is written between spaces are words, or names, that Python's own help has."""
    known = set(re.findall(r"[a-z]+", " ".join(topics.values()).lower()))
    found = [word.strip(".,:;()\"'") for word in " ".join(texts).lower().split()]
    assert len(found) > 50, "next to nothing was written"
    return sum(word in known for word in found) / len(found)


def test_what_it_writes_are_words() -> None:
    texts, noise = (written(model, HYBRID_PROMPTS) for model in (hybrid().model, random_model()))
    assert share_of_words(texts) > WORDS, texts
    assert share_of_words(noise) < NOISE, "the bound tells nothing"


def test_a_sentence_is_likelier_than_its_words_in_disorder() -> None:
    def loss(text: str) -> float:
        tokens = hybrid().tokenizer.encode(f"# Example\n\n{text}")
        logits = hybrid().model(mx.array([tokens[:-1]]))[0]
        chosen = mx.take_along_axis(
            logits - mx.logsumexp(logits, axis=-1, keepdims=True), mx.array(tokens[1:])[:, None], 1
        )
        return float(-mx.mean(chosen).item())

    sentence = "If the file does not exist, an exception is raised and the function returns None."
    words = sentence.split()
    disorder = " ".join(words[start] for part in range(3) for start in range(part, len(words), 3))
    assert loss(sentence) < 0.8 * loss(disorder)
    assert loss(sentence) < LOSS


def test_it_was_trained_by_the_script_that_is_here() -> None:
    story = json.loads((HYBRID_FOLDER / "train.json").read_text())
    size = sum(array.size for _, array in tree_flatten(hybrid().model.parameters()))
    assert story["parameters"] == size
    assert story["history"][-1][1] == story["steps"]
    assert story["valid_loss"] < story["history"][0][3]


def test_the_demo_shows_it() -> None:
    command = [sys.executable, "-m", "scheduler.cli", "demo", "--model", "hybrid", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["requests"], found["completed"], found["exit_status"]) == (8, 8, 0)
    assert found["model"] == HYBRID_NAME
    assert found["tokens"] > 8
