"""A TCP proxy before one server, in a thread of its own, that cuts connections on request.

A cut is a reset (RST), as a failing switch or a killed load balancer gives it: neither side is told anything before.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Callable
from typing import Final

_CHUNK: Final = 64 << 10
#: The whole statement: BEGIN ISOLATION LEVEL READ COMMITTED is none.
_COMMIT: Final = b"COMMIT\x00"
_WAIT_S: Final = 10.0
_LAST_TURNS: Final = 10  #: of the loop


class Proxy:
    """Listens on 127.0.0.1:`port` and passes everything on to 127.0.0.1:`target_port`. `port` 0: a free one."""

    def __init__(self, target_port: int, *, port: int = 0) -> None:
        self._target_port = target_port
        self._loop = asyncio.new_event_loop()
        self._links: set[_Link] = set()
        self._serving: set[object] = set()  # tasks, one a client, also while its continuation is being opened
        self._is_ending = False
        self.num_cuts = 0  #: connections cut so far
        self._commits_to_lose = 0
        self._answers_to_lose = 0
        self._most_answered: int | None = None
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._thread.start()
        listening = asyncio.start_server(self._serve, "127.0.0.1", port)
        self._server = asyncio.run_coroutine_threadsafe(listening, self._loop).result(_WAIT_S)
        self.port: Final[int] = self._server.sockets[0].getsockname()[1]

    def cut(self) -> None:
        """Reset every connection now."""
        self._call(self._cut_all)

    def cut_commits(self, num_lost: int, num_unanswered: int) -> None:
        """Reset the connections of the next COMMITs: first those that never reach the server, then those that do.

        Of the latter the client never learns that they were carried out.
        """
        self._call(lambda: self._plan_cuts(num_lost, num_unanswered))

    def cut_answers(self, *, after_bytes: int | None) -> None:
        """Reset every connection once the server has answered so many bytes over it; None: no longer."""
        self._most_answered = after_bytes

    def hold(self) -> None:
        """Pass nothing on: connections stay open and say nothing, as behind a broken cable."""
        self._call(self._flowing.clear)

    def release(self) -> None:
        """Pass on what was held, and all that comes."""
        self._call(self._flowing.set)

    def close(self) -> None:
        """Cut everything and end the thread."""
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(_WAIT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_WAIT_S)
        self._loop.close()

    def _call(self, act: Callable[[], object]) -> None:
        done = threading.Event()

        def run() -> None:
            act()
            done.set()

        self._loop.call_soon_threadsafe(run)
        done.wait(_WAIT_S)

    def _cut_all(self) -> None:
        for link in tuple(self._links):
            link.cut()

    def _plan_cuts(self, num_lost: int, num_unanswered: int) -> None:
        self._commits_to_lose, self._answers_to_lose = num_lost, num_unanswered

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        self._serving.add(task)
        try:
            await self._pass_on_all(reader, writer)
        finally:
            self._serving.discard(task)

    async def _pass_on_all(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            server = await asyncio.open_connection("127.0.0.1", self._target_port)
        except OSError:
            _reset(writer)
            return
        link = _Link(self, (reader, writer), server)
        self._links.add(link)
        try:
            if self._is_ending:
                link.cut()
            await link.run()
        finally:
            self._links.discard(link)

    async def _end(self) -> None:
        await close_listener(self._server)
        self._is_ending = True
        self._flowing.set()
        self._cut_all()
        while self._serving:
            await asyncio.sleep(0)
        await asyncio.sleep(0)  # what was reset last is closed

    async def pass_on(self, link: _Link, chunk: bytes) -> bool:
        """Whether a chunk of the client may go to the server, after a hold; cuts `link` where that was asked for."""
        await self._flowing.wait()
        if _COMMIT not in chunk:
            return True
        if self._commits_to_lose:
            self._commits_to_lose -= 1
            link.cut()
            return False
        if self._answers_to_lose:
            self._answers_to_lose -= 1
            link.cut_at_answer = True
        return True

    async def answer(self, link: _Link) -> bool:
        """Whether an answer of the server may go to the client."""
        await self._flowing.wait()
        if link.cut_at_answer or (self._most_answered is not None and link.num_answered > self._most_answered):
            link.cut()
        return not link.is_cut


async def close_listener(listener: asyncio.Server) -> None:
    """Take no connections any more, once whoever was accepted last is served.

    A connection that asyncio is accepting while its server is closed is neither served nor closed.
    """
    for one in listener.sockets:
        asyncio.get_running_loop().remove_reader(one.fileno())
    for _ in range(_LAST_TURNS):
        await asyncio.sleep(0)
    listener.close()


_Side = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class _Link:
    """One connection and its continuation."""

    def __init__(self, proxy: Proxy, client: _Side, server: _Side) -> None:
        self._proxy, self._client, self._server = proxy, client, server
        self.cut_at_answer = False
        self.num_answered = 0  #: bytes that the server has sent
        self.is_cut = False

    async def run(self) -> None:
        """Until either side ends; the other then ends, too."""
        there, back = asyncio.create_task(self._there()), asyncio.create_task(self._back())
        try:
            await asyncio.wait((there, back), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (there, back):
                task.cancel()
            await asyncio.gather(there, back, return_exceptions=True)
            for _, writer in (self._client, self._server):
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()

    def cut(self) -> None:
        """Reset both sides."""
        if not self.is_cut:
            self.is_cut = True
            self._proxy.num_cuts += 1
            _reset(self._client[1])
            _reset(self._server[1])

    async def _there(self) -> None:
        with contextlib.suppress(OSError):
            while chunk := await self._client[0].read(_CHUNK):
                if not await self._proxy.pass_on(self, chunk):
                    return
                self._server[1].write(chunk)
                await self._server[1].drain()

    async def _back(self) -> None:
        with contextlib.suppress(OSError):
            while chunk := await self._server[0].read(_CHUNK):
                self.num_answered += len(chunk)
                if not await self._proxy.answer(self):
                    return
                self._client[1].write(chunk)
                await self._client[1].drain()


def _reset(writer: asyncio.StreamWriter) -> None:
    connection = writer.get_extra_info("socket")
    if connection is not None:
        with contextlib.suppress(OSError):
            # Lingering for no time makes the close a reset.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
