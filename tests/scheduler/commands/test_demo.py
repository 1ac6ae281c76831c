"""`laned demo`: its table, its numbers, and (slow) the whole of it with the real model."""

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from scheduler.commands import demo
from scheduler.commands.demo import _Outcome
from scheduler.commands.demo_restart import Turn
from scheduler.commands.demo_table import Row, answers_of, table_of


def row(text: str = "", num_tokens: int = 0, finish_reason: str | None = None, error: str | None = None) -> Row:
    found = Row("1", "Why?", asked_s=10.0)
    if text:
        found.add("", 1, 10.5)
        found.add(text, num_tokens - 1, 12.5)
    found.finish_reason, found.error = finish_reason, error
    if finish_reason or error:
        found.ended_s = 12.5
    return found


def rendered(table: object, width: int = 80) -> list[str]:
    stream = io.StringIO()
    Console(file=stream, width=width).print(table)
    return stream.getvalue().splitlines()


def test_a_rows_numbers() -> None:
    waiting, done = row(), row("because", 41, "stop")
    assert (waiting.ttft_s, waiting.tokens_per_s, waiting.completed, waiting.rate(20.0)) == (None, 0.0, False, "")
    assert (done.ttft_s, done.tokens_per_s, done.completed, done.rate(20.0)) == (0.5, 16.4, True, "20.0")
    assert row("because", 41).rate(14.5) == "10.0"
    assert not row("beca", 2, error="cut").completed


@pytest.mark.parametrize("width", [60, 80, 200])
def test_the_live_table_keeps_its_height_and_shows_the_end(width: int) -> None:
    empty = [row() for _ in range(8)]
    full = [row("begin " + "word\n" * 300 + "the end", 300) for _ in range(8)]
    assert len(rendered(table_of(empty, 13.0), width)) == len(rendered(table_of(full, 13.0), width)) == 12
    assert "the end" in rendered(table_of(full, 13.0), width)[4]
    assert "Why?" in rendered(table_of(empty, 13.0), width)[4]


def test_wide_characters_fit_into_the_line() -> None:
    lines = rendered(table_of([row("語" * 400 + "終", 300)], 13.0))
    assert len(lines) == 5
    assert "終" in lines[3]


def test_in_the_end_the_beginnings_are_shown_and_what_failed() -> None:
    rows = [row("A long answer. " * 20, 90, "length"), row("begun", 2, error="the daemon went away")]
    lines = rendered(table_of(rows, 13.0))
    assert len(lines) == 6
    assert "done: length" in lines[3]
    assert "│ A long answer. A long" in lines[3]
    assert "failed" in lines[4]
    assert "the daemon went away" in lines[4]


def test_whole_answers_are_shown_and_cannot_command_the_terminal() -> None:
    text = " ".join(
        " ".join(rendered(answers_of([row("A long answer. " * 20 + "End\x1b[2J.", 90, "length"), row()]))).split()
    )
    assert text.count("A long answer.") == 20
    assert r"End\x1b[2J." in text
    assert text.count("Why?") == 2


def test_the_record_counts_tokens_over_the_whole_time() -> None:
    rows = [row("x", 41, "stop"), row("x", 23, "length"), row("x", 2, "cancelled"), row(error="lost")]
    cold, warm = Turn(4.0, 500, 0, ""), Turn(0.25, 540, 523, "")
    outcome = _Outcome("m", 1.0, row("x", 21, "stop"), rows, 4.0, 3, 1000, [], cold, warm=warm)
    found = outcome.record()
    assert (found["requests"], found["completed"], found["peak_rows"]) == (4, 2, 3)
    assert (found["tokens"], found["tok_s"], found["tok_s_alone"]) == (66, 16.5, 8.4)
    assert found["ttft_s"] == {"together": 0.5, "alone": 0.5, "cold": 4.0, "warm": 0.25}
    assert found["cached_tokens_after_restart"] == 523


def test_a_daemon_that_does_not_start_is_explained_by_its_log(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "scheduler.cli", "demo", "--json", "--model", str(tmp_path / "none")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert "before it was ready" in done.stderr
    assert "The end of its log:\n  " in done.stderr


@pytest.mark.slow
def test_the_whole_demo() -> None:
    command = [sys.executable, "-m", "scheduler.cli", "demo", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["requests"] == found["completed"] == found["peak_rows"] == len(demo.PROMPTS)
    assert found["exit_status"] == 0
    assert found["tok_s"] > found["tok_s_alone"]
    assert found["cached_tokens_after_restart"] > 400
    assert "laned_generation_tokens_total" in done.stderr
