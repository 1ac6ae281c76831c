"""What clients ask becomes rows, or a refusal that says why; every request is counted once, however it ends."""

from collections import Counter
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from lanes.lane import Sampling
from scheduler import codec
from scheduler.errors import Overloaded, Refused
from scheduler.metrics import OUTCOMES
from scheduler.protocol import ERROR_CODES, PROTOCOL_VERSION, Done, Error, Hello, Message, Usage
from tests.scheduler.bytes_tokenizer import END
from tests.scheduler.echo_daemon import EchoDaemon, echo_daemon, in_trio
from tests.scheduler.fake_engine import INFO

SHORT = replace(INFO, context_tokens=10)


def assert_counted_once(daemon: EchoDaemon, **expected: int) -> None:
    """In the service's books and in the metrics alike; whatever is not named has not happened."""
    outcomes = {outcome: expected.get(outcome, 0) for outcome in OUTCOMES}
    assert {outcome: daemon.service.outcomes[outcome] for outcome in OUTCOMES} == outcomes
    assert {outcome: daemon.counted("laned_requests_total", outcome=outcome) for outcome in OUTCOMES} == outcomes
    assert daemon.counted("laned_requests_received_total") == sum(outcomes.values())


async def refused(daemon: EchoDaemon, **fields: Any) -> Refused:
    """Submit what cannot be served; nothing of it stays behind."""
    with pytest.raises(Refused) as caught:
        await daemon.submit(**fields)
    assert caught.value.code in ERROR_CODES
    assert not daemon.loop.scheduler.requests
    assert daemon.loop.scheduler.num_waiting == 0
    return caught.value


@in_trio
async def test_a_prompt_is_answered() -> None:
    async with echo_daemon() as daemon:
        client = await daemon.ask("grüße! ", id=17, max_tokens=21)
        done = await client.done()
        assert client.text == "grüße! grüße! gr\ufffd", "it ends within a character"
        assert client.token_ids == list(("grüße! " * 3).encode()[:21])
        assert (done.id, done.finish_reason, done.text) == (17, "length", None)
        assert done.usage == Usage(prompt_tokens=9, completion_tokens=21, cached_tokens=0)
        assert_counted_once(daemon, length=1)


@in_trio
async def test_each_answer_derives_from_its_own_prompt_only() -> None:
    async with echo_daemon() as daemon:
        prompts = [f"{i:02}" * (1 + i) for i in range(32)]
        clients = [await daemon.submit(id=prompt, prompt=prompt, max_tokens=64) for prompt in prompts]
        for prompt, client in zip(prompts, clients, strict=True):
            done = await client.done()
            assert (done.id, client.text) == (prompt, (prompt * 64)[:64])
        assert_counted_once(daemon, length=32)


@in_trio
async def test_a_chat_goes_through_the_template() -> None:
    """The daemon's own variables for it, and over them the client's."""
    async with echo_daemon(chat_template_args={"thinking": False, "tone": "dry"}) as daemon:
        laid_out = "system:be kind;user:hi;thinking=True;tone=dry;"
        client = await daemon.submit(
            messages=(Message("system", "be kind"), Message("user", "hi")),
            chat_template_kwargs={"thinking": True},
            max_tokens=len(laid_out),
        )
        await client.done()
        assert client.text == laid_out


@in_trio
async def test_token_ids_are_taken_as_they_are() -> None:
    async with echo_daemon() as daemon:
        client = await daemon.submit(prompt_token_ids=(0, 97, 255), max_tokens=3)
        await client.done()
        assert client.token_ids == [0, 97, 255]


@pytest.mark.parametrize("outside", [-1, INFO.vocab_size, 2**31 - 1])
@in_trio
async def test_ids_outside_the_vocabulary_are_refused(outside: int) -> None:
    """MLX checks no bounds: such an id would read what lies behind the embedding."""
    async with echo_daemon() as daemon:
        refusal = await refused(daemon, prompt_token_ids=(3, outside, 4))
        assert refusal.code == "bad_request"
        assert str(outside) in refusal.message
        assert "256" in refusal.message
        assert_counted_once(daemon, refused=1)


@pytest.mark.parametrize("prompt", [{"prompt": ""}, {"prompt_token_ids": ()}])
@in_trio
async def test_a_prompt_of_no_tokens_is_refused(prompt: dict[str, Any]) -> None:
    async with echo_daemon() as daemon:
        assert (await refused(daemon, **prompt)).code == "bad_request"
        assert_counted_once(daemon, refused=1)


@pytest.mark.parametrize("length", [10, 11, 1000])
@pytest.mark.parametrize("form", ["prompt", "prompt_token_ids", "messages"])
@in_trio
async def test_a_prompt_that_leaves_no_room_is_refused(length: int, form: str) -> None:
    prompts: dict[str, Any] = {
        "prompt": "x" * length,
        "prompt_token_ids": (1,) * length,
        "messages": (Message("r", "x" * (length - 3)),),
    }
    async with echo_daemon(SHORT) as daemon:
        refusal = await refused(daemon, **{form: prompts[form]})
        assert refusal.code == "context_length_exceeded"
        assert str(length) in refusal.message
        assert "10" in refusal.message
        assert_counted_once(daemon, refused=1)


@pytest.mark.parametrize(
    ("context", "option", "limit"), [(10, None, 10), (None, 10, 10), (10, 30, 10), (30, 10, 10), (None, None, None)]
)
@in_trio
async def test_answers_are_cut_to_the_context(context: int | None, option: int | None, limit: int | None) -> None:
    """The model's or --max-model-len, whichever is less; prompt and answer together fill it at most."""
    async with echo_daemon(replace(INFO, context_tokens=context), max_model_len=option) as daemon:
        for prompt_tokens, wanted in ((1, 3), (1, 100), (8, 100), (9, 100), (9, 1)):
            client = await daemon.ask("x" * prompt_tokens, max_tokens=wanted)
            done = await client.done()
            room = wanted if limit is None else min(wanted, limit - prompt_tokens)
            assert (done.finish_reason, done.usage.completion_tokens) == ("length", room)


@in_trio
async def test_a_template_that_fails_is_a_refusal_with_its_reason() -> None:
    async with echo_daemon() as daemon:
        refusal = await refused(daemon, messages=(Message("refused", "hi"),))
        assert (refusal.code, refusal.message) == ("bad_request", "the template knows no such role")
        assert_counted_once(daemon, refused=1)


@pytest.mark.parametrize("name", ["messages", "self"])
@in_trio
async def test_no_name_of_a_template_variable_is_a_fault_of_ours(name: str) -> None:
    """It may be that of a parameter: the client is refused or served, and keeps its connection."""
    async with echo_daemon() as daemon:
        with suppress(Refused):
            client = await daemon.submit(
                messages=(Message("user", "hi"),), chat_template_kwargs={name: "mine"}, max_tokens=3
            )
            await client.done()
        assert daemon.service.outcomes.total() == 1


@in_trio
async def test_while_draining_new_requests_are_refused_and_old_ones_go_on() -> None:
    async with echo_daemon() as daemon:
        running = await daemon.submit(prompt="abc", max_tokens=200)
        daemon.service.is_draining = True
        with pytest.raises(Refused) as caught:
            await daemon.submit(prompt="late")
        assert caught.value.code == "shutting_down"
        assert (await running.done()).usage.completion_tokens == 200
        assert_counted_once(daemon, refused=1, length=1)


@in_trio
async def test_too_many_are_told_to_come_back() -> None:
    async with echo_daemon(max_queue=2, run_loop=False) as daemon:
        for _ in range(INFO.max_rows + 2):
            await daemon.submit(prompt="x")
        with pytest.raises(Overloaded) as caught:
            await daemon.submit(prompt="x")
        assert caught.value.code == "overloaded"
        assert caught.value.retry_after_s > 0
        daemon.loop.scheduler.fail_all("shutting_down", "over", trio.current_time())
        assert_counted_once(daemon, refused=1, failed=INFO.max_rows + 2)


@in_trio
async def test_what_is_not_said_is_the_daemons_default_and_zero_is_said() -> None:
    defaults: dict[str, Any] = {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "max_tokens": 3}
    async with echo_daemon(**defaults) as daemon:
        default = await (await daemon.submit(prompt="x")).done()
        assert default.usage.completion_tokens == 3
        said = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": 0}
        await (await daemon.submit(prompt="x", max_tokens=1, **said)).done()
        first, second = (spec.sampling for spec in daemon.engine.specs.values())
        assert replace(first, seed=0) == Sampling(temperature=0.7, top_p=0.9, top_k=40, min_p=0.05)
        assert second == Sampling(seed=0)


@in_trio
async def test_without_a_seed_requests_draw_differently_and_with_one_alike() -> None:
    async with echo_daemon() as daemon:
        for seed in [None] * 8 + [2**63 - 1] * 2:
            await daemon.ask("x", max_tokens=1, seed=seed)
        seeds = [spec.sampling.seed for spec in daemon.engine.specs.values()]
        assert len(set(seeds[:8])) == 8
        assert all(0 <= seed < 2**63 for seed in seeds)
        assert seeds[8:] == [2**63 - 1] * 2


@in_trio
async def test_where_an_answer_ends() -> None:
    prompt = (*b"ab", END, *b"cd")
    async with echo_daemon() as daemon:

        async def end_of(**fields: Any) -> tuple[str, str, Any]:
            client = await daemon.submit(prompt_token_ids=prompt, max_tokens=7, **fields)
            done = await client.done()
            return client.text, done.finish_reason, done.stop_reason

        assert await end_of() == ("ab", "stop", END)
        assert await end_of(ignore_eos=True) == ("abcdab", "length", None)
        assert await end_of(ignore_eos=True, stop_token_ids=(ord("c"),)) == ("ab", "stop", ord("c"))
        assert await end_of(stop_token_ids=(ord("b"),)) == ("a", "stop", ord("b"))
        assert await end_of(ignore_eos=True, stop=("da", "zz")) == ("abc", "stop", "da")
        assert await end_of(stop=("b",)) == ("a", "stop", "b")
        assert_counted_once(daemon, stop=5, length=1)


@in_trio
async def test_without_streaming_the_answer_comes_at_once() -> None:
    async with echo_daemon() as daemon:
        client = await daemon.ask("abc", max_tokens=5, stream=False)
        assert (client.text, client.token_ids) == ("", [])
        assert (await client.done()).text == "abcab"


@in_trio
async def test_cancelling_is_idempotent_and_counted_once() -> None:
    async with echo_daemon() as daemon:
        client = await daemon.submit(prompt="x", max_tokens=2**31 - 1)
        for _ in range(3):
            daemon.cancel(client)
        assert (await client.done()).finish_reason == "cancelled"
        daemon.cancel(client)
        daemon.service.cancel(12345)
        ended = await daemon.ask("y", max_tokens=1)
        daemon.cancel(ended)
        assert_counted_once(daemon, cancelled=1, length=1)


@in_trio
async def test_when_the_engine_is_gone_all_are_told_and_no_more_are_taken() -> None:
    async with echo_daemon() as daemon:
        clients = [await daemon.submit(prompt="x" * 20, max_tokens=2**31 - 1) for _ in range(6)]
        daemon.engine.fail_engine = True
        for client in clients:
            assert (await client.error()).code == "model_failed"
        await daemon.failed.wait()
        with pytest.raises(Refused) as caught:
            await daemon.submit(prompt="late")
        assert caught.value.code == "shutting_down"
        assert_counted_once(daemon, failed=6, refused=1)


FATES = st.lists(st.sampled_from(["length", "stop", "cancelled", "refused", "failed"]), max_size=12)


@settings(max_examples=25, deadline=None)
@given(fates=FATES, pause=st.integers(0, 9))
def test_every_request_is_counted_once_however_it_ends(fates: list[str], pause: int) -> None:
    @in_trio
    async def run() -> None:
        async with echo_daemon() as daemon:
            tokens_told = 0
            clients = []
            for fate in fates:
                if fate == "refused":
                    await refused_beside_others(daemon)
                    continue
                prompt = (1, END) if fate == "stop" else (1, 2, 3)
                endless = fate in ("cancelled", "failed")
                max_tokens = 2**31 - 1 if endless else 5
                clients.append((fate, await daemon.submit(prompt_token_ids=prompt, max_tokens=max_tokens)))
                for _ in range(pause):
                    await trio.lowlevel.checkpoint()
            for fate, client in clients:
                if fate == "cancelled":
                    daemon.cancel(client)
                elif fate == "failed":
                    request = daemon.loop.scheduler.requests[client.row_id or 0]
                    request.fail("model_failed", "as by a step that failed", trio.current_time())
                    daemon.loop.scheduler._retire(request)
                    daemon.loop.wake()
                await client.ended.wait()
                assert isinstance(client.end, Error if fate == "failed" else Done)
                tokens_told += len(client.token_ids)
            assert_counted_once(daemon, **Counter(fates))
            generated = daemon.service.tokens["generated"]
            assert generated == daemon.counted("laned_generation_tokens_total")
            # A stop token is drawn, but not told.
            assert generated == tokens_told + fates.count("stop")

    async def refused_beside_others(daemon: EchoDaemon) -> None:
        with pytest.raises(Refused):
            await daemon.submit(prompt_token_ids=(5000,))

    run()


@in_trio
async def test_the_books_can_be_read_and_sent() -> None:
    async with echo_daemon(SHORT, served_model_name="parrot", max_model_len=9) as daemon:
        assert daemon.service.hello() == Hello(PROTOCOL_VERSION, "laned 0.1", "parrot")
        await daemon.loop.wait_idle()
        await daemon.ask("abc", max_tokens=4)
        await daemon.loop.wait_idle()
        endless = await daemon.submit(prompt="x", max_tokens=8)
        report = daemon.service.status().report
        assert report["model"]["name"] == "parrot"
        assert report["model"]["context_tokens"] == 9
        assert report["rows"] == {"running": 0, "prefilling": 0, "set_aside": 0, "waiting": 1, "max": INFO.max_rows}
        totals = report["totals"]
        assert (totals["requests"], totals["completed"]) == (1, 1)
        assert (totals["prompt_tokens"], totals["generated_tokens"]) == (3, 4)
        assert report["memory"]["rss_bytes"] > 2**20
        assert report["slots"]["used"] == 0
        assert report["uptime_s"] >= 0
        codec.encode(daemon.service.status())
        await endless.done()


@in_trio
async def test_row_ids_are_never_used_twice() -> None:
    async with echo_daemon() as daemon:
        rows = [(await daemon.ask("x", id="same", max_tokens=1)).row_id for _ in range(5)]
        assert len(set(rows)) == 5
