"""What must be equal for a row of one model to be taken up by another: a hash, by content and never by name.

In it are the configuration as the model runs, its weights, its tokenizer (not the chat template, which makes other
prompts and no other rows), code that comes with it, the types that the weights have here, its caches with their rings,
types and bits, the versions of MLX and mlx-lm, and what computes. Which BLAS does is not in it: another one gives other
last bits, and no other model.

A file's digest is noted with its device, inode, size and time of change, so that a start does not read the weights.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import xxhash
from mlx.utils import tree_flatten

from lanes.freeze import dtype_name
from lanes.lane import LaneSettings
from lanes.load import LoadedModel
from lanes.rows import kind_of, rows_like
from lanes.solo import RowMaker
from lanes.thaw import leaves
from lanes.tuning import backend

logger = logging.getLogger(__name__)

# Goes up when tensors of a part get other names, or their columns another order.
LAYOUT = 1
FILES = (
    *("model*.safetensors", "*.py", "tokenizer.json", "tokenizer.model", "*.tiktoken"),
    *("vocab.*", "merges.txt", "added_tokens.json", "special_tokens_map.json", "tokenizer_config.json"),
)
# Configuration that says where a model comes from, not what it is.
NAMES = {"_name_or_path", "transformers_version"}

READ_BYTES = 4 << 20
MOST_DIGESTS = 1000
# A file that changed so recently may change again without a later time to show for it.
SETTLED_S = 2.0


def fingerprint(
    loaded: LoadedModel, settings: LaneSettings, digests: Path | None = None, read_only: bool = False
) -> str:
    """32 hexadecimal digits. digests: where files' digests are noted; without it all files are read. read_only: nothing
    is added there.

    Raises ValueError for a model that was not loaded from files, OSError where these cannot be read any more.
    """
    if loaded.path is None:
        raise ValueError(f"{loaded.name} was not loaded from files")
    known = Digests(digests)
    make_row = RowMaker(loaded.model, settings.kv_bits, settings.kv_group_size)
    meaning = {
        "layout": LAYOUT,
        "config": {key: value for key, value in loaded.config.items() if key not in NAMES},
        "files": sorted(known.of(path) for path in model_files(loaded.path)),
        "types": sorted({dtype_name(array.dtype) for _, array in tree_flatten(loaded.model.parameters())}),
        "caches": list(_caches(make_row)),
        "bits": [settings.kv_bits, settings.kv_group_size] if settings.kv_bits else None,
        "versions": [version("mlx"), version("mlx-lm")],
        "backend": backend(),
    }
    if not read_only:
        known.save()
    said = json.dumps(meaning, sort_keys=True, default=lambda value: type(value).__name__)
    logger.debug("fingerprint of %s", said)
    return xxhash.xxh3_128_hexdigest(said.encode())


def model_files(path: Path) -> list[Path]:
    """What a model is made of: a GGUF file, or those files of a folder that are its weights, tokenizer and code."""
    return [path] if path.is_file() else sorted({file for pattern in FILES for file in path.glob(pattern)})


def _caches(make_row: RowMaker) -> Iterator[list[Any]]:
    """Of each cache its kind, its ring, the type of its arrays and, of columns, their heads and dim."""
    row = make_row()
    make_row.model(mx.zeros((1, 2), dtype=mx.int32), cache=row)  # nothing is computed for it
    for cache in row:
        kind = kind_of(cache)
        yield [
            kind or type(cache).__name__,
            [
                (
                    place,
                    (held.ring.size, held.ring.keep) if held.ring else None,
                    [(dtype_name(array.dtype), held.runs and array.shape[1::2]) for array in held.arrays],
                )
                for place, member in (leaves([cache]) if kind else ())
                for held in rows_like(member).held_alone(member, 2)
            ],
        ]


class Digests:
    """Digests of files, by what tells a file and its content from any other. What is noted is a help only: a file that
    cannot be read or written costs a warning, and that the weights are read."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._known = dict(_read(path)) if path else {}
        self._is_new = False

    def of(self, file: Path) -> str:
        """The xxh3 of the file's content; of a tokenizer's configuration, of all but the chat template."""
        if file.name == "tokenizer_config.json":
            return _without_template(file)
        with file.open("rb", buffering=0) as opened:
            before = os.fstat(opened.fileno())
            key = f"{before.st_dev}:{before.st_ino}:{before.st_size}:{before.st_mtime_ns}"
            if key in self._known:
                return self._known[key]
            digest, buffer = xxhash.xxh3_128(), memoryview(bytearray(READ_BYTES))
            while count := opened.readinto(buffer):
                digest.update(buffer[:count])
            after = os.fstat(opened.fileno())
        is_settled = time.time() - after.st_mtime > SETTLED_S
        if is_settled and (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns):
            self._known[key] = digest.hexdigest()
            self._is_new = True
        return digest.hexdigest()

    def save(self) -> None:
        """Note what was found, in place of what was noted before: whole, or not at all."""
        if self.path is None or not self._is_new:
            return
        latest = dict(list(self._known.items())[-MOST_DIGESTS:])
        temporary = self.path.with_name(f"{self.path.name}.writing")
        try:
            temporary.write_text(json.dumps(latest, indent=0))
            temporary.replace(self.path)
        except OSError as error:
            logger.warning("the digests of the model's files could not be noted: %s", error)
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)


def _read(path: Path) -> Mapping[str, str]:
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        logger.warning("what was noted of the model's files cannot be read: %s", error)
        return {}
    is_sound = isinstance(found, dict) and all(isinstance(digest, str) for digest in found.values())
    return found if is_sound else {}


def _without_template(file: Path) -> str:
    content = json.loads(file.read_text())
    content.pop("chat_template", None)
    return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True).encode())
