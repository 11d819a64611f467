"""One endpoint over HTTP: connections that are kept for the next request, and limits on bytes and silence."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from types import SimpleNamespace, TracebackType
from typing import Final, Self

import aiohttp
from pydantic import SecretStr

from alphaloop.errors import (
    AlphaloopError,
    ReplyCut,
    ReplyInvalid,
    ServerLoginRefused,
    ServerSilent,
    ServerUnreachable,
)
from worker.servers.asking import Body
from worker.servers.endpoint import Limits
from worker.servers.refusals import refusal

#: Servers close a connection without requests after five seconds. A request that is sent at that moment would be lost
#: without a word whether the server began with it, so connections are given up earlier on this side.
_KEEP_ALIVE_S: Final = 2.0
#: A kept connection that is lost this soon was closed before the request came. Later, the server may have died of it.
_STALE_S: Final = 1.0
_END_S: Final = 1.0  #: wait for the end of a stream that has said it is done
_MAX_REFUSAL_BYTES: Final = 1 << 20  #: read of the body of a refusal


@dataclass(slots=True)
class _Sending:
    """What becomes of one request."""

    is_on_kept_connection: bool = False


class HttpSession:
    """Sends requests and hands over replies. An asynchronous context manager; raises errors of alphaloop's tree."""

    def __init__(self, api_key: SecretStr | None, limits: Limits) -> None:
        self._api_key, self._limits = api_key, limits
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        # Nothing is compressed, so that a limit on bytes is a limit on memory; cookies have no place here.
        headers = {"Accept-Encoding": "identity"}
        if self._api_key is not None:
            headers["Authorization"] = f"Bearer {self._api_key.get_secret_value()}"
        watched = aiohttp.TraceConfig()
        watched.on_connection_reuseconn.append(_on_kept_connection)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=self._limits.max_connections, keepalive_timeout=_KEEP_ALIVE_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._limits.connect_s),
            trace_configs=[watched],
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    @asynccontextmanager
    async def asked(self, method: str, url: str, body: Body | None = None) -> AsyncIterator[Content]:
        """The content of a reply with status 200. Raises errors of alphaloop's for all others."""
        try:
            async with await self._answered(method, url, body) as response:
                content = Content(response, self._limits)
                if response.status != 200:
                    raise refusal(response.status, response.headers, await content.at_most(_MAX_REFUSAL_BYTES))
                yield content
        except (aiohttp.ClientError, OSError) as error:
            raise _lost(error) from None

    async def _answered(self, method: str, url: str, body: Body | None) -> aiohttp.ClientResponse:
        """What the server begins to answer, on a connection that works.

        A server may close a kept connection at any time (RFC 9112, 9.3.1; llama.cpp does behind each stream). A request
        that finds it closed is sent again: a text that was begun twice costs time and changes nothing. The server may
        also have died of the request; then no other connection can be made, and the first loss is what is told.
        """
        first: AlphaloopError | None = None
        while True:
            sending, began = _Sending(), time.perf_counter()
            try:
                return await self._sent(method, url, body, sending)
            except aiohttp.ClientConnectorError as error:
                raise first or _lost(error) from None
            except ServerUnreachable as error:
                raise first or error from None
            except (aiohttp.ClientConnectionError, ConnectionError) as error:
                if not sending.is_on_kept_connection or time.perf_counter() - began > _STALE_S:
                    raise
                first = first or _lost(error)

    async def _sent(self, method: str, url: str, body: Body | None, sending: _Sending) -> aiohttp.ClientResponse:
        if self._session is None:
            raise RuntimeError("an HttpSession is used as an asynchronous context manager")
        limits = self._limits
        try:
            async with asyncio.timeout(limits.answer_s):
                return await self._session.request(
                    method, url, json=body, allow_redirects=False, trace_request_ctx=sending
                )
        except aiohttp.ConnectionTimeoutError:
            raise ServerUnreachable(f"no connection to the server within {limits.connect_s:g} s") from None
        except TimeoutError:
            raise ServerSilent(f"the server did not answer within {limits.answer_s:g} s") from None


@dataclass(frozen=True, slots=True)
class Content:
    """What a server sends behind its status."""

    _response: aiohttp.ClientResponse
    _limits: Limits

    async def whole(self) -> bytes:
        """All of it."""
        return b"".join([chunk async for chunk in self.chunks()])

    async def at_most(self, num_bytes: int) -> bytes:
        """All of it; nothing where it is longer."""
        found = b""
        async for chunk in self.chunks():
            found += chunk
            if len(found) > num_bytes:
                return b""
        return found

    async def chunks(self) -> AsyncIterator[bytes]:
        """It as it comes, within the limits on its size and on silence."""
        limits, num_bytes = self._limits, 0
        while True:
            try:
                async with asyncio.timeout(limits.silence_s):
                    chunk = await self._response.content.readany()
            except TimeoutError:
                raise ServerSilent(f"the server stopped inside a reply: nothing for {limits.silence_s:g} s") from None
            if not chunk:
                return
            num_bytes += len(chunk)
            if num_bytes > limits.max_reply_bytes:
                raise ReplyInvalid(f"expected a reply of at most {limits.max_reply_bytes} bytes, found a larger one")
            yield chunk

    async def end(self) -> None:
        """Read what stands behind the last event of a stream, a packet of its own; unread, the connection is lost."""
        if not self._response.content.at_eof():
            # The text is whole already, however the connection ends.
            with suppress(TimeoutError, aiohttp.ClientError, OSError):
                async with asyncio.timeout(_END_S):
                    await self._response.content.readany()


async def _on_kept_connection(
    session: aiohttp.ClientSession, context: SimpleNamespace, told: aiohttp.TraceConnectionReuseconnParams
) -> None:
    context.trace_request_ctx.is_on_kept_connection = True


def _lost(error: aiohttp.ClientError | OSError) -> AlphaloopError:
    """The error of a connection that could not be made, or that broke."""
    if isinstance(error, aiohttp.ClientSSLError):
        return ServerLoginRefused("no TLS connection to the server", hint="check the address and its certificate")
    if isinstance(error, aiohttp.ClientConnectorError):
        return ServerUnreachable(f"no connection to the server: {error.strerror or type(error.os_error).__name__}")
    if isinstance(error, aiohttp.ClientConnectionError | aiohttp.ClientPayloadError | ConnectionError):
        return ReplyCut("the server closed the connection before the whole reply had come")
    return ReplyInvalid(f"expected a reply of HTTP, found none that can be read: {type(error).__name__}")
