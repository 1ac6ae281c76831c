"""Clients that send mutated frames to a daemon, to any daemon: assault(path, frames, seed).

A visit is one connection: a hello as a rule, some frames, most of them mutated, and one of several ends. The first
frame that breaks the framing is the visit's last, so that the daemon has to read every frame that is counted, except
where the visitor leaves at once. What the daemon says meanwhile must be frames and messages of the protocol; the rest
(its other clients, tasks, memory) is for the caller to look at.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trio

from scheduler.codec import decode_reply
from scheduler.protocol import ERROR_CODES, Error
from store.framing import FrameDecoder, ProtocolError, encode_frame

NUM_VISITORS = 8
MAX_FRAMES = 30

# Small requests, so that what survives its mutation costs a real daemon little.
HELLO = {"type": "hello", "version": 1, "client": "assault"}
SUBMIT = {"type": "submit", "id": 1, "prompt": "one two three", "max_tokens": 3, "temperature": 0.7, "seed": 3}
CHAT = {"type": "submit", "id": "b", "messages": [{"role": "user", "content": "héllo"}], "max_tokens": 2, "stop": "x"}
IDS = {"type": "submit", "id": 2, "prompt_token_ids": [1, 2, 300], "max_tokens": 2, "stream": False, "top_p": 0.5}
CANCEL = {"type": "cancel", "id": 1}
MESSAGES: list[dict[str, Any]] = [HELLO, SUBMIT, CHAT, IDS, CANCEL, {"type": "status"}, {"type": "ping", "nonce": "n"}]

ODD: list[Any] = [None, True, 0, -1, 2**64 - 1, 1e308, float("nan"), "", "x" * 300, b"\x00", [], {}, [[[]]], [{}]]


@dataclass
class Report:
    """What came of it. replies: what was read, by type; errors: those among them, by code."""

    num_frames: int = 0
    num_connections: int = 0
    replies: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)


async def assault(path: Path, frames: int, seed: int) -> Report:
    """Send at least so many frames. Raises where the daemon breaks the protocol or does not answer."""
    report = Report()

    async def visitor(dice: random.Random) -> None:
        while report.num_frames < frames:
            await _visit(path, dice, report)

    async with trio.open_nursery() as visitors:
        for number in range(NUM_VISITORS):
            visitors.start_soon(visitor, random.Random(f"{seed} {number}"))
    return report


async def _visit(path: Path, dice: random.Random, report: Report) -> None:
    data, num_frames = _conversation(dice)
    report.num_frames += num_frames
    report.num_connections += 1
    async with await trio.open_unix_socket(str(path)) as stream, trio.open_nursery() as nursery:
        heard = trio.Event()
        if reads := dice.random() < 0.9:
            nursery.start_soon(_hear, stream, report, heard)
        try:
            for piece in _cut(dice, data):
                await stream.send_all(piece)
            if reads and dice.random() < 0.8:
                await stream.send_eof()
                await heard.wait()
            elif dice.random() < 0.5:
                await trio.sleep(dice.random() / 200)
        except trio.BrokenResourceError:
            # The daemon has closed already. What it said can still be read.
            if reads:
                await heard.wait()
        nursery.cancel_scope.cancel()


async def _hear(stream: trio.SocketStream, report: Report, heard: trio.Event) -> None:
    """Read to the end, of the stream or of the visit."""
    decoder = FrameDecoder()
    try:
        while data := await stream.receive_some(65536):
            decoder.feed(data)
            for message in decoder:
                reply = decode_reply(message)
                report.replies[message["type"]] += 1
                if isinstance(reply, Error):
                    assert reply.code in ERROR_CODES, reply
                    report.errors[reply.code] += 1
        decoder.end()
    except trio.BrokenResourceError:
        # A daemon that closes before it has read all that was sent.
        pass
    heard.set()


def _conversation(dice: random.Random) -> tuple[bytes, int]:
    """The bytes of a visit, and the number of frames in them."""
    data, num_frames = b"", 0
    if dice.random() < 0.95:
        data, num_frames = encode_frame(HELLO), 1
    for _ in range(dice.randint(1, MAX_FRAMES)):
        frame = dice.choices(MUTATIONS, WEIGHTS)[0](dice)
        data += frame
        num_frames += 1
        if not _keeps_framing(frame):
            break
    return data, num_frames


def _keeps_framing(frame: bytes) -> bool:
    decoder = FrameDecoder()
    decoder.feed(frame)
    try:
        return len(list(decoder)) > 0 and not decoder.mid_frame
    except ProtocolError:
        return False


def _cut(dice: random.Random, data: bytes) -> list[bytes]:
    cuts = sorted(dice.randrange(len(data)) for _ in range(dice.choice([0, 0, 1, 5])))
    return [data[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(data)], strict=True)]


# Mutations: of a message (its frame stays whole), of a body (its length stays right), of a frame.


def _as_it_is(dice: random.Random) -> bytes:
    return encode_frame(dice.choice(MESSAGES))


def _odd_fields(dice: random.Random) -> bytes:
    message = dict(dice.choice(MESSAGES))
    for _ in range(dice.randint(1, 3)):
        key = dice.choice([*message, *SUBMIT, *CHAT, *IDS, "x" * dice.randrange(200)])
        match dice.randrange(3):
            case 0:
                message.pop(key, None)
            case 1:
                message[key] = dice.choice(ODD)
            case 2:
                message[key] = [dice.choice(ODD) for _ in range(dice.randrange(4))]
    return encode_frame(message)


def _odd_body(dice: random.Random) -> bytes:
    body = bytearray(encode_frame(dice.choice(MESSAGES))[4:])
    for _ in range(dice.randint(1, 4)):
        at = dice.randrange(len(body) + 1)
        match dice.randrange(4):
            case 0:
                body[at : at + 1] = dice.randbytes(1)
            case 1:
                body[at : at + dice.randint(1, 8)] = b""
            case 2:
                body[at:at] = dice.randbytes(dice.randint(1, 8))
            case 3:
                body[at:at] = b"\x91" * dice.choice([10, 100, 2000])
    return len(body).to_bytes(4, "big") + body


def _odd_length(dice: random.Random) -> bytes:
    frame = encode_frame(dice.choice(MESSAGES))
    length = dice.choice([0, 1, len(frame) - 5, len(frame) - 3, 2**23, 2**23 + 1, 2**32 - 1, dice.randrange(2**32)])
    return length.to_bytes(4, "big") + frame[4:]


def _cut_short(dice: random.Random) -> bytes:
    frame = encode_frame(dice.choice(MESSAGES))
    return frame[: dice.randrange(1, len(frame))]


def _noise(dice: random.Random) -> bytes:
    return dice.choice([b"GET / HTTP/1.1\r\n\r\n", b"\n", bytes(9), dice.randbytes(dice.randint(1, 300))])


MUTATIONS: list[Callable[[random.Random], bytes]] = [_as_it_is, _odd_fields, _odd_body, _odd_length, _cut_short, _noise]
WEIGHTS = [15, 60, 15, 4, 3, 3]
