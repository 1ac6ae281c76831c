"""Steps that give a row several tokens: what comes behind the end of its text is nobody's."""

import pytest

from lanes.lane import Sampling
from scheduler.protocol import Done
from scheduler.request import Request, Wish
from scheduler.text import TextStream
from scheduler.transcript import Transcript
from store.settings import StoreSettings
from store.store import open_store
from tests.scheduler.bytes_tokenizer import ByteStream
from tests.scheduler.fake_engine import echoed
from tests.scheduler.test_remembering import RememberingBench
from tests.scheduler.trio_test import trio_test
from tests.scheduler.turned_by_hand import STOP, Bench, Heard


def bench_of(prompt: str, max_tokens: int, stops: tuple[str, ...] = ()) -> tuple[Bench, Request, Heard]:
    """One request for the bytes of its prompt, round and round, five of them in its first step."""
    bench, heard = Bench(tokens_a_step=5), Heard()
    bench.engine.num_turns = 3  # the next steps are read at once
    wish = Wish("r4", tuple(prompt.encode()), max_tokens, Sampling(), frozenset({STOP}))
    request = Request(4, wish, Transcript(TextStream(ByteStream(), stops)), heard.reply, 0.0)
    bench.scheduler.submit(request)
    return bench, request, heard


def test_all_of_them_are_told_in_the_turn_and_have_the_same_moment() -> None:
    bench, request, heard = bench_of("a", 50)
    step = bench.begin()
    assert step is not None
    assert [since_s for _, since_s in bench.end(step)] == [None, 0, 0, 0, 0]
    assert bytes(heard.tokens) == b"aaaaa"
    assert request.num_held == 5, "the prompt's token and four of the answer"
    bench.run()
    assert isinstance(heard.end, Done)
    assert (bytes(heard.tokens), heard.end.finish_reason) == (b"a" * 50, "length")


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "stops", "used", "text", "end"),
    [
        ("abc", 3, (), 3, "abc", ("length", None)),
        ("abc", 9, ("ca",), 4, "ab", ("stop", "ca")),
        ("abc", 9, ("d", "a"), 1, "", ("stop", "a")),
    ],
)
def test_the_text_ends_in_the_middle(
    prompt: str, max_tokens: int, stops: tuple[str, ...], used: int, text: str, end: tuple[str, str | None]
) -> None:
    bench, request, heard = bench_of(prompt, max_tokens, stops)
    bench.turn()  # its prompt
    bench.turn()
    assert isinstance(heard.end, Done), "it is told in the turn that gave it the tokens"
    assert (heard.end.finish_reason, heard.end.stop_reason) == end
    assert heard.end.usage.completion_tokens == used == len(request.generated)
    assert request.num_held == len(prompt) - 1 + used, "of what its row has, what is known"
    assert heard.text == text
    bench.run()


def test_a_stop_token_in_the_middle() -> None:
    bench = Bench(tokens_a_step=5)
    rows = [bench.submit([1 + place] * place + [STOP], 40) for place in range(1, 5)]
    bench.run()
    for row in rows:
        bench.assert_answered(row)
    assert any(bench.engine.num_steps_of[row] > len(bench.expected(row)) + 1 for row in rows), "too many were drawn"


@trio_test
async def test_what_is_remembered_ends_where_the_text_does() -> None:
    """The next turn of the conversation finds all of the answer but the last token, and not what was drawn behind."""
    async with open_store(StoreSettings("a model", 1 << 20, 0, cut_anywhere=True), None) as store:
        bench = RememberingBench(store)
        bench.engine.tokens_a_step = 5
        prompt = [1, 2, 3, 4, 5]
        for max_tokens in range(2, 12):
            asked = [max_tokens + 10, *prompt]
            await bench.answer(asked, max_tokens=max_tokens)
            row = max(bench.heard)
            assert bench.engine.num_steps_of[row] >= max_tokens
            turn = [*asked, *echoed(asked, max_tokens), 8]
            assert (await bench.answer(turn)).usage.cached_tokens == len(asked) + max_tokens - 1
