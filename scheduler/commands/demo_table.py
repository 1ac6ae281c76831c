"""What `laned demo` shows: one row for each request, while it runs and when it has ended."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from scheduler.log import printable

# Enough of an answer's end for the widest terminal; the table cuts it to its column.
_TAIL_CHARS = 300


@dataclass(slots=True)
class Row:
    """A request as its client sees it. Times are of time.monotonic()."""

    name: str
    prompt: str
    text: str = ""
    num_tokens: int = 0
    asked_s: float = 0.0
    first_s: float | None = None
    ended_s: float | None = None
    finish_reason: str | None = None
    error: str | None = None

    def add(self, text: str, num_tokens: int, now_s: float) -> None:
        self.first_s = self.first_s if self.first_s is not None else now_s
        self.text += text
        self.num_tokens += num_tokens

    @property
    def completed(self) -> bool:
        return self.finish_reason in ("stop", "length")

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_s is None else self.first_s - self.asked_s

    @property
    def tokens_per_s(self) -> float:
        """All its tokens over the time from asking to the end, 0 before that."""
        return 0.0 if self.ended_s is None else self.num_tokens / (self.ended_s - self.asked_s)

    @property
    def state(self) -> Text:
        if self.error is not None:
            return Text("failed", style="red")
        if self.finish_reason is not None:
            return Text(f"done: {self.finish_reason}", style="green")
        return Text("waiting", style="dim") if self.first_s is None else Text("writing", style="yellow")

    def rate(self, now_s: float) -> str:
        """Tokens per second since the first one, as text."""
        if self.first_s is None or self.num_tokens < 2:
            return ""
        end_s = now_s if self.ended_s is None else self.ended_s
        return f"{(self.num_tokens - 1) / max(end_s - self.first_s, 1e-3):.1f}"


def table_of(rows: Sequence[Row], now_s: float) -> Table:
    """One line for each row, whatever its text, so that the height never changes.

    While a row is written its end is shown, afterwards its beginning.
    """
    table = Table(expand=True)
    table.add_column("row", justify="right", no_wrap=True)
    table.add_column("state", no_wrap=True, min_width=12)
    table.add_column("tokens", justify="right", no_wrap=True)
    table.add_column("tokens/s", justify="right", no_wrap=True)
    table.add_column("text", ratio=1, no_wrap=True)
    for row in rows:
        text = printable(" ".join(row.text.split()))
        shown: Text | _Tail
        if row.error is not None:
            shown = Text(printable(row.error), style="red", overflow="ellipsis")
        elif row.ended_s is not None:
            shown = Text(text, overflow="ellipsis")
        else:
            shown = _Tail(text[-_TAIL_CHARS:], "") if text else _Tail(row.prompt, "dim")
        table.add_row(row.name, row.state, str(row.num_tokens), row.rate(now_s), shown)
    return table


def answers_of(rows: Sequence[Row]) -> Text:
    """All prompts with their whole answers."""
    answers = []
    for row in rows:
        said = printable(" ".join(row.text.split()))
        answers.append(Text.assemble((f"{row.name}  {row.prompt}\n", "bold"), said, "\n"))
    return Text("\n").join(answers)


class _Tail:
    """One line: as much of a text's end as fits."""

    def __init__(self, text: str, style: str) -> None:
        self._text = text
        self._style = style

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(1, options.max_width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        shown = self._text
        while cell_len(shown) > options.max_width:
            shown = shown[1:]
        yield Text(shown, style=self._style, no_wrap=True)
