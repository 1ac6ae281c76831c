import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import trio

from scheduler import client as client_module
from scheduler.client import Answer, Client, ClientError, ConnectionLost, RequestError
from scheduler.connection import Limits
from scheduler.listener import listen
from store.framing import encode_frame
from tests.scheduler.echo import serving
from tests.scheduler.trio_test import trio_test, until


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "laned.sock"


async def text_of(answer: Answer) -> str:
    return "".join([delta.text async for delta in answer])


@trio_test
async def test_an_answer_comes_in_deltas_and_ends_with_a_record(path: Path) -> None:
    async with serving(path), Client(path) as client:
        assert (client.hello.version, client.hello.server) == (1, "echo")
        async with client.submit(prompt="one pause two") as answer:
            assert await text_of(answer) == "one pause two "
            assert [delta async for delta in answer] == []
        assert answer.done.finish_reason == "stop"
        assert answer.done.usage.completion_tokens == 3


@trio_test
async def test_the_record_is_not_there_before_the_end(path: Path) -> None:
    async with serving(path), Client(path) as client, client.submit(prompt="a hang") as answer:
        await anext(answer)
        with pytest.raises(RuntimeError, match="not ended"):
            _ = answer.done


@trio_test
async def test_ask_gives_the_whole_text(path: Path) -> None:
    async with serving(path), Client(path) as client:
        chat = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi there"}]
        assert (await client.ask(messages=chat)).text == "be brief hi there "
        assert (await client.ask(prompt_token_ids=(5, 6, 7), max_tokens=2)).text == "5 6 "
        done = await client.ask("as one argument", stop=("x",), seed=None)
        assert (done.text, done.finish_reason) == ("as one argument ", "stop")


@trio_test
async def test_several_answers_come_by_their_index(path: Path) -> None:
    async with serving(path), Client(path) as client:
        async with client.submit("one two", n=3) as answer:
            deltas = [delta async for delta in answer]
            assert [done.index for done in answer.all_done] == [0, 1, 2]
        for index in range(3):
            assert "".join(delta.text for delta in deltas if delta.index == index) == "one two "
        assert [done.text for done in await client.ask_all("a b", n=2)] == ["a b ", "a b "]
        # Of several the first, once all have ended.
        assert (await client.ask("a b", n=2)).index == 0


@trio_test
async def test_where_one_of_several_answers_fails_the_others_are_given_up(path: Path) -> None:
    async with serving(path) as daemon, Client(path) as client:
        with pytest.raises(RequestError, match="as asked"):
            await client.ask_all("first fail", n=3)
        await until(lambda: daemon.service.num_cancelled == 2)
        assert (await client.ask("goes on")).text == "goes on "


@trio_test
async def test_options_may_be_of_any_kind_of_sequence_and_map(path: Path) -> None:
    async with serving(path), Client(path) as client:
        chat: list[dict[str, Any]] = [
            {"role": "user", "content": "a"},
            {"role": "assistant", "tool_calls": ({"id": "c", "function": {"name": "f", "arguments": "{}"}},)},
            {"role": "tool", "content": "b", "tool_call_id": "c"},
        ]
        tools = ({"type": "function", "function": {"name": "f"}},)
        assert (await client.ask(messages=chat, tools=tools, logit_bias={5: 1.5, 7: -1})).text == "a b "


@trio_test
async def test_status_and_ping(path: Path) -> None:
    async with serving(path), Client(str(path)) as client, client.submit(prompt="hang"):
        assert await client.status() == {"running": 1}
        assert await client.ping() > 0


@trio_test
async def test_many_tasks_share_a_client_and_a_slow_one_holds_up_no_other(path: Path) -> None:
    async with serving(path), Client(path) as client, client.submit(prompt="slow " * 3000) as slow:
        texts = {}

        async def ask(number: int) -> None:
            async with client.submit(prompt=f"{number} pause {'x ' * number}") as answer:
                texts[number] = await text_of(answer)

        async with trio.open_nursery() as nursery:
            for number in range(30):
                nursery.start_soon(ask, number)
            nursery.start_soon(client.ping)
        assert texts == {number: f"{number} pause {'x ' * number}" for number in range(30)}
        assert await text_of(slow) == "slow " * 3000


@trio_test
async def test_to_leave_the_block_early_cancels_the_request(path: Path) -> None:
    async with serving(path) as daemon, Client(path) as client:
        async with client.submit(prompt="a hang") as answer:
            await anext(answer)
            assert len(daemon.service.rows) == 1
        await until(lambda: daemon.service.num_cancelled == 1)
        with trio.move_on_after(0.01):
            await client.ask("hang")
        await until(lambda: daemon.service.num_cancelled == 2)
        assert (await client.ask("still here")).text == "still here "


@trio_test
async def test_to_close_the_client_cancels_all(path: Path) -> None:
    async with serving(path) as daemon:
        async with Client(path) as client, trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(client.ask, "hang")
            await until(lambda: len(daemon.service.rows) == 3)
            nursery.cancel_scope.cancel()
        await until(lambda: not daemon.service.rows)
        with pytest.raises(ConnectionLost, match="block was left"):
            await client.ask("a")


@trio_test
async def test_a_refusal_is_an_exception_with_its_code_and_the_client_goes_on(path: Path) -> None:
    async with serving(path), Client(path) as client:
        with pytest.raises(RequestError, match="as asked") as raised:
            await client.ask("full")
        assert (raised.value.code, raised.value.retry_after_s) == ("overloaded", 2.5)
        async with client.submit(prompt="a fail") as answer:
            assert (await anext(answer)).text == "a "
            for _ in range(2):
                with pytest.raises(RequestError) as failed:
                    await anext(answer)
            assert failed.value.code == "model_failed"
        assert (await client.ask("a")).text == "a "


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "takes one of prompt"),
        ({"prompt": ""}, "prompt is empty"),
        ({"prompt": "a", "max_tokens": 0}, "ask for 1 at least"),
        ({"prompt": "a", "max_new_tokens": 1}, 'did you mean "max_tokens"'),
        ({"prompt": "a \ud800"}, "no Unicode"),
    ],
)
@trio_test
async def test_a_wrong_option_is_told_at_once(path: Path, options: dict[str, Any], says: str) -> None:
    async with serving(path) as daemon, Client(path) as client:
        with pytest.raises(RequestError, match=says) as raised:
            await client.ask(**options)
        assert raised.value.code == "bad_request"
        assert daemon.service.num_rows == 0
        await client.ping()


@trio_test
async def test_a_prompt_over_the_frame_limit_is_told_at_once(path: Path) -> None:
    async with serving(path), Client(path) as client:
        with pytest.raises(RequestError) as raised:
            await client.ask("x" * (9 << 20))
        assert raised.value.code == "frame_too_large"
        await client.ping()


@trio_test
async def test_without_a_daemon_it_says_how_to_start_one(path: Path) -> None:
    with pytest.raises(ConnectionLost, match=r"no daemon answers at .*laned serve"):
        async with Client(path):
            pass
    async with listen(path):
        pass
    with pytest.raises(ConnectionLost, match="no daemon answers"):
        async with Client(path.parent / ("x" * 200)):
            pass


@trio_test
async def test_a_daemon_that_does_not_say_hello_is_not_waited_for(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "HELLO_S", 0.05)
    async with listen(path):
        with pytest.raises(ConnectionLost, match="does not say hello"):
            async with Client(path):
                pass


@trio_test
async def test_a_daemon_of_another_version_is_told_with_its_words(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "PROTOCOL_VERSION", 2)
    async with serving(path):
        with pytest.raises(ConnectionLost, match=r"speaks version 1, the client 2 \(unsupported_version\)"):
            async with Client(path):
                pass


@trio_test
async def test_when_the_daemon_goes_all_that_wait_are_told(path: Path) -> None:
    async with serving(path) as daemon, Client(path) as client:
        lost = []

        async def ask() -> None:
            try:
                await client.ask("hang")
            except ConnectionLost as error:
                lost.append(str(error))

        async with trio.open_nursery() as nursery, client.submit(prompt="a hang") as answer:
            for _ in range(3):
                nursery.start_soon(ask)
            await until(lambda: len(daemon.service.rows) == 4)
            daemon.scopes[0].cancel()
            assert (await anext(answer)).text == "a "
            with pytest.raises(ConnectionLost, match="closed the connection"):
                await anext(answer)
        assert lost == ["the daemon closed the connection"] * 3
        for call in (client.ask("a"), client.status(), client.ping()):
            with pytest.raises(ConnectionLost):
                await call


@trio_test
async def test_at_goodbye_the_daemons_last_words_are_the_reason(path: Path) -> None:
    async with serving(path) as daemon, Client(path) as client:
        daemon.goodbye.set()
        await until(lambda: not daemon.handlers.child_tasks)
        with pytest.raises(ConnectionLost, match="going down"):
            await client.ping()


@trio_test
async def test_the_blocks_own_exception_comes_out_as_it_is(path: Path) -> None:
    async with serving(path):
        with pytest.raises(ZeroDivisionError):
            async with Client(path) as client, client.submit(prompt="hang"):
                raise ZeroDivisionError
        with trio.CancelScope() as scope:
            async with Client(path):
                scope.cancel()
                await trio.sleep_forever()
        assert scope.cancelled_caught


@trio_test
async def test_a_stranger_at_the_socket_is_a_lost_connection(path: Path) -> None:
    async def answer_in_html(stream: trio.SocketStream) -> None:
        async with stream:
            await stream.send_all(b"<!DOCTYPE html>")

    async with listen(path) as opened, trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, answer_in_html, [opened])
        with pytest.raises(ConnectionLost, match="does not keep to the protocol"):
            async with Client(path):
                pass
        nursery.cancel_scope.cancel()


@trio_test
async def test_what_a_newer_daemon_says_more_is_ignored(path: Path) -> None:
    async def answer(stream: trio.SocketStream) -> None:
        async with stream:
            for message in (
                {"type": "weather", "sky": "blue"},
                {"type": "hello", "version": 1, "server": "new", "model": "m", "mood": "good"},
                {"type": "delta", "id": 77, "text": "whose?", "token_ids": []},
                {"type": "pong"},
            ):
                await stream.send_all(encode_frame(message))
            await trio.sleep_forever()

    async with listen(path) as opened, trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, answer, [opened])
        async with Client(path) as client:
            assert client.hello.server == "new"
        nursery.cancel_scope.cancel()


@trio_test
async def test_hundreds_of_clients_may_come_at_once(path: Path) -> None:
    async with serving(path, Limits()):
        texts = []

        async def visit(number: int) -> None:
            async with Client(path) as client:
                texts.append((await client.ask(f"{number} pause")).text)

        async with trio.open_nursery() as visitors:
            for number in range(300):
                visitors.start_soon(visit, number)
        assert sorted(texts) == sorted(f"{number} pause " for number in range(300))


def test_the_client_needs_no_mlx() -> None:
    program = (
        "import sys, scheduler.client; print([name for name in sys.modules if name.split('.')[0] in ('mlx', 'lanes')])"
    )
    assert subprocess.check_output([sys.executable, "-c", program], text=True) == "[]\n"


def test_all_its_errors_are_client_errors() -> None:
    assert issubclass(RequestError, ClientError)
    assert issubclass(ConnectionLost, ClientError)
