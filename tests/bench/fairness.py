"""A long prompt comes in while four rows decode, and a short newcomer while it is being processed: what the four keep
of the rate they have before and after, and how long the newcomer waits for its first token. Ours, scheduler and engine
without sockets, beside mlx-lm's BatchGenerator: the same requests at the same moments, in turns. The rows ask again
when they are answered, so that they stay short, none at the same time as another; what they keep between an answer's
tokens, without the wait for the next one's first, is told by itself.

What is kept is a part of the rate before and after together, which differ as the machine's speed does. Steps of few
rows on a GPU go as fast as the host dispatches them, and a host that others share changes its speed by half within
seconds: so both are told there by the host's speed, too, in tokens for a loop that is timed before each turn.

Ours gives a prompt nearly the share of the device that a row has, so four rows beside one keep four fifths, and it
takes five times as long as it would alone; the table tells that, too. On a CPU the model has few layers, for such a
prompt would take an hour with all of SmolLM2; with --quick it is SmolLM2.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from tests.bench.drive import BLAS, Ask, Ours, Outcome, Peer, Side, Story, engine_for, play, random_prompt

# isort: split
from lanes.tuning import backend
from tests.bench.harness import Report, bench, interleave_long
from tests.bench.models import default_model, model_for_long_prompts

SEED = 5
ROWS = 4
ROW_TOKENS, NEWCOMER_TOKENS = 32, 50
ANSWERS = [200 + 31 * row for row in range(ROWS)]


@dataclass(frozen=True, slots=True)
class Case:
    """The long prompt comes after quiet_s, the newcomer later_s after that; the rows go on for quiet_s after it."""

    long_tokens: int
    quiet_s: float
    later_s: float

    def asks(self) -> list[Ask]:
        source = random.Random(SEED)
        rows = [Ask(0.0, random_prompt(source, ROW_TOKENS), tokens, again=True) for tokens in ANSWERS]
        long = Ask(self.quiet_s, random_prompt(source, self.long_tokens), 1)
        newcomer = Ask(self.quiet_s + self.later_s, random_prompt(source, NEWCOMER_TOKENS), 8)
        return [*rows, long, newcomer]


CPU, QUICK, GPU = Case(16_000, 10.0, 5.0), Case(1000, 4.0, 2.0), Case(30_000, 5.0, 0.5)
ROUNDS = 3


# From and to, in seconds.
Stretch = tuple[float, float]
# About a tenth of a millisecond.
LOOPS = 5000


class Host:
    """How fast it is: before each turn, the time and what a loop of always the same work took, in seconds."""

    def __init__(self) -> None:
        self.loops: list[tuple[float, float]] = []

    def measure(self, now_s: float) -> None:
        began_s = time.perf_counter()
        for _ in range(LOOPS):
            pass
        self.loops.append((now_s, time.perf_counter() - began_s))

    def loop_s(self, start_s: float, stop_s: float) -> float:
        """The mean in a stretch of time."""
        return statistics.mean(loop_s for at, loop_s in self.loops if start_s <= at < stop_s)


class Round:
    """One side's: when its rows were by themselves, and when the long prompt was processed."""

    def __init__(self, outcome: Outcome, host: Host) -> None:
        *self.rows, self.long, self.newcomer = outcome.stories
        self.host = host
        self.before = max(story.token_s[0] for story in self.rows), self.long.arrived_s
        self.loaded = self.long.arrived_s, self.long.token_s[0]
        answered_s = max(self.long.token_s[-1], self.newcomer.token_s[-1])
        self.after = answered_s, max(story.token_s[-1] for story in self.rows)

    def tokens_per_s(self, stretch: Stretch) -> float:
        """Of all rows together."""
        start_s, stop_s = stretch
        return sum(start_s <= at < stop_s for story in self.rows for at in story.token_s) / (stop_s - start_s)

    def tokens_per_loop(self, stretch: Stretch) -> float:
        return self.tokens_per_s(stretch) * self.host.loop_s(*stretch)

    def tokens_per_s_between(self, stretch: Stretch) -> float:
        """Of a row, of tokens that are not the first of an answer; the rows' mean."""
        return statistics.mean(rate_between(*row, *stretch) for row in zip(self.rows, ANSWERS, strict=True))

    def kept(self, rate: Callable[[Stretch], float]) -> float:
        """The part of a rate that was kept while the long prompt was processed: of its mean before and after."""
        return rate(self.loaded) / statistics.mean((rate(self.before), rate(self.after)))

    @property
    def longest_gap_ms(self) -> float:
        """Between two tokens of a row."""
        return max(max(story.gaps_s) for story in self.rows) * 1000


def rate_between(story: Story, answer_tokens: int, start_s: float, stop_s: float) -> float:
    """Tokens a second, of those that came in a stretch of time and were not the first of an answer."""
    came = enumerate(zip(story.token_s[1:], story.gaps_s, strict=True), start=1)
    gaps = [gap for place, (at, gap) in came if place % answer_tokens and start_s <= at < stop_s]
    return len(gaps) / sum(gaps) if gaps else 0.0


FIGURES: dict[str, Callable[[Round], float]] = {
    "rate kept by the rows": lambda each: each.kept(each.tokens_per_s),
    "the same between an answer's tokens": lambda each: each.kept(each.tokens_per_s_between),
    "rate after, of that before": lambda each: each.tokens_per_s(each.after) / each.tokens_per_s(each.before),
}
BY_THE_HOSTS_SPEED: dict[str, Callable[[Round], float]] = {
    "rate kept, by the host's speed": lambda each: each.kept(each.tokens_per_loop),
    "rate after, by the host's speed": lambda each: (
        each.tokens_per_loop(each.after) / each.tokens_per_loop(each.before)
    ),
}


def main() -> None:
    flags = {
        "prompt": "tokens of the long prompt",
        "peer": "`no` leaves mlx-lm out: beside ours it has no memory for 60,000 tokens of an 8B model on 139 GB",
    }
    with bench("fairness", __doc__ or "", flags=flags) as run:
        run.blas = BLAS.sentence
        case = GPU if backend() != "cpu" else QUICK if run.quick else CPU
        if run.flags["prompt"]:
            case = replace(case, long_tokens=int(run.flags["prompt"]))
        make_model = default_model if run.quick else model_for_long_prompts
        name, model = make_model()
        engine = engine_for(model, 2 * ROWS)
        sides: list[Callable[[], Side]] = [lambda: Ours(engine, 2 * ROWS)]
        if run.flags["peer"] != "no":
            _, plain = make_model()
            sides.append(lambda: Peer(plain, 2 * ROWS))
        asks, num_rounds = case.asks(), 1
        if backend() != "cpu":
            num_rounds = ROUNDS
            # Kernels are compiled at their first use, and attention is planned for each pair of lengths.
            for make in sides:
                play(make(), asks, lambda part: None, first_tokens_only=True)

        def measure(make: Callable[[], Side], report: Report) -> Round:
            host = Host()
            outcome = play(make(), asks, report, first_tokens_only=True, go_on_s=case.quiet_s, before_turn=host.measure)
            return Round(outcome, host)

        rounds = interleave_long(num_rounds, "fairness", *(partial(measure, make) for make in sides))
        ours, peer = [*rounds, []][:2]
        said = f"{name}, {ROWS} rows, then a prompt of {case.long_tokens:,} tokens, {case.later_s:g} s later one of 50"
        for what, of in (FIGURES if backend() == "cpu" else FIGURES | BY_THE_HOSTS_SPEED).items():
            run.add(said, what, "", [of(each) for each in ours], [of(each) for each in peer])
        less = partial(run.add, said, more_is_better=False)
        less("longest wait between tokens", "ms", *([each.longest_gap_ms for each in side] for side in (ours, peer)))
        less("first token of the newcomer", "s", *([each.newcomer.ttft_s for each in side] for side in (ours, peer)))
        less("first token of the long prompt", "s", *([each.long.ttft_s for each in side] for side in (ours, peer)))


if __name__ == "__main__":
    main()
