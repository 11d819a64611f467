"""An event loop on a thread of its own, for everything that waits for servers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Collection, Coroutine
from typing import Any, Final, TypeVar

Result = TypeVar("Result")

_END_S: Final = 5.0  #: wait for the thread's end


class LoopThread:
    """Runs from its making until `close`. Any thread may call it."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._kept: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, act: Callable[[], object]) -> None:
        """Have the loop call `act` soon; calls keep their order. Nothing happens once the thread has ended."""
        try:
            self._loop.call_soon_threadsafe(act)
        except RuntimeError:  # the loop is closed
            if not self._loop.is_closed():
                raise

    def wait_for(self, work: Coroutine[Any, Any, Result], timeout_s: float | None = None) -> Result:
        """The result of a coroutine that the loop runs, or what it raised."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout_s)

    def keep(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine until the end or `end_kept`; called from within the loop."""
        self._kept.add(self._loop.create_task(work))

    async def end_kept(self) -> None:
        """Cancel what is kept and wait for its end, so that what it uses can be closed."""
        kept = tuple(self._kept)
        self._kept.clear()
        await _ended(kept)

    def close(self) -> None:
        """Cancel all that runs and end the thread."""
        self.call(self._loop.stop)
        self._thread.join(_END_S)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            self._cancel_all()
        finally:
            self._loop.close()

    def _cancel_all(self) -> None:
        self._loop.run_until_complete(_ended(asyncio.all_tasks(self._loop)))


async def _ended(tasks: Collection[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
