"""The metadata of an architecture in a GGUF file, read strictly: a key that is not known here is refused by name."""

import math
from typing import Any

from lanes.gguf.header import GgufError, Header

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
_OF_WINDOWS = {"attention.sliding_window", "attention.sliding_window_pattern", "rope.freq_base_swa"}

# How the Llama 3 family stretches its rotation. The file holds only the factors that come of it, and these numbers are
# the only ones published with it; the factors decide whether they are right.
_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_CONTEXT = 1.0, 4.0, 8192


class Keys:
    """The values under the architecture's name. Every method raises GgufError for one that cannot be what it is."""

    def __init__(self, header: Header, architecture: str, windowed: bool = False) -> None:
        """windowed: whether the architecture has layers that see a window, and keys for them."""
        self.header = header
        self.architecture = architecture
        prefix = f"{architecture}."
        self.values = {
            key.removeprefix(prefix): value for key, value in header.metadata.items() if key.startswith(prefix)
        }
        for key in _NEEDED:
            if key not in self.values:
                raise GgufError(f"{header.path} lacks the metadata {prefix}{key}")
        known = _KNOWN | _IDLE | (_OF_WINDOWS if windowed else set())
        for key, value in self.values.items():
            if key not in known and not (key in _MUST_BE_ZERO and value == 0):
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

    def head_dim(self, heads: int, any_head_dim: bool) -> int:
        if heads == 0:
            raise self.strange("attention.head_count", heads)
        usual = self.number("embedding_length") // heads
        width = self.number("attention.key_length", usual)
        if self.number("attention.value_length", width) != width or (width != usual and not any_head_dim):
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
