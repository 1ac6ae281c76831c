"""The doctor's checks: this backend passes them, and each of them finds what is broken on purpose."""

from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
import pytest

from lanes import doctor
from lanes.attention import LaneAttention
from lanes.doctor import CHECKS, beside, check, draws, forms, in_place, quantized, remembered, rope
from lanes.doctor.models import TINY
from lanes.doctor.verdict import Verdict, off_by
from lanes.lane import Sampling
from lanes.rows.columns import ColumnRows
from store.checkpoint import Destination, Part

LLAMA, GEMMA, SINKS = TINY[:3]


@pytest.mark.parametrize("name", [name for name in CHECKS if not name.endswith("side by side")])
def test_this_backend_passes(name: str) -> None:
    verdicts = check(name)
    assert verdicts
    assert {verdict["outcome"] for verdict in verdicts} == {"right"}, verdicts
    assert all(verdict["then"] is None for verdict in verdicts)


@pytest.mark.parametrize(
    ("tiny", "bits"), [(tiny, bits) for tiny in TINY for bits in (None, 8) if tiny.quantizable or not bits]
)
def test_rows_of_every_kind_are_as_alone(tiny: Any, bits: int | None) -> None:
    model = tiny.make()
    assert beside.difference_of(model, bits, "fused") < 1e-5
    assert beside.difference_of(model, bits, "by hand") < 1e-5


def test_every_tiny_model_is_checked() -> None:
    assert {f"rows of {tiny.family} side by side" for tiny in TINY} <= set(CHECKS)


def test_a_model_in_all_types() -> None:
    (verdict,) = check(f"rows of {SINKS.family} side by side")
    figures, said = verdict["figures"], verdict["said"]
    assert verdict["outcome"] == "right"
    assert "float32, fused" in figures
    # What MLX cannot do at all on a processor is no fault of a lane.
    assert "not in bfloat16 and float16" in said or "bfloat16, fused" in figures


def test_a_wrong_mask_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def all_columns(self: ColumnRows, *args: Any, **kwargs: Any) -> mx.array:
        return mx.ones_like(self.columns().mask)

    monkeypatch.setattr(ColumnRows, "make_mask", all_columns)
    first, *_ = beside.check_rows(LLAMA)
    assert (first.outcome, first.then) == ("wrong", beside.SERIAL)


def test_a_little_that_the_lanes_own_trial_lets_pass_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside, "difference_of", lambda model, bits, form: 0.02)
    first, *_ = beside.check_rows(LLAMA)
    assert (first.outcome, first.then) == ("wrong", beside.UNSEEN)
    assert "float32, fused: off by 0.02" in first.said
    assert "bfloat16" not in first.said


def test_a_form_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: LaneAttention, *args: Any, **kwargs: Any) -> mx.array:
        if self.form == "by hand":
            raise RuntimeError("no kernel\nfor this")
        return call(self, *args, **kwargs)

    call = LaneAttention.__call__
    monkeypatch.setattr(LaneAttention, "__call__", fail)
    first, *_ = beside.check_rows(LLAMA)
    assert first.outcome == "wrong"
    assert "float32, by hand: RuntimeError: no kernel" in first.said
    assert "fused:" not in first.said


def test_rope_that_reads_one_position_for_all_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = mx.fast.rope

    def first_only(x: mx.array, *, offset: Any, **rest: Any) -> mx.array:
        return fast(x, offset=offset if isinstance(offset, int) else int(offset[0].item()), **rest)

    monkeypatch.setattr(mx.fast, "rope", first_only)
    (verdict,) = rope.check_rope()
    assert verdict.outcome == "wrong"
    assert "halves, float32" in verdict.said


@pytest.mark.parametrize(("backend", "excused"), [("metal", True), ("cpu", False)])
def test_a_product_that_is_wrong_for_two_and_three_rows_is_found(
    backend: str, excused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = mx.quantized_matmul

    def wrong(x: mx.array, *args: Any, transpose: bool = True, **rest: Any) -> mx.array:
        product = right(x, *args, transpose=transpose, **rest)
        return product * 2 if not transpose and x.shape[-2] in (2, 3) else product

    monkeypatch.setattr(mx, "quantized_matmul", wrong)
    monkeypatch.setattr(quantized, "backend", lambda: backend)
    verdicts = {verdict.name: verdict for verdict in quantized.check_quantized()}
    assert verdicts["quantized layers"].outcome == verdicts["attention over quantized keys"].outcome == "right"
    values = verdicts["attention over quantized values"]
    assert values.outcome == "wrong"
    assert "2 rows, 4 bits, float32" in values.said
    assert ("4 rows" in values.said, "nothing is lost" in str(values.then)) == (False, excused)


def test_a_product_that_is_not_there_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    right = mx.quantized_matmul

    def unbatched(x: mx.array, *args: Any, **rest: Any) -> mx.array:
        if x.ndim > 2:
            raise RuntimeError("no implementation for problem shape")
        return right(x, *args, **rest)

    monkeypatch.setattr(mx, "quantized_matmul", unbatched)
    assert [verdict.outcome for verdict in quantized.check_quantized()] == ["right", "right", "absent", "absent"]


@pytest.mark.parametrize("kind", in_place.KINDS)
def test_a_copy_of_the_cache_is_found(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert in_place.write_rise(kind, 5) < 0.5
    held: list[mx.array] = []
    write = ColumnRows.update_and_fetch

    def hold(self: ColumnRows, keys: mx.array, values: mx.array) -> Any:
        held[:] = [part[:1] for part in self.parts]
        mx.eval(held)
        return write(self, keys, values)

    monkeypatch.setattr(ColumnRows, "update_and_fetch", hold)
    assert in_place.write_rise(kind, 5) > 0.9


def test_steps_that_copy_are_found() -> None:
    def holding(model: Any, caches: Any) -> Any:
        step = forms.plain(model, caches)

        def forward(tokens: mx.array) -> mx.array:
            held = [array[:1] for layer in caches.layers for array in layer.state]
            mx.eval(held)
            logits = step(tokens)
            mx.eval(logits)
            return logits

        return forward

    assert in_place.step_rise(holding) > 0.9


def test_a_form_of_the_step_that_differs_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def join_wrongly(model: Any) -> None:
        model.model.norm.weight = model.model.norm.weight[::-1]

    monkeypatch.setattr(forms, "TINY", (LLAMA,))
    monkeypatch.setattr(forms, "join_projections", join_wrongly)
    compiled, joined = forms.check_forms()
    assert (compiled.outcome, joined.outcome, joined.then) == ("right", "wrong", forms.REPORT)


def test_draws_that_depend_on_their_neighbours_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Crowded(draws.Sampler):
        def __init__(self, settings: Any) -> None:
            super().__init__([Sampling(s.temperature, seed=s.seed + len(settings)) for s in settings])

    monkeypatch.setattr(draws, "Sampler", Crowded)
    (verdict,) = draws.check_draws()
    assert verdict.outcome == "wrong"


def test_a_row_that_comes_back_changed_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    fill = remembered.fill

    def fill_wrongly(destinations: Sequence[Destination], part: Part) -> None:
        fill(destinations, part)
        destinations[0].buffer[:64] = bytes(64)

    monkeypatch.setattr(remembered, "fill", fill_wrongly)
    (verdict,) = remembered.check_remembered()
    assert (verdict.outcome, verdict.then) == ("wrong", remembered.THEN)
    assert "llama" in verdict.said


def test_a_check_that_fails_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Iterator[Verdict]:
        yield Verdict("first", "right", "well")
        raise RuntimeError("device lost")

    monkeypatch.setitem(doctor.CHECKS, "broken", broken)
    assert [(verdict["name"], verdict["outcome"]) for verdict in check("broken")] == [
        ("first", "right"),
        ("broken", "wrong"),
    ]
    assert "device lost" in check("broken")[1]["said"]


def test_differences_in_words() -> None:
    assert (off_by(0.0), off_by(3.21e-6)) == ("to the bit", "off by 3e-06 of the range at most")


def test_on_cuda_only_products_that_are_taken_there_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized, "backend", lambda: "cuda")
    verdicts = list(quantized.check_quantized())
    assert [verdict.outcome for verdict in verdicts] == ["right", "absent", "absent", "absent"]
    assert [bool(verdict.figures) for verdict in verdicts] == [True, False, False, False]
