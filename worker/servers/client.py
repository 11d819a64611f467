"""The client of one inference server: requests go out concurrently, on one event loop.

Cancelling the task that waits for a reply closes its connection, and servers abort a request whose connection closes.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack, aclosing
from types import TracebackType
from typing import Final, Self

from alphaloop.errors import RequestRefused
from alphaloop.messages import Job
from alphaloop.server_kind import ServerKind
from worker.engine import Sampling
from worker.servers.asking import body_of, path_of, tokenize_body_of
from worker.servers.counters import Counters
from worker.servers.endpoint import Endpoint
from worker.servers.events import events
from worker.servers.forms import ModelCard, ModelList, Piece, Tokenized, Version, read_form
from worker.servers.generate import PATH as GENERATE_PATH
from worker.servers.generate import GeneratedPieces, generate_body
from worker.servers.http import Content, HttpSession
from worker.servers.load_page import MAX_BYTES, load_url, num_present
from worker.servers.reading import Reply, ReplyReader
from worker.servers.refusals import of_piece

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
        self._http = HttpSession(endpoint.api_key, endpoint.limits)
        # A page of metrics elsewhere does not see the server's key.
        self._metrics = self._http if endpoint.has_own_metrics else HttpSession(None, endpoint.limits)
        self._open = AsyncExitStack()
        self._named: Version | None = None  #: an SGLang's, asked once
        self._naming = asyncio.Lock()

    async def __aenter__(self) -> Self:
        for session in {self._http, self._metrics}:
            await self._open.enter_async_context(session)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._open.aclose()

    async def complete(
        self,
        job: Job,
        sampling: Sampling,
        *,
        on_text: Callable[[str], None] | None = None,
        num_draft_tokens: int | None = None,
    ) -> Reply:
        """The text of a job. With `on_text` it is streamed, and each piece of text handed over as it comes.

        A chat of an old SGLang is streamed only where the job asks for it. `num_draft_tokens`: most tokens of a draft,
        where the server follows a request in that (0: it decodes vanilla); None: as it was started.

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
            body = body_of(
                endpoint.kind,
                endpoint.model,
                job,
                sampling,
                stream=on_text is not None,
                num_draft_tokens=num_draft_tokens,
            )
        reader = ReplyReader(
            endpoint.kind,
            endpoint.model,
            sampling.max_tokens,
            self._context_length,
            endpoint.num_draft_tokens if num_draft_tokens is None else num_draft_tokens,
        )
        began = time.perf_counter()
        async with self._http.asked("POST", url, body) as content:
            if on_text is None:
                reader.add(take(await content.whole()))
            else:
                await self._stream(content, reader, take, on_text, began)
        return reader.reply(time.perf_counter() - began)

    @property
    def endpoint(self) -> Endpoint:
        """Whom it asks."""
        return self._endpoint

    @property
    def must_stream(self) -> bool:
        """Whether only a stream tells when the first token came, and loses nothing that a whole reply tells."""
        return self._endpoint.kind in ("openai", "tensorrt_llm", "sglang")

    @property
    def sick(self) -> str | None:
        """A server may always come back."""
        return None

    async def revive(self) -> None:
        """Others start the server."""

    async def room_behind(self, job: Job) -> int | None:
        """Tokens that the context leaves behind the job's prompt; None where the server does not count for others.

        Raises what `complete` raises.
        """
        if self._endpoint.kind != "vllm":
            return None
        body = tokenize_body_of(self._endpoint.model, job)
        async with self._http.asked("POST", f"{self._endpoint.root}/tokenize", body) as content:
            found = read_form(Tokenized, await content.whole())
        return found.max_model_len - found.count

    async def counters(self) -> Counters:
        """What the page of metrics says; the endpoint has its address. Raises ServerError."""
        url = self._endpoint.metrics_url
        if url is None:
            raise RuntimeError("an endpoint without an address of metrics has no counters")
        async with self._metrics.asked("GET", url) as content:
            return Counters.of_page((await content.whole()).decode(errors="replace"))

    async def num_present(self) -> int | None:
        """Requests that run or wait there now, whoever sent them; None of a server that has no page for it.

        Raises ServerError, which is RequestRefused where the page was not turned on.
        """
        endpoint = self._endpoint
        if (url := load_url(endpoint)) is None:
            return None
        session = self._metrics if url == endpoint.metrics_url else self._http
        async with session.asked("GET", url) as content:
            return num_present(endpoint, await content.at_most(MAX_BYTES))

    async def models(self) -> tuple[ModelCard, ...]:
        """What the server lists at /models."""
        async with self._http.asked("GET", f"{self._endpoint.api}/models") as content:
            return read_form(ModelList, await content.whole()).data

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
            async with self._http.asked("GET", f"{self._endpoint.root}{path}") as content:
                return read_form(Version, await content.whole())
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
        content: Content,
        reader: ReplyReader,
        take: Callable[[bytes], Piece],
        on_text: Callable[[str], None],
        began: float,
    ) -> None:
        found = events(content.chunks(), max_event_bytes=self._endpoint.limits.max_event_bytes)
        async with aclosing(found):
            async for data in found:
                if text := reader.add(take(data)):
                    if reader.first_text_s is None:
                        reader.first_text_s = time.perf_counter() - began
                    on_text(text)
        await content.end()


def _taken(content: bytes) -> Piece:
    """A piece of a reply; raises what it reports in place of a text."""
    piece = read_form(Piece, content)
    if piece.error is not None:
        raise of_piece(piece.error)
    return piece
