"""The client of one inference server.

Requests go out concurrently, on one event loop. Cancelling the task that waits for a reply closes its connection, and
servers abort a request whose connection closes.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Mapping
from contextlib import aclosing
from typing import Final, Self

from alphaloop.engine import AnswerPiece, Sampling
from alphaloop.errors import ConfigError, RequestRefused, ServerSilent
from alphaloop.messages import Job
from alphaloop.server_identity import ServerKind
from alphaloop.settings.endpoints import EndpointSettings
from worker.servers.forms import ModelCard, ModelList, ReplyPiece, Tokenized, Version, read_form
from worker.servers.http import Content, HttpSession, events, of_piece
from worker.servers.replies import Reply, ReplyReader
from worker.servers.request_body import AskedDrafts, Measured, body_of, path_of, tokenize_body_of

_VERSION_PATHS: Final[Mapping[ServerKind, str]] = {
    "vllm": "/version",
    "sglang": "/server_info",
    "tensorrt_llm": "/version",
    "llama_cpp": "/props",
}
_PAGE_S: Final = 2.0  #: for one page: a result may wait for it
_MOST_PAGE_BYTES: Final = 8 << 20
_VERSION: Final = re.compile(r"[\w.+-]{1,64}")
_NUMBERS: Final = re.compile(r"(\d+)\.(\d+)\.(\d+)")
#: The first SGLang that reports drafts in OpenAI's form, in streams too.
_FIRST_SGLANG: Final = (0, 5, 19)


class ServerClient:
    """Asks one endpoint. An asynchronous context manager; every method raises errors of alphaloop's tree only."""

    def __init__(
        self,
        endpoint: EndpointSettings,
        *,
        context_length: int | None = None,
        adapters: frozenset[str] = frozenset(),
    ) -> None:
        """`adapters`: of the model, that jobs may ask for in place of it."""
        self.endpoint, self.context_length, self.adapters = endpoint, context_length, adapters
        self.model = endpoint.model or ""  #: the name that requests give
        self._http = HttpSession(endpoint)
        # A page of metrics elsewhere does not see the server's key.
        self._metrics = self._http if endpoint.has_own_metrics else HttpSession(endpoint, shows_key=False)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for session in {self._http, self._metrics}:
            await session.close()

    async def complete(
        self,
        job: Job,
        sampling: Sampling,
        *,
        on_piece: Callable[[AnswerPiece], None] | None = None,
        asked: AskedDrafts | None = None,
        measured: Measured | None = None,
    ) -> Reply:
        """The texts of a job. With `on_piece` they are streamed, and each piece is handed over as it comes.

        `asked`: its drafts, where the server follows a request in that; None: as it was started. `measured`: where the
        server measures its steps.

        Raises PromptTooLong, InvalidField, or a ServerError.
        """
        endpoint = self.endpoint
        url = f"{endpoint.api}{path_of(job)}"
        stream = on_piece is not None
        body = body_of(endpoint.kind, self._model_of(job), job, sampling, stream=stream, asked=asked, measured=measured)
        reader = ReplyReader(
            endpoint.kind,
            body["model"],
            sampling,
            self.context_length,
            endpoint.num_draft_tokens if asked is None else asked.num_draft_tokens,
            endpoint.varies_drafts,
        )
        began = time.perf_counter()
        async with self._http.asked("POST", url, body) as content:
            if on_piece is None:
                reader.add(_taken(await content.whole()))
            else:
                await self._stream(content, reader, on_piece, began)
        return reader.reply(time.perf_counter() - began)

    def _model_of(self, job: Job) -> str:
        """The name that the server has for what the job asks for."""
        if (model := job.body.model) is None or model not in self.adapters:
            return self.model
        return f"{self.model}:{model}" if self.endpoint.kind == "sglang" else model

    @property
    def must_stream(self) -> bool:
        """Whether only a stream shows when the first token came, and has all that a whole reply has."""
        return self.endpoint.kind in ("openai", "tensorrt_llm", "sglang")

    async def room_after(self, job: Job) -> int | None:
        """Tokens that the context leaves after the job's prompt; None where the server cannot count them.

        Raises what `complete` raises.
        """
        if self.endpoint.kind != "vllm":
            return None
        body = tokenize_body_of(self._model_of(job), job)
        async with self._http.asked("POST", f"{self.endpoint.root}/tokenize", body) as content:
            tokenized = read_form(Tokenized, await content.whole())
        return tokenized.max_model_len - tokenized.count

    async def page(self, url: str) -> bytes:
        """A page outside OpenAI's form, nothing of one that is too long. Raises ServerError.

        RequestRefused says that the server has no such page, or that it was not turned on.
        """
        session = self._metrics if url == self.endpoint.metrics_url else self._http
        try:
            async with asyncio.timeout(_PAGE_S), session.asked("GET", url) as content:
                return await content.at_most(_MOST_PAGE_BYTES)
        except TimeoutError:
            raise ServerSilent(f"no page within {_PAGE_S:g} s") from None

    async def models(self) -> tuple[ModelCard, ...]:
        """What the server lists at /models."""
        async with self._http.asked("GET", f"{self.endpoint.api}/models") as content:
            return read_form(ModelList, await content.whole()).data

    async def version(self) -> str | None:
        """The server's version or build; None where it does not say.

        Raises ConfigError for an SGLang that is too old, and for one that changes k by itself, or does not, other than
        `varies_drafts` says; errors as of a server that is away.
        """
        if (path := _VERSION_PATHS.get(self.endpoint.kind)) is None:
            return None
        try:
            async with self._http.asked("GET", f"{self.endpoint.root}{path}") as content:
                said = read_form(Version, await content.whole())
        except RequestRefused:  # a proxy lets only OpenAI's paths through
            return None
        name = said.name or ""
        if self.endpoint.kind == "sglang":
            _refuse_old_sglang(name)
            _refuse_other_drafts(self.endpoint, is_adaptive=said.speculative_adaptive)
        return name if _VERSION.fullmatch(name) else None

    async def _stream(
        self,
        content: Content,
        reader: ReplyReader,
        on_piece: Callable[[AnswerPiece], None],
        began: float,
    ) -> None:
        async with aclosing(events(content.chunks())) as datas:
            async for data in datas:
                for piece in reader.add(_taken(data)):
                    if reader.first_text_s is None:
                        reader.first_text_s = time.perf_counter() - began
                    on_piece(piece)
        await content.end()


def _refuse_other_drafts(endpoint: EndpointSettings, *, is_adaptive: bool | None) -> None:
    """Counts of a k that changes, read as those of one k, would be wrong, and nothing in a reply shows it."""
    if endpoint.drafter is None or is_adaptive is None or is_adaptive == endpoint.varies_drafts:
        return
    raise ConfigError(
        f"varies_drafts: expected {str(is_adaptive).lower()}, because the server runs "
        f"{'with' if is_adaptive else 'without'} --speculative-adaptive, found {str(endpoint.varies_drafts).lower()}",
        hint="set varies_drafts = true, and num_draft_tokens to the largest of its candidate_steps (7 by default)"
        if is_adaptive
        else "leave varies_drafts out, and set num_draft_tokens to --speculative-num-steps",
    )


def _refuse_old_sglang(version: str) -> None:
    numbers = _NUMBERS.match(version)
    if numbers is not None and tuple(map(int, numbers.groups())) < _FIRST_SGLANG:
        raise ConfigError(
            f"expected SGLang {'.'.join(map(str, _FIRST_SGLANG))} or newer, found {numbers.group()}",
            hint="older ones do not report drafts in OpenAI's form: update the server, or name it with "
            'kind = "openai" and without a drafter',
        )


def _taken(content: bytes) -> ReplyPiece:
    """A piece of a reply; raises what it reports in place of a text."""
    piece = read_form(ReplyPiece, content)
    if piece.error is not None:
        raise of_piece(piece.error)
    return piece
