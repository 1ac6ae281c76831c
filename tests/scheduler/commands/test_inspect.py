"""`laned inspect`: as a process, and how many rows it finds room for."""

import json
import subprocess
import sys
from dataclasses import replace
from io import StringIO
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from lanes.geometry import RowGeometry
from scheduler.budget import Budget
from scheduler.commands.inspect import rows, rows_that_fit, show
from scheduler.usage import UsageError
from tests.lanes.gguf import models
from tests.scheduler.fake_engine import INFO

GIB = 1 << 30
RING = {"columns": 8, "column_bytes": 256}
GEOMETRY = RowGeometry(1000, 256, ((512, 64),))


def inspect(*argv: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "scheduler.cli", "inspect", *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model with windows of 8, a context of 512 tokens and heads of 32."""
    model, config = models.random_model("gemma3_text", head_dim=32, query_pre_attn_scalar=32)
    return str(models.write_model(tmp_path_factory.mktemp("models") / "tiny.gguf", model, config))


@pytest.mark.parametrize("bits", [(), ("--kv-bits", "8")])
def test_the_demonstrations_model_as_json(bits: tuple[str, ...]) -> None:
    done = inspect("demo", "--json", "--length", "100", "--length", "8192", "--kv-cache-memory-bytes", "2GiB", *bits)
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert report["model"]["name"] == "SmolLM2-135M-Instruct"
    assert report["model"]["weight_bytes"] == 4 * 134_515_008
    assert report["lane"]["name"] == "batch"
    assert [(run["first"], run["last"]) for run in report["caches"]] == [(0, 29)]
    # 3 heads of 64, keys and values: 4 bytes each, or 1 byte and two factors of 4 bytes for each 64.
    per_token = 30 * 2 * 3 * (64 * 4 if not bits else 64 + 8)
    assert report["row"] == {"bytes_per_token": per_token, "fixed_bytes": 0, "state_bytes": 0}
    assert report["memory"]["cache_limit_bytes"] == 2 * GIB
    assert report["memory"]["remembered_bytes"] == report["memory"]["device_bytes"] // 10
    assert report["memory"]["device_bytes"] > report["memory"]["weight_bytes"]
    assert [(each["tokens"], each["row_bytes"]) for each in report["rows"]] == [
        (100, 100 * per_token),
        (8192, 8192 * per_token),
    ]
    assert all(each["rows"] > 0 for each in report["rows"])


def test_a_file_as_a_table(tiny: str) -> None:
    done = inspect(tiny, "--blas", "off")
    assert (done.returncode, done.stderr) == (0, "")
    for said in ("tiny", "gemma3_text", "0-1 rotating (8)", "3-4 rotating (8)", "2 kv", "512 tokens:", "batch"):
        assert said in done.stdout


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["/no/such/model"], "/no/such/model"),
        (["{tiny}", "--length", "513"], "--length 513: the model's context is 512 tokens."),
        (["{tiny}", "--length", "0"], "--length: invalid number of tokens value: '0'."),
        (["{tiny}", "--kv-bits", "5"], "--kv-bits takes"),
        (["{tiny}", "--kv-bits", "8", "--kv-group-size", "64"], "--kv-bits 8: "),
        (["{tiny}", "--socket", "x"], "has no option --socket"),
        ([], "MODEL"),
    ],
)
def test_a_mistake_is_status_2_and_one_sentence(tiny: str, argv: list[str], words: str) -> None:
    done = inspect("--blas", "off", *(tiny if word == "{tiny}" else word for word in argv))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("laned: ")
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1


sizes = st.integers(0, 1 << 20)


@given(
    st.builds(RowGeometry, sizes, sizes, st.tuples(st.tuples(st.integers(1, 600), sizes))),
    st.integers(0, 1 << 40),
    st.integers(1, 5000),
)
def test_as_many_rows_fit_as_the_daemon_would_let_in(geometry: RowGeometry, limit_bytes: int, tokens: int) -> None:
    found = rows_that_fit(geometry, limit_bytes, tokens)
    if geometry == RowGeometry(rings=((geometry.rings[0][0], 0),)):
        assert found is None
        return
    assert found is not None
    assert geometry.lane_bytes(found, tokens) <= limit_bytes < geometry.lane_bytes(found + 1, tokens)
    if found < 1000:
        budget = Budget(limit_bytes, geometry)
        assert budget.fits([tokens] * found, [])
        assert not budget.fits([tokens] * (found + 1), [])


@pytest.mark.parametrize(
    ("context", "asked", "told"),
    [
        (None, None, [4096]),
        (1024, None, [1024]),
        (32768, None, [4096, 32768]),
        (32768, [7, 100], [7, 100]),
    ],
)
def test_which_lengths_are_told(context: int | None, asked: list[int] | None, told: list[int]) -> None:
    info = replace(INFO, context_tokens=context, geometry=GEOMETRY)
    found = rows(info, Budget(GIB, GEOMETRY), asked)
    assert [each["tokens"] for each in found] == told
    assert [each["row_bytes"] for each in found] == [GEOMETRY.row_bytes(tokens) for tokens in told]


def test_a_length_beyond_the_context_is_a_mistake() -> None:
    with pytest.raises(UsageError, match="context is 10 tokens"):
        rows(replace(INFO, context_tokens=10), Budget(GIB, None), [11])


def test_the_serial_lane_has_one_row() -> None:
    (found,) = rows(replace(INFO, lane="serial"), Budget(GIB, None), [100])
    assert found == {"tokens": 100, "row_bytes": None, "rows": 1}


def shown(**changed: Any) -> str:
    report: dict[str, Any] = {
        "model": {
            "name": "a [b] \x1b",
            "model_type": "odd",
            "dtype": "float32",
            "vocab_size": 1000,
            "context_tokens": None,
            "weight_bytes": GIB,
            "weights": "weights stay as they are",
        },
        "device": {"backend": "cuda", "blas": ""},
        "lane": {"name": "serial", "reason": "no rows in slots for OddCache", "max_rows": 1},
        "forms": {"attention": None, "joined": 60, "compiled": True, "shared_prompt_tokens": 0},
        "caches": [
            {"first": 0, "last": 0, "kind": "OddCache", "state_bytes": None, "column_bytes": None, "rings": None},
            {"first": 1, "last": 3, "kind": "kv", "state_bytes": 0, "column_bytes": 0, "rings": []},
            {"first": 4, "last": 9, "kind": "ssm+kv", "state_bytes": 2048, "column_bytes": 512, "rings": [RING]},
        ],
        "row": None,
        "memory": {"device_bytes": 8 * GIB, "weight_bytes": GIB, "cache_limit_bytes": 5 * GIB, "remembered_bytes": GIB},
        "rows": [{"tokens": 4096, "row_bytes": None, "rows": None}],
        **changed,
    }
    out = StringIO()
    show(report, Console(file=out, width=120))
    return out.getvalue()


def test_what_is_not_known_is_said_to_be() -> None:
    text = shown()
    for said in (
        "a [b] \\x1b",
        "no limit",
        "stay as they are",
        "as the model has it",
        "60 groups joined",
        "compiled",
        "one after another",
        "0 OddCache: size not known",
        "1-3 kv: not used",
        "4-9 ssm+kv: 2.0 KiB of state, 512 bytes a token, 256 bytes for each of 8 tokens",
        "4,096 tokens: not known",
    ):
        assert said in text


def test_a_row_is_told_by_its_parts() -> None:
    text = shown(row={"bytes_per_token": 1024, "fixed_bytes": 4096, "state_bytes": 0})
    assert "grows by 1.0 KiB a token" in text
    assert "and has 4.0 KiB of state and full rings" in text
    still = shown(row={"bytes_per_token": 0, "fixed_bytes": 4096, "state_bytes": 4096})
    assert "does not grow" in still
