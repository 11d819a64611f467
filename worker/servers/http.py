"""HTTP to one server: connections, limits on time and size, server-sent events, and errors as alphaloop's.

    endpoint → HttpSession.asked → Content → events: the data of server-sent events
    a reply that is not 200, or an error in place of a text → one of alphaloop's errors

Connections are kept for the next request. A server's own words may quote the prompt, so no message of ours repeats
them: it says the status, and the server's name for the error where that is a name.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import Any, Final

import aiohttp
from pydantic import SecretStr, ValidationError

from alphaloop.errors import (
    AlphaloopError,
    ConfigError,
    ModelNotServed,
    PromptTooLong,
    ReplyCut,
    ReplyInvalid,
    RequestRefused,
    ServerBusy,
    ServerFailed,
    ServerLoginRefused,
    ServerSilent,
    ServerUnavailable,
    ServerUnreachable,
)
from alphaloop.server_identity import ServerKind
from alphaloop.settings.endpoints import EndpointSettings
from worker.servers.forms import RefusalBody, ServerFailure
from worker.servers.request_body import Body

#: Servers close a connection without requests after five seconds. A request that is sent at that moment would be lost
#: without a word whether the server began with it, so connections are given up earlier on this side.
_KEEP_ALIVE_S: Final = 2.0
#: A kept connection that is lost this soon was closed before the request came. Later, the server may have died of it.
_STALE_S: Final = 1.0
_END_S: Final = 1.0  #: wait for the end of a stream that has said it is done
_MAX_REFUSAL_BYTES: Final = 1 << 20  #: read of the body of a refusal

_DONE: Final = b"[DONE]"  #: the last event of a stream

_TOO_LONG_NAMES: Final = frozenset({"exceed_context_size_error", "context_length_exceeded"})  # llama.cpp, OpenAI
#: vLLM, SGLang and TensorRT-LLM have no name for it.
_TOO_LONG_WORDS: Final = re.compile(
    r"(maximum|model's) context length|maximum model length|max_model_len|max_seq_len|max_num_tokens", re.IGNORECASE
)
_MODEL_NAMES: Final = frozenset({"model_not_found"})
_MODEL_WORDS: Final = re.compile(r"\bmodel\b.*(does not exist|not found)", re.IGNORECASE | re.DOTALL)
_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")
_LOGIN_HINT: Final = "check the key that this endpoint is given"
_FULL_WORDS: Final = re.compile(r"queue is full", re.IGNORECASE)  # SGLang, with 503
_BUSY_HINT: Final = "send fewer requests at once, or raise the server's limit"
_AWAY: Final = frozenset({408, 425, 502, 503, 504})


CONNECT_S: Final = 10.0
MAX_SILENCE_S: Final = 60.0  #: between two pieces of a reply that has begun: nothing queues there
MAX_REPLY_BYTES: Final = 64 << 20  #: of a whole reply, streamed or not
MAX_EVENT_BYTES: Final = 8 << 20  #: of one event of a stream
MAX_CONNECTIONS: Final = 1024


def endpoint_of(
    url: str, kind: ServerKind, model: str | None = None, api_key: SecretStr | None = None, **more: Any
) -> EndpointSettings:
    """An endpoint that is not in the settings; `more` are its other ones. Raises ConfigError."""
    try:
        return EndpointSettings(url=url, kind=kind, model=model, api_key=api_key, **more)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field, message = ".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, ")
        raise ConfigError(f"{field}: {message}" if field else message) from None


class HttpSession:
    """Sends requests and hands over replies, until it is closed. Raises errors of alphaloop's tree."""

    def __init__(self, endpoint: EndpointSettings, *, shows_key: bool = True) -> None:
        self._endpoint = endpoint
        self._api_key = endpoint.api_key if shows_key else None

    @cached_property
    def _session(self) -> aiohttp.ClientSession:
        # Nothing is compressed, so that a limit on bytes is a limit on memory; cookies have no place here.
        headers = {"Accept-Encoding": "identity"}
        if self._api_key is not None:
            headers["Authorization"] = f"Bearer {self._api_key.get_secret_value()}"
        watched = aiohttp.TraceConfig()
        watched.on_connection_reuseconn.append(_on_kept_connection)
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=MAX_CONNECTIONS, keepalive_timeout=_KEEP_ALIVE_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
            trace_configs=[watched],
        )

    async def close(self) -> None:
        """Close its connections; none was opened if nothing was asked."""
        if "_session" in self.__dict__:
            await self._session.close()

    @asynccontextmanager
    async def asked(self, method: str, url: str, body: Body | None = None) -> AsyncIterator[Content]:
        """The content of a reply with status 200. Raises errors of alphaloop's for all others."""
        try:
            async with await self._answered(method, url, body) as response:
                content = Content(response, min(self._endpoint.answer_s, MAX_SILENCE_S))
                if response.status != 200:
                    raise refusal_of_reply(response.status, response.headers, await content.at_most(_MAX_REFUSAL_BYTES))
                yield content
        except (aiohttp.ClientError, OSError) as error:
            raise _lost(error) from None

    async def _answered(self, method: str, url: str, body: Body | None) -> aiohttp.ClientResponse:
        """What the server begins to answer, on a connection that works.

        A server may close a kept connection at any time (RFC 9112, 9.3.1; llama.cpp does after each stream). A request
        that finds it closed is sent again: a text that was begun twice costs time and changes nothing. The server may
        also have died of the request; then no other connection can be made, and the first loss is raised.
        """
        first: AlphaloopError | None = None
        while True:
            on_kept_connection, began = asyncio.Event(), time.perf_counter()
            try:
                async with asyncio.timeout(self._endpoint.answer_s):
                    return await self._session.request(
                        method, url, json=body, allow_redirects=False, trace_request_ctx=on_kept_connection
                    )
            except aiohttp.ConnectionTimeoutError:
                raise first or ServerUnreachable(f"no connection to the server within {CONNECT_S:g} s") from None
            except TimeoutError:
                raise ServerSilent(f"the server did not answer within {self._endpoint.answer_s:g} s") from None
            except aiohttp.ClientConnectorError as error:
                raise first or _lost(error) from None
            except (aiohttp.ClientConnectionError, ConnectionError) as error:
                if not on_kept_connection.is_set() or time.perf_counter() - began > _STALE_S:
                    raise
                first = first or _lost(error)


@dataclass(frozen=True, slots=True)
class Content:
    """The body of a reply."""

    _response: aiohttp.ClientResponse
    _silence_s: float

    async def whole(self) -> bytes:
        """All of it."""
        return b"".join([chunk async for chunk in self.chunks()])

    async def at_most(self, num_bytes: int) -> bytes:
        """All of it; nothing where it is longer."""
        content = b""
        async for chunk in self.chunks():
            content += chunk
            if len(content) > num_bytes:
                return b""
        return content

    async def chunks(self) -> AsyncIterator[bytes]:
        """It as it comes, within the limits on its size and on silence."""
        num_bytes = 0
        while True:
            try:
                async with asyncio.timeout(self._silence_s):
                    chunk = await self._response.content.readany()
            except TimeoutError:
                raise ServerSilent(f"the server stopped inside a reply: nothing for {self._silence_s:g} s") from None
            if not chunk:
                return
            num_bytes += len(chunk)
            if num_bytes > MAX_REPLY_BYTES:
                raise ReplyInvalid(f"expected a reply of at most {MAX_REPLY_BYTES} bytes, found a larger one")
            yield chunk

    async def end(self) -> None:
        """Read what follows the last event of a stream, in a packet of its own; unread, the connection is lost."""
        if not self._response.content.at_eof():
            # The text is whole already, however the connection ends.
            with suppress(TimeoutError, aiohttp.ClientError, OSError):
                async with asyncio.timeout(_END_S):
                    await self._response.content.readany()


async def _on_kept_connection(
    session: aiohttp.ClientSession, context: SimpleNamespace, params: aiohttp.TraceConnectionReuseconnParams
) -> None:
    context.trace_request_ctx.set()


def _lost(error: aiohttp.ClientError | OSError) -> AlphaloopError:
    """The error of a connection that could not be made, or that broke."""
    if isinstance(error, aiohttp.ClientSSLError):
        return ServerLoginRefused("no TLS connection to the server", hint="check the address and its certificate")
    if isinstance(error, aiohttp.ClientConnectorError):
        return ServerUnreachable(f"no connection to the server: {error.strerror or type(error.os_error).__name__}")
    if isinstance(error, aiohttp.ClientConnectionError | aiohttp.ClientPayloadError | ConnectionError):
        return ReplyCut("the server closed the connection before the whole reply had come")
    return ReplyInvalid(f"expected a reply of HTTP, found none that can be read: {type(error).__name__}")


async def events(chunks: AsyncIterable[bytes]) -> AsyncGenerator[bytes, None]:
    """The data of every event until [DONE] or the end of the chunks. Raises ReplyInvalid for an event too large.

    Lines end with LF or CRLF; comments and other fields are left out. Where a stream ends inside an event, that event
    is left out.
    """
    rest, data = b"", b""
    async for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        if len(rest) > MAX_EVENT_BYTES:
            raise _too_large()
        for line in lines:
            stripped = line.removesuffix(b"\r")
            if not stripped and data:
                if data == _DONE:
                    return
                yield data
                data = b""
            elif (value := _data(stripped)) is not None:
                data = data + b"\n" + value if data else value
                if len(data) > MAX_EVENT_BYTES:
                    raise _too_large()


def _data(line: bytes) -> bytes | None:
    """The value of `data:`. llama.cpp names a failure `error:` instead, and sends the same JSON."""
    name, colon, value = line.partition(b":")
    if not colon or name not in (b"data", b"error"):
        return None
    return value.removeprefix(b" ")


def _too_large() -> ReplyInvalid:
    return ReplyInvalid(f"expected events of at most {MAX_EVENT_BYTES} bytes, found a larger one")


def refusal_of_reply(status: int, headers: Mapping[str, str], content: bytes) -> AlphaloopError:
    """The error of a reply that is not 200."""
    retry_after = headers.get("Retry-After", "").strip()
    wait_s = float(retry_after) if re.fullmatch(r"[0-9]{1,7}", retry_after) else None  # dates are not read
    return _error_of(status, _failure(content), wait_s)


def _error_of(status: int, failure: ServerFailure, wait_s: float | None = None) -> AlphaloopError:
    """The error that a server's status, names and words mean; `wait_s`: for how long it asks to wait."""
    said, words = _said(status, failure), failure.message or ""
    if status == 429 or (status == 503 and (wait_s is not None or _FULL_WORDS.search(words))):
        return ServerBusy(said, retry_after_s=wait_s, hint=_BUSY_HINT)
    if status in (401, 403, 407):
        return ServerLoginRefused(said, hint=_LOGIN_HINT)
    if 300 <= status < 400:
        return RequestRefused(said, hint="give the address that this one leads to: redirects are not followed")
    if status in _AWAY:
        return ServerUnavailable(said)
    names = {str(name) for name in (failure.type, failure.code) if name is not None}
    if status < 500 and (names & _TOO_LONG_NAMES or _TOO_LONG_WORDS.search(words)):
        sizes = (
            f"expected at most {failure.n_ctx} tokens, found a prompt of {failure.n_prompt_tokens}"
            if failure.n_ctx and failure.n_prompt_tokens
            else "prompt and output do not fit the server's context"
        )
        return PromptTooLong(sizes, field="body", hint="shorten the prompt, or serve a model with a longer context")
    if status < 500 and (names & _MODEL_NAMES or (status in (400, 404) and _MODEL_WORDS.search(words))):
        return ModelNotServed(said, hint="ask for the name that the server lists at /v1/models")
    if status == 404:
        return RequestRefused(said, hint="is the address the server's, and does it end in /v1?")
    return ServerFailed(said) if status >= 500 else RequestRefused(said)


def of_piece(failure: ServerFailure | str) -> AlphaloopError:
    """The error that stands in place of a text in a reply of status 200; servers put the status into `code`."""
    failure = ServerFailure(message=failure) if isinstance(failure, str) else failure
    status = failure.code if isinstance(failure.code, int) and 400 <= failure.code < 600 else 500
    return _error_of(status, failure)


def _failure(content: bytes) -> ServerFailure:
    try:
        body = RefusalBody.model_validate_json(content)
    except ValidationError:
        return ServerFailure()
    if isinstance(body.error, ServerFailure):
        return body.error
    words = body.error or body.message or (body.detail if isinstance(body.detail, str) else None)
    return ServerFailure(message=words, type=body.type, code=body.code)


def _said(status: int, failure: ServerFailure) -> str:
    """The status, and what the server names: the kind of the error, and the field at fault."""
    kind = next((name for name in (failure.type, failure.code) if _is_name(name)), None)
    names = [str(name) for name in (kind, failure.param) if _is_name(name)]
    return f"the server answered {status} ({': '.join(names)})" if names else f"the server answered {status}"


def _is_name(name: int | str | None) -> bool:
    return isinstance(name, str) and _NAME.fullmatch(name) is not None
