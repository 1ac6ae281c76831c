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
              messages: [message] (1..4096)        goes through the chat template, see below
              prompt_token_ids: [token] (1..2**20)   is taken as it is, if the vocabulary has all of them
            max_tokens?: 1..2**31-1              new tokens at most [the daemon's default]
            temperature?: number 0..100          0 takes the likeliest token [the daemon's default]
            top_p?: number 0..1, not 0           [the daemon's default; 1 switches it off]
            top_k?: 0..2**31-1                   [the daemon's default; 0 switches it off]
            min_p?: number 0..1                  [the daemon's default; 0 switches it off]
            xtc_probability?: number 0..1        how often the likeliest tokens are left out: of those above the
                                                 threshold all but the least likely [0, off]
            xtc_threshold?: number 0..0.5        the probability from which on that happens [0.1]
            repetition_penalty?: number 0.01..100   divides the logits of tokens that came before, or multiplies
                                                 negative ones [1, off]
            presence_penalty?: number -100..100  is subtracted from the logits of tokens that came before [0, off]
            frequency_penalty?: number -100..100 the same for each time that they came [0, off]
            repetition_context_size?, presence_context_size?, frequency_context_size?: 1..2**31-1   how many of the last
                                                 tokens, prompt and answer, the three look at [20]
            logit_bias?: {text: number -100..100} (<= 1024)   added to logits; keys are token ids in digits [none]
            seed?: 0..2**63-1                    same seed, same prompt: same answer [a new one per request]
            n?: 1..128                           so many answers to one prompt, each with an index from 0 on and, but
                                                 for the first, a seed made of the request's and its index [1]; where
                                                 nothing is remembered, those that get rows later process it once more
            stop?: text or [text] (<= 32 of 1..256 chars)  ends before the first of these, which is not sent [none]
            stop_token_ids?: [token] (<= 128)    ends at the first of these, beside the model's own [none]
            ignore_eos?: bool                    does not end at the model's own end tokens [false]
            min_tokens?: 0..2**31-1              new tokens before any of the above may end it; at most max_tokens [0]
            logprobs?: bool                      tell the log-probability of each token [false]
            top_logprobs?: 0..20                 and those of so many of the likeliest in its place; needs logprobs [0]
            echo?: bool                          the answer's text begins with the prompt's; not with messages [false]
            structured_outputs?: {} with one of  the answer keeps to this, to its end if max_tokens lets it get there
              json: {} (<= 1024 keys)              a JSON schema
              json_object: bool (true)             any JSON object
              regex: text (1..65536 chars)         a regular expression, for all of the answer
              choice: [text] (1..1024)             one of these
              grammar: text (1..65536 chars)       a grammar in Lark's notation
            tools?: [{}] (<= 128)                functions that the model may call, as the template wants them; with
                                                 messages only, for models that mlx-lm has a parser for [none]
            tool_choice?: "auto" or "none"       none: tools are not shown to the model ["auto"]
            stream?: bool                        false: no delta, the text comes with done [true]
            chat_template_kwargs?: {} (<= 64 keys)  variables for the chat template, with messages only [none]
            priority?: -1000..1000               lower ones are admitted first, each step of it worth 30 s of waiting,
                                                 and set aside last where memory is short [0]
            timeout_s?: number above 0 to 10**6  ends with the error "timed_out" if it is not answered in that time,
                                                 what came until then being good [no limit]
            cache?: "both", "read", "write", "none"  whether it may begin with what is remembered of others, and be
                                                 remembered itself ["both"]
            cache_salt?: text (1..256 chars)     its prompt is remembered for requests of the same salt alone [none]
            adapter?: text (1..128 chars)        is answered with the adapter of this name; "none": by the model as it
                                                 is [the adapter named default, if there is one]
    cancel  id                                   the request ends with done "cancelled"; if none runs, nothing happens
    status
    ping    nonce?: text (1..128 chars) or integer
    load_adapter    id
            name: text (1..128 chars)            stands for this low-rank adapter from now on; what runs keeps what it
            path: text (1..4096 chars)           began with. An absolute path, of a folder where the daemon runs
    unload_adapter  id, name                     it stands for nothing from now on; what runs keeps what it began with
    flush                                        answered once all that was remembered before is on disk or given up;
                                                 what this connection sends meanwhile waits

    daemon to client
    ----------------
    hello   version: count, server: text, model: text
    delta   id, text: text, token_ids: [token]   what is new: as many tokens as became known since the last delta; text
                                                 may be empty, and lag behind the tokens, where a character is not whole
            index?: count                        which of the request's answers [0]
            reasoning?: text                     what a model thinks before it answers, which is no part of text [""]
            tool_calls?: [tool_call]             calls that are complete now [none]
            logprobs?: [{token_id: token, token: text, logprob: number, top_logprobs: [{token_id, token, logprob}]}]
                                                 one for each of token_ids, where they were asked for [none]
    done    id, finish_reason: text              "stop" (an end token or a stop), "tool_calls" (the same after a call),
                                                 "length" or "cancelled"
            index?: count                        which of the request's answers has ended [0]
            usage: {prompt_tokens, completion_tokens, cached_tokens: count, cached_memory_tokens?, cached_disk_tokens?:
                   count [0]}                    cached_tokens of the prompt's were not processed, but remembered: these
                                                 in memory, those on disk
            timings: {queued_s, prompt_s, decode_s, total_s: number, ttft_s?: number}   seconds; ttft_s: from submit to
                                                 the first token, if there was one
            stop_reason?: text or token          the stop string or the token that ended it
            text?: text                          the whole answer, where stream was false; then reasoning?, tool_calls?
            reasoning?, tool_calls?, logprobs?   and logprobs? are the whole, too, as in deltas
    error   id?, code: text, message: text, retry_after_s?: number, index?: count
                                                 with an id: that submit is refused, or that request has failed; nothing
                                                 follows for it (but see duplicate_id). Without: the connection or a
                                                 message that bears no id.
    status  report: {}                           for people and dashboards; its keys are no part of this protocol
    pong    nonce?                               the ping's
    adapters  id, names: [text]                  the adapter is loaded or unloaded; these are there now
    flushed on_disk: bool                        all of it: false where some was given up since the connection began or
                                                 flushed last, or no store on disk is there

A message of a chat, and a tool_call in it or in an answer:

    message    role: text (1..64 chars), content: text, which may be left out [""] where there are tool_calls,
               name?: text (1..128 chars), tool_calls?: [tool_call] (<= 128), tool_call_id?: text (1..128 chars)
    tool_call  id: text (1..128 chars), type?: "function" ["function"]
               function: {name: text (1..128 chars), arguments: text}   arguments are JSON

For each submit there are deltas (none where stream is false), then exactly one done or error; with n answers one for
each, an error then with its index, or one error without an index, which refuses them all. Status, pong and flushed come
in the order of their questions. The daemon refuses fields it does not know, as a misspelt option must not be dropped in
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
    timed_out                 the request      its timeout_s is over: give it more time, or ask for less
    unknown_adapter           the message      no adapter of that name is loaded
    bad_adapter               the message      the adapter cannot be used, or not with this model; the message says why
    model_failed              the request      the model failed on this row; others go on
    internal                  the request      a fault of the daemon, which its log explains

Without an id, overloaded, shutting_down and internal end the connection.
"""

from dataclasses import dataclass
from typing import Any

PROTOCOL_VERSION = 1

# fmt: off
ERROR_CODES = frozenset([
    "bad_frame", "frame_too_large", "unsupported_version", "hello_expected", "timeout", "forbidden", "unknown_type",
    "bad_request", "duplicate_id", "context_length_exceeded", "overloaded", "shutting_down", "timed_out",
    "unknown_adapter", "bad_adapter", "model_failed", "internal",
])
# fmt: on

RequestId = str | int


@dataclass(frozen=True, slots=True)
class ClientHello:
    version: int
    client: str | None = None


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """arguments: JSON, as the model wrote them."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    id: str
    function: FunctionCall
    type: str = "function"


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a chat."""

    role: str
    content: str = ""
    name: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None


@dataclass(frozen=True, slots=True)
class StructuredOutputs:
    """What an answer must look like: exactly one is not None."""

    json: dict[str, Any] | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None


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
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    repetition_penalty: float = 1.0
    repetition_context_size: int = 20
    presence_penalty: float = 0.0
    presence_context_size: int = 20
    frequency_penalty: float = 0.0
    frequency_context_size: int = 20
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: bool = False
    top_logprobs: int = 0
    echo: bool = False
    structured_outputs: StructuredOutputs | None = None
    tools: tuple[dict[str, Any], ...] = ()
    tool_choice: str = "auto"
    stream: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    priority: int = 0
    timeout_s: float | None = None
    cache: str = "both"
    cache_salt: str | None = None
    adapter: str | None = None


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
class Flush:
    pass


@dataclass(frozen=True, slots=True)
class LoadAdapter:
    id: RequestId
    name: str
    path: str


@dataclass(frozen=True, slots=True)
class UnloadAdapter:
    id: RequestId
    name: str


@dataclass(frozen=True, slots=True)
class Hello:
    version: int
    server: str
    model: str


@dataclass(frozen=True, slots=True)
class TopLogprob:
    token_id: int
    token: str
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """token: the text that it stands for alone, which may be no whole character."""

    token_id: int
    token: str
    logprob: float
    top_logprobs: tuple[TopLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Delta:
    id: RequestId
    text: str
    token_ids: tuple[int, ...]
    index: int = 0
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    cached_memory_tokens: int = 0
    cached_disk_tokens: int = 0


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
    index: int = 0
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Error:
    """Without an id it is about the connection, or about a message that bears no readable id. index: of the answer that
    failed, where others of the request go on."""

    code: str
    message: str
    id: RequestId | None = None
    retry_after_s: float | None = None
    index: int | None = None


@dataclass(frozen=True, slots=True)
class Status:
    report: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Pong:
    nonce: RequestId | None = None


@dataclass(frozen=True, slots=True)
class Flushed:
    on_disk: bool


@dataclass(frozen=True, slots=True)
class Adapters:
    id: RequestId
    names: tuple[str, ...]


Request = ClientHello | Submit | Cancel | AskStatus | Ping | Flush | LoadAdapter | UnloadAdapter
Reply = Hello | Delta | Done | Error | Status | Pong | Flushed | Adapters

REQUESTS: dict[str, type[Request]] = {
    "hello": ClientHello,
    "submit": Submit,
    "cancel": Cancel,
    "status": AskStatus,
    "ping": Ping,
    "flush": Flush,
    "load_adapter": LoadAdapter,
    "unload_adapter": UnloadAdapter,
}
REPLIES: dict[str, type[Reply]] = {
    "hello": Hello,
    "delta": Delta,
    "done": Done,
    "error": Error,
    "status": Status,
    "pong": Pong,
    "flushed": Flushed,
    "adapters": Adapters,
}
