"""Imports run one way, MLX is where it belongs, files are short. Every rule is shown to catch what breaks it."""

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAX_LINES = 400

# What a package may import beside the standard library; a name stands for all that is in it.
ALLOWED = {
    "store": {"store", "msgpack", "trio", "xxhash"},
    "lanes": {"lanes", "store.checkpoint", "mlx", "mlx_lm", "numpy"},
    "scheduler": {
        *("scheduler", "store", "lanes.geometry", "lanes.lane", "lanes.thread"),
        *("h11", "msgpack", "prometheus_client", "rich", "trio"),
    },
}
# A part of a package that may import less than its package does: only this. The gateway is a client of the socket.
INSTEAD = {
    "scheduler/gateway/": {
        *("scheduler.gateway", "scheduler.client", "scheduler.protocol", "scheduler.answer"),
        *("scheduler.dial", "scheduler.log", "scheduler.usage", "scheduler.values"),
        *("hypercorn", "prometheus_client", "pydantic", "starlette", "trio"),
    },
}
# What some of their files may import, too: the longest path that fits counts.
ALSO = {
    "lanes/thread.py": {"trio", "outcome"},
    "lanes/fingerprint.py": {"xxhash"},
    "lanes/grammar.py": {"llguidance"},
    "lanes/tokenizer.py": {"transformers", "tokenizers"},
    "lanes/gguf/": {"transformers", "tokenizers"},
    "lanes/load.py": {"transformers", "tokenizers", "jinja2"},
    "lanes/sources.py": {"huggingface_hub"},
    "scheduler/loading.py": {"lanes"},
    "scheduler/commands/plot.py": {"matplotlib"},
    "scheduler/commands/completion.py": {"shtab"},
}
# The scheduler imports those of the first lines; the BLAS has to be in place before MLX is.
WITHOUT_MLX = {
    "lanes/__init__.py",
    "lanes/lane.py",
    "lanes/geometry.py",
    "lanes/rounding.py",
    "lanes/thread.py",
    "lanes/blas.py",
    "lanes/openblas_copy.py",
    "lanes/machine.py",
}
MLX = {"mlx", "mlx_lm"}
# Who may know of the commands: a daemon does not.
COMMANDS, KNOW_COMMANDS = "scheduler.commands", ("scheduler/commands/", "scheduler/cli.py")
# A model's class is found by the name in its config.
IMPORTS_BY_NAME = {"lanes/load.py"}

_RUN = "[-=*#~_+]{3,}"
_BANNER = re.compile(rf"#\s*{_RUN}|.*\s{_RUN}\s*$")


def is_in(name: str, packages: set[str]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def imported(tree: ast.AST) -> Iterator[tuple[int, tuple[str, ...]]]:
    """(line, names) of each import, in functions too. One name has to be allowed: of `from a import b` a or a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, (alias.name,)) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield from ((node.lineno, (module, f"{module}.{alias.name}")) for alias in node.names)


def imports_by_name(tree: ast.AST) -> Iterator[int]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__"):
                yield node.lineno


def wrong_arrows(path: str, source: str) -> list[str]:
    """Imports that a file of the repository may not have; path as from its root."""
    package = path.split("/")[0]
    own = next((names for prefix, names in INSTEAD.items() if path.startswith(prefix)), ALLOWED[package])
    allowed = set(sys.stdlib_module_names) | own
    for prefix, names in ALSO.items():
        if path == prefix or (prefix.endswith("/") and path.startswith(prefix)):
            allowed |= names
    if path in WITHOUT_MLX:
        allowed -= MLX
    forbidden = set() if path.startswith(KNOW_COMMANDS) else {COMMANDS}
    tree = ast.parse(source)
    found = [
        f"{path}:{line} imports {names[0]}"
        for line, names in imported(tree)
        if not any(is_in(name, allowed) for name in names) or any(is_in(name, forbidden) for name in names)
    ]
    if path not in IMPORTS_BY_NAME:
        found += [f"{path}:{line} imports by a name" for line in imports_by_name(tree)]
    return found


def banners(path: str, source: str) -> list[str]:
    """Comments that draw lines: a file that needs them holds more than one concept."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return [
        f"{path}:{token.start[0]} {token.string}"
        for token in tokens
        if token.type == tokenize.COMMENT and _BANNER.match(token.string)
    ]


def files(*folders: str) -> Iterator[tuple[str, str]]:
    """(path, source) of the Python files in the repository's folders."""
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")


def test_imports_run_one_way() -> None:
    checked = list(files(*ALLOWED))
    assert {path.split("/")[0] for path, _ in checked} == set(ALLOWED)
    assert [wrong for path, source in checked for wrong in wrong_arrows(path, source)] == []


def test_the_tables_name_files_that_exist() -> None:
    named = {path for path in {*ALSO, *INSTEAD, *WITHOUT_MLX, *IMPORTS_BY_NAME} if not (ROOT / path).exists()}
    assert named == set()


def test_no_file_is_long() -> None:
    lengths = {path: len(source.splitlines()) for path, source in files(*ALLOWED, "tests")}
    assert {path: length for path, length in lengths.items() if length > MAX_LINES} == {}


def test_no_comment_draws_a_line() -> None:
    assert [banner for path, source in files(*ALLOWED, "tests") for banner in banners(path, source)] == []


def test_the_scheduler_is_there_without_mlx() -> None:
    """What the rules say of each file, seen in a process that imports them all, and whatever they import."""
    paths = [path for path, _ in files("scheduler", "store")] + sorted(WITHOUT_MLX)
    modules = [path.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for path in paths]
    code = "\n".join(
        [
            "import sys",
            *(f"import {module}" for module in modules if not module.endswith("__main__")),
            "print([name for name in sys.modules if name.split('.')[0] in ('mlx', 'mlx_lm')])",
        ]
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert (ran.stdout.strip(), ran.stderr) == ("[]", "")


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("store/segment.py", "import mlx.core as mx"),
        ("store/segment.py", "from lanes.lane import Step"),
        ("store/segment.py", "import scheduler"),
        ("store/segment.py", "import numpy"),
        ("lanes/engine.py", "import trio"),
        ("lanes/engine.py", "def f():\n    import trio"),
        ("lanes/engine.py", "from scheduler.request import Request"),
        ("lanes/engine.py", "from store.segment import Segment"),
        ("lanes/engine.py", "from store import segment"),
        ("lanes/engine.py", "import store"),
        ("lanes/engine.py", "import store.checkpoints"),
        ("lanes/engine.py", "import transformers"),
        ("lanes/engine.py", "from . import lane"),
        ("lanes/lane.py", "import mlx.core as mx"),
        ("lanes/thread.py", "from mlx import core"),
        ("lanes/blas.py", "def f():\n    import mlx_lm"),
        ("scheduler/loop.py", "import mlx"),
        ("scheduler/loop.py", "from mlx.core import array"),
        ("scheduler/loop.py", "from lanes import engine"),
        ("scheduler/loop.py", "import lanes.engine"),
        ("scheduler/loop.py", "from lanes.engine import MlxEngine"),
        ("scheduler/loop.py", "if TYPE_CHECKING:\n    from lanes.engine import MlxEngine"),
        ("scheduler/loop.py", "import lanes"),
        ("scheduler/loop.py", "import numpy"),
        ("scheduler/loading.py", "import mlx.core"),
        ("scheduler/loop.py", "import starlette"),
        ("scheduler/loop.py", "from scheduler import commands"),
        ("scheduler/loop.py", "from scheduler.commands.status import show"),
        ("scheduler/gateway/app.py", "from scheduler.service import Service"),
        ("scheduler/gateway/app.py", "from lanes.lane import Step"),
        ("scheduler/gateway/app.py", "import store.framing"),
        ("scheduler/loop.py", "import importlib\nimportlib.import_module('mlx')"),
        ("scheduler/loop.py", "__import__('mlx')"),
    ],
)
def test_a_wrong_arrow_is_seen(path: str, source: str) -> None:
    assert len(wrong_arrows(path, source)) == 1


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("store/segment.py", "import os, struct, xxhash, msgpack\nfrom store.framing import encode_frame"),
        (
            "lanes/engine.py",
            "import mlx.core as mx\nfrom store import checkpoint\nfrom store.checkpoint import Checkpoint",
        ),
        ("lanes/thread.py", "import outcome\nimport trio"),
        ("lanes/gguf/vocabulary.py", "import tokenizers"),
        ("scheduler/loop.py", "from lanes import lane\nfrom lanes.lane import Step\nimport trio\nimport store.framing"),
        ("scheduler/loading.py", "from lanes.build import build_engine"),
        ("scheduler/cli.py", "from scheduler.commands import ask"),
        ("scheduler/gateway/app.py", "from scheduler.client import Client\nimport starlette.routing\nimport trio"),
    ],
)
def test_a_right_arrow_is_let_through(path: str, source: str) -> None:
    assert wrong_arrows(path, source) == []


@pytest.mark.parametrize(
    "comment", ["# --- name ---", "# ====", "#######", "    # ---- the rest", "x = 1  # name -----"]
)
def test_a_banner_is_seen(comment: str) -> None:
    assert len(banners("f.py", f"if x:\n    pass\n{comment}\n")) == 1


@pytest.mark.parametrize("comment", ["# half of it -- or less", "x = '# ---- text'", "# [start, stop): a - b", "#: x"])
def test_an_ordinary_comment_is_let_through(comment: str) -> None:
    assert banners("f.py", f"{comment}\n") == []
