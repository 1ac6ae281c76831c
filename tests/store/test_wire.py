import pytest

from store import wire
from store.framing import FRAME_BYTES, FrameDecoder, ProtocolError, encode_frame

ID = "0123456789abcdef" * 2
FILE = "0123456789abcdef.writing"

MESSAGES: list[tuple[dict[str, type], object]] = [
    (wire.REQUESTS, wire.Hello(1, "model-1")),
    (wire.REQUESTS, wire.Find(1, ID, 5, b"\x01\0\0\0")),
    (wire.REQUESTS, wire.Find(1, ID, 0, b"")),
    (wire.REQUESTS, wire.Release(7)),
    (wire.REQUESTS, wire.Condemn(1, ID)),
    (wire.REQUESTS, wire.Reserve(1, 2**40)),
    (wire.REQUESTS, wire.Commit(1, FILE)),
    (wire.REQUESTS, wire.Abandon(1, FILE)),
    (wire.REQUESTS, wire.Flush(1)),
    (wire.REQUESTS, wire.Stat(1)),
    (wire.REPLIES, wire.Welcome(1, "/store")),
    (wire.REPLIES, wire.FoundChain(1, 2, 3, 3, (ID, ID))),
    (wire.REPLIES, wire.FoundChain(1, 0, 0, 0, ())),
    (wire.REPLIES, wire.Reserved(1, FILE)),
    (wire.REPLIES, wire.Reserved(1)),
    (wire.REPLIES, wire.Committed(1, "kept")),
    (wire.REPLIES, wire.Finished(1)),
    (wire.REPLIES, wire.Stats(1, 2, 3, 4, 5, 6, 7, 8)),
    (wire.REPLIES, wire.Away(1, "no folder")),
    (wire.REPLIES, wire.Failure("bad_frame", "why")),
]


@pytest.mark.parametrize(("table", "message"), MESSAGES, ids=lambda value: type(value).__name__)
def test_every_message_comes_back_as_it_was(table: dict[str, type], message: object) -> None:
    decoder = FrameDecoder()
    decoder.feed(encode_frame(wire.encode(message)))  # type: ignore[arg-type]
    assert [wire.decode(said, table) for said in decoder] == [message]


def test_every_type_is_among_them() -> None:
    assert {type(message) for _, message in MESSAGES} == {*wire.REQUESTS.values(), *wire.REPLIES.values()}


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"type": 1},
        {"type": "found"},
        {"type": "release"},
        {"type": "release", "pin": -1},
        {"type": "release", "pin": True},
        {"type": "release", "pin": 2**63},
        {"type": "condemn", "n": 1, "id": ID.upper()},
        {"type": "condemn", "n": 1, "id": f"../{ID[3:]}"},
        {"type": "commit", "n": 1, "file": f"../{FILE}"},
        {"type": "commit", "n": 1, "file": f"{ID}.segment"},
        {"type": "commit", "n": 1, "file": None},
        {"type": "find", "n": 1, "root": ID, "limit": 1, "tokens": b"123"},
        {"type": "find", "n": 1, "root": ID, "limit": 1, "tokens": [1]},
        {"type": "hello", "version": 1, "fingerprint": ""},
    ],
)
def test_what_is_wrong_is_refused(said: dict[str, object]) -> None:
    with pytest.raises(ProtocolError) as refused:
        wire.decode(said, wire.REQUESTS)
    assert refused.value.code == "bad_request"


@pytest.mark.parametrize("said", [{"ids": [ID, 1]}, {"ids": [f"/{ID[1:]}"]}, {"ids": ID}, {"outcome": "fine"}])
def test_a_wrong_answer_is_refused(said: dict[str, object]) -> None:
    whole = {"n": 1, "pin": 1, "matched": 1, "tokens": 1, **said, "type": "committed" if "outcome" in said else "found"}
    with pytest.raises(ProtocolError):
        wire.decode(whole, wire.REPLIES)


def test_the_longest_question_and_answer_fit_into_a_frame() -> None:
    tokens = bytes(4 * wire.MAX_TOKENS)
    assert len(encode_frame(wire.encode(wire.Find(2**62, ID, 2**62, tokens)))) <= FRAME_BYTES
    assert len(encode_frame(wire.encode(wire.FoundChain(1, 1, 1, 1, (ID,) * 100_000)))) <= FRAME_BYTES
