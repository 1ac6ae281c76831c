"""`laned demo`: a daemon of its own in a temporary folder, eight prompts at once, a conversation that outlives the
daemon, and what came of it in numbers.

It uses nothing but what everybody has: the command `laned serve`, the socket, /metrics and SIGTERM.
"""

import json
import signal
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import trio
from rich.console import Console
from rich.live import Live

from scheduler.client import Client, ClientError
from scheduler.commands.demo_daemon import DemoDaemon, running
from scheduler.commands.demo_restart import Turn, first_turn, next_turn
from scheduler.commands.demo_table import Row, answers_of, table_of
from scheduler.commands.status import size_of
from scheduler.log import printable
from scheduler.usage import CommandFailed, Parser

# Short prompts: on a CPU they are processed at some 150 tokens a second, and the show is the decoding.
PROMPTS = (
    "Explain to a child why the sky is blue.",
    "Write a short poem about a lighthouse in winter.",
    "What is the capital of France, and what is it known for?",
    "What would happen if the moon disappeared?",
    "Write a Python function that reverses a string.",
    "Tell me a surprising fact about octopuses.",
    "Write the first lines of a story about a dragon who is afraid of fire.",
    "Write a letter from a cat to its owner.",
)
ALONE = "How do bees find their way home?"
MAX_TOKENS = 64
# The hybrid has read manuals: what is asked is a title, and it writes the section. The likeliest words of so small a
# model repeat themselves, so it draws them, each row with its own seed.
HYBRID_PROMPTS = (
    "Reading and writing files",
    "How to sort a list",
    "Exceptions",
    "What is a generator?",
    "Threads and locks",
    "Writing a test",
    "Path.exists",
    "Security considerations",
)
HYBRID_ALONE = "Command line options"
HYBRID_SAMPLING = {"temperature": 0.6, "top_p": 0.95}

# Drawing takes a few milliseconds of the processor that the model runs on.
_LOOK_S = 0.2


@dataclass(slots=True)
class _Outcome:
    model: str
    load_s: float
    alone: Row
    rows: list[Row]
    wall_s: float
    peak_rows: int
    rss_bytes: int
    scraped: list[str]
    cold: Turn
    exit_status: int | None = None
    stop_s: float = 0.0
    warm: Turn | None = None

    def record(self) -> dict[str, Any]:
        """The numbers, for machines. tok_s: all tokens over the time from the submits to the end of the last answer."""
        tokens = sum(row.num_tokens for row in self.rows)
        firsts = [row.ttft_s for row in self.rows if row.ttft_s is not None]
        return {
            "requests": len(self.rows),
            "completed": sum(row.completed for row in self.rows),
            "peak_rows": self.peak_rows,
            "tokens": tokens,
            "tok_s": round(tokens / self.wall_s, 2),
            "tok_s_alone": round(self.alone.tokens_per_s, 2),
            "ttft_s": {
                "together": round(statistics.median(firsts), 3) if firsts else None,
                "alone": None if self.alone.ttft_s is None else round(self.alone.ttft_s, 3),
                "cold": round(self.cold.ttft_s, 3),
                "warm": None if self.warm is None else round(self.warm.ttft_s, 3),
            },
            "cached_tokens_after_restart": 0 if self.warm is None else self.warm.cached_tokens,
            "wall_s": round(self.wall_s, 3),
            "load_s": round(self.load_s, 3),
            "stop_s": round(self.stop_s, 3),
            "exit_status": self.exit_status,
            "rss_bytes": self.rss_bytes,
            "model": self.model,
        }


def main(argv: Sequence[str]) -> int:
    parser = Parser(
        "demo",
        f"Start a daemon with a small model in a temporary folder, send it {len(PROMPTS)} prompts at once, watch the\n"
        "answers come, stop it, and start it again for a conversation's next turn. Takes about a minute on a CPU.",
        ("laned demo", "laned demo --json | tail -1", "laned demo --model mlx-community/Qwen3-4B-4bit"),
    )
    parser.add_argument(
        "--json", action="store_true", help="print the numbers as one JSON object; the show is on stderr"
    )
    parser.add_argument(
        "--model", default="demo", metavar="MODEL", help="as in laned serve (default: demo); hybrid starts in seconds"
    )
    chosen = parser.parse(argv)
    console = Console(stderr=chosen.json, highlight=False)
    # Ended from outside, it ends as by ^C, and takes its daemon and its folder along.
    for end in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(end, lambda *_: signal.raise_signal(signal.SIGINT))
    with TemporaryDirectory(prefix="laned-demo-") as folder:
        outcome = trio.run(_demo, chosen.model, Path(folder), console)
    _summary(outcome, console)
    record = outcome.record()
    if chosen.json:
        print(json.dumps(record))
    return 0 if record["completed"] == len(PROMPTS) and outcome.exit_status == 0 else 1


async def _demo(model: str, folder: Path, console: Console) -> _Outcome:
    started_s = time.monotonic()
    sampling = HYBRID_SAMPLING if model == "hybrid" else {}
    async with running(model, folder, len(PROMPTS)) as daemon:
        await _wait_ready(daemon, console)
        load_s = time.monotonic() - started_s
        try:
            async with Client(daemon.socket) as client:
                console.print(f"The daemon is ready after {load_s:.1f} s, on {daemon.socket}.", soft_wrap=True)
                alone = Row("alone", HYBRID_ALONE if model == "hybrid" else ALONE)
                with console.status("one request alone, to compare"):
                    await _ask(client, alone, sampling)
                prompts = HYBRID_PROMPTS if model == "hybrid" else PROMPTS
                rows = [Row(str(number), prompt) for number, prompt in enumerate(prompts, 1)]
                wall_s, peak_rows = await _ask_all(client, rows, sampling, console)
                report = await client.status()
                scraped = await _scrape(report.get("metrics_host", "127.0.0.1"), report["metrics_port"])
                with console.status("a conversation begins with a long text"):
                    cold = await first_turn(client, sampling)
        except (ClientError, OSError, trio.BrokenResourceError) as error:
            raise CommandFailed(daemon.explain(f"The conversation with the daemon broke off: {error}")) from error
        rss_bytes = report.get("memory", {}).get("rss_bytes", 0)
        outcome = _Outcome(report["model"]["name"], load_s, alone, rows, wall_s, peak_rows, rss_bytes, scraped, cold)
        stopping_s = time.monotonic()
        outcome.exit_status = await daemon.stop()
        outcome.stop_s = time.monotonic() - stopping_s
        if outcome.exit_status != 0:
            console.print(daemon.explain("The daemon did not end well."), style="red", markup=False, soft_wrap=True)
            return outcome
    async with running(model, folder, len(PROMPTS)) as daemon:
        await _wait_ready(daemon, console)
        try:
            async with Client(daemon.socket) as client:
                with console.status("its next turn, after the restart"):
                    outcome.warm = await next_turn(client, cold, sampling)
        except ClientError as error:
            raise CommandFailed(daemon.explain(f"The conversation with the daemon broke off: {error}")) from error
        outcome.exit_status = await daemon.stop()
    return outcome


async def _wait_ready(daemon: DemoDaemon, console: Console) -> None:
    with console.status("starting the daemon") as line:
        await daemon.wait_ready(lambda said: line.update(f"loading: {printable(said)}"))


async def _ask(client: Client, row: Row, sampling: Mapping[str, Any]) -> None:
    """Send the row's prompt and gather what comes; a failure is the row's, and the others go on."""
    row.asked_s = time.monotonic()
    try:
        messages = [{"role": "user", "content": row.prompt}]
        async with client.submit(messages=messages, max_tokens=MAX_TOKENS, **sampling) as answer:
            async for delta in answer:
                row.add(delta.text, len(delta.token_ids), time.monotonic())
            row.finish_reason = answer.done.finish_reason
            row.num_tokens = answer.done.usage.completion_tokens
    except ClientError as error:
        row.error = str(error)
    row.ended_s = time.monotonic()


async def _ask_all(client: Client, rows: list[Row], sampling: Mapping[str, Any], console: Console) -> tuple[float, int]:
    """All rows at once, shown live. Returns seconds until the last had ended, and most rows decoded together."""
    peak_rows = 0
    started_s = time.monotonic()

    async def watch() -> None:
        nonlocal peak_rows
        while True:
            report = await client.status()
            peak_rows = max(peak_rows, report["rows"]["running"])
            await trio.sleep(_LOOK_S)

    async def draw(live: Live) -> None:
        while True:
            live.update(table_of(rows, time.monotonic()), refresh=True)
            await trio.sleep(_LOOK_S)

    with Live(console=console, auto_refresh=False, transient=True) as live:
        async with trio.open_nursery() as background:
            background.start_soon(watch)
            if console.is_terminal:
                background.start_soon(draw, live)
            async with trio.open_nursery() as nursery:
                for seed, row in enumerate(rows):
                    nursery.start_soon(_ask, client, row, {**sampling, "seed": seed})
            wall_s = time.monotonic() - started_s
            background.cancel_scope.cancel()
    console.print(answers_of(rows), table_of(rows, time.monotonic()), sep="\n")
    return wall_s, peak_rows


async def _scrape(host: str, port: int) -> list[str]:
    """Three lines of /metrics that tell what has just happened."""
    request = f"GET /metrics HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n\r\n"
    with trio.fail_after(10):
        async with await trio.open_tcp_stream(host, port) as stream:
            await stream.send_all(request.encode("ascii"))
            page = b"".join([part async for part in stream]).decode("utf-8")
    wanted = ("laned_requests_total", "laned_generation_tokens_total", "laned_time_to_first_token_seconds_sum")
    lines = [line for line in page.splitlines() if line.startswith(wanted) and not line.endswith(" 0.0")]
    return lines[:3]


def _summary(outcome: _Outcome, console: Console) -> None:
    found = outcome.record()
    firsts = found["ttft_s"]
    gain = found["tok_s"] / found["tok_s_alone"] if found["tok_s_alone"] else 0.0
    console.print(
        f"{found['completed']} of {found['requests']} requests completed; "
        f"at most {found['peak_rows']} rows ran together.",
        f"  together     {found['tok_s']:6.1f} tokens/s   {found['tokens']} tokens in {found['wall_s']:.1f} s",
        f"  alone        {found['tok_s_alone']:6.1f} tokens/s   together is {gain:.1f} times that",
        f"  first token  {firsts['together'] or 0:6.2f} s          median; alone {firsts['alone'] or 0:.2f} s",
        f"  memory       {size_of(found['rss_bytes'])} of the daemon's process",
        "From /metrics:",
        *(f"  {line}" for line in outcome.scraped),
        f"SIGTERM: the daemon ended with status {outcome.exit_status} after {found['stop_s']:.2f} s.",
        *_restart_lines(outcome),
        sep="\n",
        markup=False,
        soft_wrap=True,
    )


def _restart_lines(outcome: _Outcome) -> list[str]:
    cold, warm = outcome.cold, outcome.warm
    if warm is None:
        return []
    return [
        "Started again, it goes on with a conversation:",
        f"  before       {cold.ttft_s:6.2f} s          to the first token of an answer to {cold.prompt_tokens} tokens",
        f"  after        {warm.ttft_s:6.2f} s          of {warm.prompt_tokens}, {warm.cached_tokens} remembered",
    ]
