"""What passes between the scheduler, which decides, and the lanes, which compute.

Everything here is plain data: ints, floats, strings and tuples of them may cross to and from the model's thread,
arrays may not. This file imports no MLX, so that the scheduler can be tested against a fake engine.

A row's life in the engine: it is admitted, its prompt is processed alone in chunks up to its last token but one, it is
merged into a lane, and from then on every step feeds it one token, the last of its prompt first. It leaves whenever the
scheduler says so. A row of which something is known already is admitted with a Recall: the engine makes memory for it
and tells where (StepResult.destinations), somebody fills that, and Step.recalled says how it went. Where the Recall
has the arrays already, mapped, the row begins with them at once.
"""

from dataclasses import dataclass, field
from typing import Literal, Protocol

from lanes.geometry import RowGeometry
from store.checkpoint import Destination, Part, Recall


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an answer must look like: a JSON schema, a regular expression or a Lark grammar, as text."""

    kind: Literal["json", "regex", "lark"]
    text: str


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a row draws its tokens. Together with a token's position the seed fixes the draw, whatever other rows are in
    the lane.

    temperature 0 takes the likeliest token. top_p 1, top_k 0, min_p 0 and xtc_probability 0 switch those filters off;
    xtc_spared are tokens that XTC never leaves out.
    logit_bias: (token, what is added to its logit). The penalties look at the row's last tokens, prompt and answer, as
    many as their context size says, at least 1; repetition_penalty 1 and 0 of the others are off.
    end_token_ids are not drawn at a position before earliest_end; a prompt's first token has position 0.
    num_top_logprobs: how many of the likeliest tokens are told with each token and its log-probability; None: neither.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    xtc_spared: tuple[int, ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    repetition_penalty: float = 1.0
    repetition_context_size: int = 20
    presence_penalty: float = 0.0
    presence_context_size: int = 20
    frequency_penalty: float = 0.0
    frequency_context_size: int = 20
    earliest_end: int = 0
    end_token_ids: tuple[int, ...] = ()
    num_top_logprobs: int | None = None
    grammar: Grammar | None = None

    @property
    def window(self) -> int:
        """How many of the row's last tokens its penalties look at."""
        repetition = self.repetition_context_size if self.repetition_penalty != 1 else 0
        presence = self.presence_context_size if self.presence_penalty else 0
        frequency = self.frequency_context_size if self.frequency_penalty else 0
        return max(repetition, presence, frequency)


@dataclass(frozen=True, slots=True)
class Logprob:
    """A drawn token's log-probability, and the likeliest tokens with theirs, the likeliest first."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Adapter:
    """A low-rank adapter, as its files have it: to the output of linear layers it adds scale (x A) B.

    digest: of all that it means. weights: in the safetensors format, of a layer named L the tensors L.lora_a, A
    [inputs, rank], and L.lora_b, B [rank, outputs].
    """

    digest: str
    rank: int
    scale: float
    weights: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """An adapter that rows can have, how many layers have a part of it, and what it takes in memory."""

    digest: str
    rank: int
    num_layers: int
    num_bytes: int


class AdapterError(Exception):
    """An adapter cannot be used with this model, or at all; the message is a clause that says why."""


@dataclass(frozen=True, slots=True)
class RowSpec:
    """What the engine must know of a row: its number, unique for the engine's life, its prompt (at least one token id)
    and how it samples. recall: what need not be processed, fewer tokens than the prompt has. adapter: the digest of one
    that is loaded."""

    row_id: int
    prompt: tuple[int, ...]
    sampling: Sampling
    recall: Recall | None = None
    adapter: str | None = None


@dataclass(frozen=True, slots=True)
class Chunk:
    """The tokens [start, stop) of a row's prompt, to be processed next. stop is at most len(prompt) - 1.

    save: stop is a boundary: the row's rings and state as they then are go into what is frozen of it later.
    """

    row_id: int
    start: int
    stop: int
    save: bool = False


@dataclass(frozen=True, slots=True)
class Freeze:
    """What a row has of its tokens [start, stop) is wanted, with the boundaries saved in it and one more at stop.

    stop is how many tokens the row's caches hold, or fewer where the model can be taken up at any token.
    """

    row_id: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Step:
    """One turn of the engine, carried out in the order of the fields: rows are frozen, which changes nothing of them
    (whether their prompts are under way, or they are merged or set aside), rows leave, merged rows are set aside as
    they are, rows come, recalled rows have been read (or not: these begin with nothing), rows take over what is
    processed of another's prompt, the same, rows whose prompt is processed are merged, rows that were set aside are
    merged again, all merged rows decode one token, and at most one chunk of a prompt is processed.

    fork: (row, row that takes over from it); both are merged in this turn.

    sharing: further rows whose whole prompts are processed in one pass with chunk, which is a whole prompt then too;
    each has been admitted, has nothing processed and the same adapter, and is of at most
    ModelInfo.shared_prompt_tokens.
    """

    freeze: tuple[Freeze, ...] = ()
    leave: tuple[int, ...] = ()
    set_aside: tuple[int, ...] = ()
    admit: tuple[RowSpec, ...] = ()
    recalled: tuple[tuple[int, bool], ...] = ()
    fork: tuple[tuple[int, int], ...] = ()
    merge: tuple[int, ...] = ()
    bring_back: tuple[int, ...] = ()
    chunk: Chunk | None = None
    sharing: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """What came of a turn.

    tokens: (row id, token) of the decode step dispatched one turn EARLIER, which is read while this turn's runs. A turn
    in which rows come or a chunk is processed may read its own step as well, and then a row may be in here twice, its
    tokens in their order. A step may give a row several tokens, where what may come next was guessed; its caches then
    hold as many more, and what of them is not wanted is dropped. Rows that left meanwhile may still be among them.
    failures: (row id, reason) of rows that ended in this turn and are gone from the engine.
    seconds: how long the work took whose end this turn has seen: so many steps, the last of which had rows_decoded
    rows, and chunk_tokens of prompts processed, whichever turn dispatched it. What is only dispatched is told later.
    logprobs: (row id, of its token in tokens) of rows that want them; for a row that is in tokens twice, both in order.
    rows: merged rows now; in_flight: whether a decode step is dispatched and not yet read.
    frozen: what was to be frozen, and that; None of a row that could not be, and serves on. Each is told once, in the
    turn that was to do it, or in the next, where in_flight says that there is one.
    destinations: (row id, memory to be filled) of rows admitted with a Recall that is to be read; until Step.recalled
    tells of them, or they leave, that memory is theirs. A row that leaves while it is being filled keeps it alive. ()
    where memory cannot be made, or what is known does not fit the model: that row is to begin with nothing.
    saved_bytes: of all boundaries that rows have passed, which are held beside their caches until they leave.
    drafted_tokens, accepted_tokens: guessed for the step dispatched in this turn, and how many of those it has drawn.
    """

    tokens: tuple[tuple[int, int], ...] = ()
    logprobs: tuple[tuple[int, Logprob], ...] = ()
    failures: tuple[tuple[int, str], ...] = ()
    seconds: float = 0.0
    steps: int = 1
    rows_decoded: int = 0
    chunk_tokens: int = 0
    rows: int = 0
    in_flight: bool = False
    frozen: tuple[tuple[Freeze, Part | None], ...] = ()
    destinations: tuple[tuple[int, tuple[Destination, ...]], ...] = ()
    saved_bytes: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What is known of the model once it is loaded. Sizes in bytes; context_tokens None where the model sets no limit.

    cache_kinds: one per cache, in the model's order. lane: "batch" or "serial", with the reason. memory_bytes: what
    the device has for everything. geometry: None where the caches are of no known kind. shared_prompt_tokens: prompts
    up to this length gain from sharing a forward pass; 0 where they must not. chunk_multiple: chunks of prompts
    are best multiples of so many tokens. host_memory_bytes: what the host has, where what is remembered is kept in its
    memory and that is not the device's; else None.
    """

    name: str
    model_type: str
    vocab_size: int
    context_tokens: int | None
    cache_kinds: tuple[str, ...]
    lane: str
    lane_reason: str
    max_rows: int
    weight_bytes: int
    memory_bytes: int
    geometry: RowGeometry | None
    shared_prompt_tokens: int
    chunk_multiple: int
    remembers: Literal["anywhere", "boundaries", "nothing"]
    dtype: str
    backend: str
    blas: str
    host_memory_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class LaneSettings:
    """What the user decides of the lanes. kv_bits: 4 or 8 to hold keys and values quantized, in groups of so many.
    num_draft_tokens: to guess for a row and step at most; None: as many as pay on this device."""

    max_rows: int = 32
    kv_bits: int | None = None
    kv_group_size: int = 64
    compile: Literal["auto", "on", "off"] = "auto"
    num_draft_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class EngineGauges:
    """A reading of the engine between turns, for status and metrics. lengths: tokens in each merged row, by slot.
    row_ids: whose each slot is, None where it is free."""

    slots: int
    slots_used: int
    capacity_tokens: int
    lengths: tuple[int, ...]
    cache_bytes: int
    mlx_active_bytes: int
    mlx_cache_bytes: int
    mlx_peak_bytes: int
    row_ids: tuple[int | None, ...] = ()


class Engine(Protocol):
    """What the scheduler drives, on the model's thread only."""

    info: ModelInfo

    def step(self, step: Step) -> StepResult:
        """Carry out a turn. Raises EngineFailed when the engine cannot go on."""
        ...

    def load_adapter(self, adapter: Adapter) -> LoadedAdapter:
        """Have an adapter ready for rows; one that is loaded already stays. Raises AdapterError."""
        ...

    def unload_adapter(self, digest: str) -> None:
        """Forget an adapter as soon as no row has it; no row that is admitted from now on will."""
        ...

    def gauges(self) -> EngineGauges: ...

    def check(self) -> None:
        """Assert the engine's invariants; called when no row is left."""
        ...


class EngineFailed(Exception):
    """The model's thread cannot compute any more: the daemon should end, non-zero, for its supervisor to start anew."""
