"""The options of `laned serve`: each is defined once, as a field of Options below.

The flags of the command line, the keys of the file given with --config and the documentation are all made from the
table OPTIONS, which is made from those fields. A value comes from the flag, else from the file, else from the default.
Names are the ones that users of mlx_lm.server and vLLM know; where those two differ, both are accepted.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from scheduler import values
from scheduler.option import Option, option, table_of
from store.framing import FRAME_BYTES

_NO_ARGS: Mapping[str, Any] = MappingProxyType({})
_NO_FOLDERS: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class Options:
    """What `laned serve` was told. None stands for "not limited" or "to be found out", as each option's help says."""

    model: str = option(
        values.text("a folder, a Hugging Face id, a .gguf file or one of the words demo and hybrid"),
        None,
        "model",
        "MODEL",
        "what to serve: a folder with an MLX model, a Hugging Face id, a .gguf file, or one of the words demo and "
        "hybrid",
        required=True,
    )
    served_model_name: str | None = option(
        values.text("a name"), None, "model", "NAME", "name that clients are told (default: the model's own)"
    )
    trust_remote_code: bool = option(
        values.switch(), False, "model", "", "run Python code that comes with the model's tokenizer"
    )
    chat_template: str | None = option(
        values.template(),
        None,
        "model",
        "FILE|TEXT",
        "Jinja template for chats, a file or the text (default: the model's)",
    )
    chat_template_args: Mapping[str, Any] = option(
        values.json_map(),
        _NO_ARGS,
        "model",
        "JSON",
        'arguments for the chat template, as {"enable_thinking": false}',
        reloads=True,
    )
    max_model_len: int | None = option(
        values.whole(2), None, "model", "TOKENS", "longest prompt with its answer (default: the model's own limit)"
    )
    dtype: str = option(
        values.choice("auto", "float32", "bfloat16", "float16"),
        "auto",
        "model",
        "TYPE",
        "type of the weights: auto, float32, bfloat16 or float16; auto keeps the model's, and on a CPU takes float32 "
        "where it fits",
    )
    adapter: Mapping[str, str] = option(
        values.named_folders("default"),
        _NO_FOLDERS,
        "model",
        "NAME=FOLDER",
        "a LoRA in mlx-lm's format that requests may name; may be given several times. FOLDER without a name, or the "
        "name default: for requests that name none",
        aliases=("adapter-path", "lora-modules"),
    )
    max_tokens: int = option(
        values.whole(1, 2**31 - 1),
        512,
        "defaults of requests",
        "TOKENS",
        "longest answer where a request sets no limit",
        reloads=True,
    )
    temperature: float = option(
        values.number("a number from 0 to 100", lambda value: 0 <= value <= 100),
        0.0,
        "defaults of requests",
        "T",
        "sampling temperature; 0 takes the likeliest token",
        aliases=("temp",),
        reloads=True,
    )
    top_p: float = option(
        values.number("a number above 0 and at most 1", lambda value: 0 < value <= 1),
        1.0,
        "defaults of requests",
        "P",
        "sample from the likeliest tokens that make up this probability; 1 is off",
        reloads=True,
    )
    top_k: int = option(
        values.whole(0, 2**31 - 1),
        0,
        "defaults of requests",
        "K",
        "sample from this many likeliest tokens; 0 is off",
        reloads=True,
    )
    min_p: float = option(
        values.number("a number from 0 to 1", lambda value: 0 <= value <= 1),
        0.0,
        "defaults of requests",
        "P",
        "leave out tokens less likely than this part of the likeliest one; 0 is off",
        reloads=True,
    )
    max_rows: int = option(
        values.whole(1, 4096),
        32,
        "scheduling",
        "N",
        "requests that are decoded together at most",
        aliases=("max-num-seqs", "decode-concurrency"),
    )
    # A queue this long is minutes of work already; a client does better to hear so at once than to wait at its end.
    max_queue: int = option(
        values.whole(0),
        256,
        "scheduling",
        "N",
        "requests that may wait for a row; more are refused, to be tried again",
        reloads=True,
    )
    kv_bits: int | None = option(
        values.one_of_numbers(4, 8),
        None,
        "scheduling",
        "4|8",
        "hold keys and values quantized to so many bits, from the first token on (default: as the model computes them)",
    )
    kv_group_size: int = option(
        values.one_of_numbers(32, 64, 128), 64, "scheduling", "N", "values that share a scale when they are quantized"
    )
    kv_cache_memory_bytes: int | None = option(
        values.size(1 << 50),
        None,
        "scheduling",
        "SIZE",
        "memory for the rows' caches; rows that would outgrow it are set aside (default: four fifths of the device's, "
        "less the weights)",
    )
    compile: Literal["auto", "on", "off"] = option(
        values.choice("auto", "on", "off"),
        "auto",
        "scheduling",
        "auto|on|off",
        "compile decode steps; auto does where it was measured to be faster",
    )
    num_draft_tokens: int | None = option(
        values.whole(0, 64),
        None,
        "scheduling",
        "N",
        "tokens to guess for a row and step at most, from where its last ones stood before, for requests with "
        "temperature 0; 0 is off (default: 10 on a CPU, 0 elsewhere)",
    )
    prefill_step_size: int = option(
        values.whole(1),
        2048,
        "scheduling",
        "TOKENS",
        "tokens of a prompt that are processed at once at most",
        reloads=True,
    )
    max_stall_ms: float = option(
        values.number("a number of milliseconds above 0", lambda value: value > 0),
        50.0,
        "scheduling",
        "MS",
        "how long decoding may wait for a piece of somebody's prompt, or eight decode steps if those take longer",
        reloads=True,
    )
    drain_timeout: float = option(
        values.number("a number of seconds of at least 0", lambda value: value >= 0),
        30.0,
        "scheduling",
        "SECONDS",
        "how long a SIGTERM lets running requests go on",
        reloads=True,
    )
    prompt_cache_bytes: int | None = option(
        values.size(1 << 50, least_bytes=0),
        None,
        "what is remembered",
        "SIZE",
        "memory for what was processed before, 0 for none (default: a tenth of the device's; on CUDA of the host's)",
    )
    demote_idle: float | None = option(
        values.seconds(),
        None,
        "what is remembered",
        "SECONDS",
        "leave to the disk what memory holds unused for so long (default: what memory has room for stays)",
    )
    store: str | None = option(
        values.text("a folder"),
        None,
        "what is remembered",
        "DIR",
        "folder on an SSD for what was processed, so that it outlives the daemon (default: memory alone)",
    )
    store_max: int = option(
        values.size(1 << 60),
        20 << 30,
        "what is remembered",
        "SIZE",
        "all files in that folder together; what was not used for longest goes first",
        aliases=("store-max-bytes",),
    )
    store_min_free: int = option(
        values.size(1 << 60, least_bytes=0),
        5 << 30,
        "what is remembered",
        "SIZE",
        "space that is left free on the folder's disk",
    )
    store_queue_bytes: int = option(
        values.size(1 << 50),
        1 << 30,
        "what is remembered",
        "SIZE",
        "memory for what waits to be written; beyond it the oldest is given up, until it can be written later",
    )
    store_verify: bool = option(
        values.switch(), False, "what is remembered", "", "check the bytes too whenever something is read back"
    )
    restore: Literal["auto", "read", "map"] = option(
        values.choice("auto", "read", "map"),
        "auto",
        "what is remembered",
        "auto|read|map",
        "how a row gets what is on disk: read; or map, where one file has it all, which MLX can use as it is on a Mac; "
        "auto reads, as nobody has measured mapping there yet",
    )
    store_read_only: bool = option(
        values.switch(), False, "what is remembered", "", "read the folder, which another daemon may be writing to"
    )
    store_socket: str | None = option(
        values.text("a path"),
        None,
        "what is remembered",
        "PATH",
        "socket of a `laned store serve` that keeps the folder, for several daemons together, in place of --store",
    )
    socket: str | None = option(
        values.text("a path"),
        None,
        "clients",
        "PATH",
        "Unix socket to listen on (default: $XDG_RUNTIME_DIR/laned.sock); one from systemd or launchd goes first",
    )
    allow_user: tuple[str, ...] = option(
        values.names("users' names or numbers, with commas between them (in a file, a list)"),
        (),
        "clients",
        "NAMES",
        "users who may connect beside our own and root, with commas between them",
    )
    allow_group: tuple[str, ...] = option(
        values.names("groups' names or numbers, with commas between them (in a file, a list)"),
        (),
        "clients",
        "NAMES",
        "groups whose members may connect, with commas between them",
    )
    hello_timeout: float = option(
        values.seconds(), 5.0, "clients", "SECONDS", "cut a client that does not say hello", reloads=True
    )
    client_timeout: float = option(
        values.seconds(),
        30.0,
        "clients",
        "SECONDS",
        "cut a client that reads nothing for so long while answers wait for it",
        reloads=True,
    )
    # One delta may come to hold all that waits for a client, and a frame holds no more.
    outbox_bytes: int = option(
        values.size(FRAME_BYTES),
        FRAME_BYTES,
        "clients",
        "SIZE",
        "what may wait for one client before it is cut",
        reloads=True,
    )
    # As many as one request may ask for (n), and no more than half of max_queue, so that others find a place.
    max_requests_per_connection: int = option(
        values.whole(1),
        128,
        "clients",
        "N",
        "answers that may run or wait on one connection at a time; with half of --max-queue or less, one that asks for "
        "all it may leaves room for others",
        reloads=True,
    )
    metrics_port: int | None = option(
        values.whole(0, 65535),
        None,
        "metrics and logs",
        "PORT",
        "serve /metrics and /healthz over HTTP; 0 takes any free port (default: off)",
    )
    metrics_host: str = option(
        values.text("a host's name or address"), "127.0.0.1", "metrics and logs", "HOST", "address of /metrics"
    )
    log_format: str = option(
        values.choice("text", "json"),
        "text",
        "metrics and logs",
        "FORMAT",
        "text for people or json for machines",
        reloads=True,
    )
    log_level: str = option(
        values.choice("debug", "info", "warning", "error"),
        "info",
        "metrics and logs",
        "LEVEL",
        "debug, info, warning or error",
        reloads=True,
    )
    log_prompts: bool = option(
        values.switch(),
        False,
        "metrics and logs",
        "",
        "write prompts and answers into the log; off, as they are private",
        reloads=True,
    )
    blas: str = option(
        values.text("auto, off or a library's path"),
        "auto",
        "processor",
        "auto|off|PATH",
        "BLAS library for MLX on the CPU; auto takes OpenBLAS where MLX has only the slow reference one",
    )
    threads: int | None = option(
        values.whole(1), None, "processor", "N", "threads of that library (default: chosen from the processor)"
    )


OPTIONS: tuple[Option, ...] = table_of(Options)
