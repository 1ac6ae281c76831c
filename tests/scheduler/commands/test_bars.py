"""Bars and curves: as wide as asked, nothing above zero is invisible, and parts are where they belong."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.commands.bars import ASCII, BLOCKS, Glyphs, curve, two_part_bar

amounts = st.floats(0, 1e6)
every_kind = pytest.mark.parametrize("glyphs", [BLOCKS, ASCII])


@every_kind
@given(values=st.lists(amounts, max_size=80), width=st.integers(0, 90))
def test_a_curve_shows_every_value_above_nothing(glyphs: Glyphs, values: list[float], width: int) -> None:
    drawn = curve(values, width, glyphs)
    assert len(drawn) == min(width, len(values))
    assert set(drawn) <= set(glyphs.levels)
    if drawn:
        assert (glyphs.levels[0] * len(drawn) == drawn) == (max(values) == 0)
        assert max(values) == 0 or glyphs.levels[-1] in drawn


def test_a_curve_that_is_cut_shows_means() -> None:
    assert curve([0, 0, 4, 4, 8, 8, 2, 6], 4, BLOCKS) == " ▄█▄"
    assert curve([0, 1000, 1, 0], 4, BLOCKS) == " █▁ "


@every_kind
@given(first=amounts, second=amounts, spare=amounts, width=st.integers(1, 80))
def test_a_bar_has_its_width_and_its_parts_in_order(
    glyphs: Glyphs, first: float, second: float, spare: float, width: int
) -> None:
    bar = two_part_bar(first, second, first + second + spare, width, glyphs).plain
    cells = [bar.count(glyph) for glyph in (glyphs.first, glyphs.second, glyphs.rest)]
    assert bar == glyphs.first * cells[0] + glyphs.second * cells[1] + glyphs.rest * cells[2]
    assert sum(cells) == width
    if width > 1:
        assert (cells[0] > 0, cells[1] > 0) == (first > 0, second > 0)


def test_a_bar_that_is_too_full_is_full() -> None:
    assert two_part_bar(30, 90, 100, 10, ASCII).plain == "===#######"
