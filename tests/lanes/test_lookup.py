"""What is guessed from a row's own tokens, how long the guesses are, and what stands of them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lanes.lookup import FIRST_CHANCES, MARGIN, Lookup, accepted, best_width

tokens = st.lists(st.integers(0, 3), max_size=40)
chances = st.lists(st.floats(0, 1), max_size=8)


@given(tokens, st.integers(0, 12))
def test_a_draft_is_what_has_followed_the_last_tokens_before(row: list[int], most: int) -> None:
    """Against a search through the whole row."""
    lookup = Lookup(row)
    assert len(lookup) == len(row)
    ngram, draft = lookup.draft(most)
    places = {n: [at for at in range(n, len(row)) if row[at - n : at] == row[-n:]] for n in FIRST_CHANCES}
    found = [n for n in FIRST_CHANCES if places[n]]
    assert ngram == (found[0] if found else 0)
    assert len(draft) == (most if found else 0)
    if found:
        at = places[ngram][-1]
        assert draft == [*row[at:], *draft][:most], "the latest place, and once more what is drafted"


@given(tokens, tokens)
def test_tokens_may_come_one_by_one(first: list[int], then: list[int]) -> None:
    whole, grown = Lookup([*first, *then]), Lookup(first)
    for token in then:
        grown.extend(token)
    assert grown.draft(9) == whole.draft(9)


def test_what_repeats_itself_is_drafted_to_go_on_so() -> None:
    assert Lookup([9, 5, 6, 7, 5, 6, 7]).draft(7) == (3, [5, 6, 7, 5, 6, 7, 5])
    assert Lookup([4, 4, 4, 4]).draft(3) == (3, [4, 4, 4])
    assert Lookup([1, 2, 8, 1, 2]).draft(2) == (2, [8, 1])
    assert Lookup([1, 2, 3]).draft(2) == (0, [])


@given(st.lists(st.integers(0, 2), min_size=1, max_size=9), st.data())
def test_what_stands_is_what_would_have_been_drawn_one_by_one(truth: list[int], data: st.DataObject) -> None:
    """truth: what the model draws, each token after those before it. Behind a wrong guess it draws anything."""
    draft = data.draw(st.lists(st.integers(0, 2), max_size=len(truth) - 1))
    right = next((n for n, (a, b) in enumerate(zip(draft, truth, strict=False)) if a != b), len(draft))
    noise = data.draw(st.lists(st.integers(0, 2), min_size=len(draft), max_size=len(draft)))
    drawn = [*truth[: right + 1], *noise][: len(draft) + 1]
    stands = accepted(draft, drawn)
    assert stands == truth[: right + 1]
    assert 1 <= len(stands) <= len(draft) + 1


@given(st.lists(st.tuples(st.sampled_from([3, 2]), st.integers(1, 9), st.integers(0, 9)), max_size=50))
def test_chances_follow_what_came_of_drafts_and_stay_chances(past: list[tuple[int, int, int]]) -> None:
    lookup = Lookup([])
    for ngram, num_drafted, stood in past:
        before = dict(lookup.chances)
        num_accepted = min(stood, num_drafted)
        lookup.book(ngram, num_drafted, num_accepted)
        after = lookup.chances
        assert 0 < after[ngram] < 1
        assert all(after[n] == before[n] for n in FIRST_CHANCES if n != ngram)
        if num_accepted == num_drafted:
            assert after[ngram] > before[ngram]
        elif num_accepted == 0:
            assert after[ngram] < before[ngram]


def test_a_row_whose_drafts_fail_pauses_and_tries_again() -> None:
    lookup = Lookup([])
    widths = []
    for _ in range(300):
        width = best_width([lookup.chances[3]], 10, 1, 20)
        widths.append(width)
        if width:
            lookup.book(3, width, 0)
        else:
            lookup.book_untried(3)
    assert widths[0] > 1
    assert 0 < sum(width > 0 for width in widths[100:]) < 50
    assert max(widths[100:]) <= 2
    for _ in range(30):
        lookup.book(3, 10, 10)
    assert best_width([lookup.chances[3]], 10, 1, 20) == 10
    assert lookup.chances[2] == FIRST_CHANCES[2]


def rate(chances: list[float], width: int, num_slots: int, weights_tokens: int) -> float:
    """Tokens for the time of reading one token's worth."""
    expected = num_slots + sum(chance**k for chance in chances for k in range(1, width + 1))
    return expected / (weights_tokens + num_slots * (1 + width))


@given(chances, st.integers(-3, 12), st.integers(0, 8), st.integers(1, 200))
def test_the_best_width_gives_most_tokens_for_its_time_by_a_margin(
    chances: list[float], most: int, more: int, weights: int
) -> None:
    num_slots = max(len(chances) + more, 1)
    width = best_width(chances, most, num_slots, weights)
    assert 0 <= width <= max(most, 0)
    rates = [rate(chances, w, num_slots, weights) for w in range(max(most, 0) + 1)]
    if width:
        assert rates[width] == pytest.approx(max(rates))
        assert rates[width] > MARGIN * rates[0] * 0.999
    else:
        assert max(rates) < MARGIN * rates[0] * 1.001


def test_drafts_are_shorter_beside_rows_without_and_where_weights_are_read_soon() -> None:
    assert best_width([0.9], 10, 1, 20) > best_width([0.9], 10, 2, 20) > best_width([0.9], 10, 16, 20) == 0
    assert best_width([0.9] * 16, 10, 16, 20) > 0
    assert best_width([0.5], 10, 1, 200) > best_width([0.5], 10, 1, 2)
    assert best_width([], 10, 4, 20) == best_width([0.01], 10, 1, 20) == 0
