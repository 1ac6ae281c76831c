"""The header: what was written is read, and a damaged file is a sentence, never a crash."""

import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lanes.gguf.header import GgufError, read_header
from tests.lanes.gguf import writer

values = st.one_of(
    st.booleans(),
    st.integers(-(2**63), 2**32 - 1),
    st.floats(width=32, allow_nan=False),
    st.text(),
    st.lists(st.text(), max_size=5),
    st.lists(st.integers(0, 2**32 - 1), max_size=5),
)
in_one_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)


@in_one_folder
@given(
    metadata=st.dictionaries(st.text(max_size=20).filter(lambda key: key != "split.count"), values, max_size=6),
    shapes=st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=4), max_size=5),
    alignment=st.sampled_from([8, 32, 64, 4096]),
    version=st.sampled_from([2, 3]),
)
def test_what_is_written_is_read(
    tmp_path: Path, metadata: dict[str, object], shapes: list[list[int]], alignment: int, version: int
) -> None:
    metadata.pop("general.alignment", None)
    tensors = {f"t{at}": np.full(shape, at, np.float32) for at, shape in enumerate(shapes)}
    path = writer.write(tmp_path / "a.gguf", metadata, tensors, version=version, alignment=alignment)
    header = read_header(path)
    assert {key: header.metadata[key] for key in metadata} == metadata
    content = path.read_bytes()
    for name, array in tensors.items():
        info = header.tensors[name]
        assert info.shape == array.shape
        assert content[info.start : info.start + info.num_bytes] == array.tobytes()


def small_file(path: Path) -> Path:
    metadata = {"general.architecture": "llama", "list": ["a", "bb"], "number": 3}
    tensors = {"one": np.ones((3, 4), np.float32), "two": np.ones(7, np.float32)}
    return writer.write(path, metadata, tensors)


def test_every_truncation_is_found(tmp_path: Path) -> None:
    whole = small_file(tmp_path / "whole.gguf").read_bytes()
    end_of_two = len(whole) - (-7 * 4 % 32)  # the padding behind the last tensor may be missing
    cut = tmp_path / "cut.gguf"
    for length in range(end_of_two):
        cut.write_bytes(whole[:length])
        with pytest.raises(GgufError):
            read_header(cut)
    cut.write_bytes(whole[:end_of_two])
    assert set(read_header(cut).tensors) == {"one", "two"}


@in_one_folder
@given(changes=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=4))
def test_damage_is_an_error_or_a_header(tmp_path: Path, changes: list[tuple[int, int]]) -> None:
    content = bytearray(small_file(tmp_path / "a.gguf").read_bytes())
    for at, byte in changes:
        content[at % len(content)] = byte
    path = tmp_path / "damaged.gguf"
    path.write_bytes(content)
    try:
        header = read_header(path)
    except GgufError:
        return
    for info in header.tensors.values():
        assert info.start + info.num_bytes <= len(content)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "too short"),
        (b"PK\x03\x04" + bytes(40), "no GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60), "truncated or damaged"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**63, 0), "truncated or damaged"),
        (writer.header({"split.count": 3}, []), "one of 3 parts"),
        (writer.header({"general.alignment": 7}, []), "alignment"),
        (writer.header({}, [("w", (4,), 0, 0), ("w", (4,), 0, 0)]) + bytes(16), "two tensors"),
        (writer.header({}, [("w", (4,), 0, 1)]) + bytes(32), "not aligned"),
        (writer.header({}, [("w", (4,), 0, 32)]) + bytes(16), "truncated"),
        (writer.header({}, [("w", (31,), 2, 0)]) + bytes(64), "impossible shape"),
        (writer.header({}, [("blk.0.ffn_up.weight", (256,), 16, 0)]) + bytes(66), "IQ2_XXS"),
        (writer.header({}, [("w", (256,), 99, 0)]) + bytes(66), "number 99"),
        (writer.header({}, [("w", (1, 1, 1, 1, 1), 0, 0)]) + bytes(4), "5 dimensions"),
    ],
)
def test_refused_by_name(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(content)
    with pytest.raises(GgufError, match=words) as caught:
        read_header(path)
    assert str(path) in str(caught.value)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(GgufError, match="cannot be read"):
        read_header(tmp_path / "none.gguf")
