"""A real model with rings of 512 tokens: it makes sense, and its rows together equal each alone."""

import copy
import inspect
import textwrap
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
import pytest

from lanes.batch import SlotCaches
from lanes.choice import choose_lane
from lanes.decoder import Decoder
from lanes.lane import Sampling
from lanes.load import LoadedModel
from lanes.solo import RowMaker
from tests.lanes.families.check import Answer, Recording, difference
from tests.lanes.gemma_model import gemma

pytestmark = pytest.mark.slow

WINDOW = 512
CHUNK_TOKENS = 200
ROUNDING = 1e-4
TEXT = inspect.getsource(textwrap)


@dataclass(frozen=True, slots=True)
class Row:
    """Tokens of its prompt, the turn at which it enters the lane, and the tokens it draws."""

    prompt: int
    turn: int
    tokens: int


# The first outgrows the window while it is decoded, the second leaves and the last takes its slot.
ROWS = (Row(WINDOW - 7, 0, 20), Row(3, 0, 6), Row(WINDOW + 1, 2, 14), Row(WINDOW + 128, 6, 12))


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return gemma()


def greedy(model: LoadedModel, text: str, num_tokens: int) -> str:
    tokens, caches, drawn = model.tokenizer.encode(text), RowMaker(model.model)(), []
    while len(drawn) < num_tokens:
        logits = model.model(mx.array([tokens]), cache=caches)[0, -1]
        tokens = [cast(int, mx.argmax(logits).item())]
        drawn += tokens
    return model.tokenizer.decode(drawn)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("Question: What colour is the sky on a clear day?\nAnswer:", " Blue\n"),
        ("1, 2, 3, 4, 5,", " 6, 7, 8,"),
    ],
)
def test_it_answers(model: LoadedModel, text: str, answer: str) -> None:
    num_tokens = len(model.tokenizer.encode(answer)) - 1  # less the token that begins a text
    assert greedy(model, text, num_tokens) == answer


def test_its_facts(model: LoadedModel) -> None:
    config = model.config
    assert (config["sliding_window"], config["sliding_window_pattern"]) == (WINDOW, 6)
    assert (config["rope_theta"], config["rope_local_base_freq"]) == (1e6, 1e4)
    assert (config["query_pre_attn_scalar"], config["tie_word_embeddings"]) == (256, True)
    assert (model.dtype, model.context_tokens) == ("float32", 32768)
    assert model.weight_bytes == 4 * 268_098_176
    choice = choose_lane(RowMaker(model.model))
    assert choice.lane == "batch", choice.reason
    assert choice.cache_kinds == (*["rotating"] * 5, "kv") * 3


def test_rows_together_equal_each_alone(model: LoadedModel) -> None:
    make_row = RowMaker(model.model)
    tokens = model.tokenizer.encode(TEXT)
    processed = prefilled(make_row, tokens)
    alone = [answer(make_row, copy.deepcopy(caches), tokens, row) for caches, row in zip(processed, ROWS, strict=True)]
    lane = SlotCaches(make_row(), len(ROWS) - 1)
    recording = Recording(model.model, lane)
    decoder = Decoder(lane, recording)
    drawn: dict[int, list[int]] = {index: [] for index in range(len(ROWS))}
    for turn in range(max(row.turn + row.tokens for row in ROWS)):
        for index, row in enumerate(ROWS):
            if row.turn == turn:
                length = row.prompt - 1
                decoder.merge(index, processed[index], length, tokens[length], Sampling())
        for index, token in decoder.dispatch().read():
            drawn[index].append(token)
        decoder.check()
        for index, row in enumerate(ROWS):
            if row.turn + row.tokens == turn + 1:
                decoder.leave(index)
    together = [Answer(drawn[index], recording.logits[index]) for index in range(len(ROWS))]
    found = difference(together, alone)
    assert found.rows == 0
    assert found.logits <= ROUNDING


def prefilled(make_row: RowMaker, tokens: list[int]) -> list[list[Any]]:
    """The caches of each row before its first step. The rows' prompts begin alike, so each takes up the one before."""
    caches, done, found = make_row(), 0, {}
    for length in sorted(row.prompt - 1 for row in ROWS):
        while done < length:
            stop = min(done + CHUNK_TOKENS, length)
            make_row.model(mx.array([tokens[done:stop]]), cache=caches)
            mx.eval([cache.state for cache in caches])
            done = stop
        found[length] = copy.deepcopy(caches)
    return [found[row.prompt - 1] for row in ROWS]


def answer(make_row: RowMaker, caches: list[Any], tokens: list[int], row: Row) -> Answer:
    drawn, logits = [tokens[row.prompt - 1]], []
    for _ in range(row.tokens):
        logits.append(make_row.model(mx.array([[drawn[-1]]]), cache=caches)[0, -1])
        drawn.append(cast(int, mx.argmax(logits[-1]).item()))
    return Answer(drawn[1:], logits)
