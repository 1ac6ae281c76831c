"""The options of `laned serve`: each is defined once, as a field of Options below.

The flags of the command line, the keys of the file given with --config and the documentation are all made from the
table OPTIONS, which is made from those fields. A value comes from the flag, else from the file, else from the default.
Names are the ones that users of mlx_lm.server and vLLM know; where those two differ, both are accepted.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from scheduler import values
from scheduler.values import Kind
from store.framing import FRAME_BYTES


def _option(
    kind: Kind, default: Any, group: str, metavar: str, help: str, aliases: tuple[str, ...] = (), required: bool = False
) -> Any:
    metadata = {"kind": kind, "group": group, "metavar": metavar, "help": help, "aliases": aliases}
    if required:
        return dataclasses.field(metadata=metadata)
    return dataclasses.field(default_factory=lambda: default, metadata=metadata)


_NO_ARGS: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class Options:
    """What `laned serve` was told. None stands for "not limited" or "to be found out", as each option's help says."""

    model: str = _option(
        values.text("a folder, a Hugging Face id, a .gguf file or one of the words demo and hybrid"),
        None,
        "model",
        "MODEL",
        "what to serve: a folder with an MLX model, a Hugging Face id, a .gguf file, or one of the words demo and "
        "hybrid",
        required=True,
    )
    served_model_name: str | None = _option(
        values.text("a name"), None, "model", "NAME", "name that clients are told (default: the model's own)"
    )
    trust_remote_code: bool = _option(
        values.switch(), False, "model", "", "run Python code that comes with the model's tokenizer"
    )
    chat_template: str | None = _option(
        values.template(),
        None,
        "model",
        "FILE|TEXT",
        "Jinja template for chats, a file or the text (default: the model's)",
    )
    chat_template_args: Mapping[str, Any] = _option(
        values.json_map(), _NO_ARGS, "model", "JSON", 'arguments for the chat template, as {"enable_thinking": false}'
    )
    max_model_len: int | None = _option(
        values.whole(2), None, "model", "TOKENS", "longest prompt with its answer (default: the model's own limit)"
    )
    dtype: str = _option(
        values.choice("auto", "float32", "bfloat16", "float16"),
        "auto",
        "model",
        "TYPE",
        "type of the weights: auto, float32, bfloat16 or float16; auto keeps the model's, and on a CPU takes float32 "
        "where it fits",
    )
    max_tokens: int = _option(
        values.whole(1, 2**31 - 1),
        512,
        "defaults of requests",
        "TOKENS",
        "longest answer where a request sets no limit",
    )
    temperature: float = _option(
        values.number("a number from 0 to 100", lambda value: 0 <= value <= 100),
        0.0,
        "defaults of requests",
        "T",
        "sampling temperature; 0 takes the likeliest token",
        aliases=("temp",),
    )
    top_p: float = _option(
        values.number("a number above 0 and at most 1", lambda value: 0 < value <= 1),
        1.0,
        "defaults of requests",
        "P",
        "sample from the likeliest tokens that make up this probability; 1 is off",
    )
    top_k: int = _option(
        values.whole(0, 2**31 - 1), 0, "defaults of requests", "K", "sample from this many likeliest tokens; 0 is off"
    )
    min_p: float = _option(
        values.number("a number from 0 to 1", lambda value: 0 <= value <= 1),
        0.0,
        "defaults of requests",
        "P",
        "leave out tokens less likely than this part of the likeliest one; 0 is off",
    )
    max_rows: int = _option(
        values.whole(1, 4096),
        32,
        "scheduling",
        "N",
        "requests that are decoded together at most",
        aliases=("max-num-seqs", "decode-concurrency"),
    )
    # A queue this long is minutes of work already; a client does better to hear so at once than to wait at its end.
    max_queue: int = _option(
        values.whole(0), 256, "scheduling", "N", "requests that may wait for a row; more are refused, to be tried again"
    )
    kv_bits: int | None = _option(
        values.one_of_numbers(4, 8),
        None,
        "scheduling",
        "4|8",
        "hold keys and values quantized to so many bits, from the first token on (default: as the model computes them)",
    )
    kv_group_size: int = _option(
        values.one_of_numbers(32, 64, 128), 64, "scheduling", "N", "values that share a scale when they are quantized"
    )
    kv_cache_memory_bytes: int | None = _option(
        values.size(1 << 50),
        None,
        "scheduling",
        "SIZE",
        "memory for the rows' caches; rows that would outgrow it are set aside (default: four fifths of the device's, "
        "less the weights)",
    )
    compile: Literal["auto", "on", "off"] = _option(
        values.choice("auto", "on", "off"),
        "auto",
        "scheduling",
        "auto|on|off",
        "compile decode steps; auto does where it was measured to be faster",
    )
    prefill_step_size: int = _option(
        values.whole(1), 2048, "scheduling", "TOKENS", "tokens of a prompt that are processed at once at most"
    )
    max_stall_ms: float = _option(
        values.number("a number of milliseconds above 0", lambda value: value > 0),
        50.0,
        "scheduling",
        "MS",
        "how long decoding may wait for a piece of somebody's prompt, or eight decode steps if those take longer",
    )
    drain_timeout: float = _option(
        values.number("a number of seconds of at least 0", lambda value: value >= 0),
        30.0,
        "scheduling",
        "SECONDS",
        "how long a SIGTERM lets running requests go on",
    )
    socket: str | None = _option(
        values.text("a path"),
        None,
        "clients",
        "PATH",
        "Unix socket to listen on (default: $XDG_RUNTIME_DIR/laned.sock)",
    )
    hello_timeout: float = _option(values.seconds(), 5.0, "clients", "SECONDS", "cut a client that does not say hello")
    client_timeout: float = _option(
        values.seconds(),
        30.0,
        "clients",
        "SECONDS",
        "cut a client that reads nothing for so long while answers wait for it",
    )
    # One delta may come to hold all that waits for a client, and a frame holds no more.
    outbox_bytes: int = _option(
        values.size(FRAME_BYTES), FRAME_BYTES, "clients", "SIZE", "what may wait for one client before it is cut"
    )
    max_requests_per_connection: int = _option(
        values.whole(1), 256, "clients", "N", "requests that may run on one connection at a time"
    )
    metrics_port: int | None = _option(
        values.whole(0, 65535),
        None,
        "metrics and logs",
        "PORT",
        "serve /metrics and /healthz over HTTP; 0 takes any free port (default: off)",
    )
    metrics_host: str = _option(
        values.text("a host's name or address"), "127.0.0.1", "metrics and logs", "HOST", "address of /metrics"
    )
    log_format: str = _option(
        values.choice("text", "json"), "text", "metrics and logs", "FORMAT", "text for people or json for machines"
    )
    log_level: str = _option(
        values.choice("debug", "info", "warning", "error"),
        "info",
        "metrics and logs",
        "LEVEL",
        "debug, info, warning or error",
    )
    log_prompts: bool = _option(
        values.switch(),
        False,
        "metrics and logs",
        "",
        "write prompts and answers into the log; off, as they are private",
    )
    blas: str = _option(
        values.text("auto, off or a library's path"),
        "auto",
        "processor",
        "auto|off|PATH",
        "BLAS library for MLX on the CPU; auto takes OpenBLAS where MLX has only the slow reference one",
    )
    threads: int | None = _option(
        values.whole(1), None, "processor", "N", "threads of that library (default: chosen from the processor)"
    )


@dataclass(frozen=True, slots=True)
class Option:
    """A line of the table. name and aliases are written with dashes; field is the name in Options."""

    name: str
    field: str
    kind: Kind
    default: Any
    required: bool
    metavar: str
    help: str
    group: str
    aliases: tuple[str, ...]

    @property
    def described(self) -> str:
        """The help with the default and the other names."""
        said = self.help
        if type(self.default) in (int, float, str):
            said += f" (default: {self.kind.show(self.default)})"
        if self.aliases:
            said += "; also " + ", ".join(f"--{alias}" for alias in self.aliases)
        return said


def _table() -> tuple[Option, ...]:
    table = []
    for field in dataclasses.fields(Options):
        required = field.default_factory is dataclasses.MISSING
        default = None if field.default_factory is dataclasses.MISSING else field.default_factory()
        name = field.name.replace("_", "-")
        table.append(Option(name, field.name, default=default, required=required, **field.metadata))
    return tuple(table)


OPTIONS: tuple[Option, ...] = _table()
