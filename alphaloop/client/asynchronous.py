"""`AsyncClient`: the client for asyncio. Each call runs `Client` in a thread that ends with it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from datetime import datetime
from functools import partial
from typing import Self, TypeVar

from alphaloop.client.arrivals import Alive, Batch, Piece
from alphaloop.client.sync import Client, JobLike
from alphaloop.messages import Result
from alphaloop.settings import KafkaSettings, Settings

_Answer = TypeVar("_Answer")


class AsyncClient:
    """The methods of `Client`, to be awaited.

    Cancelling what awaits ends the work at its next poll, in a fraction of a second. Only a request that Kafka has not
    answered yet is waited for, at most 10 s.
    """

    def __init__(self, kafka: str | KafkaSettings | Settings | None = None) -> None:
        self._client = Client(kafka)

    async def submit(
        self,
        jobs: JobLike | Iterable[JobLike],
        *,
        batch_id: str | None = None,
        high: bool = False,
        stream: bool = False,
    ) -> Batch:
        """As `Client.submit`. An iterator is read in a thread."""
        return await _in_thread(
            lambda alive: self._client.submit(jobs, batch_id=batch_id, high=high, stream=stream, alive=alive)
        )

    async def sent_before(self, job_ids: Iterable[str], *, since: datetime | None = None) -> Batch:
        """As `Client.sent_before`."""
        return await _in_thread(lambda _: self._client.sent_before(job_ids, since=since))

    async def results(self, batch: Batch, *, timeout_s: float | None = None) -> AsyncGenerator[Result]:
        """As `Client.results`."""
        make = partial(self._client.polled, batch, timeout_s=timeout_s)
        async with aclosing(_polled(make)) as polled:
            async for arrival in polled:
                if isinstance(arrival, Result):
                    yield arrival

    async def stream(self, jobs: JobLike | Batch, *, timeout_s: float | None = None) -> AsyncGenerator[Piece | Result]:
        """As `Client.stream`."""
        batch = jobs if isinstance(jobs, Batch) else await self.submit(jobs, stream=True)
        make = partial(self._client.polled, batch, streams=True, timeout_s=timeout_s)
        async with aclosing(_polled(make)) as polled:
            async for arrival in polled:
                yield arrival

    async def cancel(self, jobs: Batch | str | Iterable[str], *, even_if_unknown_until: datetime | None = None) -> None:
        """As `Client.cancel`."""
        await _in_thread(lambda _: self._client.cancel(jobs, even_if_unknown_until=even_if_unknown_until))

    async def close(self) -> None:
        """As `Client.close`."""
        await _in_thread(lambda _: self._client.close())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class _Thread:
    """The thread of one call or iteration. `alive` raises in it once nothing awaits it any more."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="alphaloop-client")
        self._is_over = threading.Event()

    def alive(self) -> None:
        if self._is_over.is_set():
            raise _Over

    async def run(self, call: Callable[[], _Answer]) -> _Answer:
        """What `call` returns. On cancellation `alive` raises in the thread, which is waited for."""
        future = asyncio.get_running_loop().run_in_executor(self._executor, call)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            self._is_over.set()
            await asyncio.wait([future])
            future.exception()  # `alive` raised it, and it counts as read now
            raise

    def end(self) -> None:
        """Let the thread end with what it does now."""
        self._is_over.set()
        self._executor.shutdown(wait=False)


class _Over(Exception):
    pass


async def _in_thread(call: Callable[[Alive], _Answer]) -> _Answer:
    thread = _Thread()
    try:
        return await thread.run(partial(call, thread.alive))
    finally:
        thread.end()


async def _polled(
    make: Callable[[Alive], Generator[list[Piece | Result]]],
) -> AsyncGenerator[Piece | Result]:
    """What the generator yields in a thread of its own, one by one."""
    thread = _Thread()
    polled = make(thread.alive)
    try:
        while (arrivals := await thread.run(partial(next, polled, None))) is not None:
            for arrival in arrivals:
                yield arrival
    finally:
        try:
            await thread.run(polled.close)
        finally:
            thread.end()
