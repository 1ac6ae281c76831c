"""What comes to a client for one request, and what can go wrong between it and its daemon.

A request may have several answers (its option n); each of its deltas bears the index of one.
"""

from collections import deque
from collections.abc import AsyncIterator

import trio

from scheduler.protocol import Delta, Done


class ClientError(Exception):
    """What goes wrong between a client and its daemon."""


class RequestError(ClientError):
    """One request was refused or has failed; code is one of protocol.ERROR_CODES. Others go on."""

    def __init__(self, code: str, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(f"{message} ({code})")
        self.code = code
        self.message = message
        self.retry_after_s = retry_after_s


class ConnectionLost(ClientError):
    """There is no connection (any more); the message says why, as far as that is known."""


class Answer:
    """What comes for one request: iterate over its deltas, then look at `done`, of several answers at `all_done`."""

    def __init__(self, id: int, num_answers: int = 1) -> None:
        self.id = id
        self._num_answers = num_answers
        self._deltas: deque[Delta] = deque()
        self._done: dict[int, Done] = {}
        self._error: ClientError | None = None
        self._news = trio.lowlevel.ParkingLot()

    @property
    def done(self) -> Done:
        """The record of the first answer's end: finish_reason, usage, timings. Raises RuntimeError before all of them
        have ended."""
        return self.all_done[0]

    @property
    def all_done(self) -> list[Done]:
        """The records of all answers' ends, by their index. Raises RuntimeError before that."""
        if len(self._done) < self._num_answers:
            raise RuntimeError("the answer has not ended: iterate over it first")
        return [self._done[index] for index in range(self._num_answers)]

    @property
    def ended(self) -> bool:
        return len(self._done) == self._num_answers or self._error is not None

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        """Raises RequestError or ConnectionLost where the answer broke off."""
        await trio.lowlevel.checkpoint()
        while not self._deltas:
            if self._error is not None:
                raise self._error
            if self.ended:
                raise StopAsyncIteration
            await self._news.park()
        return self._deltas.popleft()

    def take(self, news: Delta | Done | ClientError) -> None:
        """What the client hands over when it comes; the last one is a Done or an error, which ends all answers."""
        if isinstance(news, Delta):
            self._deltas.append(news)
        elif isinstance(news, Done):
            self._done[news.index] = news
        else:
            self._error = news
        self._news.unpark_all()
