"""Loading: the demonstration's model, folders of mlx-lm, and what cannot be loaded."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map

import lanes.load
from lanes import sources
from lanes.gguf.header import Header
from lanes.gguf.vocabulary import read_tokenizer
from lanes.load import LoadedModel, LoadError, context_tokens, load
from lanes.sources import locate
from tests.lanes.demo_model import demo_file
from tests.lanes.gguf import models, writer


@pytest.fixture(scope="module")
def demo_and_peak_bytes() -> tuple[LoadedModel, int]:
    """The model, and the most that loading it had in memory beyond what was there before."""
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    loaded = load("demo")
    return loaded, mx.get_peak_memory() - before


@pytest.fixture(scope="module")
def demo(demo_and_peak_bytes: tuple[LoadedModel, int]) -> LoadedModel:
    return demo_and_peak_bytes[0]


def test_the_demonstrations_model_answers(demo: LoadedModel) -> None:
    tokens = demo.tokenizer.encode("The capital of France is")
    token = int(mx.argmax(demo.model(mx.array([tokens]))[0, -1]).item())
    assert demo.tokenizer.decode([token]) == " Paris"


def test_the_demonstrations_facts(demo: LoadedModel) -> None:
    assert (demo.name, demo.dtype, demo.context_tokens) == ("SmolLM2-135M-Instruct", "float32", 8192)
    assert demo.weight_bytes == 4 * 134_515_008
    assert demo.config["num_hidden_layers"] == 30
    assert "float32" in demo.note


def test_weights_are_in_memory_once(demo_and_peak_bytes: tuple[LoadedModel, int]) -> None:
    demo, peak_bytes = demo_and_peak_bytes
    assert peak_bytes < 1.05 * demo.weight_bytes


def test_the_demonstrations_weights_are_those_of_mlxs_reader(demo: LoadedModel, tmp_path: Path) -> None:
    """MLX reads this type of file, too; its packed weights, dequantized in float32, are ours to the last bit."""
    copy = shutil.copy(demo_file(), tmp_path / "copy.gguf")  # MLX wants to be allowed to write to it
    theirs = mx.load(str(copy))
    ours = dict(tree_flatten(demo.model.parameters()))

    def dense(name: str) -> mx.array:
        factors = [theirs[f"{name}.{kind}"].astype(mx.float32) for kind in ("scales", "biases")]
        weight = theirs[f"{name}.weight"]
        return mx.dequantize(weight, *factors, group_size=32, bits=weight.shape[1] // factors[0].shape[1])

    assert mx.array_equal(ours["model.embed_tokens.weight"], dense("token_embd"))
    assert mx.array_equal(ours["model.layers.7.mlp.down_proj.weight"], dense("blk.7.ffn_down"))
    assert mx.array_equal(ours["model.norm.weight"], theirs["output_norm.weight"])
    interleaved = dense("blk.29.attn_k").reshape(3, 32, 2, 576)
    assert mx.array_equal(
        ours["model.layers.29.self_attn.k_proj.weight"].reshape(3, 2, 32, 576).swapaxes(1, 2), interleaved
    )


def test_progress_is_monotonous_and_complete() -> None:
    told: list[tuple[int, int, str]] = []
    load("demo", progress=lambda *args: told.append(args))
    done = [args[0] for args in told]
    assert done == sorted(done)
    assert done[0] == 0
    assert {total for _, total, _ in told} == {done[-1]}
    assert len(told) > 100


def test_progress_can_end_the_loading() -> None:
    class Enough(Exception):
        pass

    def progress(done: int, total: int, phase: str) -> None:
        if done:
            raise Enough

    with pytest.raises(Enough):
        load("demo", progress=progress)


def folder(path: Path, bits: int | None = None, dtype: mx.Dtype = mx.float32, **extra: Any) -> tuple[Path, Any]:
    """A model of mlx-lm's in a folder, quantized or not; and that model."""
    model, config = models.random_model("llama", tie_word_embeddings=False)
    model.update(tree_map(lambda array: array.astype(dtype), model.parameters()))
    if bits is not None:
        nn.quantize(model, group_size=32, bits=bits)
        config["quantization"] = {"group_size": 32, "bits": bits}
    path.mkdir()
    mx.save_safetensors(str(path / "model.safetensors"), dict(tree_flatten(model.parameters())), {"format": "mlx"})
    (path / "config.json").write_text(json.dumps({**config, "eos_token_id": 7, **extra}))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 11]}))
    read_tokenizer(Header(path, models.VOCABULARY, {})).save_pretrained(path)
    return path, model


@pytest.mark.parametrize(("bits", "dtype"), [(None, mx.float32), (None, mx.bfloat16), (4, mx.float32), (8, mx.float16)])
def test_a_folder_becomes_float32_on_the_cpu(tmp_path: Path, bits: int | None, dtype: mx.Dtype) -> None:
    path, model = folder(tmp_path / "tiny", bits, dtype)
    loaded = load(str(path))
    assert {str(array.dtype) for _, array in tree_flatten(loaded.model.parameters())} == {"mlx.core.float32"}
    assert loaded.dtype == "float32"
    assert loaded.weight_bytes == sum(array.nbytes for _, array in tree_flatten(loaded.model.parameters()))
    expected = model
    if bits is not None:
        for _, module in model.named_modules():
            if isinstance(module, nn.QuantizedLinear | nn.QuantizedEmbedding):
                module.scales, module.biases = module.scales.astype(mx.float32), module.biases.astype(mx.float32)
    expected.update(tree_map(_widened, expected.parameters()))
    assert np.abs(models.logits(loaded.model) - models.logits(expected)).max() < 1e-4
    assert loaded.name == "tiny"
    assert loaded.tokenizer.eos_token_ids == {9, 11, len(models.PIECES) - 1}
    assert loaded.context_tokens == 512


def _widened(array: mx.array) -> mx.array:
    return array.astype(mx.float32) if mx.issubdtype(array.dtype, mx.floating) else array


def test_a_folder_is_in_memory_once(tmp_path: Path) -> None:
    """Files of 16 bits made float32: all of it once, and one tensor more."""
    sizes = {"num_hidden_layers": 12, "hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    model, config = models.random_model("llama", **sizes)
    path = tmp_path / "big"
    path.mkdir()
    halves = {name: array.astype(mx.bfloat16) for name, array in tree_flatten(model.parameters())}
    mx.save_safetensors(str(path / "model.safetensors"), halves)
    (path / "config.json").write_text(json.dumps(config))
    read_tokenizer(Header(path, models.VOCABULARY, {})).save_pretrained(path)
    del model, halves
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    loaded = load(str(path))
    largest = max(array.nbytes for _, array in tree_flatten(loaded.model.parameters()))
    assert mx.get_peak_memory() - before < loaded.weight_bytes + 4 * largest


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_type_may_be_asked_for(tmp_path: Path, dtype: str) -> None:
    dense, _ = folder(tmp_path / "dense")
    loaded = load(str(dense), dtype=dtype)
    assert {str(array.dtype) for _, array in tree_flatten(loaded.model.parameters())} == {f"mlx.core.{dtype}"}
    packed, _ = folder(tmp_path / "packed", bits=4)
    loaded = load(str(packed), dtype=dtype)
    types = {str(array.dtype) for _, array in tree_flatten(loaded.model.parameters())}
    assert types == {"mlx.core.uint32", f"mlx.core.{dtype}"}
    assert loaded.dtype == dtype


@pytest.mark.parametrize("kind", [2, 8])
def test_gguf_weights_may_stay_quantized(tmp_path: Path, kind: int) -> None:
    """Asked for 16 bits, a file's matrices stay packed; the result is the dense one's up to 16 bits' rounding."""
    block = {2: 18, 8: 34}[kind]
    model, config = models.random_model("llama")
    random = np.random.default_rng(0)
    tensors: dict[str, Any] = {}
    for name, array in models.tensors_of(model, config).items():
        tensors[name] = array
        if array.ndim == 2:
            blocks = random.integers(0, 256, (array.size // 32, block), dtype=np.uint8)
            blocks[:, :2] = np.frombuffer(np.float16(0.01 if kind == 2 else 0.001).tobytes(), np.uint8)
            tensors[name] = (blocks.tobytes(), array.shape, kind)
    path = writer.write(tmp_path / "a.gguf", models.metadata_of(config), tensors)
    dense, kept = load(str(path), dtype="float32"), load(str(path), dtype="float16")
    assert isinstance(kept.model.layers[0].mlp.up_proj, nn.QuantizedLinear)
    assert isinstance(kept.model.model.embed_tokens, nn.QuantizedEmbedding)
    assert kept.dtype == "float16"
    assert kept.weight_bytes < dense.weight_bytes / 3
    wanted, got = models.logits(dense.model), models.logits(kept.model)
    assert np.abs(wanted - got).max() < 0.02 * np.abs(wanted).max()


def test_what_does_not_fit_stays_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, model = folder(tmp_path / "tiny", bits=4)
    need = load(str(path)).weight_bytes
    monkeypatch.setattr(lanes.load, "memory_bytes", lambda: 2 * need)
    assert "made float32" in load(str(path)).note
    monkeypatch.setattr(lanes.load, "memory_bytes", lambda: 2 * need - 1)
    kept = load(str(path))
    assert "slow on the CPU" in kept.note
    assert isinstance(kept.model.layers[0].mlp.up_proj, nn.QuantizedLinear)
    assert np.array_equal(models.logits(kept.model), models.logits(model))
    assert "float32, as asked" in load(str(path), dtype="float32").note


def test_the_users_chat_template(tmp_path: Path) -> None:
    path, _ = folder(tmp_path / "tiny")
    template = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
    for model in (str(path), str(models.write_model(tmp_path / "a.gguf", *models.random_model("llama")))):
        plain = load(model)
        assert not plain.tokenizer.has_chat_template
        told = load(model, chat_template=template).tokenizer
        assert told.decode(told.encode_chat([{"role": "user", "content": "hello"}])) == "<hello>"
        with pytest.raises(LoadError, match="no Jinja: line 2"):
            load(model, chat_template="fine\n{% for %}")
        assert load(model, chat_template="{{ raise_exception('no') }}").tokenizer.has_chat_template


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda path: (path / "config.json").unlink(), "no config.json"),
        (lambda path: (path / "model.safetensors").unlink(), "No safetensors found"),
        (lambda path: (path / "config.json").write_text("{"), "cannot be loaded"),
        (lambda path: (path / "config.json").write_text('{"model_type": "unheard_of"}'), "unheard_of not supported"),
        (lambda path: (path / "model.safetensors").write_bytes(b"x" * 100), "cannot be loaded"),
        (lambda path: (path / "tokenizer.json").write_text("{}"), "cannot be loaded"),
    ],
)
def test_spoiled_folders_are_named(tmp_path: Path, spoil: Any, words: str) -> None:
    path, _ = folder(tmp_path / "tiny")
    spoil(path)
    with pytest.raises(LoadError, match=words) as caught:
        load(str(path))
    assert str(path) in str(caught.value)


def test_code_that_comes_with_a_model_is_not_run(tmp_path: Path) -> None:
    path, _ = folder(tmp_path / "tiny", model_file="custom.py")
    (path / "custom.py").write_text("from mlx_lm.models.llama import Model, ModelArgs\n")
    with pytest.raises(LoadError, match="trust_remote_code"):
        load(str(path))
    assert load(str(path), trust_remote_code=True).weight_bytes > 0


def test_models_that_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in ("no/such/folder", "./none", "none", str(tmp_path / "a"), "owner/file.gguf", "~/nothing/x", "a b/c"):
        with pytest.raises(LoadError, match="there is no folder or file"):
            load(name)
    with pytest.raises(LoadError, match=r"owner/name is neither a folder .* and HF_HUB_OFFLINE is set"):
        load("owner/name")
    (tmp_path / "note.txt").write_text("x")
    with pytest.raises(LoadError, match="not a GGUF file"):
        load(str(tmp_path / "note.txt"))
    (tmp_path / "model.gguf").write_text("x")
    with pytest.raises(LoadError, match="too short for a GGUF file"):
        load(str(tmp_path / "model.gguf"))
    with pytest.raises(LoadError, match=r"it holds model\.gguf: give that file itself"):
        load(str(tmp_path))
    monkeypatch.setattr(sources, "DEMO_PACKAGE", "no_such_package")
    with pytest.raises(LoadError, match=r"install laned\[demo\]"):
        load("demo")


def test_names() -> None:
    assert locate("demo").name == "SmolLM2-135M-Instruct"
    assert locate(str(demo_file())).name == "SmolLM2-135M-Instruct.Q4_1"
    relative = os.path.relpath(demo_file())
    assert locate(relative).is_gguf


@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        ({"max_position_embeddings": 4096}, 4096),
        ({"n_positions": 1024}, 1024),
        ({"text_config": {"max_position_embeddings": 131072}, "model_type": "gemma3"}, 131072),
        ({"max_position_embeddings": None, "llm_config": {"n_ctx": 77}}, 77),
        ({"model_max_length": True, "seq_length": 0}, None),
        ({"model_type": "mamba"}, None),
    ],
)
def test_context(config: dict[str, Any], tokens: int | None) -> None:
    assert context_tokens(config) == tokens
