"""Boundaries are where a later prompt may be taken up: they are few, in order, and bound what is lost."""

from hypothesis import given
from hypothesis import strategies as st

from scheduler.boundaries import GRID_TOKENS, NEAREST_TOKENS, boundaries

lengths = st.integers(1, 100_000)


@given(lengths, st.integers(0, 100_000), st.integers(0, 100_000), st.none() | st.integers(0, 100_000))
def test_they_ascend_above_what_is_known_and_end_before_the_last_token(
    prompt_tokens: int, known: int, matched: int, system_tokens: int | None
) -> None:
    found = boundaries(prompt_tokens, known, matched, system_tokens)
    assert list(found) == sorted(set(found))
    assert all(known < at < prompt_tokens for at in found)
    assert known >= prompt_tokens - 1 or found[-1] == prompt_tokens - 1


@given(lengths)
def test_a_prompt_has_few(prompt_tokens: int) -> None:
    assert len(boundaries(prompt_tokens, 0, 0, None)) <= 1 + max(0, (prompt_tokens // NEAREST_TOKENS).bit_length())


@given(st.integers(2, 100_000), st.data())
def test_where_a_later_prompt_parts_it_loses_no_more_than_the_rest_of_the_first_and_a_little(
    prompt_tokens: int, data: st.DataObject
) -> None:
    parted = data.draw(st.integers(0, prompt_tokens - 1))
    usable = max((at for at in boundaries(prompt_tokens, 0, 0, None) if at <= parted), default=0)
    assert parted - usable <= (prompt_tokens - parted) + NEAREST_TOKENS + GRID_TOKENS


def test_the_end_of_the_system_prompt_and_the_place_where_others_parted_are_among_them() -> None:
    assert {37, 1500, 1599} <= set(boundaries(1600, 0, 1500, 37))


def test_a_prompt_of_the_same_beginning_is_taken_up_without_having_been_expected() -> None:
    """1,500 tokens that two prompts share, and 100 of each one's own."""
    assert any(1000 < at <= 1500 for at in boundaries(1600, 0, 0, None))
