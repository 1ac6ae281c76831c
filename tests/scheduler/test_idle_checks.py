"""When no request is left the loop asks every owner whether something was left behind, and what was is found."""

from collections.abc import Callable
from typing import Any

import pytest

from lanes.lane import Freeze, RowSpec, Sampling
from scheduler.connection import Connection, Limits
from scheduler.daemon import Daemon
from scheduler.notify import Notifier
from scheduler.remembering import Remembering
from store.settings import StoreSettings
from store.store import open_store
from tests.scheduler.bytes_tokenizer import ByteTokenizer
from tests.scheduler.fake_engine import FakeEngine
from tests.scheduler.test_daemon import OPTIONS
from tests.scheduler.trio_test import trio_test
from tests.scheduler.turned_by_hand import AtOnce


def leave_an_adapter(daemon: Daemon) -> None:
    daemon.service.adapters.hold("a digest")


def leave_a_connections_request(daemon: Daemon) -> None:
    stream: Any = None
    connection = Connection(stream, daemon.service, Limits())
    connection._rows["x"], connection._num_left["x"] = 7, 1
    daemon._connections.add(connection)


def leave_a_row(daemon: Daemon) -> None:
    engine: Any = daemon.loop.engine
    engine._merged[7] = RowSpec(7, (1,), Sampling())


def leave_what_is_held(daemon: Daemon) -> None:
    assert daemon.service.store is not None
    daemon.service.store.draft([1, 2, 3], "")


def leave_what_was_to_be_frozen(daemon: Daemon) -> None:
    remembering = daemon.loop.scheduler.remembering
    assert remembering is not None
    draft = remembering.store.draft([1, 2, 3], "")
    assert draft is not None
    remembering._freezing[Freeze(7, 0, 3)] = draft, None


def leave_a_place(daemon: Daemon) -> None:
    rows: Any = daemon.loop.scheduler._recalling
    rows[7] = None


@pytest.mark.parametrize(
    ("leave", "says"),
    [
        (leave_an_adapter, "adapters are needed: {'a digest': 1}"),
        (leave_a_connections_request, r"\['x'\] are under way"),
        (leave_a_row, r"rows \{7\} are"),
        (leave_what_is_held, "1 of what was found or drafted is still held"),
        (leave_what_was_to_be_frozen, r"row_id=7.* were to be frozen"),
        (leave_a_place, r"rows \{7\} have ended but have a place"),
    ],
)
@trio_test
async def test_what_is_left_behind_is_found(leave: Callable[[Daemon], None], says: str) -> None:
    async with open_store(StoreSettings("a model", 1 << 20, 0), None) as store:
        remembering = Remembering(store, cut_anywhere=True)
        daemon = Daemon(OPTIONS, AtOnce(), FakeEngine(), ByteTokenizer(), Notifier(), remembering)
        leave(daemon)
        with pytest.raises(AssertionError, match=says):
            await daemon.loop.run()
