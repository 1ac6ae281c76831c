"""Families: a model written to a file as llama.cpp's converter does, and loaded, is the same model."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mlx.utils import tree_flatten

from lanes.gguf.families import plan
from lanes.gguf.header import GgufError, read_header
from lanes.load import LoadError, load
from tests.lanes.gguf import models, writer

LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}

Change = Callable[[dict[str, Any]], None]


def llama3_factors(base: float, width: int, factor: float) -> list[float]:
    """As the converter computes them."""
    factors = []
    for pair in range(width // 2):
        wavelength = 2 * math.pi * base ** (2 * pair / width)
        if wavelength < 8192 / 4:
            factors.append(1.0)
        elif wavelength > 8192:
            factors.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return factors


@pytest.mark.parametrize(
    ("model_type", "changed", "keys"),
    [
        ("llama", {}, {}),
        ("llama", {"tie_word_embeddings": False, "num_key_value_heads": 4}, {}),
        ("llama", {"num_key_value_heads": 4}, {"attention__head_count_kv": None}),
        ("llama", {"head_dim": 32}, {}),
        ("llama", {"attention_bias": True, "mlp_bias": True}, {}),
        ("llama", {}, {"attention__key_length": None, "attention__value_length": None, "rope__dimension_count": None}),
        ("llama", {"rope_theta": 10000.0}, {"rope__freq_base": None, "context_length": None}),
        (
            "llama",
            {"rope_scaling": {"type": "linear", "factor": 4.0}},
            {"rope__scaling__type": "linear", "rope__scaling__factor": 4.0},
        ),
        (
            "qwen3",
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}},
            {
                "rope__scaling__type": "yarn",
                "rope__scaling__factor": 4.0,
                "rope__scaling__original_context_length": 128,
            },
        ),
        ("qwen2", {}, {}),
        ("qwen2", {"tie_word_embeddings": False}, {"attention__key_length": None, "attention__value_length": None}),
        ("qwen3", {}, {}),
        ("qwen3", {"head_dim": 32, "tie_word_embeddings": False}, {}),
        ("gemma3_text", {}, {}),
        ("gemma3_text", {"tie_word_embeddings": False, "rope_local_base_freq": 500.0}, {}),
        ("gemma3_text", {"sliding_window_pattern": 1}, {}),
        ("gemma3_text", {"head_dim": 32, "query_pre_attn_scalar": 32}, {}),
        (
            "gemma3_text",
            {"num_hidden_layers": 8, "sliding_window_pattern": 6},
            {"attention__sliding_window_pattern": None, "rope__freq_base_swa": None, "rope__dimension_count": None},
        ),
        (
            "gemma3_text",
            {"rope_scaling": {"type": "linear", "factor": 8.0}},
            {"rope__scaling__type": "linear", "rope__scaling__factor": 8.0},
        ),
    ],
)
def test_round_trip(tmp_path: Path, model_type: str, changed: dict[str, Any], keys: dict[str, Any]) -> None:
    model, config = models.random_model(model_type, **changed)
    path = models.write_model(tmp_path / "a.gguf", model, config, **keys)
    loaded = load(str(path), dtype="float32")
    assert np.array_equal(models.logits(loaded.model), models.logits(model))
    assert loaded.config["vocab_size"] == 300
    assert loaded.context_tokens == (None if "context_length" in keys else 512)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_rotation(tmp_path: Path, factor: float) -> None:
    stretched = {"rope_scaling": {"rope_type": "llama3", "factor": factor, **LLAMA3}, "rope_theta": 500000.0}
    model, config = models.random_model("llama", **stretched)
    factors = np.array(llama3_factors(500000.0, 16, factor), np.float32)
    tensors = {**models.tensors_of(model, config), "rope_freqs.weight": factors}
    loaded = load(str(writer.write(tmp_path / "a.gguf", models.metadata_of(config), tensors)), dtype="float32")
    assert np.array_equal(models.logits(loaded.model), models.logits(model))
    tensors["rope_freqs.weight"] = factors * np.linspace(1, 1.1, len(factors), dtype=np.float32)
    with pytest.raises(LoadError, match=r"rope_freqs\.weight that is not Llama 3's"):
        load(str(writer.write(tmp_path / "a.gguf", models.metadata_of(config), tensors)))


@pytest.mark.parametrize("kind", [writer.F16, writer.BF16])
def test_half_precision_files(tmp_path: Path, kind: int) -> None:
    model, config = models.random_model("llama")
    path = models.write_model(tmp_path / "a.gguf", model, config, kind)
    rounded = {
        name: np.array(array) if array.ndim == 1 else rounded_to(np.array(array), kind)
        for name, array in models.tensors_of(model, config).items()
    }
    same = load(str(writer.write(tmp_path / "b.gguf", models.metadata_of(config), rounded)), dtype="float32")
    loaded = load(str(path), dtype="float32")
    assert np.array_equal(models.logits(loaded.model), models.logits(same.model))


def rounded_to(array: Any, kind: int) -> Any:
    if kind == writer.F16:
        return array.astype(np.float16).astype(np.float32)
    return (array.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def without(name: str) -> Change:
    return lambda tensors: tensors.pop(name)


def also(name: str, *shape: int) -> Change:
    return lambda tensors: tensors.update({name: np.ones(shape, np.float32)})


def assert_refused(path: Path, family: str, keys: dict[str, Any], change: Change | None, words: str) -> None:
    """A tiny model of the family, with metadata and tensors changed, is not loaded, and told why."""
    model, config = models.random_model(family)
    tensors = models.tensors_of(model, config)
    if change is not None:
        change(tensors)
    writer.write(path, models.metadata_of(config, **keys), tensors)
    with pytest.raises(LoadError, match=words):
        load(str(path))


@pytest.mark.parametrize(
    ("keys", "change", "words"),
    [
        ({"expert_count": 8}, None, r"llama\.expert_count = 8"),
        ({"attention__sliding_window": 4096}, None, r"llama\.attention\.sliding_window"),
        ({"logit_scale": 0.5}, None, r"llama\.logit_scale = 0.5"),
        ({"attention__head_count": [4, 4]}, None, r"llama\.attention\.head_count = \[4, 4\]"),
        ({"attention__head_count": 0}, None, r"llama\.attention\.head_count = 0"),
        ({"rope__dimension_count": 8}, None, r"llama\.rope\.dimension_count = 8"),
        ({"rope__scaling__type": "longrope", "rope__scaling__factor": 2.0}, None, "longrope"),
        ({"block_count": None}, None, r"lacks the metadata llama\.block_count"),
        ({"feed_forward_length": 128}, None, r"has the shape .*, its metadata asks for"),
        ({"block_count": 1}, None, r"the tensor blk\.1\."),
        ({"block_count": 3}, None, r"lacks 9 of the model's tensors, the first of them model\.layers\.2\."),
        ({}, without("blk.1.ffn_up.weight"), r"lacks 1 of .* model\.layers\.1\.mlp\.up_proj\.weight"),
        ({}, without("token_embd.weight"), r"no tensor token_embd\.weight"),
        ({}, also("blk.0.attn_sinks.weight", 4), r"the tensor blk\.0\.attn_sinks\.weight"),
        ({}, also("blk.0.attn_q_norm.weight", 16), r"1 tensors too many.*q_norm"),
        ({}, also("mm.0.weight", 4, 4), r"the tensor mm\.0\.weight"),
    ],
)
def test_refused_by_name(tmp_path: Path, keys: dict[str, Any], change: Change | None, words: str) -> None:
    assert_refused(tmp_path / "a.gguf", "llama", keys, change, words)


def test_gemmas_largest_model_scales_its_scores_otherwise(tmp_path: Path) -> None:
    """The file does not say so: the model with 62 layers is known by their number."""
    changed = {"num_hidden_layers": 62, "sliding_window_pattern": 6, "query_pre_attn_scalar": 16, "head_dim": 32}
    model, config = models.random_model("gemma3_text", **changed, hidden_size=64, intermediate_size=32)
    loaded = load(str(models.write_model(tmp_path / "a.gguf", model, config)), dtype="float32")
    assert np.array_equal(models.logits(loaded.model), models.logits(model))


@pytest.mark.parametrize(
    ("keys", "change", "words"),
    [
        ({"attention__sliding_window": 0}, None, r"gemma3\.attention\.sliding_window = 0"),
        ({"attention__sliding_window": None}, None, r"gemma3\.attention\.sliding_window = None"),
        ({"attention__sliding_window_pattern": 0}, None, r"sliding_window_pattern = 0"),
        ({"attention__sliding_window_pattern": 6}, None, r"sliding_window_pattern = 6"),
        ({"attention__sliding_window_pattern": [True, False]}, None, r"sliding_window_pattern = \[True, False\]"),
        ({"rope__freq_base": None}, None, r"gemma3\.rope\.freq_base = None"),
        ({"final_logit_softcapping": 30.0}, None, r"gemma3\.final_logit_softcapping = 30"),
        ({"attn_logit_softcapping": 50.0}, None, r"gemma3\.attn_logit_softcapping = 50"),
        (
            {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0},
            None,
            r"rope\.scaling\.original_context_length",
        ),
        (
            {
                "rope__scaling__type": "yarn",
                "rope__scaling__factor": 4.0,
                "rope__scaling__original_context_length": 128,
            },
            None,
            r"gemma3\.rope\.scaling\.type",
        ),
        ({}, without("blk.2.post_ffw_norm.weight"), r"lacks 1 of .*layers\.2\.post_feedforward_layernorm"),
        ({}, also("blk.0.ffn_post_norm.weight", 64), r"the tensor blk\.0\.ffn_post_norm\.weight"),
        ({}, also("v.blk.0.attn_q.weight", 4, 4), r"the tensor v\.blk\.0\.attn_q\.weight"),
    ],
)
def test_gemma_is_refused_by_name(tmp_path: Path, keys: dict[str, Any], change: Change | None, words: str) -> None:
    assert_refused(tmp_path / "a.gguf", "gemma3_text", keys, change, words)


@pytest.mark.parametrize("kind", [writer.F16, writer.BF16])
def test_gemmas_norms_have_their_own_type(tmp_path: Path, kind: int) -> None:
    """Norms are float32 in a file of any type, and come back to the last bit although 1 was added to them."""
    model, config = models.random_model("gemma3_text")
    path = models.write_model(tmp_path / "a.gguf", model, config, kind)
    loaded = load(str(path), dtype="float32")
    for name, array in tree_flatten(model.parameters()):
        if name.endswith("norm.weight"):
            ours = dict(tree_flatten(loaded.model.parameters()))[name]
            assert np.array_equal(1 + np.array(ours), 1 + np.array(array))


@pytest.mark.parametrize("architecture", ["gemma2", "gemma3n", "qwen35moe", 7])
def test_other_architectures_are_named(tmp_path: Path, architecture: object) -> None:
    path = writer.write(tmp_path / "a.gguf", {"general.architecture": architecture}, {})
    with pytest.raises(GgufError, match=f"architecture {architecture!r}; GGUF files of llama, qwen2, qwen3, gemma3 "):
        plan(read_header(path))
