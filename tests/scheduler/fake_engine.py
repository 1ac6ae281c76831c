"""An engine without a model, strict about what it is asked: it says each row's prompt back, round and round.

What it has of a row is the row's tokens, so that of a recalled row can be told whether it is the right one's. It keeps
to lanes.lane.Step and StepResult as the real one does, tokens a turn late or as its early reads have them, and asserts
that its driver does.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from lanes.lane import (
    Adapter,
    AdapterError,
    EngineFailed,
    EngineGauges,
    Freeze,
    LoadedAdapter,
    Logprob,
    ModelInfo,
    RowSpec,
    Step,
    StepResult,
)
from store.checkpoint import Destination, Part, TensorSpec, columns_of

INFO = ModelInfo(
    name="echo",
    model_type="fake",
    vocab_size=257,
    context_tokens=None,
    cache_kinds=("kv",),
    lane="batch",
    lane_reason="it is a fake",
    max_rows=4,
    weight_bytes=0,
    memory_bytes=1 << 30,
    geometry=None,
    shared_prompt_tokens=0,
    chunk_multiple=1,
    remembers="anywhere",
    dtype="float32",
    backend="cpu",
    blas="none",
)


def echo(spec: RowSpec, index: int) -> int:
    """The token that a row draws in its step number `index`, from 0 on."""
    return spec.prompt[index % len(spec.prompt)]


def echoed(prompt: Sequence[int], number: int) -> list[int]:
    """The first `number` tokens of the answer to a prompt."""
    return [prompt[index % len(prompt)] for index in range(number)]


def tokens_spec(start: int, stop: int) -> TensorSpec:
    """A row's tokens, as the columns of its only cache."""
    return TensorSpec("0.0", "uint32", (1, stop - start, 1), ranges=((start, stop),))


@dataclass
class FakeEngine:
    """fail_step, fail_prompt, fail_engine: what the next turn is to suffer; each happens once. tokens_a_step: how many
    a row may get of one step; where more than one, two steps in three are such ones, and are read at once.
    freezes_late: what merged rows have is told a turn later, where there is one."""

    info: ModelInfo = INFO
    fail_step: bool = False
    fail_prompt: bool = False
    fail_engine: bool = False
    early_reads: bool = False
    tokens_a_step: int = 1
    freezes_late: bool = False
    num_turns: int = 0
    most_rows: int = 0
    chunks: list[tuple[int, int, int]] = field(default_factory=list)
    num_steps_of: dict[int, int] = field(default_factory=dict)
    specs: dict[int, RowSpec] = field(default_factory=dict)
    recalled: dict[int, int] = field(default_factory=dict)
    adapters: set[str] = field(default_factory=set)
    _saved: dict[int, list[int]] = field(default_factory=dict)
    _recalling: dict[int, tuple[RowSpec, bytearray]] = field(default_factory=dict)
    _prompts: dict[int, tuple[RowSpec, int]] = field(default_factory=dict)
    _merged: dict[int, RowSpec] = field(default_factory=dict)
    _aside: dict[int, RowSpec] = field(default_factory=dict)
    _failed: set[int] = field(default_factory=set)
    _unread: tuple[tuple[int, int], ...] | None = None
    _held_back: Step | None = None
    _queued_tokens: int = 0
    _frozen: list[tuple[Freeze, Part | None]] = field(default_factory=list)
    saved_bytes: int = 0

    @property
    def rows(self) -> set[int]:
        """Rows that the engine holds."""
        return {*self._recalling, *self._prompts, *self._merged, *self._aside}

    def step(self, step: Step) -> StepResult:
        self.num_turns += 1
        if self.fail_engine:
            raise EngineFailed("the device is gone")
        held_back, self._held_back = self._held_back, None
        failures = self._process(held_back) if held_back else []
        frozen, self._frozen = self._frozen, []
        for each in step.freeze:
            is_late = self.freezes_late and each.row_id in self._merged
            part = None if each.row_id in self._failed else self._freeze(each)
            (self._frozen if is_late else frozen).append((each, part))
        self._leave(step.leave)
        self._set_aside(step.set_aside)
        destinations = tuple(self._admit(step.admit))
        self._begin_recalled(step.recalled)
        for source, target in step.fork:
            assert {source, target} <= set(step.merge), f"{source} and {target} are not merged together"
            if source in self._failed:
                del self._prompts[target]
                self._failed.add(target)
                failures.append((target, "the prompt failed"))
                continue
            spec, processed = self._prompts[source]
            assert self._prompts[target][0].prompt == spec.prompt, f"{source} and {target} have different prompts"
            self._prompts[target] = (self._prompts[target][0], processed)
        for row_id in step.merge:
            if row_id in self._failed:  # in this very turn, with the chunk that was held back
                continue
            spec, processed = self._prompts.pop(row_id)
            assert processed == len(spec.prompt) - 1, f"row {row_id} merged with {processed} of {len(spec.prompt)}"
            self._merged[row_id] = spec
        self._bring_back(step.bring_back)
        assert step != Step() or self._merged or self._unread is not None, "a turn for nothing"
        previous, self._unread = self._unread, None
        behind = self._queued_tokens
        guesses = self.tokens_a_step > 1 and self.num_turns % 3 > 0
        if self._merged:
            failures += self._decode(self.tokens_a_step if guesses and previous is None else 1)
        if guesses or (self.early_reads and (step.chunk or step.merge or step.bring_back)):
            if self._unread is not None:
                previous, self._unread = (*(previous or ()), *self._unread), None
            if previous is not None and step.chunk:
                self._held_back = step
        if self._held_back is None:
            failures += self._process(step)
        chunk_tokens = 0
        if previous is not None or (step.chunk and self._unread is None):
            chunk_tokens = behind if previous is not None else self._queued_tokens
            self._queued_tokens -= chunk_tokens
        if self._unread is None:
            frozen, self._frozen = [*frozen, *self._frozen], []
        return StepResult(
            tokens=previous or (),
            logprobs=tuple(self._logprobs(previous or ())),
            failures=tuple(failures),
            seconds=0.001 * (len(previous or ()) + chunk_tokens),
            rows_decoded=len({row_id for row_id, _ in previous or ()}),
            chunk_tokens=chunk_tokens,
            rows=len(self._merged),
            in_flight=self._unread is not None,
            frozen=tuple(frozen),
            destinations=destinations,
            saved_bytes=self.saved_bytes,
        )

    def _freeze(self, wanted: Freeze) -> Part:
        row_id, start, stop = wanted.row_id, wanted.start, wanted.stop
        assert row_id in self.rows - set(self._recalling), f"row {row_id} is frozen, but holds nothing"
        spec = self.specs[row_id]
        steps = self.num_steps_of.get(row_id, 0)
        held = self._prompts[row_id][1] if row_id in self._prompts else len(spec.prompt) - 1 + steps
        assert 0 <= start < stop <= held, f"[{start}, {stop}) of row {row_id}, which holds {held} tokens"
        if self.info.remembers == "boundaries":
            assert stop == held, f"state after {stop} tokens of row {row_id}, which holds {held}"
        tokens = [*spec.prompt, *echoed(spec.prompt, steps)][start:stop]
        bytes_of_all = memoryview(array("I", tokens).tobytes())
        saved = sorted({at for at in (*self._saved.get(row_id, ()), stop) if start < at <= stop})
        boundaries = None if self.info.remembers == "anywhere" else tuple(saved)
        return Part(start, stop, boundaries, (tokens_spec(start, stop),), (bytes_of_all,))

    def _logprobs(self, tokens: Iterable[tuple[int, int]]) -> Iterator[tuple[int, Logprob]]:
        """Every token is certain, and so are the ids that follow it."""
        for row_id, token in tokens:
            num_top = self.specs[row_id].sampling.num_top_logprobs
            if num_top is not None:
                yield row_id, Logprob(0.0, tuple((token + place, 0.0) for place in range(num_top)))

    def _leave(self, row_ids: Iterable[int]) -> None:
        for row_id in row_ids:
            assert row_id in self.rows | self._failed, f"row {row_id} is told to leave, but is not here"
            self._recalling.pop(row_id, None)
            self._prompts.pop(row_id, None)
            self._merged.pop(row_id, None)
            self._aside.pop(row_id, None)
            # The engine has ended this row itself: that it is told so once more is fine, once.
            self._failed.discard(row_id)

    def _set_aside(self, row_ids: Iterable[int]) -> None:
        for row_id in row_ids:
            assert row_id in self._merged, f"row {row_id} is set aside, but not in the lane"
            self._aside[row_id] = self._merged.pop(row_id)

    def _bring_back(self, row_ids: Iterable[int]) -> None:
        for row_id in row_ids:
            assert row_id in self._aside, f"row {row_id} comes back, but was not set aside"
            assert row_id not in dict(self._unread or ()), f"row {row_id} comes back before its last token is read"
            self._merged[row_id] = self._aside.pop(row_id)

    def _admit(self, specs: Iterable[RowSpec]) -> Iterator[tuple[int, tuple[Destination, ...]]]:
        for spec in specs:
            assert spec.row_id not in self.specs, f"row id {spec.row_id} is used twice"
            assert spec.prompt, f"row {spec.row_id} has no prompt"
            assert spec.adapter is None or spec.adapter in self.adapters, (
                f"row {spec.row_id}: {spec.adapter} is unknown"
            )
            self.specs[spec.row_id] = spec
            if spec.recall is None:
                self._prompts[spec.row_id] = (spec, 0)
                continue
            assert 0 < spec.recall.tokens < len(spec.prompt), f"{spec.recall.tokens} of {len(spec.prompt)} are recalled"
            if spec.recall.mapped is not None:
                (mapped,) = spec.recall.mapped.take()
                self._begin(spec, bytes(mapped[: 4 * spec.recall.tokens]))
                continue
            buffer = bytearray(4 * spec.recall.tokens)
            self._recalling[spec.row_id] = (spec, buffer)
            wanted = columns_of(spec.recall.specs[0], ((0, spec.recall.tokens),))
            yield spec.row_id, (Destination(wanted, memoryview(buffer), len(buffer)),)
        self.most_rows = max(self.most_rows, len(self.rows))
        assert len(self.rows) <= self.info.max_rows, f"{len(self.rows)} rows, {self.info.max_rows} are allowed"

    def _begin_recalled(self, recalled: Iterable[tuple[int, bool]]) -> None:
        for row_id, whole in recalled:
            spec, buffer = self._recalling.pop(row_id)
            self._begin(spec, bytes(buffer) if whole else b"")

    def _begin(self, spec: RowSpec, known: bytes) -> None:
        read = array("I", known).tolist()
        assert read == list(spec.prompt[: len(read)]), f"row {spec.row_id} was given another's: {read}"
        self.recalled[spec.row_id] = len(read)
        self._prompts[spec.row_id] = (spec, len(read))

    def _decode(self, most_tokens: int = 1) -> list[tuple[int, str]]:
        """Dispatch a step of all merged rows, for up to so many tokens of each; returns those that failed."""
        if self.fail_step:
            self.fail_step = False
            gone = sorted(self._merged)
            self._merged.clear()
            self._failed.update(gone)
            return [(row_id, "the step failed") for row_id in gone]
        tokens = []
        for row_id, spec in self._merged.items():
            index = self.num_steps_of.get(row_id, 0)
            number = 1 + (index + row_id) % most_tokens
            tokens += [(row_id, echo(spec, index + place)) for place in range(number)]
            self.num_steps_of[row_id] = index + number
        self._unread = tuple(tokens)
        return []

    def _process(self, step: Step) -> list[tuple[int, str]]:
        """A chunk of a prompt; returns its row if it failed."""
        if step.chunk is None:
            return []
        row_id, start, stop = step.chunk.row_id, step.chunk.start, step.chunk.stop
        if row_id in self._failed:  # in this very turn, with the chunk that was held back
            return []
        assert row_id in self._prompts, f"row {row_id} has no prompt here to process"
        spec, processed = self._prompts[row_id]
        assert start == processed, f"chunk at {start}, but {processed} tokens are processed"
        assert start < stop < len(spec.prompt), f"chunk [{start}, {stop}) of a prompt of {len(spec.prompt)}"
        if self.fail_prompt:
            self.fail_prompt = False
            del self._prompts[row_id]
            self._failed.add(row_id)
            return [(row_id, "the prompt failed")]
        self._prompts[row_id] = (spec, stop)
        self._queued_tokens += stop - start
        self.chunks.append((row_id, start, stop))
        if step.chunk.save:
            self._saved.setdefault(row_id, []).append(stop)
        return []

    def load_adapter(self, adapter: Adapter) -> LoadedAdapter:
        """Weights that are empty do not fit."""
        if not adapter.weights:
            raise AdapterError("it has no tensors")
        self.adapters.add(adapter.digest)
        return LoadedAdapter(adapter.digest, adapter.rank, 1, len(adapter.weights))

    def unload_adapter(self, digest: str) -> None:
        self.adapters.discard(digest)

    def gauges(self) -> EngineGauges:
        lengths = tuple(len(spec.prompt) + self.num_steps_of.get(row, 0) for row, spec in self._merged.items())
        return EngineGauges(
            len(self.rows), len(self.rows), max(lengths, default=0), lengths, sum(lengths), 0, 0, 0, tuple(self._merged)
        )

    def check(self) -> None:
        assert not self.rows, f"no request is left, but rows {self.rows} are"
        assert self._unread is None, "no request is left, but a step is under way"
