"""Options that change what is told: several answers, echo, log-probabilities, calls, shapes of answers."""

from collections.abc import Callable
from typing import Any

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.errors import Overloaded, Refused
from scheduler.protocol import Delta, Done, Error, Message, Reply, StructuredOutputs, Submit
from tests.scheduler.bytes_tokenizer import END, ByteParts, ByteTokenizer
from tests.scheduler.echo_daemon import EchoDaemon, echo_daemon, in_trio
from tests.scheduler.fake_engine import INFO, FakeEngine
from tests.scheduler.trio_test import until

TOOLS: tuple[dict[str, Any], ...] = ({"name": "f"}, {"name": "go"})


class DumbParts(ByteParts):
    can_call = False


class Answers:
    """What a request for n answers is told, by index."""

    def __init__(self, number: int) -> None:
        self.deltas: list[list[Delta]] = [[] for _ in range(number)]
        self.ends: list[Done | Error | None] = [None] * number
        self.row_id = 0

    def reply(self, said: Reply) -> None:
        assert isinstance(said, Delta | Done | Error)
        index = said.index or 0
        assert self.ends[index] is None, f"{said} after the end, {self.ends[index]}"
        if isinstance(said, Delta):
            self.deltas[index].append(said)
        else:
            self.ends[index] = said

    @property
    def ended(self) -> bool:
        return all(end is not None for end in self.ends)

    def texts(self) -> list[str]:
        return ["".join(delta.text for delta in deltas) for deltas in self.deltas]


async def submit(daemon: EchoDaemon, **fields: Any) -> Answers:
    message = Submit(**{"id": "x", **fields})
    answers = Answers(message.n)
    answers.row_id = await daemon.service.submit(message, answers.reply)
    return answers


async def ask(daemon: EchoDaemon, **fields: Any) -> Answers:
    answers = await submit(daemon, **fields)
    await until(lambda: answers.ended)
    return answers


def processed_tokens(engine: FakeEngine) -> int:
    return sum(stop - start for _, start, stop in engine.chunks)


@pytest.mark.parametrize("number", [2, 4])
@in_trio
async def test_the_prompt_of_several_answers_is_processed_once(number: int) -> None:
    async with echo_daemon() as daemon:
        answers = await ask(daemon, prompt="a prompt of some length", n=number, max_tokens=9)
        assert answers.texts() == ["a prompt "] * number
        assert processed_tokens(daemon.engine) == len("a prompt of some length") - 1
        seeds = [daemon.engine.specs[answers.row_id + index].sampling.seed for index in range(number)]
        assert len(set(seeds)) == number
        usages = [end.usage for end in answers.ends if isinstance(end, Done)]
        assert [usage.cached_tokens for usage in usages] == [0, *[22] * (number - 1)]
        assert daemon.counted("laned_requests_received_total") == number
        assert daemon.counted("laned_requests_total", outcome="length") == number


@in_trio
async def test_answers_that_find_no_row_beside_the_first_wait_and_come() -> None:
    """Ten answers, four rows: those that come later process the prompt again, as nobody has kept it, but together."""
    async with echo_daemon() as daemon:
        answers = await ask(daemon, prompt="0123456789", n=10, max_tokens=4)
        assert answers.texts() == ["0123"] * 10
        assert daemon.engine.most_rows == INFO.max_rows
        assert processed_tokens(daemon.engine) == 3 * 9


@in_trio
async def test_one_token_needs_no_processing_however_many_answers() -> None:
    async with echo_daemon() as daemon:
        assert (await ask(daemon, prompt="a", n=3, max_tokens=2)).texts() == ["aa"] * 3
        assert daemon.engine.chunks == []


@in_trio
async def test_all_or_none_of_several_answers_are_queued() -> None:
    async with echo_daemon(max_queue=3, run_loop=False) as daemon:
        await submit(daemon, prompt="a")
        with pytest.raises(Overloaded):
            await submit(daemon, prompt="a", n=7)
        assert daemon.loop.scheduler.num_waiting == 1
        await submit(daemon, prompt="a", n=6)
        assert daemon.loop.scheduler.num_waiting == 7
        daemon.loop.scheduler.fail_all("internal", "the test is over", 0.0)


@in_trio
async def test_more_answers_than_can_ever_wait_are_refused_with_the_number_that_would_do() -> None:
    async with echo_daemon(max_queue=3, run_loop=False) as daemon:
        with pytest.raises(Refused, match=f"ask for {INFO.max_rows + 3} or fewer") as refused:
            await submit(daemon, prompt="a", n=INFO.max_rows + 4)
        assert (type(refused.value), refused.value.code) == (Refused, "bad_request")
        assert not daemon.loop.scheduler.requests


@settings(max_examples=40, deadline=None)
@given(before=st.integers(0, 40), prompt_tokens=st.sampled_from([1, 5, 40]), number=st.integers(2, 7))
def test_to_cancel_several_answers_ends_them_all_whenever(before: int, prompt_tokens: int, number: int) -> None:
    @in_trio
    async def run() -> None:
        async with echo_daemon() as daemon:
            answers = await submit(daemon, prompt="x" * prompt_tokens, n=number, max_tokens=2**31 - 1)
            for _ in range(before):
                await trio.lowlevel.checkpoint()
            daemon.service.cancel(answers.row_id)
            await until(lambda: answers.ended)
            assert [end.finish_reason for end in answers.ends if isinstance(end, Done)] == ["cancelled"] * number

    run()


@pytest.mark.parametrize("fail", ["fail_prompt", "fail_step"])
@in_trio
async def test_a_failure_is_told_for_each_answer_that_it_ends(fail: str) -> None:
    """When the first one's prompt fails, another processes it."""
    async with echo_daemon() as daemon:
        setattr(daemon.engine, fail, True)
        answers = await ask(daemon, prompt="abcdef", n=3, max_tokens=3)
        failed = [end for end in answers.ends if isinstance(end, Error)]
        assert {end.code for end in failed} == {"model_failed"}
        assert [end.index for end in failed] == ([0] if fail == "fail_prompt" else [0, 1, 2])
        if fail == "fail_prompt":
            assert answers.texts() == ["", "abc", "abc"]


@in_trio
async def test_the_prompt_is_echoed_as_it_was_sent() -> None:
    async with echo_daemon() as daemon:
        streamed = await ask(daemon, prompt="héllo", max_tokens=2, echo=True)
        # The second token is half a character, and no other half comes.
        assert streamed.texts() == ["hélloh\N{REPLACEMENT CHARACTER}"]
        whole = (await ask(daemon, prompt_token_ids=(104, 105), max_tokens=2, echo=True, stream=False)).ends[0]
        assert isinstance(whole, Done)
        assert whole.text == "hihi"


@in_trio
async def test_log_probabilities_are_told_with_each_token() -> None:
    async with echo_daemon() as daemon:
        answers = await ask(daemon, prompt_token_ids=(97, 98, END), max_tokens=9, logprobs=True, top_logprobs=2)
        told = [logprob for delta in answers.deltas[0] for logprob in delta.logprobs]
        assert [(logprob.token_id, logprob.token) for logprob in told] == [(97, "a"), (98, "b")]
        assert [top.token for top in told[0].top_logprobs] == ["a", "b"]
        whole = (await ask(daemon, prompt="ab", max_tokens=2, logprobs=True, stream=False)).ends[0]
        assert isinstance(whole, Done)
        assert [(logprob.token, logprob.top_logprobs) for logprob in whole.logprobs] == [("a", ()), ("b", ())]
        assert (await ask(daemon, prompt="ab", max_tokens=2)).deltas[0][0].logprobs == ()


def said_by(echoed: str, **fields: Any) -> Callable[[EchoDaemon], Any]:
    """A chat whose laid-out prompt, said back, is its answer."""

    async def run(daemon: EchoDaemon) -> Done:
        prompt = (Message(echoed, ""),)
        answers = await ask(daemon, messages=prompt, max_tokens=len(echoed), stream=False, **fields)
        assert isinstance(answers.ends[0], Done), answers.ends
        return answers.ends[0]

    return run


@in_trio
async def test_reasoning_and_calls_are_told_apart_from_the_text() -> None:
    async with echo_daemon() as daemon:
        thought = await said_by("a[why]b")(daemon)
        assert (thought.text, thought.reasoning, thought.finish_reason) == ("ab", "why", "length")
        called = await said_by("a{go}b", tools=TOOLS)(daemon)
        (call,) = called.tool_calls
        assert (called.text, call.function.name, call.function.arguments) == ("ab", "go", '{"bytes": 2}')
        streamed = await ask(daemon, messages=(Message("[y]{f}x", ""),), max_tokens=7, tools=TOOLS)
        parts = [(delta.text, delta.reasoning, len(delta.tool_calls)) for delta in streamed.deltas[0]]
        assert [part for part in parts if any(part)] == [("", "y", 0), ("", "", 1), ("x", "", 0)]
        assert sum(len(delta.token_ids) for delta in streamed.deltas[0]) == 7


@in_trio
async def test_a_call_before_the_end_is_what_ended_the_answer() -> None:
    async with echo_daemon() as daemon:
        done = await said_by("{f}", tools=TOOLS, stop_token_ids=(ord(":"),))(daemon)
        assert done.finish_reason == "length"
        answers = await ask(
            daemon, messages=(Message("{f}", ""),), max_tokens=9, tools=TOOLS, stop_token_ids=(ord(":"),), stream=False
        )
        assert isinstance(answers.ends[0], Done)
        assert (answers.ends[0].finish_reason, answers.ends[0].stop_reason) == ("tool_calls", ord(":"))
        assert daemon.counted("laned_requests_total", outcome="stop") == 1


@in_trio
async def test_without_tools_what_looks_like_a_call_is_text() -> None:
    async with echo_daemon() as daemon:
        assert (await said_by("a{go}b")(daemon)).text == "a{go}b"
        assert (await said_by("a{go}b", tools=TOOLS, tool_choice="none")(daemon)).text == "a{go}b"
        assert (await said_by("a{no}b", tools=TOOLS)(daemon)).text == "a{no}b"
        assert (await ask(daemon, prompt="a[b]", max_tokens=4)).texts() == ["a[b]"]


@in_trio
async def test_tools_are_shown_to_the_template_and_need_a_model_that_calls() -> None:
    async with echo_daemon() as daemon:
        answers = await ask(daemon, messages=(Message("u", "x"),), max_tokens=60, tools=({"name": "f"},))
        assert bytes(daemon.engine.specs[answers.row_id].prompt) == b"u:x;tools=[{'name': 'f'}];"
        hidden = await ask(daemon, messages=(Message("u", "x"),), max_tokens=9, tools=TOOLS, tool_choice="none")
        assert bytes(daemon.engine.specs[hidden.row_id].prompt) == b"u:x;"
    dumb = ByteTokenizer()
    dumb.parts = DumbParts()
    async with echo_daemon(tokenizer=dumb) as daemon:
        with pytest.raises(Refused, match="this model calls no functions"):
            await submit(daemon, messages=(Message("u", "x"),), tools=TOOLS)


@in_trio
async def test_a_grammar_is_checked_before_anything_is_queued() -> None:
    async with echo_daemon() as daemon:
        with pytest.raises(Refused, match="structured_outputs: a bracket is open"):
            await submit(daemon, prompt="a", structured_outputs=StructuredOutputs(regex="("))
        assert daemon.engine.specs == {}
        answers = await ask(daemon, prompt="a", max_tokens=1, structured_outputs=StructuredOutputs(regex="a"))
        grammar = daemon.engine.specs[answers.row_id].sampling.grammar
        assert grammar is not None
        assert (grammar.kind, grammar.text) == ("regex", "a")


@in_trio
async def test_all_answers_hold_their_compiled_grammar_from_the_queue_on() -> None:
    async with echo_daemon(run_loop=False) as daemon:
        await submit(daemon, prompt="a", n=3, structured_outputs=StructuredOutputs(regex="a"))
        waiting = daemon.loop.scheduler.requests.values()
        assert [request.compiled for request in waiting] == ["a, compiled"] * 3
        daemon.loop.scheduler.fail_all("internal", "the test is over", 0.0)
