"""What HTTP costs: `laned gateway` beside the bare socket of the same daemon, and beside mlx_lm.server, all streaming,
with the same float32 weights and the same BLAS. Clients, in this process, each ask once per round, all at the same
moment; prompts are new each time.

On few cores the gateway and these clients compete with the daemon for them: the processor time of the gateway for each
token, which is told too, is what would remain elsewhere.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from lanes.blas import preload
from tests.bench.clients import Round, ask_all, of_daemon, of_http
from tests.bench.harness import Bench, Report, bench, interleave_long
from tests.bench.serve import MODEL, PROMPT, WORKERS, Lane, Prompts, Server, free_port, process, same_blas


@dataclass(frozen=True, slots=True)
class Size:
    clients: int
    tokens: int
    rounds: int


FULL = Size(32, 64, 3)
QUICK = Size(32, 12, 1)


def one_round(server: Server, prompts: Prompts, size: Size, report: Report) -> tuple[Round, float]:
    """What the clients heard, and the processor time of the server for each token, in milliseconds."""
    before_s = server.cpu_s()
    heard = ask_all(server.ask, prompts.take(size.clients), size.tokens, report)
    return heard, (server.cpu_s() - before_s) * 1000 / (size.clients * size.tokens)


def compare(run: Bench, size: Size, socket: Server, gateway: Server, peer: Server, prompts: Prompts) -> None:
    sides = [partial(one_round, side, prompts, size) for side in (socket, gateway, peer)]
    bare, ours, theirs = interleave_long(size.rounds, f"{size.clients} streams", *sides)
    case = f"{MODEL}, {size.clients} streams, {PROMPT}, {size.tokens} new tokens"
    for name, other in (("the bare socket", bare), ("mlx_lm.server", theirs)):
        rates = [[heard.tokens_per_s for heard, _ in rounds] for rounds in (ours, other)]
        run.add(f"{case}; peer: {name}", "total", "tokens/s", *rates)
        answered = [[rate / size.tokens for rate in side] for side in rates]
        run.add(f"{case}; peer: {name}", "answered", "requests/s", *answered)
        waits = [[heard.ttft_s for heard, _ in rounds] for rounds in (ours, other)]
        run.add(f"{case}; peer: {name}", "time to first token, median", "s", *waits, more_is_better=False)
    run.add(case, "processor time of the gateway", "ms a token", [cpu_ms for _, cpu_ms in ours])


def main() -> None:
    with bench("gateway", __doc__ or "") as run, tempfile.TemporaryDirectory(prefix="laned-bench-") as name:
        size = QUICK if run.quick else FULL
        folder, port, peer_port = Path(name), free_port(), free_port()
        report = preload()
        run.blas = report.sentence
        same_blas(report)
        path, rows = folder / "laned.sock", str(size.clients)
        daemon = ["scheduler.cli", "serve", "--model", "demo", "--socket", str(path), "--max-rows", rows]
        daemon += ["--num-draft-tokens", "0"]
        http = ["scheduler.cli", "gateway", "--socket", str(path), "--port", str(port)]
        lane = [WORKERS, "lane", str(folder), "1", "1"]
        their_http = [WORKERS, "peer", "--model", str(folder), "--port", str(peer_port)]
        with process(lane, folder / "lane.log", with_pipes=True) as saving:
            # For the folder that the peer loads, and for the prompts.
            Lane(saving, 1, folder / "lane.log").expect("saved")
        with (
            process(daemon, folder / "daemon.log") as daemon_process,
            process(http, folder / "gateway.log") as gateway_process,
            process([*their_http, "--decode-concurrency", rows], folder / "peer.log") as peer_process,
        ):
            socket = Server(daemon_process, folder / "daemon.log", of_daemon(path))
            gateway = Server(gateway_process, folder / "gateway.log", of_http(port, ignore_eos=True))
            peer = Server(peer_process, folder / "peer.log", of_http(peer_port))
            prompts = Prompts(folder)
            for server in (socket, gateway, peer):
                server.wait_ready(prompts.take(1)[0])
            compare(run, size, socket, gateway, peer, prompts)


if __name__ == "__main__":
    main()
