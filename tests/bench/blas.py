"""Prompt processing of the demonstration's model as laned sets MLX up on the CPU, against MLX as it comes.

    uv run --extra demo python -m tests.bench.blas --quick

A BLAS is chosen once in a process's life, so each setting is a process of its own, which loads the model and then times
one prompt whenever it is told to. The peers are MLX with its reference BLAS: with the file's weights packed, which is
what a user of mlx_lm gets, and with float32 weights, which shows what the BLAS alone does.
"""

import subprocess
import sys
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from tests.bench.harness import bench, interleave

SETTINGS = ("ours", "packed", "float32")


class Worker:
    """A process with one of the settings. Ready once `about` is known."""

    def __init__(self, setting: str) -> None:
        command = [sys.executable, "-m", "tests.bench.blas", "--worker", setting]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.about = self._answer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.terminate()
        self._process.wait()

    def tokens_per_s(self, num_tokens: int) -> float:
        """Of a prompt this long, the first token of the answer included."""
        assert self._process.stdin is not None
        print(num_tokens, file=self._process.stdin, flush=True)
        return num_tokens / float(self._answer())

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        if not line:
            raise SystemExit(f"a worker ended with status {self._process.wait()}")
        return line


@dataclass(frozen=True, slots=True)
class Size:
    """rounds of prompts this long; alone: the length of a longer prompt that only ours is timed with."""

    rounds: int
    num_tokens: int
    alone: int


def main() -> None:
    with bench("blas", "prompt processing with laned's BLAS and float32 weights, against MLX as it comes") as run:
        size = Size(2, 24, 256) if run.quick else Size(3, 128, 1024)
        with Worker("ours") as ours, Worker("packed") as packed, Worker("float32") as dense:
            run.blas = ours.about
            both = [lambda worker=worker: worker.tokens_per_s(size.num_tokens) for worker in (ours, packed, dense)]
            for warm_up in (4, size.num_tokens):
                ours.tokens_per_s(warm_up)
            mine, theirs_packed, theirs_dense = interleave(size.rounds, "prompts", *both)
            (longer,) = interleave(size.rounds, "longer prompts", lambda: ours.tokens_per_s(size.alone))
        what = f"prompt of {size.num_tokens} tokens"
        run.add(f"{what}; peer: {packed.about}", "prefill", "tokens/s", mine, theirs_packed)
        run.add(f"{what}; peer: {dense.about}", "prefill", "tokens/s", mine, theirs_dense)
        run.add(f"prompt of {size.alone} tokens", "prefill", "tokens/s", longer)


def work(setting: str) -> None:
    """The other side of Worker: a line on what is set up, then for each number on standard input the seconds taken."""
    from lanes import blas

    report = blas.preload("auto" if setting == "ours" else "off")
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm.models.cache import make_prompt_cache

    from lanes.load import load

    loaded = load("demo", dtype="float16" if setting == "packed" else "auto")
    if setting == "packed":
        # As the file has them: packed matrices with 16-bit factors, float32 for the rest and so for what is computed.
        norms = [(name, array) for name, array in tree_flatten(loaded.model.parameters()) if array.ndim == 1]
        loaded.model.load_weights([(name, array.astype(mx.float32)) for name, array in norms], strict=False)
    print(report.label if setting == "ours" else f"MLX's BLAS, {setting} weights", flush=True)
    for line in sys.stdin:
        tokens = mx.array([[token % 1000 + 100 for token in range(int(line))]])
        caches = make_prompt_cache(loaded.model)
        start = time.perf_counter()
        mx.eval(loaded.model(tokens, cache=caches)[:, -1])
        print(time.perf_counter() - start, flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work(sys.argv[2])
    else:
        main()
