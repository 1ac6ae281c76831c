"""What passes between the scheduler, which decides, and the lanes, which compute.

Everything here is plain data: ints, floats, strings and tuples of them may cross to and from the model's thread,
arrays may not. This file imports no MLX, so that the scheduler can be tested against a fake engine.

A row's life in the engine: it is admitted, its prompt is processed alone in chunks up to its last token but one, it is
merged into a lane, and from then on every step feeds it one token, the last of its prompt first. It leaves whenever the
scheduler says so.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

from lanes.geometry import RowGeometry


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a row draws its tokens.

    temperature 0 takes the likeliest token. top_p 1, top_k 0 and min_p 0 switch those filters off. Together with a
    token's position the seed fixes the draw, whatever other rows are in the lane.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class RowSpec:
    """What the engine must know of a row: its number, unique for the engine's life, its prompt (at least one token id)
    and how it samples."""

    row_id: int
    prompt: tuple[int, ...]
    sampling: Sampling


@dataclass(frozen=True, slots=True)
class Chunk:
    """The tokens [start, stop) of a row's prompt, to be processed next. stop is at most len(prompt) - 1."""

    row_id: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Step:
    """One turn of the engine, carried out in the order of the fields: rows leave, merged rows are set aside as they
    are, rows come, rows whose prompt is processed are merged, rows that were set aside are merged again, all merged
    rows decode one token, and at most one chunk of a prompt is processed.

    sharing: further rows whose whole prompts are processed in one pass with chunk, which is a whole prompt then too;
    each has been admitted, has nothing processed, and is of at most ModelInfo.shared_prompt_tokens.
    """

    leave: tuple[int, ...] = ()
    set_aside: tuple[int, ...] = ()
    admit: tuple[RowSpec, ...] = ()
    merge: tuple[int, ...] = ()
    bring_back: tuple[int, ...] = ()
    chunk: Chunk | None = None
    sharing: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """What came of a turn.

    tokens: (row id, token) of the decode step dispatched one turn EARLIER, which is read while this turn's runs. Rows
    that left meanwhile may still be among them.
    failures: (row id, reason) of rows that ended in this turn and are gone from the engine.
    seconds: how long the work took whose end this turn has seen: rows_decoded rows stepped (those in tokens) and
    chunk_tokens of prompts processed, whichever turn dispatched it. Work only dispatched is in a later turn's.
    rows: merged rows now; in_flight: whether a decode step is dispatched and not yet read.
    """

    tokens: tuple[tuple[int, int], ...] = ()
    failures: tuple[tuple[int, str], ...] = ()
    seconds: float = 0.0
    rows_decoded: int = 0
    chunk_tokens: int = 0
    rows: int = 0
    in_flight: bool = False


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What is known of the model once it is loaded. Sizes in bytes; context_tokens None where the model sets no limit.

    cache_kinds: one per cache, in the model's order. lane: "batch" or "serial", with the reason. memory_bytes: what
    the device has for everything. geometry: None where the caches are of no known kind. shared_prompt_tokens: prompts
    up to this length gain from sharing a forward pass; 0 where they must not.
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
    dtype: str
    backend: str
    blas: str


@dataclass(frozen=True, slots=True)
class LaneSettings:
    """What the user decides of the lanes. kv_bits: 4 or 8 to hold keys and values quantized, in groups of so many."""

    max_rows: int = 32
    kv_bits: int | None = None
    kv_group_size: int = 64
    compile: Literal["auto", "on", "off"] = "auto"


@dataclass(frozen=True, slots=True)
class EngineGauges:
    """A reading of the engine between turns, for status and metrics. lengths: tokens in each merged row, by slot."""

    slots: int
    slots_used: int
    capacity_tokens: int
    lengths: tuple[int, ...]
    cache_bytes: int
    mlx_active_bytes: int
    mlx_cache_bytes: int
    mlx_peak_bytes: int


class Engine(Protocol):
    """What the scheduler drives, on the model's thread only."""

    info: ModelInfo

    def step(self, step: Step) -> StepResult:
        """Carry out a turn. Raises EngineFailed when the engine cannot go on."""
        ...

    def gauges(self) -> EngineGauges: ...

    def check(self) -> None:
        """Assert the engine's invariants; called when no row is left."""
        ...


class EngineFailed(Exception):
    """The model's thread cannot compute any more: the daemon should end, non-zero, for its supervisor to start anew."""
