"""The client of one inference server: requests go out concurrently, on one event loop.

Cancelling the task that waits for a reply closes its connection, and servers abort a request whose connection closes.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from types import TracebackType
from typing import Final, Self

import aiohttp

from alphaloop.errors import (
    AlphaloopError,
    ReplyCut,
    ReplyInvalid,
    RequestRefused,
    ServerLoginRefused,
    ServerSilent,
    ServerUnreachable,
)
from alphaloop.messages import Job
from alphaloop.server_kind import ServerKind
from worker.engine import Sampling
from worker.servers.asking import Body, body_of, path_of, tokenize_body_of
from worker.servers.endpoint import Endpoint
from worker.servers.events import events
from worker.servers.forms import ModelCard, ModelList, Piece, Tokenized, Version, read_form
from worker.servers.generate import PATH as GENERATE_PATH
from worker.servers.generate import GeneratedPieces, generate_body
from worker.servers.reading import Reply, ReplyReader
from worker.servers.refusals import of_piece, refusal

#: Servers close a connection without requests after five seconds. A request that is sent at that moment would be lost
#: without a word whether the server began with it, so connections are given up earlier on this side.
_KEEP_ALIVE_S: Final = 2.0
_END_S: Final = 1.0  #: wait for the end of a stream that has said it is done
_MAX_REFUSAL_BYTES: Final = 1 << 20  #: read of the body of a refusal

_VERSION_PATHS: Final[Mapping[ServerKind, str]] = {
    "vllm": "/version",
    "sglang": "/server_info",
    "tensorrt_llm": "/version",
    "llama_cpp": "/props",
}
_VERSION: Final = re.compile(r"[\w.+-]{1,64}")
_NUMBERS: Final = re.compile(r"(\d+)\.(\d+)\.(\d+)")
#: The first SGLang that tells of drafts in OpenAI's form, in streams too.
_TELLS_IN_OPENAI_FORM: Final = (0, 5, 19)


class ServerClient:
    """Asks one endpoint. An asynchronous context manager; every method raises errors of alphaloop's tree only."""

    def __init__(self, endpoint: Endpoint, *, context_length: int | None = None) -> None:
        self._endpoint, self._context_length = endpoint, context_length
        self._session: aiohttp.ClientSession | None = None
        self._named: Version | None = None  #: an SGLang's, asked once
        self._naming = asyncio.Lock()

    async def __aenter__(self) -> Self:
        # Nothing is compressed, so that a limit on bytes is a limit on memory; cookies have no place here.
        headers = {"Accept-Encoding": "identity"}
        if (key := self._endpoint.api_key) is not None:
            headers["Authorization"] = f"Bearer {key.get_secret_value()}"
        limits = self._endpoint.limits
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=limits.max_connections, keepalive_timeout=_KEEP_ALIVE_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=limits.connect_s),
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def complete(self, job: Job, sampling: Sampling, *, on_text: Callable[[str], None] | None = None) -> Reply:
        """The text of a job. With `on_text` it is streamed, and each piece of text handed over as it comes.

        A chat of an old SGLang is streamed only where the job asks for it.

        Raises PromptTooLong, InvalidField, or a ServerError.
        """
        endpoint, old = self._endpoint, await self._old_sglang()
        take: Callable[[bytes], Piece] = _taken
        if old is not None and job.body.prompt is not None:
            url = f"{endpoint.root}{GENERATE_PATH}"
            body = generate_body(job.body.prompt, sampling, stream=on_text is not None)
            take = GeneratedPieces(old.incremental_streaming_output).piece
        else:
            if old is not None and not job.body.stream:
                on_text = None  # it tells of chats in whole replies alone
            url = f"{endpoint.api}{path_of(job)}"
            body = body_of(endpoint.kind, endpoint.model, job, sampling, stream=on_text is not None)
        reader = ReplyReader(
            endpoint.kind,
            endpoint.model,
            sampling.max_tokens,
            self._context_length,
            endpoint.num_draft_tokens,
        )
        began = time.perf_counter()
        async with self._asked("POST", url, body) as response:
            if on_text is None:
                reader.add(take(await self._whole(response)))
            else:
                await self._stream(response, reader, take, on_text, began)
        return reader.reply(time.perf_counter() - began)

    @property
    def must_stream(self) -> bool:
        """Whether only a stream tells when the first token came, and loses nothing that a whole reply tells."""
        return self._endpoint.kind in ("openai", "tensorrt_llm", "sglang")

    async def room_behind(self, job: Job) -> int | None:
        """Tokens that the context leaves behind the job's prompt; None where the server does not count for others.

        Raises what `complete` raises.
        """
        if self._endpoint.kind != "vllm":
            return None
        body = tokenize_body_of(self._endpoint.model, job)
        async with self._asked("POST", f"{self._endpoint.root}/tokenize", body) as response:
            found = read_form(Tokenized, await self._whole(response))
        return found.max_model_len - found.count

    async def models(self) -> tuple[ModelCard, ...]:
        """What the server lists at /models."""
        async with self._asked("GET", f"{self._endpoint.api}/models") as response:
            return read_form(ModelList, await self._whole(response)).data

    async def version(self) -> str | None:
        """The server's version or build; None where it does not say. Raises errors as of a server that is away."""
        found = await self._version()
        name = (found.version or found.build_info or "") if found else ""
        return name if _VERSION.fullmatch(name) else None

    async def _version(self) -> Version | None:
        path = _VERSION_PATHS.get(self._endpoint.kind)
        if path is None:
            return None
        try:
            async with self._asked("GET", f"{self._endpoint.root}{path}") as response:
                return read_form(Version, await self._whole(response))
        except RequestRefused:  # a proxy lets only OpenAI's paths through
            return None

    async def _old_sglang(self) -> Version | None:
        """What an SGLang says of itself that tells of drafts in `/generate` alone; None of every other server."""
        if self._endpoint.kind != "sglang":
            return None
        async with self._naming:
            if self._named is None:
                self._named = await self._version() or Version()
        numbers = _NUMBERS.match(self._named.version or "")
        is_old = numbers is not None and tuple(map(int, numbers.groups())) < _TELLS_IN_OPENAI_FORM
        return self._named if is_old else None

    async def _stream(
        self,
        response: aiohttp.ClientResponse,
        reader: ReplyReader,
        take: Callable[[bytes], Piece],
        on_text: Callable[[str], None],
        began: float,
    ) -> None:
        found = events(self._chunks(response), max_event_bytes=self._endpoint.limits.max_event_bytes)
        async with aclosing(found):
            async for data in found:
                if text := reader.add(take(data)):
                    if reader.first_text_s is None:
                        reader.first_text_s = time.perf_counter() - began
                    on_text(text)
        # Behind [DONE] stands the end of the content, in a packet of its own; unread, the connection would be lost.
        if not response.content.at_eof():
            with suppress(TimeoutError):
                async with asyncio.timeout(_END_S):
                    await response.content.readany()

    async def _whole(self, response: aiohttp.ClientResponse) -> bytes:
        return b"".join([chunk async for chunk in self._chunks(response)])

    async def _chunks(self, response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
        """The content as it comes, within the limits on its size and on silence."""
        limits, num_bytes = self._endpoint.limits, 0
        while True:
            try:
                async with asyncio.timeout(limits.silence_s):
                    chunk = await response.content.readany()
            except TimeoutError:
                raise ServerSilent(f"the server stopped inside a reply: nothing for {limits.silence_s:g} s") from None
            if not chunk:
                return
            num_bytes += len(chunk)
            if num_bytes > limits.max_reply_bytes:
                raise ReplyInvalid(f"expected a reply of at most {limits.max_reply_bytes} bytes, found a larger one")
            yield chunk

    @asynccontextmanager
    async def _asked(self, method: str, url: str, body: Body | None = None) -> AsyncIterator[aiohttp.ClientResponse]:
        """A reply with status 200, whose content is still to be read. Raises errors of alphaloop's for all others."""
        if self._session is None:
            raise RuntimeError("a ServerClient is used as an asynchronous context manager")
        limits = self._endpoint.limits
        try:
            try:
                async with asyncio.timeout(limits.answer_s):
                    response = await self._session.request(method, url, json=body, allow_redirects=False)
            except aiohttp.ConnectionTimeoutError:
                raise ServerUnreachable(f"no connection to the server within {limits.connect_s:g} s") from None
            except TimeoutError:
                raise ServerSilent(f"the server did not answer within {limits.answer_s:g} s") from None
            async with response:
                if response.status != 200:
                    raise refusal(response.status, response.headers, await self._refusal_of(response))
                yield response
        except (aiohttp.ClientError, OSError) as error:
            raise _lost(error) from None

    async def _refusal_of(self, response: aiohttp.ClientResponse) -> bytes:
        found = b""
        async for chunk in self._chunks(response):
            found += chunk
            if len(found) > _MAX_REFUSAL_BYTES:
                return b""
        return found


def _taken(content: bytes) -> Piece:
    """A piece of a reply; raises what it reports in place of a text."""
    piece = read_form(Piece, content)
    if piece.error is not None:
        raise of_piece(piece.error)
    return piece


def _lost(error: aiohttp.ClientError | OSError) -> AlphaloopError:
    """The error of a connection that could not be made, or that broke."""
    if isinstance(error, aiohttp.ClientSSLError):
        return ServerLoginRefused("no TLS connection to the server", hint="check the address and its certificate")
    if isinstance(error, aiohttp.ClientConnectorError):
        return ServerUnreachable(f"no connection to the server: {error.strerror or type(error.os_error).__name__}")
    if isinstance(error, aiohttp.ClientConnectionError | aiohttp.ClientPayloadError | ConnectionError):
        return ReplyCut("the server closed the connection before the whole reply had come")
    return ReplyInvalid(f"expected a reply of HTTP, found none that can be read: {type(error).__name__}")
