"""What the store saves: tokens that are not processed again, and bytes that are not written again. A daemon over its
socket, with what it keeps on disk; its figures are its own counters and what its answers say was remembered.

    together  requests with the same long beginning that arrive at the same moment: prompt tokens processed, in relation
              to those of one beginning and all ends. Peer: each processes its own prompt.
    turns     a conversation: bytes written, in relation to those of the tokens that were new, in layers that keep every
              token; what windows and recurrent state take at each turn comes on top. Peer: all tokens at each turn.
    clients   two clients with the same long system prompt and different ends, then a third: the part of the common
              beginning that each need not process.
    budget    conversations that take twice what the folder may, asked for by chance, some more often than others, with
              nothing in memory: the part of prompts' tokens that is read back. Peer: the same for a cache of whole
              rows that gives up the least recently used, which is as good as it gets without shared beginnings.
    foreign   10 GB of another model's segments in the folder, sparse as interrupted copies are: how long a start takes,
              and whether ours are found; then with a budget that has no room for both: whose went.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import trio

from scheduler.client import Client
from scheduler.protocol import Done
from tests.bench.harness import Bench, Report, bench, interleave_long
from tests.bench.store_scan import make
from tests.e2e.daemon import Daemon, serving
from tests.e2e.remembered import figures
from tests.e2e.tiny_models import tiny_model

PARTS = ("together", "turns", "clients", "budget", "foreign")
VOCABULARY = 3000
NEW_TOKENS = 12

NUM_TOGETHER = 16
SHARED_TOKENS, OWN_TOKENS = 2000, 32
NUM_TURNS, TURN_TOKENS = 20, 40
SYSTEM_TOKENS, QUESTION_TOKENS = 1500, 60
NUM_CONVERSATIONS, CONVERSATION_TOKENS, NUM_VISITS = 12, 400, 60
FOREIGN_BYTES, FOREIGN_SEGMENT_TOKENS, FOREIGN_LAYERS = 10 << 30, 2048, 30

# What it is called, what --model takes, and its longest prompt.
Model = tuple[str, Callable[[], str], int]
TINY: tuple[Model, ...] = (
    ("tiny, keys and values", partial(tiny_model, "columns"), 8000),
    ("tiny, with rings", partial(tiny_model, "rings"), 8000),
)
REAL: tuple[Model, ...] = (
    ("SmolLM2-135M", lambda: "demo", 8000),
    ("hybrid-3M", lambda: "hybrid", 2000),
)


class Asked:
    """A client of the daemon and what it has said so far. All prompts are token ids, and no two are alike."""

    def __init__(self, client: Client, report: Report, num_steps: int) -> None:
        self.client = client
        self._report = report
        self._num_steps = num_steps
        self._num_done = 0

    async def ask(self, prompt: Sequence[int]) -> Done:
        done = await self.client.ask(prompt_token_ids=prompt, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=True)
        self._num_done += 1
        self._report(self._num_done / self._num_steps)
        return done

    async def hit(self, prompt: Sequence[int], of_tokens: int) -> float:
        """Which part of so many tokens was remembered."""
        return min((await self.ask(prompt)).usage.cached_tokens, of_tokens) / of_tokens

    async def written_bytes(self) -> int:
        """All that was written, once it is."""
        assert await self.client.flush()
        written: int = (await self.client.status())["store"]["written_bytes"]
        return written


def tokens_of(num: int, seed: object) -> list[int]:
    return random.Random(str(seed)).choices(range(1, VOCABULARY), k=num)


@contextmanager
def daemon_of(model: str, folder: Path, *flags: str) -> Iterator[Daemon]:
    """With a store in the folder, on a disk however full."""
    runtime = Path(tempfile.mkdtemp(dir=folder.parent))
    with serving(runtime, "--model", model, "--store", str(folder), "--store-min-free", "0", *flags) as daemon:
        yield daemon
        daemon.terminate()


def with_client(daemon: Daemon, num_steps: int, work: Callable[[Asked], Awaitable[Any]], label: str) -> Any:
    """Do some work with a client, its progress shown."""

    async def main(report: Report) -> Any:
        async with Client(daemon.socket) as client:
            return await work(Asked(client, report, num_steps))

    ((found,),) = interleave_long(1, label, lambda report: trio.run(main, report))
    return found


def together(run: Bench, model: Model, folder: Path) -> None:
    name, locate, longest = model
    num_shared = min(SHARED_TOKENS, longest - OWN_TOKENS - NEW_TOKENS)
    shared = tokens_of(num_shared, name)

    async def ask_all(asked: Asked) -> float:
        before = (await figures(asked.client))["laned_prefill_tokens_total"]
        async with trio.open_nursery() as nursery:
            for number in range(NUM_TOGETHER):
                nursery.start_soon(asked.ask, [*shared, *tokens_of(OWN_TOKENS, number)])
        return (await figures(asked.client))["laned_prefill_tokens_total"] - before

    with daemon_of(locate(), folder, "--metrics-port", "0") as daemon:
        processed = with_client(daemon, NUM_TOGETHER, ask_all, f"{name}: together")
    # The last token of each prompt is the first step's input.
    needed = num_shared + NUM_TOGETHER * (OWN_TOKENS - 1)
    alone = NUM_TOGETHER * (num_shared + OWN_TOKENS - 1)
    case = f"{name}, {NUM_TOGETHER} prompts at once, {num_shared:,} tokens shared, {OWN_TOKENS} own"
    run.add(case, "tokens processed / needed", "", [processed / needed], [alone / needed], more_is_better=False)


def turns(run: Bench, model: Model, folder: Path) -> None:
    name, locate, _ = model

    async def converse(asked: Asked) -> tuple[int, int, int]:
        """Tokens of the conversation, bytes written, and bytes of tensors if each turn had written the whole row."""
        prompt: list[int] = []
        whole = 0
        for turn in range(NUM_TURNS):
            prompt += tokens_of(TURN_TOKENS, (name, turn))
            answer = await asked.ask(prompt)
            prompt += [each.token_id for each in answer.logprobs]
            # Of the answer's last token nothing was computed.
            whole += len(prompt) - 1
        return len(prompt) - 1, await asked.written_bytes(), whole

    with daemon_of(locate(), folder) as daemon:
        num_tokens, written, whole = with_client(daemon, NUM_TURNS, converse, f"{name}: turns")
        token_bytes = daemon_geometry(daemon)
    case = f"{name}, {NUM_TURNS} turns of {TURN_TOKENS} + {NEW_TOKENS} tokens"
    new = num_tokens * token_bytes
    run.add(case, "bytes written / new tokens' bytes", "", [written / new], [whole / num_tokens], more_is_better=False)
    on_disk = sum(path.stat().st_blocks * 512 for path in folder.rglob("*.segment"))
    run.add(case, "bytes on disk / new tokens' bytes", "", [on_disk / new], [whole / num_tokens], more_is_better=False)


def daemon_geometry(daemon: Daemon) -> int:
    """Bytes of a token in all caches that keep every one."""

    async def main() -> int:
        async with Client(daemon.socket) as client:
            found: int = (await client.status())["model"]["bytes_per_token"]
            return found

    return trio.run(main)


def clients(run: Bench, model: Model, folder: Path) -> None:
    name, locate, longest = model
    num_shared = min(SYSTEM_TOKENS, longest - QUESTION_TOKENS - NEW_TOKENS)
    system = tokens_of(num_shared, (name, "system"))

    async def ask_three(asked: Asked) -> tuple[list[float], int]:
        hits = [
            await asked.hit([*system, *tokens_of(QUESTION_TOKENS, (name, number))], num_shared) for number in range(3)
        ]
        return hits, await asked.written_bytes()

    with daemon_of(locate(), folder) as daemon:
        hits, written = with_client(daemon, 3, ask_three, f"{name}: clients")
        row_bytes = (num_shared + QUESTION_TOKENS + NEW_TOKENS - 1) * daemon_geometry(daemon)
    assert hits[0] == 0
    case = f"{name}, system prompt of {num_shared:,} tokens, questions of {QUESTION_TOKENS}"
    run.add(case, "second client: hit", "%", [100 * hits[1]])
    run.add(case, "third client: hit", "%", [100 * hits[2]])
    run.add(case, "bytes written / one client's", "", [written / row_bytes], [3.0], more_is_better=False)


def budget(run: Bench, model: Model, folder: Path) -> None:
    """The conversations are learnt in one daemon, which tells what they take, and asked for in one that may keep half
    of that."""
    name, locate, _ = model
    prompts = [tokens_of(CONVERSATION_TOKENS, (name, "budget", number)) for number in range(NUM_CONVERSATIONS)]
    chance = random.Random(5)
    visits = chance.choices(
        range(NUM_CONVERSATIONS), [1 / (1 + place) for place in range(NUM_CONVERSATIONS)], k=NUM_VISITS
    )

    async def learn(asked: Asked) -> None:
        for prompt in prompts:
            await asked.ask(prompt)
        await asked.written_bytes()

    async def visit(asked: Asked) -> float:
        hits = []
        for number in visits:
            hits.append(await asked.hit(prompts[number], CONVERSATION_TOKENS - 1))
            await asked.client.flush()
        return 100 * sum(hits) / len(hits)

    with daemon_of(locate(), folder) as daemon:
        with_client(daemon, NUM_CONVERSATIONS, learn, f"{name}: budget, learning")
    # And for half of one more, so that nothing hangs on a few bytes.
    allowed = taken_bytes(folder) * (NUM_CONVERSATIONS + 1) // (2 * NUM_CONVERSATIONS)
    with daemon_of(locate(), folder, "--prompt-cache-bytes", "0", "--store-max", str(allowed)) as daemon:
        hit = with_client(daemon, NUM_VISITS, visit, f"{name}: budget")
    case = f"{name}, {NUM_CONVERSATIONS} conversations, room for half of them, {NUM_VISITS} visits"
    run.add(case, "tokens read back", "%", [hit], [100 * hits_of_rows(visits, NUM_CONVERSATIONS // 2)])
    run.add(case, "bytes on disk / allowed", "", [taken_bytes(folder) / allowed])


def hits_of_rows(visits: Sequence[int], room: int) -> float:
    """Of a cache of so many whole rows which holds the last ones that were learnt before the first visit."""
    held = OrderedDict.fromkeys(range(NUM_CONVERSATIONS)[-room:])
    num_hits = 0
    for number in visits:
        num_hits += number in held
        held[number] = None
        held.move_to_end(number)
        if len(held) > room:
            held.popitem(last=False)
    return num_hits / len(visits)


def taken_bytes(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


def foreign(run: Bench, model: Model, folder: Path) -> None:
    name, locate, _ = model
    segment_bytes = FOREIGN_LAYERS * 2 * 3 * FOREIGN_SEGMENT_TOKENS * 64 * 2
    prompts = [tokens_of(CONVERSATION_TOKENS, (name, "foreign", number)) for number in range(4)]

    async def ask_each(asked: Asked) -> tuple[float, int]:
        """The part that was remembered, and the store's bytes."""
        hits = [await asked.hit(prompt, CONVERSATION_TOKENS - 1) for prompt in prompts]
        await asked.written_bytes()
        return 100 * sum(hits) / len(hits), taken_bytes(folder)

    def started(*flags: str) -> tuple[float, float, int]:
        began_s = time.perf_counter()
        with daemon_of(locate(), folder, *flags) as daemon:
            took_s = time.perf_counter() - began_s
            return took_s, *with_client(daemon, len(prompts), ask_each, f"{name}: foreign")

    _, _, own_bytes = started()
    alone_s, _, _ = started()
    make(folder, FOREIGN_BYTES // segment_bytes, FOREIGN_SEGMENT_TOKENS, FOREIGN_LAYERS, 10)
    both_bytes = taken_bytes(folder)
    beside_s, hit, _ = started()
    _, hit_after, left_bytes = started("--store-max", str(own_bytes))
    case = f"{name}, {FOREIGN_BYTES >> 30} GB of another model's ({both_bytes - own_bytes >> 20} MiB on disk)"
    run.add(case, "start, peer: without them", "s", [beside_s], [alone_s], more_is_better=False)
    run.add(case, "ours found beside them", "%", [hit])
    run.add(case, "ours found where there is no room for both", "%", [hit_after])
    run.add(case, "bytes left / allowed", "", [left_bytes / own_bytes])


WORK: dict[str, Callable[[Bench, Model, Path], None]] = {
    "together": together,
    "turns": turns,
    "clients": clients,
    "budget": budget,
    "foreign": foreign,
}


def main() -> None:
    with bench("sharing", __doc__ or "", PARTS) as run, tempfile.TemporaryDirectory(prefix="laned-bench-") as name:
        run.blas = "as the daemon chooses"
        for model in TINY if run.quick else (*REAL, *TINY):
            for part in run.only:
                folder = Path(name) / f"{part} {model[0]}" / "store"
                folder.mkdir(parents=True)
                WORK[part](run, model, folder)


if __name__ == "__main__":
    main()
