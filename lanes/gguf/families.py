"""What the models in GGUF files are called by mlx-lm: their configuration, and the name of each tensor. No MLX.

Three architectures are read: llama (Llama, Mistral, SmolLM2, TinyLlama and others that differ in numbers only), qwen2
and qwen3. Whatever a file says beyond what is known here is refused by name: a key or a tensor that is passed over
makes a model that runs and talks nonsense.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lanes.gguf.header import GgufError, Header, TensorInfo


@dataclass(frozen=True, slots=True)
class Family:
    """An architecture: mlx-lm's model type, and what distinguishes the tensors.

    interleaved: rows of the query and key projections lie as llama.cpp's rotation wants them, pairs side by side, and
    have to be put back. any_head_dim: whether heads may have another width than hidden size / heads.
    """

    model_type: str
    interleaved: bool
    any_head_dim: bool


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor to load: the name of mlx-lm's parameter, where it lies, and the heads whose rows are interleaved
    (None if they are not)."""

    name: str
    info: TensorInfo
    heads: int | None


@dataclass(frozen=True, slots=True)
class Plan:
    """A model in a file: mlx-lm's configuration, and its tensors in the order of the file."""

    config: Mapping[str, Any]
    parts: tuple[Part, ...]


FAMILIES = {
    "llama": Family("llama", interleaved=True, any_head_dim=True),
    "qwen2": Family("qwen2", interleaved=False, any_head_dim=False),
    "qwen3": Family("qwen3", interleaved=False, any_head_dim=True),
}

_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}

# Keys after the architecture's name. Those of the second set say nothing that the tensors do not.
_NEEDED = (
    "embedding_length",
    "block_count",
    "feed_forward_length",
    "attention.head_count",
    "attention.layer_norm_rms_epsilon",
)
_KNOWN = {
    *_NEEDED,
    "context_length",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.finetuned",
}
_IDLE = {"vocab_size", "tensor_data_layout"}
_MUST_BE_ZERO = {"expert_count", "expert_used_count", "attention.sliding_window"}

# How the Llama 3 family stretches its rotation. The file holds only the factors that come of it, and these numbers are
# the only ones published with it; the factors decide whether they are right.
_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_CONTEXT = 1.0, 4.0, 8192


def plan(header: Header, rope_factors: list[float] | None = None) -> Plan:
    """The configuration and the tensors of the model. Raises GgufError for what cannot be read exactly.

    rope_factors: the values of the tensor rope_freqs.weight, if the file has one.
    """
    architecture = header.metadata.get("general.architecture")
    family = FAMILIES.get(architecture) if isinstance(architecture, str) else None
    if family is None or not isinstance(architecture, str):
        known = ", ".join(FAMILIES)
        raise GgufError(f"{header.path} has the architecture {architecture!r}; GGUF files of {known} can be read")
    keys = _Keys(header, architecture)
    names = {name for name in header.tensors if name != "rope_freqs.weight"}
    heads = keys.number("attention.head_count")
    kv_heads = keys.number("attention.head_count_kv", heads)
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None:
        raise GgufError(f"{header.path} has no tensor token_embd.weight: it holds a vocabulary or an adapter, no model")
    config: dict[str, Any] = {
        "model_type": family.model_type,
        "hidden_size": keys.number("embedding_length"),
        "num_hidden_layers": keys.number("block_count"),
        "intermediate_size": keys.number("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": keys.head_dim(heads, family),
        "rms_norm_eps": keys.real("attention.layer_norm_rms_epsilon"),
        "vocab_size": embedding.shape[0],
        "rope_theta": keys.real("rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in names,
        "rope_scaling": keys.rope_scaling(rope_factors),
    }
    if (context := keys.number("context_length", 0)) > 0:
        config["max_position_embeddings"] = context
    if family.model_type == "llama":
        config["attention_bias"] = "blk.0.attn_q.bias" in names
        config["mlp_bias"] = "blk.0.ffn_up.bias" in names
    interleaved = {"attn_q": heads, "attn_k": kv_heads} if family.interleaved else {}
    ordered = sorted((header.tensors[name] for name in names), key=lambda info: info.start)
    return Plan(config, tuple(_part(header, info, config["num_hidden_layers"], interleaved) for info in ordered))


def _part(header: Header, info: TensorInfo, num_layers: int, interleaved: Mapping[str, int]) -> Part:
    match info.name.split("."):
        case ["blk", layer, tensor, "weight" | "bias" as kind] if tensor in _LAYER and layer.isdecimal():
            if int(layer) < num_layers:
                return Part(f"model.layers.{layer}.{_LAYER[tensor]}.{kind}", info, interleaved.get(tensor))
        case [tensor, "weight" | "bias" as kind] if tensor in _OUTSIDE:
            return Part(f"{_OUTSIDE[tensor]}.{kind}", info, None)
    raise GgufError(f"{header.path} has the tensor {info.name}, which its architecture as known here does not have")


class _Keys:
    """The architecture's metadata, read strictly."""

    def __init__(self, header: Header, architecture: str) -> None:
        self.header = header
        self.architecture = architecture
        prefix = f"{architecture}."
        self.values = {
            key.removeprefix(prefix): value for key, value in header.metadata.items() if key.startswith(prefix)
        }
        for key in _NEEDED:
            if key not in self.values:
                raise GgufError(f"{header.path} lacks the metadata {prefix}{key}")
        for key, value in self.values.items():
            if key not in _KNOWN and key not in _IDLE and not (key in _MUST_BE_ZERO and value == 0):
                raise GgufError(
                    f"{header.path} has {prefix}{key} = {value!r}, a variant of {architecture} not known here"
                )

    def number(self, key: str, default: int | None = None) -> int:
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31:
            raise self.strange(key, value)
        return value

    def real(self, key: str, default: float | None = None) -> float:
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.strange(key, value)
        return float(value)

    def head_dim(self, heads: int, family: Family) -> int:
        if heads == 0:
            raise self.strange("attention.head_count", heads)
        usual = self.number("embedding_length") // heads
        width = self.number("attention.key_length", usual)
        if self.number("attention.value_length", width) != width or (width != usual and not family.any_head_dim):
            raise self.strange("attention.value_length", self.values.get("attention.value_length"))
        if self.number("rope.dimension_count", width) != width:
            raise self.strange("rope.dimension_count", self.values["rope.dimension_count"])
        return width

    def rope_scaling(self, factors: list[float] | None) -> dict[str, Any] | None:
        kind = self.values.get("rope.scaling.type", "none")
        if factors is not None:
            return self.llama3_scaling(factors, kind)
        if kind == "none":
            return None
        factor = self.real("rope.scaling.factor")
        if kind == "linear" and factor > 0:
            return {"type": "linear", "factor": factor}
        if kind == "yarn" and factor > 0:
            original = self.number("rope.scaling.original_context_length")
            return {"type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        raise self.strange("rope.scaling.type", kind)

    def llama3_scaling(self, factors: list[float], kind: str) -> dict[str, Any]:
        """The configuration that these factors came of; refused if it is not the published one."""
        factor, base, width = max(factors), self.real("rope.freq_base", 10000.0), 2 * len(factors)
        expected = []
        for pair in range(len(factors)):
            turns = _LLAMA3_CONTEXT / (2 * math.pi * base ** (2 * pair / width))
            share = min(1.0, max(0.0, (turns - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW)))
            expected.append(1 / ((1 - share) / factor + share))
        close = all(math.isclose(have, want, rel_tol=1e-4) for have, want in zip(factors, expected, strict=True))
        if kind != "none" or not close:
            raise GgufError(f"{self.header.path} has a tensor rope_freqs.weight that is not Llama 3's")
        return {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": _LLAMA3_LOW,
            "high_freq_factor": _LLAMA3_HIGH,
            "original_max_position_embeddings": _LLAMA3_CONTEXT,
        }

    def strange(self, key: str, value: object) -> GgufError:
        where = f"{self.architecture}.{key}"
        return GgufError(f"{self.header.path} has {where} = {value!r}, which cannot be read here")
