"""The text of a job while it is decoded, as server-sent events."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, Final

from starlette.responses import Response, StreamingResponse

from alphaloop.errors import AlphaloopError
from alphaloop.outcomes.reading import Ended, Event, TextSoFar, Waits

log = logging.getLogger(__name__)

#: Each stream has a thread and a consumer of its own.
MAX_STREAMS: Final = 24
#: After this long a stream ends, and the browser asks anew: then it is seen whether its session still stands.
LONGEST_S: Final = 600.0
_ALIVE_EVERY_S: Final = 15.0

#: Reads events until they end or nobody watches: alphaloop.outcomes.reading.follow of one job.
Read = Callable[[Callable[[], bool]], Iterable[Event]]


class Streams:
    """The streams that are open. Threads share it."""

    def __init__(self, limit: int = MAX_STREAMS) -> None:
        self._free = threading.BoundedSemaphore(limit)

    def answer(self, read: Read) -> Response:
        """A stream of events; beyond the limit one that says so, because a browser does not ask again after that."""
        headers = {"X-Accel-Buffering": "no"}  # a proxy must not collect it
        return StreamingResponse(self._events(read), media_type="text/event-stream", headers=headers)

    async def _events(self, read: Read) -> AsyncIterator[str]:
        if not self._free.acquire(blocking=False):
            yield _sent("refused", {"reason": "too many streams are open"})
            return
        watched, told = _Watched(read), ""
        try:
            watched.start()
            is_over = False
            while not is_over:
                is_over, event = await watched.news(_ALIVE_EVERY_S)
                said, told = _of(event, told)
                yield said
        finally:
            watched.stop()
            self._free.release()


class _Watched:
    """Hands the newest event of a reading thread to the loop that sends. Older ones are of no use any more."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()
        self._newest: Event | str | None = None
        self._is_over = False
        self._is_stopped = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._run, name="console-stream", daemon=True).start()

    def stop(self) -> None:
        self._is_stopped.set()

    async def news(self, timeout_s: float) -> tuple[bool, Event | str | None]:
        """Whether nothing follows, and the newest event since the last call: a text is why the reading failed."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._news.wait(), timeout_s)
        self._news.clear()
        event, self._newest = self._newest, None
        return self._is_over, event

    def _run(self) -> None:
        failed: str | None = None
        try:
            for event in self._read(lambda: not self._is_stopped.is_set()):
                self._tell(event, is_over=isinstance(event, Ended))
        except AlphaloopError as error:
            failed = error.message
        except Exception as error:
            # Only its class: the text of a foreign exception may quote a prompt.
            log.error("a stream failed: %s", type(error).__name__, extra={"action": "console_failed"})
            failed = type(error).__name__
        self._tell(failed, is_over=True)

    def _tell(self, event: Event | str | None, *, is_over: bool) -> None:
        def note() -> None:
            self._newest, self._is_over = event or self._newest, self._is_over or is_over
            self._news.set()

        with suppress(RuntimeError):  # the loop is closed: the console stops
            self._loop.call_soon_threadsafe(note)


def _of(event: Event | str | None, told: str) -> tuple[str, str]:
    """What is sent for an event behind the text that was told before, and the text that is told then."""
    match event:
        case Waits():
            return _sent("waits", {"is_claimed": event.is_claimed}), told
        case TextSoFar():
            return _text(event.text, told), event.text
        case Ended():
            end = _sent("end", {"status": event.status.value, "reason": event.reason})
            return (end if event.text is None else _text(event.text, told) + end), told
        case str():
            return _sent("refused", {"reason": event}), told
    return ": \n\n", told  # nothing new; a browser that is gone is seen by that


def _text(text: str, told: str) -> str:
    """What is new; the whole text where it does not go on with what was told: the job is decoded again."""
    if told and text.startswith(told):
        return _sent("text", {"add": text[len(told) :]}) if len(text) > len(told) else ""
    return _sent("text", {"text": text})


def _sent(event: str, data: Mapping[str, Any]) -> str:
    return f"event: {event}\ndata: {json.dumps(data)}\n\n"
