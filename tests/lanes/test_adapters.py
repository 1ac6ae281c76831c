"""Rows with different adapters, or none, answer in one lane as each does alone in a model that mlx-lm has adapted."""

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3_moe

from lanes.adapters import Adapters
from lanes.batch import SlotCaches
from lanes.decoder import Decoder
from lanes.engine import MlxEngine
from lanes.forward import CompiledForward, eager
from lanes.joined import JoinedPart, join_projections
from lanes.lane import AdapterError, Chunk, RowSpec, Sampling, Step
from lanes.serial import SoloCaches
from lanes.solo import RowMaker
from lanes.tuning import backend
from scheduler.adapter_files import CONFIG, WEIGHTS, read_adapter
from tests.lanes.adapter_folder import ATTENTION, adapted, write_adapter
from tests.lanes.driver import INFO, Driver
from tests.lanes.tiny import VOCABULARY, alone, prompt_of, tiny_llama

# A row alone has another width: the reference BLAS adds up in the same order all the same, a GPU's kernels do not.
TOLERANCE = 0.0 if backend() == "cpu" else 0.03


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Of different rank, scale and layers."""
    root = tmp_path_factory.mktemp("adapters")
    return {
        "a": write_adapter(root / "a", tiny_llama, 1),
        "b": write_adapter(root / "b", tiny_llama, 2, rank=7, scale=10.0, num_layers=2, keys=ATTENTION),
        "c": write_adapter(root / "c", tiny_llama, 3, rank=1, scale=0.7, keys=["mlp.down_proj", "self_attn.o_proj"]),
    }


@pytest.fixture(scope="module")
def peers(folders: dict[str, Path]) -> dict[str | None, Any]:
    """By adapter: the model as mlx-lm adapts it."""
    return {name: adapted(tiny_llama(), folders.get(name or "")) for name in (None, *folders)}


class Recording:
    """A forward pass that keeps the logits of its steps."""

    def __init__(self, forward: Callable[[mx.array], mx.array]) -> None:
        self.forward = forward
        self.logits: list[mx.array] = []

    def __call__(self, tokens: mx.array) -> mx.array:
        self.logits.append(self.forward(tokens))
        return self.logits[-1]


def engine_for(model: Any, lane: str = "eager") -> MlxEngine:
    """lane: eager, compiled or serial."""
    make_row, adapters = RowMaker(model), Adapters(model)
    if lane == "serial":
        solo = SoloCaches()
        return MlxEngine(
            make_row, INFO, Decoder(solo, partial(eager, model, solo, adapters=adapters)), adapters=adapters
        )
    caches = SlotCaches(make_row(), 32)
    plain = partial(eager, model, caches, adapters=adapters)
    forward = CompiledForward(model, caches, adapters=adapters) if lane == "compiled" else plain
    return MlxEngine(make_row, INFO, Decoder(caches, Recording(forward)), adapters=adapters)


def load_all(engine: MlxEngine, folders: dict[str, Path]) -> dict[str | None, str | None]:
    """Digests by name."""
    found: dict[str | None, str | None] = {None: None}
    for name, folder in folders.items():
        found[name] = engine.load_adapter(read_adapter(folder)).digest
    return found


def joined_llama() -> Any:
    model = tiny_llama()
    assert join_projections(model) == 8
    return model


@pytest.mark.parametrize("make", [tiny_llama, joined_llama])
def test_logits_are_equal_to_the_last_bit(
    make: Callable[[], Any], folders: dict[str, Path], peers: dict[str | None, Any]
) -> None:
    """All rows enter in the first turn, so slot i is row i. A zero that pads a rank changes no sum."""
    engine = engine_for(make())
    digests = load_all(engine, folders)
    names = ["a", None, "b", "c", "a", None]
    rows = [RowSpec(i, prompt_of(1, i), Sampling(), adapter=digests[name]) for i, name in enumerate(names)]
    answers = Driver(engine).run([(0, spec, 8) for spec in rows])
    recording = engine.decoder.forward
    assert isinstance(recording, Recording)
    for slot, (name, spec) in enumerate(zip(names, rows, strict=True)):
        tokens, logits = alone(peers[name], spec.prompt, 8)
        assert answers[slot] == tokens
        for step, expected in enumerate(logits):
            difference = mx.abs(recording.logits[step][slot] - expected).max().item()
            assert difference <= TOLERANCE, f"row {slot} with {name}, step {step}"
    assert len({tuple(answer) for answer in answers.values()}) > 3, "the adapters change what is said"


rows = st.lists(
    st.tuples(st.integers(0, 12), st.integers(1, 40), st.sampled_from(["a", "b", "c", None]), st.integers(1, 9)),
    min_size=1,
    max_size=6,
)


@pytest.mark.parametrize("lane", ["eager", "compiled"])
@settings(max_examples=15)
@given(rows=rows, cut=st.dictionaries(st.integers(0, 5), st.integers(0, 20), max_size=2))
def test_batched_equals_alone(
    lane: str,
    rows: list[tuple[int, int, str | None, int]],
    cut: dict[int, int],
    folders: dict[str, Path],
    peers: dict[str | None, Any],
) -> None:
    """Rows come and leave at different times, so they move between slots, in every mixture."""
    engine = engine_for(tiny_llama(), lane)
    digests = load_all(engine, folders)
    specs = [
        (at, RowSpec(i, prompt_of(n, i), Sampling(), adapter=digests[name]), tokens)
        for i, (at, n, name, tokens) in enumerate(rows)
    ]
    answers = Driver(engine, 8).run(specs, cut)
    for (_, spec, tokens), (_, _, name, _) in zip(specs, rows, strict=True):
        expected, _ = alone(peers[name], spec.prompt, tokens)
        answer = answers.get(spec.row_id, [])
        if spec.row_id not in cut:
            assert answer == expected
        assert answer == expected[: len(answer)]
    assert not engine.adapters.rows


def test_in_the_serial_lane(folders: dict[str, Path], peers: dict[str | None, Any]) -> None:
    engine = engine_for(tiny_llama(), "serial")
    digests = load_all(engine, folders)
    for row_id, name in enumerate(["b", None, "a"]):
        spec = RowSpec(row_id, prompt_of(30, row_id), Sampling(), adapter=digests[name])
        assert Driver(engine).run([(0, spec, 8)])[row_id] == alone(peers[name], spec.prompt, 8)[0]


def test_prompts_of_one_adapter_share_a_pass(folders: dict[str, Path], peers: dict[str | None, Any]) -> None:
    engine = engine_for(tiny_llama())
    digests = load_all(engine, folders)
    specs = [RowSpec(i, prompt_of(5 + 3 * i, i), Sampling(), adapter=digests["a"]) for i in range(3)]
    engine.step(Step(admit=tuple(specs), chunk=Chunk(0, 0, 4), sharing=(1, 2)))
    engine.step(Step(merge=(0, 1, 2)))
    drawn = dict(engine.step(Step()).tokens)
    assert drawn == {spec.row_id: alone(peers["a"], spec.prompt, 1)[0][0] for spec in specs}


def test_a_row_keeps_its_adapter_when_it_is_set_aside(folders: dict[str, Path], peers: dict[str | None, Any]) -> None:
    engine = engine_for(tiny_llama())
    digests = load_all(engine, folders)
    specs = [RowSpec(i, prompt_of(1, i), Sampling(), adapter=digests[name]) for i, name in enumerate(["a", "b", None])]
    answers: dict[int, list[int]] = {0: [], 1: [], 2: []}
    turns = [Step(admit=tuple(specs), merge=(0, 1, 2)), Step(), Step(set_aside=(0,)), Step(), Step(bring_back=(0,))]
    for step in [*turns, *[Step()] * 6]:
        for row_id, token in engine.step(step).tokens:
            answers[row_id].append(token)
    for spec, name in zip(specs, ["a", "b", None], strict=True):
        answer = answers[spec.row_id]
        assert len(answer) > 6
        assert answer == alone(peers[name], spec.prompt, len(answer))[0]


def test_a_model_without_loaded_adapters_is_what_it_was(folders: dict[str, Path]) -> None:
    model = tiny_llama()
    engine = engine_for(model)
    before = [(name, type(module)) for name, module in model.named_modules()]
    names = [name for name, _ in tree_flatten(model.parameters())]
    digests = load_all(engine, folders)
    assert names == [name for name, _ in tree_flatten(model.parameters())]
    for name in folders:
        engine.unload_adapter(str(digests[name]))
    assert before == [(name, type(module)) for name, module in model.named_modules()]
    assert not any(hasattr(module, "term") for module in model.modules()), "nothing holds the stacks any more"


def test_an_adapter_goes_with_its_last_row(folders: dict[str, Path], peers: dict[str | None, Any]) -> None:
    """And another takes its place in the stacks under rows that go on."""
    engine = engine_for(tiny_llama(), "compiled")
    first, second = read_adapter(folders["a"]), read_adapter(folders["c"])
    engine.load_adapter(first)
    engine.load_adapter(second)
    specs = [RowSpec(i, prompt_of(1, i), Sampling(), adapter=each.digest) for i, each in enumerate((first, second))]
    answers: dict[int, list[int]] = {0: [], 1: []}

    def turns(number: int, step: Step = Step()) -> None:  # noqa: B008
        for turn in range(number):
            for row_id, token in engine.step(step if turn == 0 else Step()).tokens:
                answers[row_id].append(token)

    turns(7, Step(admit=tuple(specs), merge=(0, 1)))
    engine.unload_adapter(first.digest)
    turns(3)
    turns(1, Step(leave=(0,)))
    with pytest.raises(AssertionError, match="not loaded"):
        engine.adapters.admit(9, first.digest)
    engine.load_adapter(read_adapter(folders["b"]))
    turns(8)
    for spec, name in zip(specs, ("a", "c"), strict=True):
        answer = answers[spec.row_id]
        assert answer == alone(peers[name], spec.prompt, len(answer))[0]
    assert len(answers[0]) == 10
    assert len(answers[1]) == 18


def test_traces_are_made_anew_for_other_adapters(folders: dict[str, Path], peers: dict[str | None, Any]) -> None:
    engine = engine_for(tiny_llama(), "compiled")
    recording = engine.decoder.forward
    assert isinstance(recording, Recording)
    assert isinstance(recording.forward, CompiledForward)
    for row_id, name in enumerate(["a", "b"]):
        digest = engine.load_adapter(read_adapter(folders[name])).digest
        answers = Driver(engine).run([(0, RowSpec(row_id, (1,), Sampling(), adapter=digest), 8)])
        assert answers[row_id] == alone(peers[name], (1,), 8)[0]
        assert len(recording.forward._compiled) == 1


def test_quantized_layers(tmp_path: Path) -> None:
    """mlx-lm adapts these too; a row alone goes the way of several, beside one without."""

    def make() -> Any:
        model = tiny_llama()
        nn.quantize(model, group_size=32, bits=4)
        return model

    folder = write_adapter(tmp_path, make, 5, size=0.2)
    engine = engine_for(make())
    digest = engine.load_adapter(read_adapter(folder)).digest
    specs = [RowSpec(0, prompt_of(9), Sampling(), adapter=digest), RowSpec(1, prompt_of(9), Sampling())]
    answers = Driver(engine).run([(0, spec, 8) for spec in specs])
    assert answers[0] == alone(adapted(make(), folder), specs[0].prompt, 8)[0]
    assert answers[1] == alone(make(), specs[1].prompt, 8)[0]
    assert answers[0] != answers[1]


def test_types_of_16_bits(folders: dict[str, Path], peers: dict[str | None, Any]) -> None:
    """The adapter's numbers stay float32, as mlx-lm has them; the output is of the input's type."""

    def make() -> Any:
        model = tiny_llama()
        model.set_dtype(mx.bfloat16)
        return model

    engine = engine_for(make())
    digests = load_all(engine, folders)
    specs = [RowSpec(i, (7,), Sampling(), adapter=digests[name]) for i, name in enumerate(["a", None])]
    Driver(engine).run([(0, spec, 1) for spec in specs])
    recording = engine.decoder.forward
    assert isinstance(recording, Recording)
    for slot, name in enumerate(["a", None]):
        (expected,) = alone(adapted(make(), folders.get(name or "")), (7,), 1)[1]
        assert recording.logits[0].dtype == mx.bfloat16
        assert mx.abs(recording.logits[0][slot] - expected).max().item() <= TOLERANCE


def mixture_of_experts() -> Any:
    args = qwen3_moe.ModelArgs(
        model_type="qwen3_moe",
        hidden_size=32,
        num_hidden_layers=1,
        intermediate_size=32,
        num_attention_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        moe_intermediate_size=16,
        rms_norm_eps=1e-5,
        vocab_size=VOCABULARY,
        num_key_value_heads=2,
        head_dim=16,
        rope_theta=1e4,
        tie_word_embeddings=False,
        max_position_embeddings=64,
        norm_topk_prob=True,
    )
    model = qwen3_moe.Model(args)
    mx.eval(model.parameters())
    return model


def changed(folder: Path, **tensors: mx.array | None) -> Path:
    """The folder with these tensors in place of its own; None: without."""
    held: Any = mx.load(str(folder / WEIGHTS))
    held.update({name.replace("__", "."): array for name, array in tensors.items()})
    mx.save_safetensors(str(folder / WEIGHTS), {name: array for name, array in held.items() if array is not None})
    return folder


Q = "model__layers__0__self_attn__q_proj"


def refusals(root: Path) -> Iterator[tuple[Any, Path, str]]:
    """A model, a folder, and what is to be said of it."""

    def fresh(name: str, **options: Any) -> Path:
        return write_adapter(root / name, tiny_llama, 1, keys=ATTENTION, **options)

    yield tiny_llama(), root / "none", "adapter_config.json cannot be read: No such file or directory"
    yield tiny_llama(), fresh("dora", use_dora=True), "it is a DoRA"
    full = fresh("full")
    (full / CONFIG).write_text(json.dumps({"fine_tune_type": "full", "num_layers": 4}))
    yield tiny_llama(), full, "it is a full fine-tune"
    peft = fresh("peft")
    (peft / CONFIG).write_text(json.dumps({"peft_type": "LORA", "r": 4}))
    yield tiny_llama(), peft, "it is in the format of PEFT"
    bare = fresh("bare")
    (bare / CONFIG).write_text(json.dumps({"lora_parameters": {"rank": 4, "alpha": 8}}))
    yield tiny_llama(), bare, "has no lora_parameters.scale"
    (bare / CONFIG).write_text("[1")
    yield tiny_llama(), bare, "adapter_config.json is no JSON"
    torn = fresh("torn")
    (torn / WEIGHTS).write_bytes((torn / WEIGHTS).read_bytes()[:40])
    yield tiny_llama(), torn, "its tensors cannot be read"
    yield tiny_llama(), changed(fresh("half"), **{f"{Q}__lora_b": None}), "q_proj.lora_b is missing"
    yield tiny_llama(), changed(fresh("m"), **{f"{Q}__m": mx.ones(32)}), "q_proj.m is no part of a low-rank adapter"
    narrow = changed(fresh("narrow"), **{f"{Q}__lora_a": mx.ones((16, 4))})
    yield tiny_llama(), narrow, r"q_proj.lora_a has the shape \(16, 4\), and should have \(32, 4\)"
    yield tiny_llama(), changed(fresh("far"), model__layers__9__x__lora_a=mx.ones((1, 4))), "no layer model.layers.9.x"
    embedding = write_adapter(root / "embedding", tiny_llama, 1, keys=["model.embed_tokens"])
    yield tiny_llama(), embedding, "model.embed_tokens is a Embedding"
    experts = write_adapter(root / "experts", mixture_of_experts, 1, keys=["mlp.switch_mlp.up_proj"])
    yield mixture_of_experts(), experts, "up_proj is a SwitchLinear"


def test_what_cannot_be_served_is_refused_with_the_reason(tmp_path: Path) -> None:
    for model, folder, reason in refusals(tmp_path):
        engine = engine_for(model)
        classes = [type(module) for module in model.modules()]
        with pytest.raises(AdapterError, match=reason):
            engine.load_adapter(read_adapter(folder))
        assert classes == [type(module) for module in model.modules()], reason


def test_a_model_that_fails_with_an_adapter_is_left_as_it_was(folders: dict[str, Path]) -> None:
    """A layer that is called with no rows in front cannot be served for rows with different adapters."""
    model = tiny_llama()
    attention = model.model.layers[3].self_attn
    first = type(attention).__call__

    class Folding(type(attention)):  # type: ignore[misc]
        def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
            out: mx.array = first(self, x, mask, cache)
            return out + self.q_proj(x.sum(axis=0)).sum()

    attention.__class__ = Folding
    engine = engine_for(model)
    with pytest.raises(AdapterError, match="the model fails with it"):
        engine.load_adapter(read_adapter(folders["a"]))
    assert not engine.adapters._loaded
    assert not engine.adapters._terms


def test_a_joined_part_knows_its_dimensions(folders: dict[str, Path]) -> None:
    model = joined_llama()
    loaded = engine_for(model).load_adapter(read_adapter(folders["a"]))
    assert isinstance(model.model.layers[0].self_attn.k_proj, JoinedPart)
    assert loaded.num_layers == 4 * 7
    assert loaded.num_bytes == (folders["a"] / WEIGHTS).stat().st_size - _header_bytes(folders["a"] / WEIGHTS)


def _header_bytes(path: Path) -> int:
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")
