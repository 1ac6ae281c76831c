"""A model's parameters evaluated one after another, in another type if that is wanted, never two forms of all at once.

mlx-lm hands out models whose arrays are not read yet. Whoever keeps an array's lazy form while its successor is made
holds both, so everything here goes by parameters' names and fetches each array when its turn comes.
"""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.mla import MultiLinear, QuantizedMultiLinear
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

# Quantized modules, and how to make a small dense one of the same kind, whose parameters are then replaced.
_DENSE: dict[type, Callable[[bool], Any]] = {
    nn.QuantizedLinear: lambda bias: nn.Linear(1, 1, bias=bias),
    nn.QuantizedEmbedding: lambda bias: nn.Embedding(1, 1),
    QuantizedSwitchLinear: lambda bias: SwitchLinear(1, 1, 1, bias=bias),
    QuantizedMultiLinear: lambda bias: MultiLinear(1, 1, 1),
}


def float32_bytes(model: Any) -> int:
    """Bytes of the parameters once evaluate(model, mx.float32, unpack=True) is done."""
    quantized = [module for _, module in model.named_modules() if type(module) in _DENSE]
    packed = {id(module[key]) for module in quantized for key in ("weight", "scales", "biases") if key in module}
    plain = [array for _, array in tree_flatten(model.parameters()) if id(array) not in packed]
    sizes = [module.weight.size * 32 // module.bits * 4 for module in quantized]
    sizes += [4 * array.size if mx.issubdtype(array.dtype, mx.floating) else array.nbytes for array in plain]
    return sum(sizes)


def evaluate(model: Any, dtype: mx.Dtype | None, unpack: bool, on_bytes: Callable[[int], None]) -> None:
    """Evaluate all parameters.

    dtype: the type that floating-point ones are brought to, None to leave each as it is. unpack: make quantized weights
    float32. on_bytes is told of the bytes of each parameter, as they were before.
    """
    done: set[str] = set()
    if unpack:
        for name in [name for name, module in model.named_modules() if type(module) in _DENSE]:
            num_bytes = _unpack(model, name)
            done.update(f"{name}.{key}" for key, _ in tree_flatten(_at(model, name).parameters()))
            on_bytes(num_bytes)
    for name in [name for name, _ in tree_flatten(model.parameters()) if name not in done]:
        num_bytes = _at(model, name).nbytes
        if dtype is not None and mx.issubdtype(_at(model, name).dtype, mx.floating):
            model.update(tree_unflatten([(name, _at(model, name).astype(dtype))]))
        mx.eval(_at(model, name))
        on_bytes(num_bytes)


def _unpack(model: Any, name: str) -> int:
    """Put a dense module in the place of a quantized one, evaluated; the bytes of the quantized one."""
    module = _at(model, name)
    replacement = _DENSE[type(module)]("bias" in module)
    biases = module.get("biases")
    replacement.weight = mx.dequantize(
        module.weight,
        module.scales.astype(mx.float32) if biases is not None else module.scales,
        None if biases is None else biases.astype(mx.float32),
        group_size=module.group_size,
        bits=module.bits,
        mode=module.mode,
        global_scale=module.get("global_scale"),
        dtype=mx.float32,
    )
    if "bias" in module:
        replacement.bias = module.bias.astype(mx.float32)
    mx.eval(replacement.parameters())
    model.update_modules(tree_unflatten([(name, replacement)]))
    return sum(array.nbytes for _, array in tree_flatten(module.parameters()))


def _at(model: Any, name: str) -> Any:
    """The module or the parameter of this name, fetched anew: nothing else keeps it."""
    found = model
    for part in name.split("."):
        found = found[int(part)] if isinstance(found, list | tuple) else found[part]
    return found
