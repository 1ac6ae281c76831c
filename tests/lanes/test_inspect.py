"""What is told of a model is what it has."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lanes.geometry import RowGeometry
from lanes.inspect import describe, inspect, runs
from lanes.lane import LaneSettings
from lanes.load import LoadedModel, load
from lanes.solo import CannotQuantize, RowMaker
from tests.lanes.families import make_model
from tests.lanes.gguf import models

KV, RING = RowGeometry(column_bytes=256), RowGeometry(rings=((8, 256),))
SETTINGS = LaneSettings(max_rows=4)


def loaded(folder: Path, model_type: str) -> LoadedModel:
    model, config = models.random_model(model_type)
    return load(str(models.write_model(folder / "tiny.gguf", model, config)), dtype="float32")


@given(st.lists(st.sampled_from([("kv", KV), ("rotating (8)", RING), ("Odd", None)])))
def test_runs_are_what_they_were_made_of(caches: list[Any]) -> None:
    found = runs(caches)
    assert [run[2:] for run in found for _ in range(run[0], run[1] + 1)] == caches
    assert [first for first, *_ in found[1:]] == [last + 1 for _, last, *_ in found[:-1]]
    assert all(one[2:] != other[2:] for one, other in pairwise(found))


@pytest.mark.parametrize(
    ("family", "bits", "shown"),
    [
        ("gemma3_text", None, ["rotating (8)", "kv"]),
        ("gemma3_text", 4, ["rotating-qkv (8, 4 bits in groups of 32)", "qkv (4 bits in groups of 32)"]),
        ("falcon_h1", None, ["ssm (2 arrays) + kv"] * 2),
        ("llama4", None, ["ChunkedKVCache"] * 3 + ["kv"]),
    ],
)
def test_a_cache_is_told_with_what_sets_it_apart(family: str, bits: int | None, shown: list[str]) -> None:
    assert [describe(cache) for cache in RowMaker(make_model(family), bits, 32)()] == shown


def test_kept_tokens_are_told() -> None:
    cache = RowMaker(make_model("gemma3_text"))()[0]
    cache.keep = 4
    assert describe(cache) == "rotating (8, keeping 4)"


def test_the_report_of_a_model_with_windows(tmp_path: Path) -> None:
    info, report = inspect(loaded(tmp_path, "gemma3_text"), SETTINGS, "none")
    assert json.loads(json.dumps(report)) == report
    assert report["model"]["model_type"] == info.model_type == "gemma3_text"
    assert report["model"]["weight_bytes"] == info.weight_bytes > 0
    assert report["lane"] == {"name": "batch", "reason": info.lane_reason, "max_rows": 4}
    # Keys and values of 2 heads of 16 float32; every third layer of five sees everything.
    column = 2 * 2 * 16 * 4
    ring = {"state_bytes": 0, "column_bytes": 0, "rings": [{"columns": 8, "column_bytes": column}]}
    assert [(run["first"], run["last"], run["kind"]) for run in report["caches"]] == [
        (0, 1, "rotating (8)"),
        (2, 2, "kv"),
        (3, 4, "rotating (8)"),
    ]
    assert {key: report["caches"][0][key] for key in ring} == ring
    assert report["row"] == {"bytes_per_token": column, "fixed_bytes": 4 * 8 * column, "state_bytes": 0}
    assert info.geometry is not None
    assert info.geometry.row_bytes(100) == 100 * column + report["row"]["fixed_bytes"]


def test_the_forms_are_those_that_were_chosen(tmp_path: Path) -> None:
    model = loaded(tmp_path, "llama")
    for option, compiled in (("on", True), ("off", False)):
        _, report = inspect(model, LaneSettings(compile=option), "none")  # type: ignore[arg-type]
        assert report["forms"]["compiled"] is compiled
        assert report["forms"]["attention"] in ("fused", "by hand", "own")


def test_what_cannot_be_quantized_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CannotQuantize):
        inspect(loaded(tmp_path, "llama"), LaneSettings(kv_bits=8, kv_group_size=64), "none")
