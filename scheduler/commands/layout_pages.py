"""The pages of the wire and of the store's format, made of the docstrings that are the tables of both.

A docstring's paragraphs are taken as they stand, what is indented in it as blocks; a line in those that is underlined
with dashes is a heading. What begins with "This file" is about the code, and left out. What is written here is each
page's head and its example.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from itertools import groupby
from textwrap import dedent

from scheduler import protocol
from store import checkpoint, format, framing, names, segment, wire

_MADE = "This page is made by `python -m scheduler.commands.reference` from the docstrings of"

_WIRE = f"""\
# The wire

What goes over laned's socket: for who writes a client in another language, or wants to know what a field means. From
Python there is a client ([README](../README.md#from-python)). `laned status` shows where the socket is.
{_MADE}
[scheduler/protocol.py](../scheduler/protocol.py), [store/framing.py](../store/framing.py) and
[store/wire.py](../store/wire.py), which are what the daemon's readers and writers are written to.
"""

_WIRE_EXAMPLE = """\
## A client

All it takes is a socket and msgpack. Three requests go out at once; one has a mistake in it, which ends nobody else's:

```python
import socket
import struct
import sys

import msgpack


def send(stream, **message):
    body = msgpack.packb(message)
    stream.write(struct.pack(">I", len(body)) + body)


def receive(stream):
    (length,) = struct.unpack(">I", stream.read(4))
    return msgpack.unpackb(stream.read(length))


with socket.socket(socket.AF_UNIX) as sock:
    sock.connect(sys.argv[1])
    stream = sock.makefile("rwb")
    send(stream, type="hello", version=1, client="example")
    send(stream, type="submit", id="sky", prompt="The sky is", max_tokens=8)
    send(stream, type="submit", id="sea", prompt="The sea is", max_tokens=8)
    send(stream, type="submit", id="oops", prompt="The sea is", max_token=8)
    stream.flush()
    texts = {"sky": "", "sea": "", "oops": ""}
    num_running = len(texts)
    while num_running:
        match receive(stream):
            case {"type": "hello", "model": model}:
                print("connected to", model)
            case {"type": "delta", "id": id, "text": text}:
                texts[id] += text
            case {"type": "done", "id": id, "finish_reason": reason, "usage": usage}:
                print(id, reason, usage["completion_tokens"], repr(texts[id]))
                num_running -= 1
            case {"type": "error", "id": id, "code": code, "message": message}:
                print(id, code, message)
                num_running -= 1
            case {"type": "error", "code": code, "message": message}:
                sys.exit(f"{code}: {message}")
```

With `laned serve --model demo` it prints, in the order in which they end:

```text
connected to SmolLM2-135M-Instruct
oops bad_request submit has no field 'max_token': did you mean "max_tokens"?
sky length 8 ' a canvas of colors, a canvas of'
sea length 8 ' a place of endless wonder and mystery.'
```

The first of these frames, byte by byte: its length, 36, then the map.

```text
00 00 00 24  83 a4 type  a5 hello  a7 version  01  a6 client  a7 example
```
"""

_STORE = f"""\
# The store's format

What `--store` leaves on disk: for who looks after such a folder, or wants to read a file of it with other tools. `laned
store ls`, `show` and `verify` read them for you ([operations](operations.md#the-store)).
{_MADE}
[store/format.py](../store/format.py), [store/segment.py](../store/segment.py),
[store/checkpoint.py](../store/checkpoint.py) and [store/names.py](../store/names.py); a file of each version is among
the tests, so that it will be read as it was written.
"""

_STORE_EXAMPLE = """\
## To read one

The header is text, behind 24 bytes that are not. Its first line says what the segment is, without its tokens:

```sh
head -n 1 FILE.segment | tail -c +25
```

All of it, with every tensor's digest checked, in Python:

```python
import json
import struct
import sys

from xxhash import xxh3_64_hexdigest, xxh3_64_intdigest

with open(sys.argv[1], "rb") as file:
    magic, length, data_start, digest = struct.unpack("<8sIIQ", file.read(24))
    assert magic == b"lanedsg1"
    header = file.read(length)
    assert xxh3_64_intdigest(header) == digest
    segment = json.loads(header)
    print(segment["id"], "of the tokens", segment["start"], "to", segment["start"] + len(segment["tokens"]))
    for tensor in segment["tensors"]:
        file.seek(data_start + tensor["offset"])
        is_whole = xxh3_64_hexdigest(file.read(tensor["bytes"])) == tensor["xxh3"]
        print(tensor["name"], tensor["dtype"], tensor["shape"], "whole" if is_whole else "damaged")
```
"""


def wire_page() -> str:
    return "\n".join(
        [
            _WIRE,
            _section("Frames", framing.__doc__),
            _section("Messages", protocol.__doc__),
            _WIRE_EXAMPLE,
            _section("Between a daemon and the store's process", wire.__doc__),
        ]
    )


def store_page() -> str:
    return "\n".join(
        [
            _STORE,
            _section("The file", format.__doc__),
            _section("What a segment is", segment.__doc__, segment.Segment.__doc__),
            _section("What a tensor is", checkpoint.__doc__, checkpoint.TensorSpec.__doc__),
            _section("The folder", names.__doc__),
            _STORE_EXAMPLE,
        ]
    )


def _section(title: str, *docstrings: str | None) -> str:
    return "\n\n".join([f"## {title}", *(markdown(text) for text in docstrings if text)]) + "\n"


def markdown(docstring: str) -> str:
    """See the head of this file."""
    blocks = [block for block in inspect.cleandoc(docstring).split("\n\n") if not block.startswith("This file")]
    parts: list[str] = []
    for is_indented, several in groupby(blocks, key=lambda block: block.startswith("    ")):
        text = "\n\n".join(several)
        parts += _fenced(dedent(text).splitlines()) if is_indented else [text]
    return "\n\n".join(parts)


def _fenced(lines: list[str]) -> Iterator[str]:
    """Blocks of code, and between them the headings that stand in them."""
    underlines = [at for at in range(1, len(lines)) if lines[at] and lines[at] == "-" * len(lines[at - 1])]
    begins = [0, *(at + 1 for at in underlines)]
    ends = [*(at - 1 for at in underlines), len(lines)]
    headings = ["", *(lines[at - 1] for at in underlines)]
    for heading, begin, end in zip(headings, begins, ends, strict=True):
        code = "\n".join(lines[begin:end]).strip("\n")
        if heading:
            yield f"### {heading.capitalize()}"
        if code:
            yield f"```text\n{code}\n```"
