"""The commands as processes, and the README's examples as they stand there."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import trio

from scheduler.client import Client
from scheduler.configuration import read_config
from tests.e2e.daemon import LANED, Daemon, idle, run

README = Path(__file__).parents[2] / "README.md"


def readme_example(language: str, marker: str) -> str:
    """The README's one example in this language that has this in it."""
    examples = re.findall(rf"```{language}\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    (found,) = (str(code) for code in examples if marker in code)
    return found


def test_ask_streams_an_answer(daemon: Daemon) -> None:
    asked = daemon.run("ask", "--raw", "The capital of France is", "--max-tokens", "3")
    assert (asked.returncode, asked.stderr) == (0, "")
    assert "Paris" in asked.stdout
    assert asked.stdout.endswith("\n")


def test_ask_gives_the_whole_record_as_json(daemon: Daemon) -> None:
    asked = daemon.run("ask", "--json", "-", "--max-tokens", "4", "--system", "Be brief.", text_in="What is a lane?\n")
    record = json.loads(asked.stdout)
    assert asked.returncode == 0
    assert record["model"] == "SmolLM2-135M-Instruct"
    assert record["text"]
    assert record["usage"]["completion_tokens"] in range(1, 5)
    assert 0 < record["timings"]["ttft_s"] <= record["timings"]["total_s"]


@pytest.mark.parametrize(
    ("arguments", "status", "hint"),
    [
        (["ask"], 2, "prompt is missing"),
        (["ask", "--max-tokens", "0", "hello"], 2, "max_tokens"),
        (["ask", "word " * 9000], 2, "context"),
        (["ask", "--socket", "/nowhere/laned.sock", "hello"], 1, "laned serve"),
        (["status", "--socket", "/nowhere/laned.sock"], 1, "laned serve"),
        (["serve"], 2, "--model"),
    ],
)
def test_a_mistake_is_told_in_a_sentence(daemon: Daemon, arguments: list[str], status: int, hint: str) -> None:
    asked = daemon.run(*arguments)
    assert (asked.returncode, asked.stdout) == (status, "")
    said = [line for line in asked.stderr.splitlines() if line.startswith("laned: ")]
    assert len(said) == 1
    assert hint in said[0]
    assert "Traceback" not in asked.stderr


def test_an_interrupted_ask_cancels_its_request(daemon: Daemon) -> None:
    command = [str(LANED), "ask", "--socket", str(daemon.socket), "--raw", "Once", "--max-tokens", "4000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as asking:
        assert asking.stdout is not None
        assert asking.stdout.read(1)
        asking.send_signal(signal.SIGINT)
        assert asking.wait(60) == 130

    async def settled() -> None:
        async with Client(daemon.socket) as client:
            await idle(client)

    trio.run(settled)


def test_status_for_machines_and_for_people(daemon: Daemon) -> None:
    report = json.loads(daemon.run("status", "--json").stdout)
    assert report["pid"] == daemon.process.pid
    assert report["model"]["lane"] == "batch"
    assert report["model"]["context_tokens"] == 8192
    assert report["rows"]["max"] == 32
    shown = daemon.run("status")
    assert shown.returncode == 0
    for said in ("SmolLM2-135M-Instruct", str(daemon.process.pid), str(daemon.socket), "8,192 tokens"):
        assert said in shown.stdout


def test_the_readmes_config_is_one(tmp_path: Path) -> None:
    config = tmp_path / "laned.toml"
    config.write_text(readme_example("toml", "--config"), encoding="utf-8")
    assert len(read_config(str(config))) > 3


def test_the_readmes_client_runs_as_it_stands(daemon: Daemon, tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    script.write_text(readme_example("python", "from scheduler.client import Client"), encoding="utf-8")
    ran = run(sys.executable, script, runtime=daemon.folder)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert len(ran.stdout) > 20


def test_the_readmes_raw_socket_script_runs_as_it_stands(daemon: Daemon, tmp_path: Path) -> None:
    script = tmp_path / "raw.py"
    script.write_text(readme_example("python", "import msgpack"), encoding="utf-8")
    ran = run(sys.executable, "-I", script, str(daemon.socket), runtime=daemon.folder)
    assert (ran.returncode, ran.stderr) == (0, "")
    *_, last = ran.stdout.splitlines()
    assert "'type': 'done'" in last
