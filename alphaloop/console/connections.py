"""How long the console waits for a client, and how many connections there may be: clients who are silent lock none out.

A connection waits for its client while a header, or a body that is being read, has not come, and while the client does
not read its answer. For the rest of the time its client waits for us, and that has no limit here.
"""

from __future__ import annotations

import asyncio
from typing import Final

from uvicorn.protocols.http.h11_impl import H11Protocol

PATIENCE_S: Final = 15.0  #: for a header, for the next bytes of a body, and between two requests
LEAST_BYTES_PER_S: Final = 500.0  #: of a body, in the mean
READER_S: Final = 60.0  #: for a part of an answer, of which the kernel takes up to a megabyte at once
MOST_CONNECTIONS: Final = 200
MOST_OF_ADDRESS: Final = 100
_LOOK_S: Final = 1.0


class Connection(H11Protocol):
    """One connection. Where there are too many, the one that has been waited for the longest makes room for it.

    Where none is waited for, because all requests are being answered, its own are answered with 503.
    """

    _due: float  #: by the loop's clock, when its client has been waited for long enough

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has connected."""
        super().connection_made(transport)
        self._due = self.loop.time() + PATIENCE_S
        self._timer = self.loop.call_later(_LOOK_S, self._look)
        others = [
            other for other in self.connections if isinstance(other, Connection) and not other.transport.is_closing()
        ]
        of_address = [other for other in others if (other.client or "?")[0] == (self.client or "?")[0]]
        if len(of_address) > MOST_OF_ADDRESS or len(others) > MOST_CONNECTIONS:
            among = of_address if len(of_address) > MOST_OF_ADDRESS else others
            slow = [other for other in among if other is not self and other._is_waited_for]
            if slow:
                min(slow, key=lambda other: other._due)._end()
            else:
                self.limit_concurrency = 0

    def data_received(self, data: bytes) -> None:
        """A client has sent something, which earns it some more time."""
        self._due = min(self._due + len(data) / LEAST_BYTES_PER_S, self.loop.time() + PATIENCE_S)
        super().data_received(data)

    def pause_writing(self) -> None:
        """A client reads more slowly than we write."""
        self._due = self.loop.time() + READER_S
        super().pause_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """It is over."""
        self._timer.cancel()
        super().connection_lost(exc)

    @property
    def _is_waited_for(self) -> bool:
        if self.cycle is None or self.cycle.response_complete:
            return True
        return self.flow.write_paused or (self.cycle.more_body and not self.flow.read_paused)

    def _look(self) -> None:
        if not self._is_waited_for:
            self._due = self.loop.time() + PATIENCE_S
        elif self.loop.time() >= self._due:
            self._end()
        self._timer = self.loop.call_later(_LOOK_S, self._look)

    def _end(self) -> None:
        is_answered = self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete
        if self.transport.is_closing() or is_answered:
            self.transport.abort()  # what it has not read is not waited for
            return
        if self.conn.trailing_data[0] or (self.cycle is not None and self.cycle.more_body):
            self.transport.write(b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")
        self.transport.close()
