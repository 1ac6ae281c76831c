"""`laned doctor`: its report for people and machines, its exit status, and (slow) the whole self-test as a process."""

import json
import subprocess
import sys
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from scheduler.commands import doctor
from scheduler.commands.doctor import _Report, device_findings, show
from scheduler.commands.finding import Finding

COMMAND = (sys.executable, "-m", "scheduler.cli", "doctor")
RATES = {"float32": {"1 rows": 5.0, "8 rows": 30.0, "512 rows": 90.0}}
DEVICE: dict[str, Any] = {
    "backend": "cpu",
    "device": None,
    "cores": 2,
    "memory_bytes": 16 << 30,
    "device_memory_bytes": 16 << 30,
    "product_gflops": RATES,
    "copy_bytes_per_s": 3e9,
    "blas": "OpenBLAS 0.3",
    "blas_kind": "openblas",
    "blas_sentence": "it is in front of MLX",
}


def run(*argv: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([*COMMAND, *argv], capture_output=True, text=True, timeout=300, check=False)


def verdict(outcome: str, then: str | None = None) -> dict[str, Any]:
    return {"name": "RoPE", "outcome": outcome, "said": "off by a lot \x1b", "then": then, "figures": {"a": 0.5}}


def test_this_machine_as_json(tmp_path: Path) -> None:
    output = tmp_path / "report.json"
    socket = str(tmp_path / "laned.sock")
    done = run("--json", "--socket", socket, "--store", str(tmp_path), "--output", str(output))
    record = json.loads(done.stdout)
    assert done.returncode == int(record["broken"])
    assert json.loads(output.read_text()) == record
    assert record["device"]["backend"] in ("cpu", "cuda", "metal")
    assert record["running"] is None
    levels = {finding["about"]: finding["level"] for finding in record["findings"]}
    assert {"packages", "load", "open files", "socket", "store", "memory", "MLX"} <= set(levels)
    assert levels["packages"] == levels["socket"] == "ok"
    assert all(finding["do"] for finding in record["findings"] if finding["level"] != "ok")


def test_something_broken_is_status_1(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = run("--socket", str(tmp_path / "file"), "--blas", "off")
    assert done.returncode == 1
    assert "problem" in done.stdout
    assert " disk " in done.stdout, "without --store, too"
    assert "is no socket" in " ".join(done.stdout.split())


@pytest.mark.parametrize(
    ("argv", "words"),
    [(["--blas", "/no/such/lib.so"], "--blas /no/such/lib.so"), (["--output", "/no/such/x"], "--output /no/such/x")],
)
def test_a_mistake_is_told_in_a_sentence(argv: list[str], words: str) -> None:
    done = run(*argv)
    assert done.returncode in (1, 2)
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def found(told: dict[str, Any], **where: Any) -> dict[str, Finding]:
    return {finding.about: finding for finding in device_findings(told, where.get("cores", 2), where.get("load", 0.1))}


def test_a_device_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "has_nvidia", lambda: False)
    monkeypatch.setattr(sys, "platform", "linux")
    told = found(DEVICE)
    assert {name: finding.level for name, finding in told.items() if name != "memory"} == {"MLX": "ok", "BLAS": "ok"}
    assert told["BLAS"].said == "OpenBLAS 0.3: 30 GFLOP/s at 8 rows, 90 at 512"
    told = found({**DEVICE, "backend": "cuda", "device": "NVIDIA H200"})
    assert "cuda (NVIDIA H200)" in told["MLX"].said
    assert "BLAS" not in told


def test_what_is_wrong_with_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "has_nvidia", lambda: True)
    monkeypatch.setattr(sys, "platform", "linux")
    assert (found(DEVICE)["MLX"].level, "cuda13" in str(found(DEVICE)["MLX"].do)) == ("warning", True)
    stock = {**DEVICE, "blas_kind": "stock", "blas_sentence": "install laned[cpu]"}
    assert "install laned[cpu]" in found(stock)["BLAS"].said
    slow = {**DEVICE, "product_gflops": {"float32": {"8 rows": 1.0, "512 rows": 2.0}}}
    assert found(slow, load=2.0)["BLAS"].do == "end what else runs"
    assert found(slow)["BLAS"].level == "warning"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert found(DEVICE)["MLX"].level == "problem"
    (finding,) = device_findings({"error": "ImportError: libcuda.so.1"}, 2, 0.1)
    assert (finding.level, "libcuda.so.1" in finding.said) == ("problem", True)


def report(tmp_path: Path, *, as_json: bool = False) -> _Report:
    return _Report(as_json, str(tmp_path / "report"))


def test_a_wrong_verdict_breaks_and_an_absent_one_does_not(tmp_path: Path) -> None:
    made = report(tmp_path)
    made.findings.append(Finding("warning", "load", "much", "less"))
    made.verdicts += [verdict("right"), verdict("absent")]
    assert not made.is_broken
    made.verdicts.append(verdict("wrong", "do this"))
    assert made.is_broken


def test_what_is_known_is_written_before_each_part(tmp_path: Path) -> None:
    made = report(tmp_path, as_json=True)
    made.findings.append(Finding("ok", "packages", "all"))
    made.begin("rows side by side")
    record = json.loads((tmp_path / "report").read_text())
    assert (record["running"], len(record["findings"])) == ("rows side by side", 1)


def test_the_table_fits_a_terminal_and_says_all(tmp_path: Path) -> None:
    made = report(tmp_path)
    made.findings += [Finding("problem", "socket", "taken", "choose another"), Finding("ok", "load", "little")]
    made.verdicts.append(verdict("wrong", "laned takes one row at a time"))
    made.costs = {
        "attention": {"8 rows of 128 columns": {"fused": 0.002, "by hand": 0.001}},
        "steps": {"1 rows": {"eager": 0.02, "compiled": 0.01}},
        "dispatch_part": 0.25,
        "shape": {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8},
    }
    made.begin("draws by seed")
    out = StringIO()
    show(made.record(), Console(file=out, width=80))
    text = out.getvalue()
    assert max(map(len, text.splitlines())) <= 80
    for said in (
        "-> choose another",
        "off by a lot \\x1b",
        "-> laned takes one row at a time",
        "8 layers of 512",
        "20 ms",
        "after 25% of its time",
        "It ended while it was at: draws by seed.",
        "2 problems.",
    ):
        assert said in text, said


def test_a_healthy_machine_is_told_so(tmp_path: Path) -> None:
    out = StringIO()
    show(report(tmp_path).record(), Console(file=out, width=80))
    assert out.getvalue().endswith("All is well.\n")


@pytest.mark.slow
def test_the_whole_self_test(tmp_path: Path) -> None:
    done = run("--self-test", "--json", "--socket", str(tmp_path / "laned.sock"))
    record = json.loads(done.stdout)
    assert done.returncode == 0, record
    outcomes = {each["name"]: each["outcome"] for each in record["verdicts"]}
    assert len(outcomes) > 15
    assert set(outcomes.values()) == {"right"}
    assert set(record["costs"]["steps"]) == {"1 rows", "8 rows"}
