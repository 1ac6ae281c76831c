"""An engine without a model, strict about what it is asked: it says each row's prompt back, round and round.

It keeps to lanes.lane.Step and StepResult as the real one does, tokens a turn late, and asserts that its driver does.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from lanes.lane import EngineFailed, EngineGauges, ModelInfo, RowSpec, Step, StepResult

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


@dataclass
class FakeEngine:
    """fail_step, fail_prompt, fail_engine: what the next turn is to suffer; each happens once."""

    info: ModelInfo = INFO
    fail_step: bool = False
    fail_prompt: bool = False
    fail_engine: bool = False
    num_turns: int = 0
    most_rows: int = 0
    chunks: list[tuple[int, int, int]] = field(default_factory=list)
    num_steps_of: dict[int, int] = field(default_factory=dict)
    specs: dict[int, RowSpec] = field(default_factory=dict)
    _prompts: dict[int, tuple[RowSpec, int]] = field(default_factory=dict)
    _merged: dict[int, RowSpec] = field(default_factory=dict)
    _aside: dict[int, RowSpec] = field(default_factory=dict)
    _knows_next_token: set[int] = field(default_factory=set)
    _failed: set[int] = field(default_factory=set)
    _unread: tuple[tuple[int, int], ...] | None = None
    _queued_tokens: int = 0

    @property
    def rows(self) -> set[int]:
        """Rows that the engine holds."""
        return {*self._prompts, *self._merged, *self._aside}

    def step(self, step: Step) -> StepResult:
        self.num_turns += 1
        if self.fail_engine:
            raise EngineFailed("the device is gone")
        self._leave(step.leave)
        self._set_aside(step.set_aside)
        self._admit(step.admit)
        for row_id in step.merge:
            spec, processed = self._prompts.pop(row_id)
            assert processed == len(spec.prompt) - 1, f"row {row_id} merged with {processed} of {len(spec.prompt)}"
            self._merged[row_id] = spec
        self._bring_back(step.bring_back)
        assert step != Step() or self._merged or self._unread is not None, "a turn for nothing"
        failures: list[tuple[int, str]] = []
        previous, self._unread = self._unread, None
        self._knows_next_token = {row_id for row_id, _ in previous or ()} | (self._knows_next_token & set(self._aside))
        behind = self._queued_tokens
        if self._merged:
            failures += self._decode()
        failures += self._process(step)
        chunk_tokens = 0
        if previous is not None or (step.chunk and self._unread is None):
            chunk_tokens = behind if previous is not None else self._queued_tokens
            self._queued_tokens -= chunk_tokens
        return StepResult(
            tokens=previous or (),
            failures=tuple(failures),
            seconds=0.001 * (len(previous or ()) + chunk_tokens),
            rows_decoded=len(previous or ()),
            chunk_tokens=chunk_tokens,
            rows=len(self._merged),
            in_flight=self._unread is not None,
        )

    def _leave(self, row_ids: Iterable[int]) -> None:
        for row_id in row_ids:
            assert row_id in self.rows | self._failed, f"row {row_id} is told to leave, but is not here"
            self._prompts.pop(row_id, None)
            self._merged.pop(row_id, None)
            self._aside.pop(row_id, None)
            # The engine has ended this row itself: that it is told so once more is fine, once.
            self._failed.discard(row_id)

    def _set_aside(self, row_ids: Iterable[int]) -> None:
        for row_id in row_ids:
            assert row_id in self._merged, f"row {row_id} is set aside, but not in the lane"
            self._aside[row_id] = self._merged.pop(row_id)
            self._knows_next_token.discard(row_id)

    def _bring_back(self, row_ids: Iterable[int]) -> None:
        for row_id in row_ids:
            assert row_id in self._aside, f"row {row_id} comes back, but was not set aside"
            assert row_id in self._knows_next_token, f"row {row_id} comes back before its last token is read"
            self._merged[row_id] = self._aside.pop(row_id)

    def _admit(self, specs: Iterable[RowSpec]) -> None:
        for spec in specs:
            assert spec.row_id not in self.specs, f"row id {spec.row_id} is used twice"
            assert spec.prompt, f"row {spec.row_id} has no prompt"
            self.specs[spec.row_id] = spec
            self._prompts[spec.row_id] = (spec, 0)
        self.most_rows = max(self.most_rows, len(self.rows))
        assert len(self.rows) <= self.info.max_rows, f"{len(self.rows)} rows, {self.info.max_rows} are allowed"

    def _decode(self) -> list[tuple[int, str]]:
        """Dispatch a step of all merged rows; returns those that failed."""
        if self.fail_step:
            self.fail_step = False
            gone = sorted(self._merged)
            self._merged.clear()
            self._failed.update(gone)
            return [(row_id, "the step failed") for row_id in gone]
        tokens = []
        for row_id, spec in self._merged.items():
            index = self.num_steps_of.get(row_id, 0)
            tokens.append((row_id, echo(spec, index)))
            self.num_steps_of[row_id] = index + 1
        self._unread = tuple(tokens)
        return []

    def _process(self, step: Step) -> list[tuple[int, str]]:
        """A chunk of a prompt; returns its row if it failed."""
        if step.chunk is None:
            return []
        row_id, start, stop = step.chunk.row_id, step.chunk.start, step.chunk.stop
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
        return []

    def gauges(self) -> EngineGauges:
        lengths = tuple(len(spec.prompt) + self.num_steps_of.get(row, 0) for row, spec in self._merged.items())
        return EngineGauges(len(self.rows), len(self.rows), max(lengths, default=0), lengths, sum(lengths), 0, 0, 0)

    def check(self) -> None:
        assert not self.rows, f"no request is left, but rows {self.rows} are"
        assert self._unread is None, "no request is left, but a step is under way"
