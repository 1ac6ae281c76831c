"""From what the user calls a model to a model in memory, with its tokenizer, in the type that computes best here.

On MLX's CPU build that is float32, whatever the file holds: its kernel for quantized weights ran SmolLM2 nine times
slower than OpenBLAS runs the same weights dense, and 16-bit types had no fast product at all. So weights are made
float32 where they then take no more than half of the memory. On a GPU they stay as they are.

Tensors are read and converted one after another; what is in memory at the worst moment is the model and one tensor.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
from jinja2 import TemplateSyntaxError
from mlx.utils import tree_flatten
from mlx_lm.tokenizer_utils import TokenizerWrapper, _infer_tool_parser
from mlx_lm.utils import load_model, load_tokenizer

from lanes.dense import evaluate, float32_bytes
from lanes.gguf.families import Plan, plan
from lanes.gguf.header import GgufError, read_header
from lanes.gguf.vocabulary import end_ids, read_tokenizer
from lanes.gguf.weights import quantization, read_values, read_weights
from lanes.machine import memory_bytes
from lanes.sources import LoadError, Source, locate
from lanes.tokenizer import Tokenizer

__all__ = ["LoadError", "LoadedModel", "load"]

logger = logging.getLogger(__name__)

WeightType = Literal["auto", "float32", "bfloat16", "float16"]
Progress = Callable[[int, int, str], None]

GIB = 1 << 30
# What the limit on a model's positions is called, by family.
CONTEXT_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "max_sequence_length",
    "max_seq_len",
    "seq_length",
    "n_ctx",
    "model_max_length",
)
# Models that compute numbers, Qwen 2 in its attention and Gemma 3 between its layers, beyond what float16 can hold.
OVERFLOW_FLOAT16 = ("qwen2", "gemma3_text")
TEXT_CONFIGS = ("text_config", "llm_config", "language_config")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run: parameters evaluated, on the thread that loaded it.

    weight_bytes: of all parameters in memory. dtype: in which it computes. context_tokens: None where the model sets no
    limit. note: a sentence on what was done to the weights. path: its folder or GGUF file; None where it has none.
    """

    model: Any
    tokenizer: Tokenizer
    config: Mapping[str, Any]
    name: str
    weight_bytes: int
    dtype: str
    context_tokens: int | None
    note: str
    path: Path | None = None


def load(
    model: str,
    *,
    dtype: WeightType | str = "auto",
    trust_remote_code: bool = False,
    chat_template: str | None = None,
    progress: Progress | None = None,
) -> LoadedModel:
    """Load a model: a folder, a GGUF file, "demo", or OWNER/NAME of the Hugging Face hub.

    dtype: "auto" as told above; "float32" for all weights, quantized ones too; "bfloat16" or "float16" for all that are
    not quantized, and for the factors of those that are. trust_remote_code: run code that comes with the model.
    chat_template: Jinja text to use instead of the model's. progress(done bytes, total bytes, phase) is called as the
    weights are read; what it raises ends the loading. Raises LoadError.
    """
    source = locate(model)
    report = progress or (lambda done, total, phase: None)
    try:
        if source.is_gguf:
            return _load_gguf(source, dtype, chat_template, report)
        return _load_folder(source, dtype, trust_remote_code, chat_template, report)
    except GgufError as error:
        raise LoadError(str(error)) from error


def _load_gguf(source: Source, dtype: str, chat_template: str | None, report: Progress) -> LoadedModel:
    header = read_header(source.path)
    stretched = header.tensors.get("rope_freqs.weight")
    loading = plan(header, None if stretched is None else read_values(source.path, stretched))
    tokenizer = wrapped(_with_template(read_tokenizer(header), chat_template), end_ids(header))
    if len(tokenizer) > loading.config["vocab_size"]:
        raise GgufError(f"{source.path} has more tokens than rows in its embedding")
    model = _empty_model(source.path, loading)
    config = dict(loading.config)
    need = sum(4 * array.size for _, array in tree_flatten(model.parameters()))
    goal = _decide(dtype, need, "quantized where MLX can, else 16 bits wide")
    # Where weights stay as they are, their factors do: those are float16 in the file.
    wanted = goal.dtype or (mx.bfloat16 if config["model_type"] in OVERFLOW_FLOAT16 else mx.float16)
    kept = {} if goal.unpack else quantization(loading)
    if kept:
        nn.quantize(model, class_predicate=lambda path, _: kept.get(path, False))
        config["quantization"] = kept
    meter = _Meter(sum(part.info.num_bytes for part in loading.parts), report)
    for weights in read_weights(source.path, loading, wanted, not goal.unpack, meter.add):
        model.load_weights(list(weights.items()), strict=False)
    return _loaded(source, model, tokenizer, config, goal.note)


def _empty_model(path: Path, loading: Plan) -> Any:
    """A model of the plan's configuration, its parameters not yet made, that has just the plan's tensors."""
    family = import_module(f"mlx_lm.models.{loading.config['model_type']}")
    model = family.Model(family.ModelArgs.from_dict(loading.config))
    if loading.config["tie_word_embeddings"] and "lm_head" in model:
        model.sanitize({})  # this class learns that it has no head of its own from the weights
    wanted = {name: array.shape for name, array in tree_flatten(model.parameters())}
    found = {part.name: part.info.shape for part in loading.parts}
    if missing := sorted(wanted.keys() - found.keys()):
        raise GgufError(f"{path} lacks {len(missing)} of the model's tensors, the first of them {missing[0]}")
    if surplus := sorted(found.keys() - wanted.keys()):
        raise GgufError(f"{path} has {len(surplus)} tensors too many, the first of them {surplus[0]}")
    for name, shape in wanted.items():
        if found[name] != shape:
            raise GgufError(f"{path}: {name} has the shape {found[name]}, its metadata asks for {shape}")
    model.eval()
    return model


def _load_folder(
    source: Source, dtype: str, trust_remote_code: bool, chat_template: str | None, report: Progress
) -> LoadedModel:
    try:
        model, config = load_model(source.path, lazy=True, trust_remote_code=trust_remote_code)
        # Never left out: transformers would ask on the terminal whether to trust the model's code.
        extra = {"trust_remote_code": trust_remote_code}
        tokenizer = load_tokenizer(source.path, extra, eos_token_ids=_eos_ids(config) or None)
    except (OSError, ValueError, TypeError, KeyError, RuntimeError, ImportError, SystemExit) as error:
        reason = str(error).strip() or type(error).__name__
        raise LoadError(f"{source.path} cannot be loaded: {reason}") from error
    if chat_template is not None:
        named = _with_template(tokenizer._tokenizer, chat_template)
        tokenizer = wrapped(named, tokenizer.eos_token_ids)
    goal = _decide(dtype, float32_bytes(model), "as they are in the files")
    meter = _Meter(sum(array.nbytes for _, array in tree_flatten(model.parameters())), report)
    evaluate(model, goal.dtype, goal.unpack, meter.add)
    return _loaded(source, model, tokenizer, config, goal.note)


def wrapped(tokenizer: Any, eos_token_ids: Iterable[int]) -> Any:
    """mlx-lm's wrapper of a tokenizer, with the parser of calls that its own loader would find for it."""
    name = _infer_tool_parser(tokenizer)
    if name is None:
        return TokenizerWrapper(tokenizer, eos_token_ids=eos_token_ids)
    parser = import_module(f"mlx_lm.tool_parsers.{name}")
    return TokenizerWrapper(
        tokenizer,
        eos_token_ids=eos_token_ids,
        tool_parser=parser.parse_tool_call,
        tool_call_start=parser.tool_call_start,
        tool_call_end=parser.tool_call_end,
    )


def _with_template(tokenizer: Any, chat_template: str | None) -> Any:
    """The transformers tokenizer with the user's template, of which mistakes of grammar are found now."""
    if chat_template is not None:
        tokenizer.chat_template = chat_template
        try:
            tokenizer.apply_chat_template([{"role": "user", "content": "?"}], tokenize=False)
        except TemplateSyntaxError as error:
            raise LoadError(f"the chat template is no Jinja: line {error.lineno}: {error.message}") from None
        except Exception:  # a template may refuse this conversation for reasons of its own
            logger.debug("the chat template does not accept a single question", exc_info=True)
    return tokenizer


@dataclass(frozen=True, slots=True)
class _Goal:
    """What weights are made: the type of those that are not packed (None: as they are), whether packed ones are made
    dense, and a sentence about it."""

    dtype: mx.Dtype | None
    unpack: bool
    note: str


def _decide(dtype: str, need_bytes: int, otherwise: str) -> _Goal:
    """need_bytes: what float32 weights take. otherwise: how weights are that are left alone."""
    size = f"{need_bytes / GIB:.2f} GiB"
    if dtype == "float32":
        return _Goal(mx.float32, True, f"weights are made float32, as asked: {size}")
    if dtype != "auto":
        return _Goal(getattr(mx, dtype), False, f"weights that are not quantized are made {dtype}, as asked")
    if mx.default_device() != mx.Device(mx.cpu):
        return _Goal(None, False, f"weights stay {otherwise}: the GPU computes with them")
    memory = memory_bytes()
    if need_bytes * 2 <= memory:
        return _Goal(mx.float32, True, f"weights are made float32 for the CPU: {size}")
    slow = f"float32 would take {size}, more than half of {memory / GIB:.1f} GiB of memory"
    return _Goal(None, False, f"weights stay {otherwise}, which is slow on the CPU: {slow}")


class _Meter:
    """Counts bytes for the progress report."""

    def __init__(self, total: int, report: Progress) -> None:
        self.done, self.total, self.report = 0, total, report
        self.add(0)

    def add(self, count: int) -> None:
        self.done += count
        self.report(self.done, self.total, "reading weights")


def _loaded(source: Source, model: Any, tokenizer: Any, config: Mapping[str, Any], note: str) -> LoadedModel:
    mx.clear_cache()  # buffers of the conversion, which the model's steps have no use for
    arrays = [array for _, array in tree_flatten(model.parameters())]
    floating = Counter(str(array.dtype) for array in arrays if mx.issubdtype(array.dtype, mx.floating))
    return LoadedModel(
        model=model,
        tokenizer=Tokenizer(tokenizer, tokenizer.eos_token_ids),
        config=config,
        name=source.name,
        weight_bytes=sum(array.nbytes for array in arrays),
        dtype=floating.most_common(1)[0][0].removeprefix("mlx.core."),
        context_tokens=context_tokens(config),
        note=note,
        path=source.path,
    )


def context_tokens(config: Mapping[str, Any]) -> int | None:
    """The longest sequence that the configuration allows; None if it says nothing."""
    for level in (config, *_text_configs(config)):
        for key in CONTEXT_KEYS:
            value = level.get(key)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None


def _eos_ids(config: Mapping[str, Any]) -> list[int]:
    """Ids that the configuration or generation_config.json, which mlx-lm merges into it, gives as the end."""
    found: list[int] = []
    for level in (config, *_text_configs(config)):
        value = level.get("eos_token_id")
        found += [token for token in (value if isinstance(value, list) else [value]) if isinstance(token, int)]
    return sorted(set(found))


def _text_configs(config: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    """Where models of more than text keep what belongs to the text."""
    return [level for key in TEXT_CONFIGS if isinstance(level := config.get(key), dict)]
