"""How messages are cut out of a stream of bytes, on every socket of laned.

    offset  size    field
    0       4       n: length of the body in bytes, u32 big-endian, 1 <= n <= the frame limit
    4       n       body: exactly one msgpack map whose keys are strings, no two alike

A body holds nil, booleans, integers, floats, UTF-8 strings, binary, arrays and maps. Extension types, timestamps among
them, are refused: nothing needs them, and they would reach the caller as objects of a class it did not ask for.

Limits, and what they defend:

- FRAME_BYTES, 8 MiB. The largest honest frame is a prompt: a million tokens, the longest context in use, take up to
  5 MB as ids and about as much as text. A longer length is refused as soon as its four bytes are there, before anything
  is buffered for it; so is what is not this protocol at all ("GET " reads as a length of 1.2 GB).
- MAX_ARRAY, 2**20 elements: msgpack reserves room for an array as announced, before it has seen an element.
- MAX_CONTAINERS, 65,536 maps and arrays in a frame: an empty map is 1 byte here and 64 in Python, and takes a call.
- MAX_NESTING, 32: no message nests deeper than 4, and code that walks a message may recurse.

What remains is a factor of about 20 between a frame and its objects (strings of two letters), for one frame at a time.

A stream in which one frame is broken has no next frame that can be trusted: it ends there.

This file does no input or output: bytes go in, maps come out. A decoder that has raised raises the same error from then
on.
"""

import struct
from collections.abc import Iterator, Mapping
from typing import Any

import msgpack

FRAME_BYTES = 8 << 20
MAX_ARRAY = 1 << 20
MAX_CONTAINERS = 1 << 16
MAX_NESTING = 32

_LENGTH = struct.Struct(">I")


class ProtocolError(Exception):
    """The stream cannot go on. code is "bad_frame" or "frame_too_large" here; layers above add codes of their own."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


def encode_frame(message: Mapping[str, Any], limit_bytes: int = FRAME_BYTES) -> bytes:
    """The frame of one message. Raises ProtocolError if it is over the limit, ValueError or TypeError if the message
    holds what msgpack cannot say (a lone surrogate, an integer of more than 64 bits, an object)."""
    try:
        body: bytes = msgpack.packb(message)
    except OverflowError as error:
        raise ValueError(str(error)) from error
    if len(body) > limit_bytes:
        raise _too_large(len(body), limit_bytes)
    return _LENGTH.pack(len(body)) + body


class FrameDecoder:
    """Collects bytes and yields the maps that are complete.

    `feed` takes bytes as they come; iterate after each feed, until the iterator ends: it then needs more bytes. What is
    held is less than one frame and the bytes of the last feed. Frames before a broken one are yielded before it raises.
    """

    def __init__(self, limit_bytes: int = FRAME_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._buffer = bytearray()
        self._error: ProtocolError | None = None

    @property
    def mid_frame(self) -> bool:
        """Whether the bytes so far end inside a frame (once the iterator has ended)."""
        return bool(self._buffer)

    def feed(self, data: bytes) -> None:
        if self._error is None:
            self._buffer += data

    def end(self) -> None:
        """No more bytes will come. Raises ProtocolError if they ended inside a frame."""
        if self._error is None and self._buffer:
            self._error = ProtocolError("bad_frame", f"the stream ended {len(self._buffer)} bytes into a frame")
        if self._error is not None:
            raise self._error

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self

    def __next__(self) -> dict[str, Any]:
        """The next complete message. Raises ProtocolError where the bytes are no frame."""
        if self._error is None:
            try:
                return self._next()
            except ProtocolError as error:
                self._error = error
                self._buffer.clear()
        raise self._error

    def _next(self) -> dict[str, Any]:
        if len(self._buffer) < _LENGTH.size:
            raise StopIteration
        (length,) = _LENGTH.unpack_from(self._buffer)
        if length > self._limit_bytes:
            raise _too_large(length, self._limit_bytes)
        if length == 0:
            raise ProtocolError("bad_frame", "a frame of 0 bytes: every frame holds one msgpack map")
        end = _LENGTH.size + length
        if len(self._buffer) < end:
            raise StopIteration
        body = bytes(memoryview(self._buffer)[_LENGTH.size : end])
        del self._buffer[:end]
        return _unpack(body)


def _unpack(body: bytes) -> dict[str, Any]:
    num_containers = 0

    def on_list(items: list[Any]) -> list[Any]:
        nonlocal num_containers
        num_containers += 1
        if num_containers > MAX_CONTAINERS:
            raise ValueError(f"more than {MAX_CONTAINERS} arrays and maps")
        return items

    def on_map(pairs: list[tuple[Any, Any]]) -> dict[str, Any]:
        unpacked = dict(on_list(pairs))
        if not all(type(key) is str for key in unpacked):
            raise ValueError("the keys of a map must be strings")
        if len(unpacked) < len(pairs):
            raise ValueError("a key appears twice in one map")
        return unpacked

    try:
        message = msgpack.unpackb(
            body,
            raw=False,
            strict_map_key=True,
            list_hook=on_list,
            object_pairs_hook=on_map,
            ext_hook=_refuse_extension,
            max_array_len=min(MAX_ARRAY, len(body)),
            max_map_len=min(MAX_CONTAINERS, len(body)),
            max_ext_len=0,
        )
    except (ValueError, MemoryError, msgpack.UnpackException) as error:
        raise ProtocolError("bad_frame", f"the frame is not valid msgpack: {_reason(error)}") from error
    if type(message) is not dict:
        raise ProtocolError("bad_frame", f"a frame must hold a msgpack map, not {type(message).__name__}")
    # Few containers cannot nest deeply, and nearly every message has few: the walk is for the others.
    if num_containers > MAX_NESTING and _nests_deeper(message, MAX_NESTING):
        raise ProtocolError("bad_frame", f"arrays and maps nest more than {MAX_NESTING} deep")
    return message


def _nests_deeper(message: dict[str, Any], limit: int) -> bool:
    level: list[Any] = [message]
    for _ in range(limit):
        items = (item for box in level for item in (box.values() if type(box) is dict else box))
        level = [item for item in items if type(item) is dict or type(item) is list]
    return bool(level)


def _refuse_extension(code: int, data: bytes) -> None:
    raise ValueError(f"extension type {code} is not allowed")


def _reason(error: BaseException) -> str:
    """In words where msgpack has none, or names its own parameters."""
    if isinstance(error, msgpack.ExtraData):
        return "bytes follow the end of the map"
    if isinstance(error, msgpack.StackError):
        return "arrays and maps nest too deep"
    if isinstance(error, msgpack.FormatError):
        return "byte 0xc1, which starts no value"
    return "extension types are not allowed" if "max_ext_len" in str(error) else str(error) or "no memory for it"


def _too_large(length: int, limit_bytes: int) -> ProtocolError:
    return ProtocolError("frame_too_large", f"a frame of {length} bytes is over the limit of {limit_bytes}")
