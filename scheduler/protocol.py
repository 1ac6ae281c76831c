"""The wire between laned and its clients, version 1: every message, every field, every error.

Messages are msgpack maps in frames (store/framing.py: u32 big-endian length, then the map), each with a "type". A
client says hello first and waits for nothing: it may send on at once. It chooses the ids; they come back as sent.

Types: text is a string; count and token are integers of 0 and more; number is an integer or a finite float; [x] is an
array; {x} a map. A field with ? may be left out, or nil, and then stands for what follows in brackets.

    client to daemon
    ----------------
    hello   version: count                       the protocol the client speaks; the first frame, once
            client?: text (<= 256 chars)         its name, for the daemon's log
    submit  id: text (1..128 chars) or integer   unlike the ids of this connection's requests that still run
            prompt | messages | prompt_token_ids exactly one:
              prompt: text (not empty)             is tokenized as it is
              messages: [{role: text (1..64 chars), content: text}] (1..4096)   goes through the chat template
              prompt_token_ids: [token] (1..2**20)   is taken as it is, if the vocabulary has all of them
            max_tokens?: 1..2**31-1              new tokens at most [the daemon's default]
            temperature?: number 0..100          0 takes the likeliest token [the daemon's default]
            top_p?: number 0..1, not 0           [the daemon's default; 1 switches it off]
            top_k?: 0..2**31-1                   [the daemon's default; 0 switches it off]
            min_p?: number 0..1                  [the daemon's default; 0 switches it off]
            seed?: 0..2**63-1                    same seed, same prompt: same answer [a new one per request]
            stop?: text or [text] (<= 32 of 1..256 chars)  ends before the first of these, which is not sent [none]
            stop_token_ids?: [token] (<= 128)    ends at the first of these, beside the model's own [none]
            ignore_eos?: bool                    does not end at the model's own end tokens [false]
            stream?: bool                        false: no delta, the text comes with done [true]
            chat_template_kwargs?: {} (<= 64 keys)  variables for the chat template, with messages only [none]
    cancel  id                                   the request ends with done "cancelled"; if none runs, nothing happens
    status
    ping    nonce?: text (1..128 chars) or integer

    daemon to client
    ----------------
    hello   version: count, server: text, model: text
    delta   id, text: text, token_ids: [token]   what is new: as many tokens as became known since the last delta; text
                                                 may be empty, and lag behind the tokens, where a character is not whole
    done    id, finish_reason: text              "stop" (an end token or a stop), "length" or "cancelled"
            usage: {prompt_tokens, completion_tokens, cached_tokens: count}
            timings: {queued_s, prompt_s, decode_s, total_s: number, ttft_s?: number}   seconds; ttft_s: from submit to
                                                 the first token, if there was one
            stop_reason?: text or token          the stop string or the token that ended it
            text?: text                          the whole answer, where stream was false
    error   id?, code: text, message: text, retry_after_s?: number
                                                 with an id: that submit is refused, or that request has failed; nothing
                                                 follows for it (but see duplicate_id). Without: the connection or a
                                                 message that bears no id.
    status  report: {}                           for people and dashboards; its keys are no part of this protocol
    pong    nonce?                               the ping's

For each submit there are deltas (none where stream is false), then exactly one done or error. Status and pong come in
the order of their questions. The daemon refuses fields it does not know, as a misspelt option must not be dropped in
silence; a client ignores fields and types it does not know, so that the daemon may learn to say more in this version.

A client that shuts down only its writing side still gets its replies. One that closes has its requests cancelled. One
that stops reading gets fewer and larger deltas, and is cut off after a time, or a number of unsent bytes.

    error code                whom it ends     what happened, and what to do
    ------------------------  ---------------  ---------------------------------------------------------------------
    bad_frame                 the connection   no msgpack map, or the stream ended inside a frame
    frame_too_large           the connection   a frame over the limit: send token ids, or less
    unsupported_version       the connection   the daemon speaks another version; the message says which
    hello_expected            the connection   the first frame was no hello
    timeout                   the connection   hello, or the rest of a frame, came too late
    forbidden                 the connection   the socket's owner has not let in this user
    unknown_type              the message      no such type
    bad_request               the message      a field is missing, unknown, of the wrong type or out of range
    duplicate_id              the message      a request of that id still runs (and goes on running): choose another
    context_length_exceeded   the request      the prompt leaves no room in the model's context
    overloaded                the request      too much is waiting: try again after retry_after_s
    shutting_down             the request      the daemon is going down: try again when it is back
    model_failed              the request      the model failed on this row; others go on
    internal                  the request      a fault of the daemon, which its log explains

Without an id, overloaded, shutting_down and internal end the connection.
"""

from dataclasses import dataclass
from typing import Any

PROTOCOL_VERSION = 1

ERROR_CODES = frozenset(
    [
        "bad_frame",
        "frame_too_large",
        "unsupported_version",
        "hello_expected",
        "timeout",
        "forbidden",
        "unknown_type",
        "bad_request",
        "duplicate_id",
        "context_length_exceeded",
        "overloaded",
        "shutting_down",
        "model_failed",
        "internal",
    ]
)

RequestId = str | int


@dataclass(frozen=True, slots=True)
class ClientHello:
    version: int
    client: str | None = None


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a chat."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Submit:
    """Exactly one of prompt, messages and prompt_token_ids is not None. None elsewhere leaves it to the daemon."""

    id: RequestId
    prompt: str | None = None
    messages: tuple[Message, ...] | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    stream: bool = True
    chat_template_kwargs: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Cancel:
    id: RequestId


@dataclass(frozen=True, slots=True)
class AskStatus:
    pass


@dataclass(frozen=True, slots=True)
class Ping:
    nonce: RequestId | None = None


@dataclass(frozen=True, slots=True)
class Hello:
    version: int
    server: str
    model: str


@dataclass(frozen=True, slots=True)
class Delta:
    id: RequestId
    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Timings:
    queued_s: float
    prompt_s: float
    decode_s: float
    total_s: float
    ttft_s: float | None = None


@dataclass(frozen=True, slots=True)
class Done:
    id: RequestId
    finish_reason: str
    usage: Usage
    timings: Timings
    stop_reason: RequestId | None = None
    text: str | None = None


@dataclass(frozen=True, slots=True)
class Error:
    """Without an id it is about the connection, or about a message that bears no readable id."""

    code: str
    message: str
    id: RequestId | None = None
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class Status:
    report: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Pong:
    nonce: RequestId | None = None


Request = ClientHello | Submit | Cancel | AskStatus | Ping
Reply = Hello | Delta | Done | Error | Status | Pong

REQUESTS: dict[str, type[Request]] = {
    "hello": ClientHello,
    "submit": Submit,
    "cancel": Cancel,
    "status": AskStatus,
    "ping": Ping,
}
REPLIES: dict[str, type[Reply]] = {
    "hello": Hello,
    "delta": Delta,
    "done": Done,
    "error": Error,
    "status": Status,
    "pong": Pong,
}
