"""What the models in GGUF files are called by mlx-lm: their configuration, and the name of each tensor. No MLX.

Four architectures are read: llama (Llama, Mistral, SmolLM2, TinyLlama and others that differ in numbers only), qwen2,
qwen3 and gemma3. Whatever a file says beyond what is known here is refused by name: a key or a tensor that is passed
over makes a model that runs and talks nonsense.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lanes.gguf.header import GgufError, Header, TensorInfo
from lanes.gguf.keys import Keys

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
# Gemma has a norm before and after each half of a layer.
_GEMMA_LAYER = {
    **_LAYER,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


@dataclass(frozen=True, slots=True)
class Family:
    """An architecture: mlx-lm's model type, and what distinguishes the keys and the tensors.

    interleaved: rows of the query and key projections lie as llama.cpp's rotation wants them, pairs side by side, and
    have to be put back. any_head_dim: whether heads may have another width than hidden size / heads. windowed: most
    layers see a window, and rotate by another base. norms_exceed: by so much the file's norms exceed mlx-lm's.
    layer: mlx-lm's names of a layer's modules, by the file's.
    """

    model_type: str
    interleaved: bool = False
    any_head_dim: bool = True
    windowed: bool = False
    norms_exceed: float = 0.0
    layer: Mapping[str, str] = field(default_factory=lambda: _LAYER)


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor to load: the name of mlx-lm's parameter, where it lies, the heads whose rows are interleaved (None if
    they are not), and by how much its values in the file are too large."""

    name: str
    info: TensorInfo
    heads: int | None
    excess: float = 0.0


@dataclass(frozen=True, slots=True)
class Plan:
    """A model in a file: mlx-lm's configuration, and its tensors in the order of the file."""

    config: Mapping[str, Any]
    parts: tuple[Part, ...]


FAMILIES = {
    "llama": Family("llama", interleaved=True),
    "qwen2": Family("qwen2", any_head_dim=False),
    "qwen3": Family("qwen3"),
    # Its norms multiply with 1 + weight; the converter adds the 1 once and for all.
    "gemma3": Family("gemma3_text", windowed=True, norms_exceed=1.0, layer=_GEMMA_LAYER),
}

# Gemma 3's numbers that files leave out, or did before there was a key for them: every sixth layer sees everything, the
# others rotate by this base; and the model with so many layers scales its scores by another number than all others.
_GEMMA_PATTERN, _GEMMA_LOCAL_BASE, _GEMMA_27B_LAYERS = 6, 10000.0, 62


def plan(header: Header, rope_factors: list[float] | None = None) -> Plan:
    """The configuration and the tensors of the model. Raises GgufError for what cannot be read exactly.

    rope_factors: the values of the tensor rope_freqs.weight, if the file has one.
    """
    architecture = header.metadata.get("general.architecture")
    family = FAMILIES.get(architecture) if isinstance(architecture, str) else None
    if family is None or not isinstance(architecture, str):
        known = ", ".join(FAMILIES)
        raise GgufError(f"{header.path} has the architecture {architecture!r}; GGUF files of {known} can be read")
    keys = Keys(header, architecture, family.windowed)
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
        "head_dim": keys.head_dim(heads, family.any_head_dim),
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
    if family.windowed:
        config |= _windows(keys, config)
    ordered = sorted((header.tensors[name] for name in names), key=lambda info: info.start)
    return Plan(config, tuple(_part(header, info, family, config) for info in ordered))


def _windows(keys: Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    """What gemma3_text's configuration has beyond the others'."""
    scaling = config["rope_scaling"]
    if scaling is not None and scaling.get("type") != "linear":
        raise keys.strange("rope.scaling.type", scaling)
    pattern = keys.number("attention.sliding_window_pattern", _GEMMA_PATTERN)
    if not 0 < pattern <= config["num_hidden_layers"]:
        raise keys.strange("attention.sliding_window_pattern", pattern)
    window = keys.number("attention.sliding_window")
    if window == 0:
        raise keys.strange("attention.sliding_window", window)
    scalar = config["head_dim"]
    if config["num_hidden_layers"] == _GEMMA_27B_LAYERS:
        scalar = config["hidden_size"] // config["num_attention_heads"]
    return {
        "sliding_window": window,
        "sliding_window_pattern": pattern,
        "rope_theta": keys.real("rope.freq_base"),
        "rope_local_base_freq": keys.real("rope.freq_base_swa", _GEMMA_LOCAL_BASE),
        "query_pre_attn_scalar": scalar,
    }


def _part(header: Header, info: TensorInfo, family: Family, config: Mapping[str, Any]) -> Part:
    interleaved = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    excess = family.norms_exceed if info.name.endswith("norm.weight") else 0.0
    match info.name.split("."):
        case ["blk", layer, tensor, "weight" | "bias" as kind] if tensor in family.layer and layer.isdecimal():
            if int(layer) < config["num_hidden_layers"]:
                heads = interleaved.get(tensor) if family.interleaved else None
                return Part(f"model.layers.{layer}.{family.layer[tensor]}.{kind}", info, heads, excess)
        case [tensor, "weight" | "bias" as kind] if tensor in _OUTSIDE:
            return Part(f"{_OUTSIDE[tensor]}.{kind}", info, None, excess)
    raise GgufError(f"{header.path} has the tensor {info.name}, which its architecture as known here does not have")
