"""Frames of `laned top`: they fit any terminal, show every slot, and do without what a daemon does not report."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.commands.bars import ASCII, BLOCKS, Glyphs
from scheduler.commands.top_frame import frame, seconds, store_parts
from scheduler.recent import Recent
from tests.scheduler.commands.test_status import REPORT


def report(num_slots: int = 3, **changed: Any) -> dict[str, Any]:
    """A report with all that a daemon tells: rows of 100, 200 ... tokens, of which 40 are answers; a prompt, a row that
    was set aside, a free slot, and one whose request has just ended."""
    clock = iter(range(10, 10_000))
    recent = Recent(lambda: float(next(clock)))
    for _ in range(30):
        recent.token(0.098)
    recent.first_token(1.25, from_memory=300)
    requests = [request(row, "decoding", 100 * row - 40, 40) for row in range(1, num_slots + 1)]
    requests += [request(71, "prefilling", 1000, 0, 250), request(72, "aside", 300, 20)]
    slots = {
        "total": 8,
        "used": num_slots,
        "capacity_tokens": 512,
        "cache_bytes": 3 << 20,
        "rows": [*range(1, num_slots + 1), None, 99],
        "lengths": [*(100 * row for row in range(1, num_slots + 1)), 0, 77],
    }
    told = {"recent": recent.report(), "slots": slots, "requests": requests}
    rows = {"running": num_slots, "prefilling": 1, "set_aside": 1, "waiting": 7, "max": 32}
    return {**REPORT, **told, "rows": rows, **changed}


def request(row: int, state: str, prompt: int, answer: int, processed: int | None = None) -> dict[str, Any]:
    return {
        "row": row,
        "state": state,
        "prompt_tokens": prompt,
        "processed_tokens": prompt if processed is None else processed,
        "generated_tokens": answer,
        "max_tokens": 256,
        "age_s": 3.0,
    }


def shown(told: dict[str, Any], width: int = 80, height: int = 24, glyphs: Glyphs = BLOCKS) -> list[str]:
    return [line.plain.rstrip() for line in frame(told, width, height, glyphs)]


def line(lines: list[str], beginning: str) -> str:
    (found,) = (each for each in lines if each.strip().startswith(beginning))
    return found


def test_all_that_a_daemon_tells_is_there() -> None:
    lines = shown(report())
    assert "SmolLM2  batch lane on cpu, OpenBLAS 0.3.34" in lines[0]
    assert lines[0].endswith("up 1 d 2 h")
    assert line(lines, "rows") == "rows           3 of 32 decoding  1 prompt  1 set aside  7 waiting"
    assert "p50 1.25 s" in line(lines, "first token")
    assert "p99 98 ms" in line(lines, "between tokens")
    assert line(lines, "remembered").split()[1:4] == ["100%", "from", "memory"]
    assert "1.0 GiB process  700.0 MiB arrays  3.0 MiB rows" in line(lines, "memory")
    assert "1,200 completed  30 cancelled  4 failed" in line(lines, "requests ended")
    assert "3 of 8 used, 512 tokens in each" in line(lines, "──")
    assert line(lines, "0 ").endswith("100  #1  40 of 256")
    assert line(lines, "3 ").endswith("free")
    assert line(lines, "4 ").endswith("77  ended")
    told = [each for each in lines if each.startswith("  + ")]
    assert [each.split("#")[1] for each in told] == ["71  prompt of 1,000", "72  aside, 320"]


def test_bars_tell_prompt_from_answer() -> None:
    bar = line(shown(report(), glyphs=ASCII), "1 ").split()[1]
    assert len(bar) == 42
    assert bar.count("#") / 42 == pytest.approx(40 / 512, abs=1 / 42)
    assert bar.count("=") / 42 == pytest.approx(160 / 512, abs=1 / 42)


@settings(deadline=None)
@given(
    st.integers(1, 200),
    st.integers(1, 60),
    st.integers(0, 300),
    st.sampled_from([BLOCKS, ASCII]),
)
def test_a_frame_fits(width: int, height: int, num_slots: int, glyphs: Glyphs) -> None:
    lines = frame(report(num_slots), width, height, glyphs)
    assert len(lines) <= height
    assert all(each.cell_len <= width for each in lines)
    assert glyphs is BLOCKS or all(each.plain.isascii() for each in lines)


def test_many_slots_become_a_grid_that_says_how_many_are_not_shown() -> None:
    lines = shown(report(38))
    assert sum(each.count("#") for each in lines) == 0
    assert all(any(f"{slot:>3} " in each for each in lines[10:]) for slot in range(40))
    lines = shown(report(200))
    rest = int(lines[-1].split()[1])
    assert len(lines) == 24
    assert rest + 4 * (24 - 1 - lines.index(line(lines, "──")) - 1) == 202


def test_the_notice_is_the_last_line() -> None:
    from rich.text import Text

    lines = [each.plain for each in frame(report(), 80, 30, BLOCKS, Text("q ends"))]
    assert (len(lines), lines[-1]) == (30, "q ends")


@pytest.mark.parametrize("missing", ["model", "rows", "slots", "totals", "memory", "recent", "requests"])
def test_what_is_not_reported_is_left_out(missing: str) -> None:
    told = {key: value for key, value in report().items() if key != missing}
    assert 0 < len(shown(told)) <= 24


def test_a_report_of_nothing_is_a_frame() -> None:
    assert shown({})[0].startswith("?")


def test_the_store_is_told_by_tier() -> None:
    store = {
        "tiers": {"memory": {"bytes": 3 << 20, "segments": 12}, "disk": {"bytes": 5 << 30, "segments": 1200}},
        "evicted": 7,
        "corrupt": 0,
    }
    assert list(store_parts(store)) == ["3.0 MiB in 12 memory", "5.0 GiB in 1,200 disk", "7 evicted"]
    assert "5.0 GiB in 1,200 disk" in line(shown(report(store=store)), "store")


def test_names_cannot_command_the_terminal() -> None:
    lines = shown(report(model={"name": "a\x1b[2Jb", "lane": "x\x1b"}))
    assert "a\\x1b[2Jb" in lines[0]
    assert "\x1b" not in "".join(lines)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0001234, "0.123 ms"),
        (0.0984, "98.4 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1 s"),
        (17.44, "17.4 s"),
        (4e3, "4,000 s"),
    ],
)
def test_durations_have_three_digits(value: float, text: str) -> None:
    assert seconds(value) == text
