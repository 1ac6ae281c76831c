"""A client of laned, for Trio programs.

    async with Client() as client:
        async with client.submit(prompt="Once upon a time", max_tokens=64) as answer:
            async for delta in answer:
                print(delta.text, end="", flush=True)
        print(answer.done.finish_reason, answer.done.usage)

        done = await client.ask(messages=[{"role": "user", "content": "What is a lane?"}])
        print(done.text)

Any number of requests may run on one client at once, from any number of tasks. What comes for a request waits in its
answer until it is read, so one that is read slowly holds up no other; it is no more than max_tokens tokens. Leaving
submit's block early cancels the request. Options of submit and ask are submit's fields in scheduler/protocol.py.

RequestError says that the daemon (or a look at the options) refused or ended one request; the client goes on.
ConnectionLost says that there is no daemon any more, or none yet.
"""

from __future__ import annotations

import os
import socket
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, TypedDict, Unpack

import trio

from scheduler.answer import Answer, ClientError, ConnectionLost, RequestError
from scheduler.codec import BadMessage, decode_reply, decode_request, encode
from scheduler.listener import SocketUnavailable, check_length, default_socket_path
from scheduler.peer import peer_uid
from scheduler.protocol import (
    PROTOCOL_VERSION,
    REPLIES,
    Adapters,
    AskStatus,
    Cancel,
    ClientHello,
    Delta,
    Done,
    Error,
    Flush,
    Flushed,
    Hello,
    LoadAdapter,
    Ping,
    Pong,
    Reply,
    Request,
    Status,
    UnloadAdapter,
)
from store.framing import FrameDecoder, ProtocolError, encode_frame

__all__ = ["Answer", "Client", "ClientError", "ConnectionLost", "Options", "RequestError"]

# A daemon that is there says hello at once; one that is stopped or hangs never does.
HELLO_S = 10.0


class Options(TypedDict, total=False):
    """What to answer, beside a plain prompt, and how; scheduler/protocol.py has the ranges. None is as if left out."""

    messages: Sequence[Mapping[str, Any]] | None
    prompt_token_ids: Sequence[int] | None
    max_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    xtc_probability: float | None
    xtc_threshold: float | None
    repetition_penalty: float | None
    repetition_context_size: int | None
    presence_penalty: float | None
    presence_context_size: int | None
    frequency_penalty: float | None
    frequency_context_size: int | None
    logit_bias: Mapping[int, float] | None
    seed: int | None
    n: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool | None
    min_tokens: int | None
    logprobs: bool | None
    top_logprobs: int | None
    echo: bool | None
    structured_outputs: Mapping[str, Any] | None
    tools: Sequence[Mapping[str, Any]] | None
    tool_choice: str | None
    chat_template_kwargs: Mapping[str, Any] | None
    priority: int | None
    timeout_s: float | None
    cache: str | None
    cache_salt: str | None
    adapter: str | None


class _Question:
    """A status or ping that waits for its reply; None: there will be none."""

    def __init__(self) -> None:
        self.answered = trio.Event()
        self.reply: Reply | None = None

    def answer(self, reply: Reply) -> None:
        self.reply = reply
        self.answered.set()


class Client:
    """A connection to the daemon at `path` (its default without one), open for as long as its `async with` block.

    Entering raises ConnectionLost if no daemon answers there. name is for the daemon's log. wait_s: how long the daemon
    may take to say hello; one whose socket is the service manager's says it when its model is loaded.
    """

    hello: Hello

    def __init__(self, path: Path | str | None = None, name: str | None = None, wait_s: float | None = None) -> None:
        self.path = default_socket_path() if path is None else Path(path)
        self._is_default = path is None
        self._name = name
        self._wait_s = HELLO_S if wait_s is None else wait_s
        self._ids = count(1)
        self._answers: dict[int | str, Answer] = {}
        self._questions: deque[_Question] = deque()
        self._changes: dict[int | str, _Question] = {}
        self._frames: deque[bytes] = deque()
        self._unsent = trio.lowlevel.ParkingLot()
        self._greeted = trio.Event()
        self._last_words: str | None = None
        self._lost: str | None = None

    async def __aenter__(self) -> Client:
        self._block = self._open()
        return await self._block.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return await self._block.__aexit__(kind, error, trace)

    @asynccontextmanager
    async def submit(self, prompt: str | None = None, **options: Unpack[Options]) -> AsyncIterator[Answer]:
        """Send a request: exactly one of prompt, messages and prompt_token_ids. Raises RequestError, ConnectionLost.

        To leave the block before the answer has ended cancels the request.
        """
        async with self._request(prompt, options, stream=True) as answer:
            yield answer

    async def ask(self, prompt: str | None = None, **options: Unpack[Options]) -> Done:
        """Send a request and wait for its whole answer, which is in the record's `text`; of several the first."""
        return (await self.ask_all(prompt, **options))[0]

    async def ask_all(self, prompt: str | None = None, **options: Unpack[Options]) -> list[Done]:
        """Send a request and wait for all of its n whole answers."""
        async with self._request(prompt, options, stream=False) as answer:
            async for _ in answer:
                pass
        return answer.all_done

    async def status(self) -> dict[str, Any]:
        """The daemon's report on itself."""
        reply = await self._question(AskStatus())
        assert isinstance(reply, Status)
        return reply.report

    async def flush(self) -> bool:
        """Return when all that the daemon has remembered so far is on disk or given up; whether all of it is on disk,
        and nothing was given up since this client came or asked last."""
        reply = await self._question(Flush())
        assert isinstance(reply, Flushed)
        return reply.on_disk

    async def load_adapter(self, name: str, folder: Path | str) -> tuple[str, ...]:
        """Have the name stand for the adapter in a folder, by its absolute path where the daemon runs; returns all
        names. Raises RequestError, and then the name stands for what it did before."""
        return await self._change(LoadAdapter(next(self._ids), name, str(folder)))

    async def unload_adapter(self, name: str) -> tuple[str, ...]:
        """Have the name stand for nothing; returns the names that are left. Raises RequestError."""
        return await self._change(UnloadAdapter(next(self._ids), name))

    async def ping(self) -> float:
        """Seconds to the daemon and back."""
        asked_s = time.perf_counter()
        await self._question(Ping())
        return time.perf_counter() - asked_s

    @asynccontextmanager
    async def _request(self, prompt: str | None, options: Options, stream: bool) -> AsyncIterator[Answer]:
        answer = Answer(next(self._ids), options.get("n") or 1)
        fields = {"type": "submit", "id": answer.id, "prompt": prompt, "stream": stream, **options}
        try:
            # The daemon's own check: a misspelt option is told here and now.
            self._put(decode_request({key: _plain(value) for key, value in fields.items()}))
        except BadMessage as bad:
            raise RequestError(bad.code, bad.message) from None
        self._answers[answer.id] = answer
        try:
            yield answer
        finally:
            del self._answers[answer.id]
            if not answer.ended and self._lost is None:
                self._put(Cancel(answer.id))

    async def _question(self, request: Request) -> Reply:
        self._put(request)
        question = _Question()
        self._questions.append(question)
        await question.answered.wait()
        if question.reply is None:
            raise ConnectionLost(self._lost)
        return question.reply

    async def _change(self, request: LoadAdapter | UnloadAdapter) -> tuple[str, ...]:
        self._put(request)
        question = self._changes[request.id] = _Question()
        try:
            await question.answered.wait()
        finally:
            del self._changes[request.id]
        match question.reply:
            case Adapters(_, names):
                return names
            case Error(code, message):
                raise RequestError(code, message)
        raise ConnectionLost(self._lost)

    @asynccontextmanager
    async def _open(self) -> AsyncIterator[Client]:
        failure = None
        async with await self._connect() as stream, trio.open_nursery() as nursery:
            nursery.start_soon(self._send, stream)
            nursery.start_soon(self._receive, stream)
            # The nursery would wrap the block's own exception in a group, although nothing in here raises beside it.
            try:
                await self._greet()
                yield self
            except Exception as error:
                failure = error
            finally:
                self._lose("the client's block was left")
                nursery.cancel_scope.cancel()
        if failure is not None:
            raise failure

    async def _connect(self) -> trio.SocketStream:
        with ExitStack() as on_failure, trio.move_on_after(HELLO_S):
            sock = on_failure.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            sock.setblocking(False)
            while True:
                try:
                    check_length(self.path)
                    sock.connect(os.fspath(self.path))
                    # In a folder that anybody may create, the daemon must be one of ours.
                    if self._is_default and peer_uid(sock) not in (0, os.geteuid()):
                        raise ConnectionLost(f"the daemon at {self.path} is another user's")
                    on_failure.pop_all()
                    return trio.SocketStream(trio.socket.from_stdlib_socket(sock))
                except BlockingIOError:
                    # Linux: too many connect at this moment.
                    await trio.sleep(0.01)
                except (OSError, SocketUnavailable) as error:
                    why = error.strerror if isinstance(error, OSError) else error
                    raise ConnectionLost(
                        f"no daemon answers at {self.path} ({why}): `laned serve` starts one"
                    ) from error
        raise ConnectionLost(f"the daemon at {self.path} accepts no connection")

    async def _greet(self) -> None:
        self._put(ClientHello(PROTOCOL_VERSION, self._name))
        with trio.move_on_after(self._wait_s):
            await self._greeted.wait()
        if self._lost is not None:
            raise ConnectionLost(self._lost)
        if not self._greeted.is_set():
            raise ConnectionLost(
                f"the daemon at {self.path} does not say hello within {self._wait_s:g} s: it hangs, or loads its model"
            )

    # Writing is a task of its own, so that a cancelled caller never leaves half a frame on the wire.

    def _put(self, request: Request) -> None:
        if self._lost is not None:
            raise ConnectionLost(self._lost)
        try:
            self._frames.append(encode_frame(encode(request)))
        except ProtocolError as error:
            raise RequestError(error.code, error.message) from None
        except UnicodeEncodeError as error:
            raise RequestError("bad_request", f"text that is no Unicode: {error}") from None
        except ValueError as error:
            raise RequestError("bad_request", f"a value that no frame can hold: {error}") from None
        self._unsent.unpark_all()

    async def _send(self, stream: trio.SocketStream) -> None:
        # If the daemon has gone, the receiver finds out why.
        with suppress(trio.BrokenResourceError):
            while True:
                while not self._frames:
                    await self._unsent.park()
                await stream.send_all(self._frames.popleft())

    async def _receive(self, stream: trio.SocketStream) -> None:
        decoder = FrameDecoder()
        reason = "the daemon closed the connection"
        try:
            while data := await stream.receive_some(64 << 10):
                decoder.feed(data)
                for fields in decoder:
                    # A type that is new in this version of the protocol is not for us.
                    if type(tag := fields.get("type")) is not str or tag in REPLIES:
                        self._take(decode_reply(fields))
        except trio.BrokenResourceError:
            pass
        except (ProtocolError, BadMessage) as error:
            reason = f"the daemon does not keep to the protocol: {error}"
        self._lose(reason)

    def _take(self, reply: Reply) -> None:
        match reply:
            case Delta() | Done():
                self._tell(reply.id, reply)
            case Adapters(id) | Error(_, _, id) if id in self._changes:
                self._changes[id].answer(reply)
            case Error(code, message, id, retry_after_s, index):
                if index is not None and id is not None:
                    # One of several answers: nobody will read the others'.
                    self._put(Cancel(id))
                if id is None:
                    self._last_words = f"the daemon closed the connection: {message} ({code})"
                else:
                    self._tell(id, RequestError(code, message, retry_after_s))
            case Status() | Pong() | Flushed():
                if self._questions:
                    self._questions.popleft().answer(reply)
            case Hello():
                self.hello = reply
                self._greeted.set()

    def _tell(self, id: int | str, news: Delta | Done | ClientError) -> None:
        # A request whose block was left is not told any more.
        if id in self._answers:
            self._answers[id].take(news)

    def _lose(self, reason: str) -> None:
        if self._lost is not None:
            return
        self._lost = self._last_words or reason
        for answer in self._answers.values():
            if not answer.ended:
                answer.take(ConnectionLost(self._lost))
        for question in (*self._questions, *self._changes.values()):
            question.answered.set()
        self._greeted.set()


def _plain(value: Any) -> Any:
    """An option as the wire has it: any sequence as a list, any mapping as a dict with keys that are strings."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_plain(item) for item in value]
    return value
