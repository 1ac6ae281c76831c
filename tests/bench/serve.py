"""The whole daemon over its socket beside mlx_lm.server over HTTP, both streaming, with the same float32 weights and
the same BLAS in front of MLX. Clients, in this process, each ask once per round, all at the same moment; prompts are
new each time, so that nobody's cache helps. Both servers stand all the time and are loaded in turns.

Then the daemon's decode rate while all rows decode, as a ratio to its lane alone, stepped in a process of its own.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from lanes.blas import BlasReport, preload
from tests.bench.clients import Asking, Round, ask_all, of_daemon, of_http
from tests.bench.harness import Bench, Report, bench, interleave_long

START_S = 180.0
STOP_S = 20.0
IDLE_S = 2.0
MODEL = "SmolLM2-135M float32"
WORKERS = "tests.bench.serve_workers"
PROMPT = "100-token prompts"


@dataclass(frozen=True, slots=True)
class Size:
    """clients: a case for each. With the last one the daemon's decode rate is set beside its lane's."""

    clients: tuple[int, ...]
    tokens: int
    rounds: int


FULL = Size((1, 4, 8), 64, 3)
QUICK = Size((4,), 24, 1)


class Server:
    """A process that serves, its log in a file."""

    def __init__(self, process: subprocess.Popen[str], log: Path, ask: Asking) -> None:
        self.process = process
        self.log = log
        self.ask = ask

    def wait_ready(self, prompt: str) -> None:
        """Return when it has answered once."""
        until_s = time.monotonic() + START_S
        while self.process.poll() is None and time.monotonic() < until_s:
            try:
                ask_all(self.ask, [prompt], 4, lambda part: None)
            except Exception as error:  # whatever a client meets while nobody listens yet
                last = error
                time.sleep(0.2)
            else:
                return
        raise SystemExit(f"{self.process.args!r} is not ready ({last!r}):\n{self.log.read_text()[-2000:]}")

    def cpu_s(self) -> float:
        """Processor time that it has used so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def process(command: list[str], log: Path, with_pipes: bool = False) -> Iterator[subprocess.Popen[str]]:
    """A Python module as a process, ended with the block."""
    with log.open("w") as file:
        started = subprocess.Popen(
            [sys.executable, "-m", *command],
            stdin=subprocess.PIPE if with_pipes else subprocess.DEVNULL,
            stdout=subprocess.PIPE if with_pipes else file,
            stderr=file,
            text=True,
        )
    try:
        yield started
    finally:
        started.terminate()
        try:
            started.wait(STOP_S)
        except subprocess.TimeoutExpired:
            started.kill()
            started.wait()


class Lane:
    """Our lane alone, in a process that steps it when it is told to."""

    def __init__(self, process: subprocess.Popen[str], rows: int, log: Path) -> None:
        self._process, self._rows, self._log = process, rows, log

    def expect(self, said: str) -> None:
        answer = self._answer()
        assert answer == said, f"the lane's process says {answer!r}, not {said!r}"

    def tokens_per_s(self) -> float:
        assert self._process.stdin is not None
        print("go", file=self._process.stdin, flush=True)
        return self._rows / float(self._answer())

    def _answer(self) -> str:
        assert self._process.stdout is not None
        if line := self._process.stdout.readline().strip():
            return line
        raise SystemExit(f"the lane's process has ended:\n{self._log.read_text()[-2000:]}")


def same_blas(report: BlasReport) -> None:
    """Have all processes use the library the way this one has chosen, instead of measuring each for itself."""
    if found := re.search(r"\((\w+), (\d+) threads?\)", report.label):
        os.environ["OPENBLAS_CORETYPE"], os.environ["OPENBLAS_NUM_THREADS"] = found.groups()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def idle_percent(servers: Sequence[Server]) -> list[list[float]]:
    """Of one core, while nobody asks anything of them."""
    before = [server.cpu_s() for server in servers]
    time.sleep(IDLE_S)
    return [[(server.cpu_s() - used) / IDLE_S * 100] for server, used in zip(servers, before, strict=True)]


class Prompts:
    """A new one each time."""

    def __init__(self, folder: Path) -> None:
        self._texts = iter(json.loads((folder / "prompts.json").read_text()))

    def take(self, count: int) -> list[str]:
        return [next(self._texts) for _ in range(count)]


def one_round(
    server: Server, lane: Lane | None, prompts: Prompts, clients: int, tokens: int, report: Report
) -> tuple[Round, float]:
    """What the clients heard, and right after it the rate of the lane alone, if that is asked for."""
    heard = ask_all(server.ask, prompts.take(clients), tokens, report)
    return heard, lane.tokens_per_s() if lane else 0.0


def compare(run: Bench, size: Size, ours: Server, peer: Server, prompts: Prompts, lane: Lane) -> None:
    for clients in size.clients:
        beside = lane if clients == size.clients[-1] else None
        mine, theirs = interleave_long(
            size.rounds,
            f"{clients} clients",
            partial(one_round, ours, beside, prompts, clients, size.tokens),
            partial(one_round, peer, None, prompts, clients, size.tokens),
        )
        case = f"{MODEL}, {clients} client{'s' * (clients > 1)}, {PROMPT}, {size.tokens} new tokens"
        run.add(case, "total", "tokens/s", [r.tokens_per_s for r, _ in mine], [r.tokens_per_s for r, _ in theirs])
        waits = [[r.ttft_s for r, _ in rounds] for rounds in (mine, theirs)]
        run.add(case, "time to first token, median", "s", *waits, more_is_better=False)
        if beside:
            rates, alone = [r.decode_tokens_per_s for r, _ in mine], [rate for _, rate in mine]
            run.add(f"{MODEL}, {clients} rows; peer: our lane alone", "decode", "tokens/s", rates, alone)


def main() -> None:
    with bench("serve", __doc__ or "") as run, tempfile.TemporaryDirectory(prefix="laned-bench-") as name:
        size = QUICK if run.quick else FULL
        folder, port, rows = Path(name), free_port(), max(size.clients)
        report = preload()
        run.blas = report.sentence
        same_blas(report)
        daemon = ["scheduler.cli", "serve", "--model", "demo", "--socket", f"{folder}/laned.sock", "--max-rows", "8"]
        daemon += ["--num-draft-tokens", "0"]
        alone = [WORKERS, "lane", str(folder), str(rows), str(size.tokens)]
        http = [WORKERS, "peer", "--model", str(folder), "--port", str(port)]
        with (
            process(daemon, folder / "daemon.log") as daemon_process,
            process(alone, folder / "lane.log", with_pipes=True) as lane_process,
        ):
            lane = Lane(lane_process, rows, folder / "lane.log")
            lane.expect("saved")
            with process(http, folder / "peer.log") as peer_process:
                ours = Server(daemon_process, folder / "daemon.log", of_daemon(folder / "laned.sock"))
                peer = Server(peer_process, folder / "peer.log", of_http(port))
                lane.expect("ready")
                prompts = Prompts(folder)
                for server in (ours, peer):
                    server.wait_ready(prompts.take(1)[0])
                if Path("/proc/self/stat").exists():
                    busy = idle_percent((ours, peer))
                    run.add(MODEL, "processor while idle", "% of a core", *busy, more_is_better=False)
                compare(run, size, ours, peer, prompts, lane)


if __name__ == "__main__":
    main()
