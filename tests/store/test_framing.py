import struct
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from store.framing import FRAME_BYTES, MAX_CONTAINERS, MAX_NESTING, FrameDecoder, ProtocolError, encode_frame

# A busy machine is no counterexample.
LAW = settings(deadline=None)

scalars = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text() | st.binary()
)
values = st.recursive(scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20)
messages = st.dictionaries(st.text(), values)


def framed(body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + body


def decode(data: bytes, limit_bytes: int = FRAME_BYTES) -> list[dict[str, Any]]:
    decoder = FrameDecoder(limit_bytes)
    decoder.feed(data)
    return list(decoder)


def outcome(data: bytes) -> Any:
    """The messages, or the code of the error."""
    try:
        return decode(data)
    except ProtocolError as error:
        return error.code


@LAW
@given(st.lists(messages), st.data())
def test_any_cut_of_the_bytes_gives_the_same_messages(sent: list[dict[str, Any]], data: st.DataObject) -> None:
    stream = b"".join(map(encode_frame, sent))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)))))
    decoder = FrameDecoder()
    got = []
    for start, stop in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        decoder.feed(stream[start:stop])
        got += list(decoder)
    assert got == sent
    assert not decoder.mid_frame
    decoder.end()


@LAW
@given(st.binary())
def test_any_bytes_give_messages_or_a_protocol_error(data: bytes) -> None:
    assert type(outcome(data)) is list or outcome(data) in ("bad_frame", "frame_too_large")


@LAW
@given(st.binary(min_size=1))
def test_any_body_is_a_map_or_a_protocol_error(body: bytes) -> None:
    got = outcome(framed(body))
    assert got == "bad_frame" or (len(got) == 1 and set(map(type, got[0])) <= {str})


@LAW
@given(messages, st.data())
def test_an_end_inside_a_frame_is_an_error(message: dict[str, Any], data: st.DataObject) -> None:
    frame = encode_frame(message)
    decoder = FrameDecoder()
    decoder.feed(frame[: data.draw(st.integers(1, len(frame) - 1))])
    assert list(decoder) == []
    assert decoder.mid_frame
    with pytest.raises(ProtocolError) as raised:
        decoder.end()
    assert raised.value.code == "bad_frame"


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"\x90", "not list"),
        (b"\x05", "not int"),
        (b"\xc0", "not NoneType"),
        (b"\x80\x80", "bytes follow"),
        (b"\xc1", "0xc1"),
        (b"\x81\xa1a", "incomplete"),
        (b"\x81\xa1a\xa1\xff", "utf-8"),
        (b"\x81\xa1\xff\x01", "utf-8"),
        (b"\x81\x01\x02", "key"),
        (b"\x81\xc4\x01a\x02", "keys of a map must be strings"),
        (b"\x81\xa1a\x81\xc0\x02", "key"),
        (b"\x82\xa1a\x01\xa1a\x02", "twice"),
        (b"\x81\xa1a\xd4\x05x", "extension"),
        (b"\x81\xa1a\xc7\x00\x05", "extension"),
        (msgpack.packb({"a": msgpack.Timestamp(1)}), "extension"),
        (b"\x81\xa1a" + b"\x91" * 3000, "nest too deep"),
        (b"\x81\xa1a\xdd\xff\xff\xff\xff", "max_array_len"),
        (b"\xdf\xff\xff\xff\xff", "max_map_len"),
    ],
)
def test_a_body_that_is_no_map_of_ours_is_refused(body: bytes, reason: str) -> None:
    with pytest.raises(ProtocolError, match=reason) as raised:
        decode(framed(body))
    assert raised.value.code == "bad_frame"


def nested(depth: int) -> dict[str, Any]:
    message: dict[str, Any] = {}
    for _ in range(depth - 1):
        message = {"a": message}
    return message


@pytest.mark.parametrize("others", [0, MAX_NESTING])
def test_nesting_has_a_limit(others: int) -> None:
    siblings: dict[str, Any] = {"others": [[]] * others}
    fits = nested(MAX_NESTING) | siblings
    assert decode(encode_frame(fits)) == [fits]
    with pytest.raises(ProtocolError, match="nest"):
        decode(encode_frame(nested(MAX_NESTING + 1) | siblings))


def test_the_number_of_containers_has_a_limit() -> None:
    fits: dict[str, Any] = {"a": [{}] * (MAX_CONTAINERS - 2)}
    assert decode(encode_frame(fits)) == [fits]
    with pytest.raises(ProtocolError, match="arrays and maps"):
        decode(encode_frame({"a": [{}] * (MAX_CONTAINERS - 1)}))


def test_a_length_over_the_limit_is_refused_before_its_body_comes() -> None:
    with pytest.raises(ProtocolError) as raised:
        decode(struct.pack(">I", 101), limit_bytes=100)
    assert raised.value.code == "frame_too_large"
    assert decode(framed(msgpack.packb({"a": b"x" * 95})), limit_bytes=100) == [{"a": b"x" * 95}]


def test_another_protocol_is_refused_by_its_first_bytes() -> None:
    with pytest.raises(ProtocolError) as raised:
        decode(b"GET / HTTP/1.1\r\n\r\n")
    assert raised.value.code == "frame_too_large"


def test_a_frame_of_nothing_is_refused() -> None:
    with pytest.raises(ProtocolError, match="0 bytes"):
        decode(bytes(4))


def test_frames_before_a_broken_one_are_given_and_none_after() -> None:
    good = encode_frame({"a": 1})
    decoder = FrameDecoder()
    decoder.feed(good + framed(b"\xc1") + good)
    assert next(decoder) == {"a": 1}
    for _ in range(2):
        with pytest.raises(ProtocolError):
            next(decoder)
        decoder.feed(good)
    with pytest.raises(ProtocolError):
        decoder.end()


def test_encoding_keeps_the_limit_and_says_what_it_cannot() -> None:
    assert len(encode_frame({"a": b"x" * 95}, limit_bytes=100)) == 104
    with pytest.raises(ProtocolError) as raised:
        encode_frame({"a": b"x" * 96}, limit_bytes=100)
    assert raised.value.code == "frame_too_large"
    for unsayable in ("\ud800", 2**64):
        with pytest.raises(ValueError, match=r"surrogate|out of range"):
            encode_frame({"a": unsayable})
    with pytest.raises(TypeError):
        encode_frame({"a": object()})
