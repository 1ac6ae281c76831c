"""The formula of bands is arithmetic, and is tested as such."""

from itertools import combinations, pairwise

from hypothesis import given
from hypothesis import strategies as st

from lanes.rows.bands import MOST_BANDS, Band, Cutter, cost_columns, cut


def cheapest_of_all(widths: list[int], columns_per_call: float) -> float:
    """The least cost of all ways to cut, tried one by one."""
    costs = []
    for number in range(min(MOST_BANDS, len(widths))):
        for places in combinations(range(1, len(widths)), number):
            edges = (0, *places, len(widths))
            ways = [Band(a, b, max(widths[a:b])) for a, b in pairwise(edges)]
            costs.append(cost_columns(ways, columns_per_call))
    return min(costs)


@given(
    widths=st.lists(st.integers(1, 64).map(lambda n: 16 * n), min_size=1, max_size=9),
    columns_per_call=st.sampled_from([1.0, 100.0, 768.0, 5000.0]),
)
def test_no_other_cut_is_cheaper(widths: list[int], columns_per_call: float) -> None:
    bands = cut(widths, columns_per_call)
    assert cost_columns(bands, columns_per_call) == cheapest_of_all(widths, columns_per_call)
    assert [s.first for s in bands] == [0, *(s.last for s in bands[:-1])]
    assert bands[-1].last == len(widths)
    assert all(s.width == max(widths[s.first : s.last]) for s in bands)
    assert len(bands) <= MOST_BANDS


def test_the_cost_is_rows_times_width_and_a_call_each() -> None:
    assert cost_columns([Band(0, 7, 208), Band(7, 8, 16_000)], 500) == 7 * 208 + 16_000 + 2 * 500


def test_a_long_row_is_read_by_itself() -> None:
    assert cut([208] * 7 + [16_000], 500) == [Band(0, 7, 208), Band(7, 8, 16_000)]
    assert cut([208] * 3 + [16_000] + [208] * 4, 500) == [
        Band(0, 3, 208),
        Band(3, 4, 16_000),
        Band(4, 8, 208),
    ]


def test_rows_that_differ_by_less_than_a_call_stay_together() -> None:
    assert cut([100, 300, 200], 500) == [Band(0, 3, 300)]


def test_the_cuts_are_kept_while_the_rows_stay_and_the_widths_follow() -> None:
    cutter = Cutter(500)
    assert cutter.bands([1, 2], [208, 16_000]) == [Band(0, 1, 208), Band(1, 2, 16_000)]
    assert cutter.bands([1, 2], [224, 16_016]) == [Band(0, 1, 224), Band(1, 2, 16_016)]
    # Row 1 has left, and row 3 in its slot is long too.
    assert cutter.bands([3, 2], [15_900, 16_016]) == [Band(0, 2, 16_016)]


def test_a_form_that_reads_its_own_columns_is_not_cut() -> None:
    assert Cutter(None).bands([1, 2], [208, 16_000]) == [Band(0, 2, 16_000)]
