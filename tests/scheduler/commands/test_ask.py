"""`laned ask` and `laned status` as commands, against a real socket and connection; only the model is a fake."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import pytest
import trio

from scheduler import protocol
from scheduler.connection import Limits, serve_connection
from scheduler.errors import Overloaded, Refused
from scheduler.protocol import Delta, Done, Reply, Submit, Timings, TokenLogprob, TopLogprob, Usage

WORDS = ["The ", "sky ", "is ", "bl", "ue."]
REPORT = {"version": "9.9", "model": {"name": "fake"}, "rows": {"running": 1, "max": 8}}


class FakeService:
    """Answers every request with WORDS, or as told."""

    num_given_up = 0

    def __init__(self, words: list[str], refusal: Refused | None = None, endless: bool = False) -> None:
        self.words = words
        self.refusal = refusal
        self.endless = endless
        self.asked: list[Submit] = []
        self.cancelled = trio.Event()
        self.running: list[tuple[Submit, Callable[[Reply], None]]] = []

    def hello(self) -> protocol.Hello:
        return protocol.Hello(protocol.PROTOCOL_VERSION, "laned 9.9", "fake")

    async def submit(self, message: Submit, reply: Callable[[Reply], None]) -> int:
        await trio.lowlevel.checkpoint()
        self.asked.append(message)
        if self.refusal is not None:
            raise self.refusal
        self.running.append((message, reply))
        if message.stream:
            for number, word in enumerate(self.words):
                top = (TopLogprob(number, word, -0.5), TopLogprob(9, "\x1b", -1.25))[: message.top_logprobs]
                told = (TokenLogprob(number, word, -0.5, top),) if message.logprobs else ()
                reply(Delta(message.id, word, (number,), logprobs=told))
        if not self.endless:
            self._end(len(self.running) - 1, "length" if message.max_tokens == len(self.words) else "stop")
        return len(self.running) - 1

    def _end(self, row: int, reason: str) -> None:
        message, reply = self.running[row]
        text = None if message.stream else "".join(self.words)
        reply(Done(message.id, reason, Usage(7, len(self.words), 0), Timings(0.0, 0.1, 0.2, 0.3, 0.1), None, text))

    def cancel(self, row_id: int) -> None:
        if self.endless and not self.cancelled.is_set():
            self.cancelled.set()
            self._end(row_id, "cancelled")

    def status(self) -> protocol.Status:
        return protocol.Status(dict(REPORT))


def with_daemon(tmp_path: Path, service: FakeService, test: Callable[[str], Awaitable[None]]) -> None:
    """Run test(socket) while the service answers on that socket."""
    socket = str(tmp_path / "laned.sock")

    async def handle(stream: trio.SocketStream) -> None:
        await serve_connection(stream, service, Limits())

    async def main() -> None:
        with trio.fail_after(60):
            with trio.socket.socket(trio.socket.AF_UNIX) as bound:
                await bound.bind(socket)
                bound.listen()
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(trio.serve_listeners, handle, [trio.SocketListener(bound)])
                    await test(socket)
                    nursery.cancel_scope.cancel()
        os.unlink(socket)

    trio.run(main)


def command(socket: str, *argv: str) -> list[str]:
    return [sys.executable, "-m", "scheduler.cli", *argv, "--socket", socket]


async def run(argv: list[str], input: bytes = b"") -> "subprocess.CompletedProcess[bytes]":
    return await trio.run_process(argv, stdin=input, capture_stdout=True, capture_stderr=True, check=False)


def ask(tmp_path: Path, service: FakeService, *argv: str, input: bytes = b"") -> "subprocess.CompletedProcess[bytes]":
    found = []

    async def test(socket: str) -> None:
        found.append(await run(command(socket, "ask", *argv), input))

    with_daemon(tmp_path, service, test)
    return found[0]


def test_the_answer_is_printed_with_a_newline_and_nothing_else(tmp_path: Path) -> None:
    service = FakeService(WORDS)
    done = ask(tmp_path, service, "Why is", "the sky blue?")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"The sky is blue.\n", b"")
    (asked,) = service.asked
    assert asked.messages == (protocol.Message("user", "Why is the sky blue?"),)
    assert (asked.prompt, asked.stream, asked.max_tokens, asked.temperature) == (None, True, None, None)


def test_a_newline_at_the_end_is_not_doubled(tmp_path: Path) -> None:
    assert ask(tmp_path, FakeService(["a\n"]), "x").stdout == b"a\n"
    assert ask(tmp_path, FakeService(["a\n", ""]), "x").stdout == b"a\n"
    assert ask(tmp_path, FakeService([]), "x").stdout == b""


def test_every_flag_becomes_its_field(tmp_path: Path) -> None:
    service = FakeService(WORDS)
    flags = ["--system", "s", "--max-tokens", "9", "--temperature", "0.5", "--top-p", "0.9"]
    flags += ["--top-k", "40", "--min-p", "0.1", "--seed", "7"]
    done = ask(tmp_path, service, "-", *flags, "--stop", "a", "--stop", "b\n", input="Grüße\n".encode())
    assert done.returncode == 0, done.stderr
    (asked,) = service.asked
    assert asked.messages == (protocol.Message("system", "s"), protocol.Message("user", "Grüße\n"))
    assert (asked.max_tokens, asked.temperature, asked.top_p, asked.top_k) == (9, 0.5, 0.9, 40)
    assert (asked.min_p, asked.seed, asked.stop) == (0.1, 7, ("a", "b\n"))


def test_penalties_and_shapes(tmp_path: Path) -> None:
    service = FakeService(WORDS)
    penalties = [f"--{name}-penalty={value}" for name, value in (("repetition", 1.1), ("presence", -0.5))]
    assert ask(tmp_path, service, "x", *penalties, "--frequency-penalty=2", "--regex", "a+").returncode == 0
    asked = service.asked[-1]
    assert (asked.repetition_penalty, asked.presence_penalty, asked.frequency_penalty) == (1.1, -0.5, 2.0)
    assert asked.structured_outputs == protocol.StructuredOutputs(regex="a+")
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "null"}')
    for given in (str(schema), ' {"type": "null"}'):
        assert ask(tmp_path, service, "x", "--json-schema", given).returncode == 0
        assert service.asked[-1].structured_outputs == protocol.StructuredOutputs(json={"type": "null"})


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--json-schema", "no-such-file"], b"no-such-file: No such file or directory"),
        (["--json-schema", "{"], b"no JSON"),
        (["--json-schema", "{}", "--regex", "a"], b"give one of them"),
        (["--logprobs", "21"], b"from 0 to 20"),
    ],
)
def test_a_shape_that_is_none_is_a_mistake(flags: list[str], says: bytes, tmp_path: Path) -> None:
    done = ask(tmp_path, FakeService(WORDS), "x", *flags)
    assert done.returncode == 2
    assert says in done.stderr
    assert done.stderr.count(b"\n") == 1


def test_log_probabilities_are_a_line_for_each_token(tmp_path: Path) -> None:
    done = ask(tmp_path, FakeService(["The", " sky\n"]), "x", "--logprobs", "2")
    lines = done.stdout.decode().split("\n")
    assert [line.split() for line in lines] == [
        ["-0.500", '"The"', '"The"', "-0.500", '"\\u001b"', "-1.250"],
        ["-0.500", '"', 'sky\\n"', '"', 'sky\\n"', "-0.500", '"\\u001b"', "-1.250"],
        [],
    ]
    plain = ask(tmp_path, FakeService(["The"]), "x", "--logprobs", "0")
    assert plain.stdout.decode() == '   -0.500  "The"\n'


def test_raw_goes_without_the_template(tmp_path: Path) -> None:
    service = FakeService(WORDS)
    assert ask(tmp_path, service, "--raw", "Once upon").returncode == 0
    assert (service.asked[0].prompt, service.asked[0].messages) == ("Once upon", None)


def test_json_is_one_object_with_usage_and_timings(tmp_path: Path) -> None:
    service = FakeService(WORDS)
    done = ask(tmp_path, service, "--json", "x", "--max-tokens", "5")
    assert done.returncode == 0
    assert done.stdout.count(b"\n") == 1
    found = json.loads(done.stdout)
    assert (found["text"], found["finish_reason"], found["model"]) == ("The sky is blue.", "length", "fake")
    counted = {name: number for name, number in found["usage"].items() if number}
    assert counted == {"prompt_tokens": 7, "completion_tokens": 5}
    assert found["timings"]["total_s"] == 0.3
    assert service.asked[0].stream is False


@pytest.mark.parametrize(
    ("refusal", "status", "said"),
    [
        (Refused("bad_request", "stop is odd"), 2, b"laned: Stop is odd.\n"),
        (Refused("context_length_exceeded", "too long."), 2, b"laned: Too long.\n"),
        (Refused("shutting_down", "going down"), 1, b"laned: Going down (shutting_down).\n"),
        (Overloaded("full", 2.5), 1, b"laned: Full (overloaded). Try again in 2.5 s.\n"),
    ],
)
def test_a_refusal_is_one_sentence(refusal: Refused, status: int, said: bytes, tmp_path: Path) -> None:
    for flags in ([], ["--json"]):
        done = ask(tmp_path, FakeService(WORDS, refusal), "x", *flags)
        assert (done.returncode, done.stdout, done.stderr) == (status, b"", said)


def test_what_the_daemon_would_refuse_is_a_mistake(tmp_path: Path) -> None:
    done = ask(tmp_path, FakeService(WORDS), "x", "--temperature", "200")
    assert done.returncode == 2
    assert b"temperature must be" in done.stderr.lower()
    assert done.stderr.count(b"\n") == 1


def test_interrupting_cancels_the_request(tmp_path: Path) -> None:
    service = FakeService(WORDS, endless=True)

    async def test(socket: str) -> None:
        async with trio.open_nursery() as nursery:
            start = partial(trio.run_process, command(socket, "ask", "x"), check=False)
            process: trio.Process = await nursery.start(partial(start, stdout=subprocess.PIPE, stderr=subprocess.PIPE))
            assert process.stdout is not None
            assert process.stderr is not None
            text = b""
            while not text.endswith(b"blue."):
                text += await process.stdout.receive_some()
            process.send_signal(signal.SIGINT)
            assert await process.stdout.receive_some() == b"\n", "the shell's prompt begins on a line of its own"
            await service.cancelled.wait()
            assert await process.wait() == 130
            assert await process.stderr.receive_some() == b""
            nursery.cancel_scope.cancel()

    with_daemon(tmp_path, service, test)


def test_a_reader_that_leaves_is_no_error(tmp_path: Path) -> None:
    service = FakeService(["word "] * 20_000)

    async def test(socket: str) -> None:
        ours, theirs = os.pipe()
        os.close(ours)
        try:
            for flags in ([], ["--json"]):
                argv = command(socket, "ask", "x", *flags)
                done = await trio.run_process(argv, stdout=theirs, capture_stderr=True, check=False)
                assert (done.returncode, done.stderr) == (141, b"")
        finally:
            os.close(theirs)

    with_daemon(tmp_path, service, test)


def test_a_terminal_is_not_commanded_by_the_model(tmp_path: Path) -> None:
    import pty

    async def test(socket: str) -> None:
        leader, follower = pty.openpty()
        done = await trio.run_process(command(socket, "ask", "x"), stdout=follower, check=False)
        os.close(follower)
        shown = os.read(leader, 10_000)
        os.close(leader)
        assert (done.returncode, shown) == (0, b"a\\x1b[2Jb\tc\r\nd\r\n")

    with_daemon(tmp_path, FakeService(["a\x1b[2Jb\tc\nd"]), test)
    assert ask(tmp_path, FakeService(["a\x1b[2Jb"]), "x").stdout == b"a\x1b[2Jb\n", "a file gets what the model wrote"


def test_status_is_printed_and_given_as_json(tmp_path: Path) -> None:
    async def test(socket: str) -> None:
        done = await run(command(socket, "status", "--json"))
        assert (done.returncode, json.loads(done.stdout)) == (0, REPORT)
        done = await run(command(socket, "status"))
        assert done.returncode == 0
        assert "laned 9.9: fake" in done.stdout.decode()

    with_daemon(tmp_path, FakeService(WORDS), test)
