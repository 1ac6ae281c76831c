"""A request's options in the words of the lanes."""

import json
from typing import Any

import pytest

from lanes.lane import Grammar, Sampling
from scheduler.errors import Refused
from scheduler.options import Options
from scheduler.protocol import StructuredOutputs, Submit
from scheduler.sampling import grammar_of, sampling_of, seed_of

DEFAULTS = Options(model="x", temperature=0.7, top_p=0.9, top_k=40, min_p=0.05)


def sampling(**fields: Any) -> Sampling:
    return sampling_of(
        Submit("a", prompt="b", **{"seed": 3, **fields}),
        DEFAULTS,
        prompt_tokens=10,
        max_tokens=20,
        vocabulary=100,
        end_token_ids={2, 7, 100, 5000},
        spared=(7, 9, 100),
    )


def test_what_is_not_said_is_the_daemons_default_or_off() -> None:
    plain = Sampling(temperature=0.7, top_p=0.9, top_k=40, min_p=0.05, seed=3, xtc_spared=(7, 9))
    assert sampling() == plain
    assert sampling(temperature=0.0, top_k=0).temperature == 0
    # A window of what is off makes no difference, nor does a bias of nothing.
    assert sampling(repetition_context_size=3, presence_context_size=999, logit_bias={}) == plain
    assert plain.window == 0


def test_windows_are_no_longer_than_the_row_can_get() -> None:
    told = sampling(repetition_penalty=1.1, repetition_context_size=2**31 - 1, frequency_penalty=0.5)
    assert (told.repetition_context_size, told.frequency_context_size, told.presence_context_size) == (30, 20, 20)
    assert told.window == 30


def test_ends_are_put_off_by_position() -> None:
    assert (sampling().earliest_end, sampling().end_token_ids) == (0, ())
    told = sampling(min_tokens=4)
    # Ids that the model does not have are left out: MLX checks no bounds.
    assert (told.earliest_end, told.end_token_ids) == (14, (2, 7))
    with pytest.raises(Refused, match="min_tokens is 21, but there are 20"):
        sampling(min_tokens=21)


def test_a_bias_is_of_tokens_that_there_are() -> None:
    assert sampling(logit_bias={"99": -1.5}).logit_bias == ((99, -1.5),)
    with pytest.raises(Refused, match="logit_bias names 100, but the model's ids are 0 to 99"):
        sampling(logit_bias={"3": 1.0, "100": 1.0})


def test_log_probabilities() -> None:
    assert sampling().num_top_logprobs is None
    assert sampling(logprobs=True).num_top_logprobs == 0
    assert sampling(logprobs=True, top_logprobs=5).num_top_logprobs == 5


@pytest.mark.parametrize(
    ("wanted", "grammar"),
    [
        (StructuredOutputs(json={"type": "null"}), Grammar("json", '{"type": "null"}')),
        (StructuredOutputs(json_object=True), Grammar("json", '{"type": "object"}')),
        (StructuredOutputs(regex="a+"), Grammar("regex", "a+")),
        (StructuredOutputs(grammar="start: /a/"), Grammar("lark", "start: /a/")),
        (StructuredOutputs(choice=("a", 'b "c"', "ü\n")), Grammar("lark", 'start: "a" | "b \\"c\\"" | "ü\\n"')),
    ],
)
def test_structured_outputs_become_grammars(wanted: StructuredOutputs, grammar: Grammar) -> None:
    assert grammar_of(wanted) == grammar
    assert sampling(structured_outputs=wanted).grammar == grammar


def test_a_schema_that_is_no_json_is_refused() -> None:
    with pytest.raises(Refused, match=r"structured_outputs\.json is no JSON"):
        grammar_of(StructuredOutputs(json={"const": b"binary"}))
    assert json.loads(grammar_of(StructuredOutputs(json={})).text) == {}


def test_every_answer_has_a_seed_of_its_own() -> None:
    seeds = {seed_of(seed, index) for seed in range(200) for index in range(128)}
    assert len(seeds) == 200 * 128
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert seed_of(2**63 - 1, 0) == 2**63 - 1
    assert seed_of(5, 1) == seed_of(5, 1)
