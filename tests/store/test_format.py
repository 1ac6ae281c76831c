"""The file's form: what is written is read, each rule is enforced, and the first version stays what it was."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from tempfile import TemporaryFile
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from store.checkpoint import DTYPE_BYTES, TensorSpec
from store.files import FILES, Files
from store.format import (
    ALIGN_BYTES,
    PREAMBLE,
    CorruptSegment,
    OtherVersion,
    aligned,
    decode,
    decode_identity,
    encode,
    validate,
)
from store.segment import Segment
from store.segment_file import read_identity, read_stored, verify_file, verify_tensor, write_segment
from tests.store.segments import bytes_for, save, segment, with_tensors

GOLDEN = Path(__file__).parent / "golden"


def hybrid() -> Segment:
    """One of every kind: columns of a part, a ring with its first tokens, state at two boundaries."""
    parent = segment(range(100, 110))
    return segment(
        [1, 2, 3, 70000, 5, 6],
        parent,
        10,
        (13, 16),
        (
            TensorSpec("0.0", "bfloat16", (2, 6, 4), ((10, 16),)),
            TensorSpec("0.1", "bfloat16", (2, 6, 4), ((10, 16),)),
            TensorSpec("1.0", "float32", (1, 5, 2), ((0, 1), (9, 11), (14, 16))),
            TensorSpec("2.0.0", "uint32", (3, 5), (), 13),
            TensorSpec("2.0.0", "uint32", (3, 5), (), 16),
        ),
    )


def stored_bytes(of: Segment) -> bytes:
    """The file as bytes, its holes zeros."""
    with TemporaryFile() as file:
        write_segment(file.fileno(), of, bytes_for(of))
        return file.read()


ids = st.integers(0, 2**32 - 1)
dims = st.integers(0, 3)


@st.composite
def segments(draw: st.DrawFn) -> Segment:
    parent = draw(st.none() | st.lists(ids, min_size=1, max_size=5).map(segment))
    start = 0 if parent is None else draw(st.integers(1, parent.stop))
    tokens = draw(st.lists(ids, min_size=1, max_size=20))
    stop = start + len(tokens)
    dtype = draw(st.sampled_from(sorted(DTYPE_BYTES)))
    bounds = draw(st.none() | st.sets(st.integers(start + 1, stop)).map(lambda found: tuple(sorted(found))))
    tensors = [TensorSpec("0.0", dtype, (draw(dims), len(tokens), draw(dims)), ((start, stop),))]
    tensors += [TensorSpec("1.0", dtype, tuple(draw(st.lists(dims, max_size=4))), (), at) for at in bounds or ()]
    return segment(tokens, parent, start, bounds, tuple(draw(st.permutations(tensors))))


@given(segments())
def test_what_is_written_is_read(of: Segment) -> None:
    digests = tuple(f"{place:016x}" for place in range(len(of.tensors)))
    head = encode(of, digests)
    stored = decode(head)
    validate(stored, stored.data_start + stored.data_bytes)
    assert stored.segment == of
    assert stored.xxh3 == digests
    assert stored.data_start == aligned(len(head))
    assert all(place % ALIGN_BYTES == 0 for place in stored.places)
    assert decode_identity(head) == (replace(of, tensors=()), stored.data_start + stored.data_bytes)


def test_a_file_holds_its_tensors_where_its_header_says(tmp_path: Path) -> None:
    of = hybrid()
    path = tmp_path / "segment"
    save(path, of)
    data = path.read_bytes()
    stored = verify_file(path)
    assert stored.segment == of
    for place, size, buffer in zip(stored.places, stored.sizes, bytes_for(of), strict=True):
        assert data[place : place + size] == buffer
    assert len(data) == stored.places[-1] + stored.sizes[-1]


def test_a_segment_without_tensors_is_its_header(tmp_path: Path) -> None:
    save(tmp_path / "segment", segment([1, 2]))
    assert verify_file(tmp_path / "segment").segment == segment([1, 2])
    assert (tmp_path / "segment").stat().st_size == ALIGN_BYTES


def test_holes_are_not_written(tmp_path: Path) -> None:
    of = with_tensors(range(10), layers=20)
    fd = FILES.create(tmp_path / "segment")
    written = write_segment(fd, of, bytes_for(of))
    stored = read_stored(fd)
    FILES.close(fd)
    assert written < of.nbytes + stored.data_start
    assert (tmp_path / "segment").stat().st_size > 39 * ALIGN_BYTES


def test_a_write_that_takes_less_than_it_was_given_goes_on(tmp_path: Path) -> None:
    class Short(Files):
        def write(self, fd: int, data: bytes | memoryview, offset: int) -> int:
            return super().write(fd, data[:7], offset)

    fd = FILES.create(tmp_path / "segment")
    write_segment(fd, hybrid(), bytes_for(hybrid()), Short())
    FILES.close(fd)
    assert verify_file(tmp_path / "segment").segment == hybrid()


def test_a_header_longer_than_the_first_read(tmp_path: Path) -> None:
    of = with_tensors([2**32 - 1] * 100_000, dim=1)
    save(tmp_path / "segment", of)
    assert verify_file(tmp_path / "segment").segment == of
    os.truncate(tmp_path / "segment", 50_000)
    with pytest.raises(CorruptSegment, match="50000 bytes"):
        verify_file(tmp_path / "segment")


def test_the_header_is_text_in_lines(tmp_path: Path) -> None:
    save(tmp_path / "segment", hybrid())
    lines = (tmp_path / "segment").read_bytes()[PREAMBLE.size :].split(b"\n")
    assert json.loads(lines[0].rstrip(b",") + b"}")["boundaries"] == [13, 16]
    assert lines[1] == b'"tokens": [1, 2, 3, 70000, 5, 6],'
    assert json.loads(lines[3].rstrip(b","))["name"] == "0.0"


def test_the_first_version_stays_what_it_was() -> None:
    """A changed form gets a new version, and its own golden file."""
    assert stored_bytes(hybrid()) == (GOLDEN / "segment-1").read_bytes()


def test_every_byte_of_a_header_counts(tmp_path: Path) -> None:
    whole = stored_bytes(hybrid())
    path = tmp_path / "segment"
    path.write_bytes(whole)
    fd = FILES.open(path, writable=True)
    random = Random(1)
    for place in range(PREAMBLE.size + PREAMBLE.unpack_from(whole)[1]):
        for flip in (1 << random.randrange(8), 0xFF):
            os.pwrite(fd, bytes([whole[place] ^ flip]), place)
            for read in (read_stored, read_identity):
                with pytest.raises(CorruptSegment):
                    read(fd)
        os.pwrite(fd, whole[place : place + 1], place)
    assert read_stored(fd).segment == hybrid()
    FILES.close(fd)


def test_flipped_bits_of_tensors_are_found_by_verifying(tmp_path: Path) -> None:
    of = with_tensors(range(40), layers=3, dim=16)
    path = tmp_path / "segment"
    save(path, of)
    fd = FILES.open(path, writable=True)
    stored = read_stored(fd)
    random = Random(2)
    for _ in range(5000):
        place = random.randrange(len(of.tensors))
        at = stored.places[place] + random.randrange(stored.sizes[place])
        was = os.pread(fd, 1, at)
        os.pwrite(fd, bytes([was[0] ^ 1 << random.randrange(8)]), at)
        read_stored(fd)
        with pytest.raises(CorruptSegment, match=of.tensors[place].name):
            verify_tensor(fd, stored, place)
        os.pwrite(fd, was, at)
    FILES.close(fd)
    verify_file(path)


@pytest.mark.parametrize("off", [-1, 1, ALIGN_BYTES])
def test_a_file_of_another_length_is_not_whole(tmp_path: Path, off: int) -> None:
    save(tmp_path / "segment", hybrid())
    os.truncate(tmp_path / "segment", (tmp_path / "segment").stat().st_size + off)
    fd = FILES.open(tmp_path / "segment")
    for read in (read_stored, read_identity):
        with pytest.raises(CorruptSegment, match="its file has"):
            read(fd)
    FILES.close(fd)


@given(st.binary(max_size=200))
def test_any_bytes_are_corrupt(data: bytes) -> None:
    for read in (decode, decode_identity):
        with pytest.raises(CorruptSegment):
            read(data)
    with pytest.raises(CorruptSegment):
        decode(encode(segment([1]), ())[: PREAMBLE.size] + data)


def test_another_version_is_told_from_a_broken_file() -> None:
    head = encode(segment([1]), ())
    with pytest.raises(OtherVersion):
        decode(head[:7] + b"2" + head[8:])


def sealed(said: Any) -> bytes:
    """A head with this for a header, its digest right."""
    text = json.dumps(said).encode()
    return PREAMBLE.pack(b"lanedsg1", len(text), aligned(PREAMBLE.size + len(text)), xxh3_64_intdigest(text)) + text


def said_of(of: Segment) -> Any:
    head = encode(of, ["0" * 16] * len(of.tensors))
    return json.loads(head[PREAMBLE.size :])


def set_tensor(place: int, **fields: Any) -> Callable[[Any], None]:
    return lambda said: said["tensors"][place].update(fields)


def set_field(**fields: Any) -> Callable[[Any], None]:
    return lambda said: said.update(fields)


BROKEN: dict[str, Callable[[Any], None]] = {
    "id of other tokens": lambda said: said["tokens"].__setitem__(0, 9),
    "id of another root": set_field(root="0" * 32),
    "root no id": set_field(root="x"),
    "parent no id": set_field(parent="x"),
    "no parent": set_field(parent=None),
    "start at 0 with a parent": set_field(start=0),
    "negative start": set_field(start=-1),
    "no tokens": set_field(tokens=[]),
    "a negative token": set_field(tokens=[-1]),
    "a token over 32 bits": set_field(tokens=[2**32]),
    "a token of text": set_field(tokens=["1"]),
    "boundary at start": set_field(boundaries=[10, 16]),
    "boundary past the end": set_field(boundaries=[13, 17]),
    "boundaries descend": set_field(boundaries=[16, 13]),
    "boundaries of text": set_field(boundaries=["13"]),
    "a field too many": set_field(more=1),
    "a field too few": lambda said: said.pop("data_bytes"),
    "no number": set_field(start=True),
    "data bytes": set_field(data_bytes=1),
    "tensors no list": set_field(tensors={}),
    "a tensor no object": set_field(tensors=[1]),
    "a tensor's field too few": lambda said: said["tensors"][0].pop("at"),
    "name": set_tensor(0, name="../0"),
    "dtype": set_tensor(0, dtype="float8"),
    "negative shape": set_tensor(0, shape=[-2, 6, -4]),
    "a shape of text": set_tensor(0, shape=["2", 6, 4]),
    "size": set_tensor(0, bytes=95),
    "columns without heads": set_tensor(0, shape=[6, 8]),
    "ranges do not add up": set_tensor(0, ranges=[[10, 15]]),
    "ranges overlap": set_tensor(2, ranges=[[0, 2], [1, 4]]),
    "ranges past the end": set_tensor(0, ranges=[[11, 17]]),
    "negative range": set_tensor(2, ranges=[[-1, 4]]),
    "empty range": set_tensor(2, ranges=[[0, 0], [0, 5]]),
    "range of three": set_tensor(0, ranges=[[10, 16, 17]]),
    "state between boundaries": set_tensor(3, at=14),
    "state with ranges": set_tensor(3, ranges=[[10, 11]]),
    "a tensor twice": set_tensor(4, at=13),
    "offset not aligned": set_tensor(1, offset=100),
    "tensors overlap": set_tensor(1, offset=0),
    "a gap": set_tensor(4, offset=10 * ALIGN_BYTES),
    "digest": set_tensor(0, xxh3="0"),
    "offset a float": set_tensor(0, offset=0.0),
}


@pytest.mark.parametrize("name", BROKEN)
def test_each_rule_is_enforced(name: str) -> None:
    said = said_of(hybrid())
    good = decode(sealed(said))
    validate(good, good.data_start + good.data_bytes)
    BROKEN[name](said)
    with pytest.raises(CorruptSegment):  # noqa: PT012
        stored = decode(sealed(said))
        validate(stored, stored.data_start + stored.data_bytes)


def test_what_can_be_cut_anywhere_has_all_its_columns() -> None:
    of = with_tensors(range(10))
    spec = of.tensors[0]
    short = replace(of, tensors=(spec._replace(shape=(2, 9, 4), ranges=((1, 10),)), *of.tensors[1:]))
    stored = decode(encode(short, ["0" * 16] * 4))
    with pytest.raises(CorruptSegment, match="without boundaries"):
        validate(stored, stored.data_start + stored.data_bytes)


def test_a_header_that_nests_without_end_is_corrupt() -> None:
    text = b"[" * 100_000
    head = PREAMBLE.pack(b"lanedsg1", len(text), aligned(PREAMBLE.size + len(text)), xxh3_64_intdigest(text)) + text
    with pytest.raises(CorruptSegment):
        decode(head)
