"""A long prompt comes in while four rows decode, and a short newcomer while it is being processed: what the four keep
of the rate they had before, and how long the newcomer waits for its first token. Ours, scheduler and engine without
sockets, beside mlx-lm's BatchGenerator: the same requests at the same moments, in turns. The rows ask again when they
are answered, so that they stay short, none at the same time as another; what they keep between an answer's tokens,
without the wait for the next one's first, is told by itself.

Ours gives each request the same share of the device, so four rows beside one prompt keep four fifths, and the prompt
takes five times as long as it would alone; the table tells that, too. What its chunks take is paid afterwards, the last
one never, so that a prompt of few chunks takes more. On a CPU the model has few layers, for such a prompt would take an
hour with all of SmolLM2; with --quick it is SmolLM2.
"""

from __future__ import annotations

import random
import statistics
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
ENDLESS = 1 << 16


@dataclass(frozen=True, slots=True)
class Case:
    """The long prompt comes after quiet_s, the newcomer later_s after that."""

    long_tokens: int
    quiet_s: float
    later_s: float

    def asks(self) -> list[Ask]:
        source = random.Random(SEED)
        rows = [Ask(0.0, random_prompt(source, ROW_TOKENS), tokens, again=True) for tokens in ANSWERS]
        long = Ask(self.quiet_s, random_prompt(source, self.long_tokens), ENDLESS)
        newcomer = Ask(self.quiet_s + self.later_s, random_prompt(source, NEWCOMER_TOKENS), 8)
        return [*rows, long, newcomer]


CPU, QUICK, GPU = Case(16_000, 10.0, 5.0), Case(1000, 4.0, 2.0), Case(30_000, 5.0, 0.5)
ROUNDS = 3


def rate(rows: list[Story], start_s: float, stop_s: float) -> float:
    """Tokens a second of all rows together in a stretch of time."""
    return sum(start_s <= at < stop_s for story in rows for at in story.token_s) / (stop_s - start_s)


def kept(outcome: Outcome) -> float:
    """The part of their rate that the rows kept while the long prompt was processed."""
    *rows, long, _ = outcome.stories
    settled_s = max(story.token_s[0] for story in rows)
    return rate(rows, long.arrived_s, long.token_s[0]) / rate(rows, settled_s, long.arrived_s)


def kept_between(outcome: Outcome) -> float:
    """The same of a row's rate between the tokens of an answer, without its waits for first tokens; the rows' mean."""
    *rows, long, _ = outcome.stories
    settled_s = max(story.token_s[0] for story in rows)
    loaded, quiet = (long.arrived_s, long.token_s[0]), (settled_s, long.arrived_s)
    each = zip(rows, ANSWERS, strict=True)
    return statistics.mean(rate_between(*row, *loaded) / rate_between(*row, *quiet) for row in each)


def rate_between(story: Story, answer_tokens: int, start_s: float, stop_s: float) -> float:
    """Tokens a second, of those that came in a stretch of time and were not the first of an answer."""
    came = enumerate(zip(story.token_s[1:], story.gaps_s, strict=True), start=1)
    gaps = [gap for place, (at, gap) in came if place % answer_tokens and start_s <= at < stop_s]
    return len(gaps) / sum(gaps) if gaps else 0.0


def longest_gap(outcome: Outcome) -> float:
    """Between two tokens of a row, milliseconds."""
    *rows, _, _ = outcome.stories
    return max(max(story.gaps_s) for story in rows) * 1000


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
        asks, rounds = case.asks(), 1
        if backend() != "cpu":
            rounds = ROUNDS
            # Kernels are compiled at their first use, and attention is planned for each pair of lengths.
            for make in sides:
                play(make(), asks, lambda part: None, first_tokens_only=True)

        def measure(make: Callable[[], Side], report: Report) -> Outcome:
            return play(make(), asks, report, first_tokens_only=True)

        ours, peer = [*interleave_long(rounds, "fairness", *(partial(measure, make) for make in sides)), []][:2]
        said = f"{name}, {ROWS} rows, then a prompt of {case.long_tokens:,} tokens, {case.later_s:g} s later one of 50"
        run.add(said, "rate kept by the rows", "", [kept(o) for o in ours], [kept(o) for o in peer])
        run.add(
            said, "the same between an answer's tokens", "", *([kept_between(o) for o in side] for side in (ours, peer))
        )
        less = partial(run.add, said, more_is_better=False)
        less("longest wait between tokens", "ms", [longest_gap(o) for o in ours], [longest_gap(o) for o in peer])
        for place, whose in ((-1, "newcomer"), (-2, "long prompt")):
            waits = [[outcome.stories[place].ttft_s for outcome in side] for side in (ours, peer)]
            less(f"first token of the {whose}", "s", *waits)


if __name__ == "__main__":
    main()
