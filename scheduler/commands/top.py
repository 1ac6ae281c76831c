"""`laned top`: what a running daemon is doing, drawn anew every second.

On a terminal it is a screen of its own, which q or ^C ends; a daemon that goes away is told of, and looked for until it
is back. Where nothing can be drawn (TERM=dumb, a pipe), a line of figures each time does instead.
"""

from __future__ import annotations

import io
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import trio
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from scheduler import dial
from scheduler.client import Client, ConnectionLost
from scheduler.commands.bars import ASCII, BLOCKS, Glyphs
from scheduler.commands.keys import single_keys, wait_for
from scheduler.commands.top_frame import frame, seconds
from scheduler.log import printable
from scheduler.usage import CommandFailed, Parser, UsageError

Report = Mapping[str, Any]

# A daemon answers in milliseconds, however busy its model is. One that does not has stopped, or was stopped.
PATIENCE_S = 10.0
PICTURE_COLUMNS, PICTURE_LINES = 90, 24
# How often the figures in lines are named again.
HEADING_EVERY = 20


def main(argv: Sequence[str]) -> int:
    parser = Parser(
        "top",
        "Watch a running daemon: its rows, the slots and how long they are, queue, rates, latencies, memory.\n"
        "q or ^C ends it.",
        ("laned top", "laned top --once", "laned top --interval 5 | tee figures.txt", "laned top --once --svg top.svg"),
    )
    parser.add_argument("--once", action="store_true", help="show one frame and end")
    parser.add_argument("--interval", metavar="SECONDS", type=float, default=1.0, help="time between two (default: 1)")
    parser.add_argument("--svg", metavar="FILE", help="with --once: write the frame as a picture")
    dial.add_flag(parser)
    chosen = parser.parse(argv)
    if not 0.1 <= chosen.interval <= 3600:
        raise UsageError(f"--interval takes 0.1 to 3600 seconds, not {chosen.interval:g}.")
    if chosen.svg and not chosen.once:
        raise UsageError("--svg writes one frame: give --once with it.")
    first = dial.call(chosen.socket, _ask)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a model's name may have what a plain terminal has not
    console = Console()
    if chosen.svg:
        _write(chosen.svg, picture(first))
    elif chosen.once:
        console.print(Group(*frame(first, console.width, _ENDLESS, glyphs_for(console))))
    elif console.is_terminal and not console.is_dumb_terminal:
        # Ended from outside, it ends as by ^C, and leaves the terminal as it was.
        for end in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(end, lambda *_: signal.raise_signal(signal.SIGINT))
        trio.run(_on_screen, chosen.socket, chosen.interval, console, first)
    else:
        trio.run(_in_lines, chosen.socket, chosen.interval)
    return 0


# More lines than any lane has slots.
_ENDLESS = 10_000


async def _ask(client: Client) -> Report:
    return await client.status()


def _write(path: str, text: str) -> None:
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise CommandFailed(f"{path} cannot be written: {error.strerror}.") from error


def glyphs_for(console: Console) -> Glyphs:
    return ASCII if console.options.ascii_only else BLOCKS


def picture(report: Report) -> str:
    """The frame as an SVG picture of a terminal."""
    console = Console(
        record=True, file=io.StringIO(), width=PICTURE_COLUMNS, force_terminal=True, color_system="truecolor"
    )
    console.print(Group(*frame(report, PICTURE_COLUMNS, PICTURE_LINES, BLOCKS)))
    return console.export_svg(title="laned top", unique_id="laned-top")


async def follow(
    socket: str | None, interval_s: float, tell: Callable[[Report], None], lost: Callable[[str], None]
) -> None:
    """Ask the daemon every interval_s, until cancelled. lost(why) is called as often while there is none."""
    while True:
        why = "the daemon does not answer"
        try:
            with trio.fail_after(PATIENCE_S) as patience:
                async with Client(socket) as client:
                    while True:
                        tell(await client.status())
                        patience.deadline = trio.current_time() + interval_s + PATIENCE_S
                        await trio.sleep(interval_s)
        except ConnectionLost as error:
            why = str(error)
        except trio.TooSlowError:
            pass
        lost(why)
        await trio.sleep(interval_s)


class _Screen:
    """The last report, and whether there is still a daemon behind it."""

    def __init__(self, live: Live, report: Report) -> None:
        self._live = live
        self._report = report
        self._lost_s: float | None = None

    def tell(self, report: Report) -> None:
        self._report, self._lost_s = report, None
        where = printable(str(report.get("socket", "")))
        self._draw(Text.assemble(("q", "bold"), f" ends   {where}   {datetime.now():%X}", style="dim"))

    def lost(self, why: str) -> None:
        now_s = trio.current_time()
        self._lost_s = now_s if self._lost_s is None else self._lost_s
        since = f"for {now_s - self._lost_s:.0f} s"
        self._draw(Text(f"Looking for the daemon {since}: {printable(why)}", style="bold red"))

    def _draw(self, notice: Text) -> None:
        console = self._live.console
        lines = frame(self._report, console.width, console.height, glyphs_for(console), notice)
        if self._lost_s is not None:
            for line in lines[:-1]:
                line.stylize("dim")
        self._live.update(Group(*lines), refresh=True)


async def _on_screen(socket: str | None, interval_s: float, console: Console, first: Report) -> None:
    with single_keys() as keys, Live(console=console, screen=True, auto_refresh=False) as live:
        screen = _Screen(live, first)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(follow, socket, interval_s, screen.tell, screen.lost)
            await wait_for("qQ", keys)
            nursery.cancel_scope.cancel()


class _Lines:
    """A line for each report, its figures named now and then."""

    def __init__(self) -> None:
        self._num_lines = 0
        self._is_lost = False

    def tell(self, report: Report) -> None:
        if self._num_lines % HEADING_EVERY == 0:
            print(HEADING)
        self._num_lines += 1
        self._is_lost = False
        print(f"{datetime.now():%X}{figures(report)}", flush=True)

    def lost(self, why: str) -> None:
        if not self._is_lost:
            print(f"{datetime.now():%X}  looking for the daemon: {printable(why)}", flush=True)
        self._is_lost = True


HEADING = "time      rows prompts waiting   out/s    in/s  1st p50     p99 next p50     p99"


def figures(report: Report) -> str:
    """A report's figures under HEADING."""
    rows, recent = report.get("rows", {}), report.get("recent", {})
    tokens = recent.get("tokens", {})
    rates = [f"{tokens.get(name, {}).get('per_s', 0):8.1f}" for name in ("generated", "processed")]
    times = []
    for name in ("first_token", "between_tokens"):
        for part, width in (("p50_s", 9), ("p99_s", 8)):
            value = recent.get(name, {}).get(part)
            times.append(f"{'-' if value is None else seconds(value):>{width}}")
    counts = f"{rows.get('running', 0):>6}{rows.get('prefilling', 0):>8}{rows.get('waiting', 0):>8}"
    return counts + "".join(rates + times)


async def _in_lines(socket: str | None, interval_s: float) -> None:
    lines = _Lines()
    await follow(socket, interval_s, lines.tell, lines.lost)
