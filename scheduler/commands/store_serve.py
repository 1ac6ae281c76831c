"""`laned store serve`: keeps a folder of what was remembered, for the daemons of one host together.

The folder, its budget and its one writer are this process's. Daemons reach it with `laned serve --store-socket PATH`,
and serve on without it while it is away.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import trio

from scheduler import configuration, log
from scheduler.door import Door
from scheduler.listener import SocketUnavailable, accept
from scheduler.notify import Notifier
from scheduler.signals import Signals
from scheduler.usage import Parser, UsageError
from store.keeper import FolderUnavailable, KeeperSettings, open_keeper
from store.server import serve_client

logger = logging.getLogger(__name__)

OPTIONS = ("store-max", "store-min-free", "log-format", "log-level")


def main(argv: Sequence[str]) -> int:
    parser = Parser(
        "store serve",
        "Keep what daemons remember in one folder, for all of them together: other models, several of one, the next\n"
        "version beside today's. SIGTERM or ^C ends it; what was committed is on disk by then.",
        (
            "laned store serve --store ~/.cache/laned --socket /run/user/1000/laned-store.sock",
            "laned serve --model demo --store-socket /run/user/1000/laned-store.sock",
        ),
    )
    parser.add_argument("--store", metavar="DIR", required=True, help="the folder, which is made if it is not there")
    parser.add_argument("--socket", metavar="PATH", required=True, help="Unix socket for the daemons")
    configuration.add_flags(parser, OPTIONS)
    # The table of options wants one; whatever models the daemons have, this serves them.
    parser.set_defaults(model="any")
    chosen = configuration.load(parser.parse(argv))
    assert chosen.store is not None
    assert chosen.socket is not None
    log.configure(chosen.log_format, chosen.log_level)
    settings = KeeperSettings(
        folder=Path(chosen.store).expanduser(), max_bytes=chosen.store_max, min_free_bytes=chosen.store_min_free
    )
    notifier, door = Notifier.from_environment(), Door.for_options(chosen)
    mistakes: list[str] = []
    try:
        trio.run(_serve, settings, door, notifier)
    except* FolderUnavailable as unavailable:
        mistakes = [f"--store: {_leaf(unavailable)}"]
    except* SocketUnavailable as unavailable:
        mistakes = [f"--socket: {_leaf(unavailable)}"]
    if mistakes:
        raise UsageError(f"{mistakes[0]}.")
    return 0


async def _serve(settings: KeeperSettings, door: Door, notifier: Notifier) -> None:
    signals = Signals(lambda: None)
    async with trio.open_nursery() as nursery:
        await nursery.start(signals.watch)
        async with open_keeper(settings) as keeper, door.open() as listener, trio.open_nursery() as clients:
            serve = partial(serve_client, keeper=keeper, greet=keeper.use)
            nursery.start_soon(accept, listener, serve, clients)
            logger.info("keeping %s for the daemons that connect to %s", settings.folder, door.name)
            notifier.ready(f"keeping {settings.folder}")
            await signals.stop.wait()
            clients.cancel_scope.cancel()
        nursery.cancel_scope.cancel()


def _leaf(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
