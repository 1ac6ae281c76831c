"""One connection that asks for all it may does not keep others from being served."""

from pathlib import Path

import trio

from scheduler.connection import Limits, serve_connection
from scheduler.listener import accept, listen
from scheduler.options import Options
from scheduler.protocol import Done, Error
from scheduler.request import Request
from tests.scheduler.echo_daemon import EchoDaemon, echo_daemon, in_trio
from tests.scheduler.raw import Raw, connected, submit

LIMIT, MAX_QUEUE, TOKENS = 10, 20, 8


def test_by_default_one_connection_leaves_half_of_the_queue_to_others() -> None:
    options = Options(model="echo")
    assert 2 * options.max_requests_per_connection <= options.max_queue


def noted(daemon: EchoDaemon) -> list[tuple[str, str]]:
    """What is queued and what has ended from now on, in order: ("queued" or "ended", the request's id)."""
    notes: list[tuple[str, str]] = []
    queue, book = daemon.loop.scheduler.submit, daemon.service._book

    def submit_noted(*requests: Request) -> None:
        queue(*requests)
        notes.append(("queued", str(requests[0].wish.client_id)))

    def book_noted(request: Request, end: Done | Error) -> None:
        notes.append(("ended", str(request.wish.client_id)))
        book(request, end)

    daemon.loop.scheduler.submit = submit_noted  # type: ignore[method-assign]
    daemon.service._book = book_noted  # type: ignore[method-assign]
    return notes


async def flood(raw: Raw, is_full: trio.Event) -> None:
    """As many as it may, and another for each that ends."""
    await raw.send(*(submit(f"flood {number}", "x", max_tokens=TOKENS) for number in range(LIMIT + 1)))
    assert (await raw.until("error"))["code"] == "overloaded"
    is_full.set()
    number = LIMIT
    while True:
        await raw.until("done")
        number += 1
        await raw.send(submit(f"flood {number}", "x", max_tokens=TOKENS))


@in_trio
async def test_others_wait_for_no_more_than_one_connection_may_have(tmp_path: Path) -> None:
    path, others = tmp_path / "laned.sock", [f"other {number}" for number in range(30)]
    async with echo_daemon(max_queue=MAX_QUEUE) as daemon, listen(path) as listener, trio.open_nursery() as nursery:
        notes = noted(daemon)

        async def handle(stream: trio.SocketStream) -> None:
            await serve_connection(stream, daemon.service, Limits(requests=LIMIT))

        nursery.start_soon(accept, listener, handle, nursery)
        async with connected(path) as flooding:
            is_full = trio.Event()
            nursery.start_soon(flood, flooding, is_full)
            await is_full.wait()
            for id in others:
                async with connected(path) as raw:
                    await raw.send(submit(id, "y", max_tokens=TOKENS))
                    assert (await raw.until("done"))["id"] == id
            nursery.cancel_scope.cancel()
        for id in others:
            meanwhile = notes[notes.index(("queued", id)) : notes.index(("ended", id))]
            num_flooding = sum(what == "ended" for what, _ in meanwhile)
            # Those before it, and those that run beside it to its end.
            assert num_flooding <= LIMIT + 2 * daemon.engine.info.max_rows
