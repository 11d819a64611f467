"""OpenAI's API for files and batches, under /v1: what its own client asks, and answers in its own form.

A request belongs to a key, and to nothing else: no cookie counts here, and no key on a page. What belongs to another
key is answered exactly as what is not there.
"""

from __future__ import annotations

import json
import logging
import re
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from itertools import chain
from typing import IO, Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import MutableHeaders, UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from alphaloop.batches.advancing import KEPT_FOR, Advancing
from alphaloop.batches.contents import FileContents
from alphaloop.batches.lines import ENDPOINTS
from alphaloop.batches.progress import Progress
from alphaloop.console.page import address_of
from alphaloop.console.reading import Sources
from alphaloop.errors import AlphaloopError, BrokerError, ContentMissing, ContentStoreUnavailable, StoreUnavailable
from alphaloop.messages.fields import PlainText, kind_of
from alphaloop.settings import settings_of_segment
from alphaloop.store.api import (
    OPEN,
    ApiBatch,
    ApiBatchStore,
    ApiFile,
    ApiFileStore,
    ApiKey,
    ApiKeyStore,
    Deed,
    InUse,
    NoRoom,
    NotThere,
    backlog_of_segment,
    new_id,
)
from alphaloop.store.database import DatabaseClock
from alphaloop.store.promises import PromisedEnd
from alphaloop.store.spending import SpendingStore, spent_as_json
from alphaloop.store.workers import WorkerStore, heard_lately

log = logging.getLogger(__name__)

PREFIX: Final = "/v1"
_MB: Final = 10**6
#: Size of the form around a file, and of any other body.
_FRAME_BYTES: Final = 65_536
_MAX_FIELD_BYTES: Final = 4096
_CHUNK_BYTES: Final = 1 << 20
_FILE_ID: Final = re.compile(r"file-[0-9a-f]{32}")
_BATCH_ID: Final = re.compile(r"batch_[0-9a-f]{32}")
_EXPIRES_AFTER: Final = '{"anchor": "created_at", "seconds": 3600 to 2592000}'
_MAX_LISTED: Final = {"files": 10_000, "batches": 100}
_DEFAULT_LISTED: Final = 20
_TOLD_ONLINE: Final = (
    "this address takes files and batches only. Send online requests to the inference servers themselves, or upload a "
    "file of requests and create a batch with POST /v1/batches"
)
_OF_FILES: Final = ("file", "purpose", "expires_after[anchor]", "expires_after[seconds]")
_RETRY_AFTER: Final = {"Retry-After": "10"}
#: Requests of a key that are answered at once: each holds a connection, and most of them a thread.
MOST_OF_KEY: Final = 16


class Refused(AlphaloopError):
    """A request that is answered with an error of OpenAI's form."""

    def __init__(
        self,
        message: str | None = None,
        *,
        status: int = 400,
        code: str = "invalid_value",
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message, hint=hint)
        self.status, self.told_code, self.param, self.headers = status, code, param, headers


_ANSWERS: Final[tuple[tuple[tuple[type[AlphaloopError], ...], int, str, Mapping[str, str] | None], ...]] = (
    ((NotThere,), 404, "not_found", None),
    ((NoRoom,), 429, "limit_reached", _RETRY_AFTER),
    ((InUse,), 400, "file_in_use", None),
    ((StoreUnavailable, BrokerError, ContentStoreUnavailable, ContentMissing), 503, "unavailable", _RETRY_AFTER),
    ((AlphaloopError,), 500, "error", None),
)
_Name = Annotated[PlainText, Field(min_length=1, max_length=64)]
_Note = Annotated[PlainText, Field(max_length=512)]


class _ExpiresAfter(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    anchor: Literal["created_at"]
    seconds: int = Field(ge=3600, le=int(KEPT_FOR.total_seconds()))


class _BatchAsked(BaseModel):
    """The descriptions are what errors expect."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    input_file_id: str = Field(pattern="^file-[0-9a-f]{32}$", description="the id of an uploaded file")
    endpoint: str = Field(pattern=f"^({'|'.join(ENDPOINTS)})$", description=f"one of {', '.join(ENDPOINTS)}")
    completion_window: str = Field(
        pattern="^([1-9]|[1-9][0-9]|1[0-5][0-9]|16[0-8])h$|^[1-7]d$",
        description="24h, or another number of hours or days (12h, 3d), at most 7d",
    )
    metadata: Annotated[dict[_Name, _Note], Field(max_length=16)] | None = Field(
        None, description="at most 16 names of 1 to 64 characters with texts of at most 512"
    )
    output_expires_after: _ExpiresAfter | None = Field(None, description=_EXPIRES_AFTER)


Handler = Callable[[ApiKey, Request], Response]


class OpenAIApi:
    """Answers requests below /v1, and lets everything else pass to the application that it wraps."""

    def __init__(self, behind: ASGIApp, sources: Sources, advancing: Advancing) -> None:
        self._behind, self._sources, self._advancing = behind, sources, advancing
        database = sources.database
        self._keys, self._files, self._batches = ApiKeyStore(database), ApiFileStore(database), ApiBatchStore(database)
        self._workers, self._clock = WorkerStore(database), DatabaseClock(database)
        self._contents = FileContents(sources.settings)
        self._num_of_key, self._lock = Counter[str](), threading.Lock()
        self._api = self._routes()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve."""
        if scope["type"] != "http" or not f"{scope['path']}/".startswith(f"{PREFIX}/"):
            await self._behind(scope, receive, send)
            return

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = scope["request_id"]
            await send(message)

        scope["request_id"] = new_id("req_")
        try:
            await self._api(scope, receive, send_with_id)
        finally:
            with self._lock:
                self._num_of_key[scope.get("key_name", "")] -= 1

    def _routes(self) -> Starlette:
        def route(path: str, handler: Handler, method: str = "GET") -> Route:
            return Route(f"{PREFIX}/{path}", self._of(handler), methods=[method])

        api = Starlette(
            routes=[
                Route(f"{PREFIX}/files", _told(self._upload), methods=["POST"]),
                route("files", self._list_files),
                route("files/{id}", self._file),
                route("files/{id}", self._delete_file, "DELETE"),
                route("files/{id}/content", self._content),
                Route(f"{PREFIX}/batches", _told(self._create), methods=["POST"]),
                route("batches", self._list_batches),
                route("batches/{id}", self._batch),
                route("batches/{id}/cancel", self._cancel, "POST"),
                route("models", self._models),
                route("models/{id:path}", self._model),
            ],
            exception_handlers={HTTPException: _no_such_address},
        )
        api.router.redirect_slashes = False
        return api

    def _of(self, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
        def answer(request: Request) -> Response:
            return handler(self._key(request), request)

        return _told(lambda request: run_in_threadpool(answer, request))

    def _key(self, request: Request) -> ApiKey:
        scheme, _, secret = request.headers.get("authorization", "").partition(" ")
        key = self._keys.find(secret.strip()) if scheme.lower() == "bearer" else None
        if key is None:
            what = "a key that is unknown, revoked or expired" if scheme.lower() == "bearer" else "none"
            problem = f"expected the header `Authorization: Bearer KEY` with a key that is valid, found {what}"
            raise Refused(problem, status=401, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        with self._lock:
            request.scope["key_name"] = key.name
            self._num_of_key[key.name] += 1
            if self._num_of_key[key.name] > MOST_OF_KEY:
                problem = f"expected at most {MOST_OF_KEY} requests of this key at once, found another one"
                raise Refused(problem, status=429, code="limit_reached", headers={"Retry-After": "1"})
        return key

    async def _upload(self, request: Request) -> Response:
        body = _Body(request, self._most_bytes + _FRAME_BYTES)
        try:
            key = await run_in_threadpool(self._key, request)
            _refuse_other_parameters(request)
            return await self._received(request, body, key)
        except AlphaloopError:
            await body.drain()
            raise

    @property
    def _most_bytes(self) -> int:
        return self._sources.settings.console.max_batch_mb * _MB

    async def _received(self, request: Request, body: _Body, key: ApiKey) -> Response:
        """Read the form around a file: the file goes to the disk as it comes, and no further than the limit."""
        problem = f"expected a file of at most {self._most_bytes // _MB} MB"
        too_large = Refused(problem, status=413, code="file_too_large", param="file")
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "multipart/form-data":
            raise Refused("expected a form of the type multipart/form-data", status=415, code="unsupported_media_type")
        try:
            form = await Request(request.scope, body).form(max_files=1, max_fields=8, max_part_size=_MAX_FIELD_BYTES)
        except Exception:
            # Whatever the parser says of a form that it cannot read.
            if body.is_over:
                raise too_large from None
            raise Refused("expected a form with the fields file and purpose", code="invalid_form") from None
        try:
            file = form.get("file")
            fields = {name: value for name, value in form.items() if isinstance(value, str)}
            if other := next((name for name in form if name not in _OF_FILES), None):
                raise _unknown(other, _OF_FILES)
            if not isinstance(file, UploadFile):
                raise Refused("expected a file, found none", code="missing_file", param="file")
            if (file.size or 0) > self._most_bytes:
                raise too_large
            return await run_in_threadpool(self._keep, key, request, file.file, file.filename or "", fields)
        finally:
            await form.close()

    def _keep(
        self, key: ApiKey, request: Request, content: IO[bytes], name: str, fields: Mapping[str, str]
    ) -> Response:
        if (purpose := fields.get("purpose")) != "batch":
            problem = f"expected the purpose batch, found {'nothing' if purpose is None else _shown(purpose)}"
            raise Refused(problem, code="invalid_purpose", param="purpose")
        kept_for = _kept_for(fields)
        file_id, now = new_id("file-"), self._clock.measure()
        num_bytes, parts = self._contents.write(file_id, iter(lambda: content.read(_CHUNK_BYTES), b""))
        shown = _encodable(name.replace("\x00", ""))[:200] or "file"
        file = ApiFile(
            id=file_id,
            key_name=key.name,
            filename=shown,
            purpose="batch",
            num_bytes=num_bytes,
            parts=parts,
            created_at=now,
            expires_at=now + kept_for,
        )
        most_bytes = self._sources.settings.console.max_stored_mb * _MB
        try:
            self._files.add(file, most_bytes=most_bytes, deed=_deed(key, request, "file_uploaded", file_id))
        except BaseException:
            with suppress(AlphaloopError, OSError):
                self._contents.delete(file_id, parts)
            raise
        return JSONResponse(_file_object(file))

    def _list_files(self, key: ApiKey, request: Request) -> Response:
        limit, after = _page_of(request, "files")
        order = request.query_params.get("order", "desc")
        if order not in ("asc", "desc"):
            raise Refused(f"expected asc or desc, found {_shown(order)}", param="order")
        purpose = request.query_params.get("purpose")
        if purpose not in (None, "batch", "batch_output"):
            return _list([], limit)
        files = self._files.page(key.name, limit + 1, after=after, purpose=purpose, oldest_first=order == "asc")
        return _list([_file_object(file) for file in files], limit)

    def _file(self, key: ApiKey, request: Request) -> Response:
        return JSONResponse(_file_object(self._found_file(key, request)))

    def _found_file(self, key: ApiKey, request: Request) -> ApiFile:
        return self._files.find(key.name, _named(request, _FILE_ID, "file"))

    def _content(self, key: ApiKey, request: Request) -> Response:
        file = self._found_file(key, request)
        chunks: Iterator[bytes] = self._contents.read(file.id, file.parts)
        first = next(chunks, b"")  # so that a store that is away is an error in words, not a file that breaks off
        headers = {
            "Content-Length": str(file.num_bytes),
            "Content-Disposition": f'attachment; filename="{file.id}.jsonl"',
        }
        return StreamingResponse(chain([first], chunks), media_type="application/octet-stream", headers=headers)

    def _delete_file(self, key: ApiKey, request: Request) -> Response:
        file_id = _named(request, _FILE_ID, "file")
        file = self._files.remove(key.name, file_id, _deed(key, request, "file_deleted", file_id))
        with suppress(AlphaloopError, OSError):  # no request finds it any more, and it is tried again
            self._contents.delete(file.id, file.parts)
            self._files.forget(file.id)
        return JSONResponse({"id": file.id, "object": "file", "deleted": True})

    async def _create(self, request: Request) -> Response:
        body = _Body(request, _FRAME_BYTES)
        try:
            key = await run_in_threadpool(self._key, request)
            _refuse_other_parameters(request)
            asked = await _asked(request, body)
        except AlphaloopError:
            await body.drain()
            raise
        made = await run_in_threadpool(self._created, key, request, asked)
        self._advancing.wake()
        return made

    def _created(self, key: ApiKey, request: Request, asked: _BatchAsked) -> Response:
        task = self._task(key, asked)
        if (purpose := self._files.find(key.name, asked.input_file_id).purpose) != "batch":
            problem = f"expected a file that was uploaded with the purpose batch, found the purpose {purpose}"
            raise Refused(problem, code="invalid_file", param="input_file_id")
        now, window = self._clock.measure(), asked.completion_window
        batch = ApiBatch(
            id=new_id("batch_"),
            key_name=key.name,
            segment=key.segment,
            task=task,
            tasks=key.tasks,
            endpoint=asked.endpoint,
            completion_window=window,
            metadata=asked.metadata,
            output_kept_s=asked.output_expires_after.seconds if asked.output_expires_after else None,
            input_file_id=asked.input_file_id,
            created_at=now,
            expires_at=now + timedelta(hours=int(window[:-1]) * (24 if window[-1] == "d" else 1)),
        )
        most_open = self._sources.settings.console.max_open_batches
        self._refuse_beyond_limit(key.segment)
        deed = _deed(key, request, "batch_created", batch.id)
        return JSONResponse(self._shown([self._batches.add(batch, most_open=most_open, deed=deed)])[0])

    def _refuse_beyond_limit(self, segment: str) -> None:
        """Refuse a batch of a segment of which as many requests wait as may."""
        most = settings_of_segment(self._sources.settings.segments, segment).max_waiting_jobs
        if most is None:
            return
        backlog = backlog_of_segment(self._sources.database, segment)
        if wait_s := backlog.retry_after_s(most):
            problem = (
                f"{backlog.num_waiting} requests of this segment wait; a batch is taken while fewer than {most} do"
            )
            raise Refused(problem, status=429, code="limit_reached", headers={"Retry-After": str(wait_s)})

    def _task(self, key: ApiKey, asked: _BatchAsked) -> str | None:
        """The task of lines that name none: the one of `metadata`, or the only one that there is."""
        known = tuple(self._sources.settings.tasks)
        allowed = key.tasks or known
        named = (asked.metadata or {}).get("task")
        if named is None:
            return allowed[0] if len(allowed) == 1 else None
        if named not in allowed or named not in known:
            problem = f"expected one of {', '.join(task for task in allowed if task in known)}, found {named!r}"
            raise Refused(problem, code="unknown_task", param="metadata.task")
        return named

    def _list_batches(self, key: ApiKey, request: Request) -> Response:
        limit, after = _page_of(request, "batches")
        batches = self._batches.page(key.name, limit + 1, after=after)
        return _list(self._shown(batches), limit)

    def _batch(self, key: ApiKey, request: Request) -> Response:
        return JSONResponse(self._shown([self._batches.find(key.name, _named(request, _BATCH_ID, "batch"))])[0])

    def _cancel(self, key: ApiKey, request: Request) -> Response:
        batch_id = _named(request, _BATCH_ID, "batch")
        batch = self._batches.cancel(key.name, batch_id, _deed(key, request, "batch_cancelled", batch_id))
        if batch.status not in OPEN:
            problem = f"Cannot cancel a batch with status '{batch.status}'."
            raise Refused(problem, status=409, code="batch_ended")
        self._advancing.wake()
        return JSONResponse(self._shown([batch])[0])

    def _shown(self, batches: Sequence[ApiBatch]) -> list[dict[str, Any]]:
        """The objects of batches, with what their jobs have taken so far."""
        prices = self._sources.settings.prices
        spent = SpendingStore(self._sources.database, prices).of_batches([batch.id for batch in batches])
        return [_batch_object(batch, spent_as_json(spent.get(batch.id), prices.currency)) for batch in batches]

    def _models(self, key: ApiKey, request: Request) -> Response:
        served = self._served()
        return JSONResponse({"object": "list", "data": [served[name] for name in sorted(served)]})

    def _model(self, key: ApiKey, request: Request) -> Response:
        if (served := self._served().get(request.path_params["id"])) is None:
            raise NotThere("no worker serves this model now")
        return JSONResponse(served)

    def _served(self) -> dict[str, dict[str, Any]]:
        """What live workers serve, by name."""
        models: dict[str, dict[str, Any]] = {}
        for worker in heard_lately(self._workers.seen()):
            made = {"id": worker.load.target, "object": "model", "created": _second(worker.started_at)}
            models.setdefault(worker.load.target, {**made, "owned_by": "alphaloop"})
        return models


class _BrokenOff(MultiPartException):
    """A body that is too large or ends early, said in the way after which the parser closes what it has opened."""


class _Body:
    """Receives a body up to a length."""

    def __init__(self, request: Request, most_bytes: int) -> None:
        self._receive, self._most_bytes = request.receive, most_bytes
        self._num_bytes = 0
        self._is_whole = False

    @property
    def is_over(self) -> bool:
        """Whether it is longer."""
        return self._num_bytes > self._most_bytes

    async def __call__(self) -> Message:
        """The next message of the server. Raises _BrokenOff."""
        message = await self._next()
        if message["type"] == "http.disconnect":
            raise _BrokenOff("the client is gone")
        if self.is_over:
            raise _BrokenOff("the body is too large")
        return message

    async def drain(self) -> None:
        """Read what is left, so that a sender who reads no answer before hears why it was refused; but not too much."""
        while not self._is_whole and self._num_bytes <= 2 * self._most_bytes:
            await self._next()

    async def _next(self) -> Message:
        message = await self._receive()
        self._num_bytes += len(message.get("body", b""))
        self._is_whole = not message.get("more_body", False)
        return message


def _told(answer: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    """`answer`, with every error in OpenAI's form."""

    async def in_form(request: Request) -> Response:
        failed = {"action": "api_failed", "request_id": request.scope["request_id"]}
        try:
            return await answer(request)
        except Refused as error:
            return _error(error.status, error.message, error.told_code, error.param, error.headers)
        except AlphaloopError as error:
            _, status, code, headers = next(answer_of for answer_of in _ANSWERS if isinstance(error, answer_of[0]))
            if status >= 500:
                log.warning("%s", error.message, extra={**failed, "code": error.code})
            # Not the error's own words where these name servers and folders.
            message = error.message if status < 500 else "the request cannot be carried out now"
            return _error(status, message, code, None, headers)
        except Exception as error:
            # Only its class: the text of a foreign exception may quote a prompt.
            log.error("a request failed: %s", type(error).__name__, extra=failed)
            return _error(500, "the request failed", "error", None)

    return in_form


def _error(
    status: int, message: str, code: str, param: str | None, headers: Mapping[str, str] | None = None
) -> Response:
    kind = "server_error" if status >= 500 else "rate_limit_error" if status == 429 else "invalid_request_error"
    body = {"error": {"message": _encodable(message), "type": kind, "param": param and _encodable(param), "code": code}}
    return JSONResponse(body, status, dict(headers or {}))


def _encodable(text: str) -> str:
    """Without lone surrogates, which no UTF-8 holds."""
    return text.encode("utf-8", "replace").decode()


async def _no_such_address(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException) and error.status_code == 405:
        message = f"{request.url.path} takes no {request.method}"
        return _error(405, message, "method_not_allowed", None, error.headers)
    return _error(404, f"{request.url.path[:200]} is not served here: {_TOLD_ONLINE}", "unknown_url", None)


async def _asked(request: Request, body: _Body) -> _BatchAsked:
    try:
        asked = json.loads(await Request(request.scope, body).body())
        if not isinstance(asked, dict):
            raise ValueError
        return _BatchAsked.model_validate(asked)
    except _BrokenOff:
        if body.is_over:
            raise Refused(f"expected at most {_FRAME_BYTES} bytes", status=413, code="request_too_large") from None
        raise Refused("the request broke off", code="incomplete_request") from None
    except ValidationError as error:  # which is a ValueError, too
        raise _wrong(error) from None
    except (ValueError, RecursionError):
        raise Refused("expected a JSON object, found something else", code="invalid_json") from None


def _wrong(error: ValidationError) -> Refused:
    """What is wrong first with a batch that was asked for."""
    first, fields = error.errors(include_url=False)[0], _BatchAsked.model_fields
    name = str(first["loc"][0])
    param = ".".join(str(part)[:64] for part in first["loc"] if part not in ("", "[key]"))
    if name not in fields:
        return _unknown(name, fields)
    shown = "nothing" if first["type"] == "missing" else _shown(first["input"])
    return Refused(f"expected {fields[name].description}, found {shown}", param=param)


def _unknown(name: str, known: Iterable[str]) -> Refused:
    problem = f"expected {', '.join(known) or 'no parameter'}, found {name[:64]!r}"
    return Refused(problem, code="unknown_parameter", param=name[:64])


def _shown(value: object) -> str:
    return repr(value[:60]) if isinstance(value, str) else kind_of(value)


def _kept_for(fields: Mapping[str, str]) -> timedelta:
    """How long a file is kept: as long as its sender says, and no longer than any other."""
    given = {name[14:-1]: value for name, value in fields.items() if name.startswith("expires_after[")}
    if not given:
        return KEPT_FOR
    try:
        return timedelta(seconds=_ExpiresAfter.model_validate_strings(given).seconds)
    except ValidationError:
        raise Refused(f"expected {_EXPIRES_AFTER}, found {json.dumps(given)[:200]}", param="expires_after") from None


def _refuse_other_parameters(request: Request, known: Sequence[str] = ()) -> None:
    if other := next((name for name in request.query_params if name not in known), None):
        raise _unknown(other, known)


def _page_of(request: Request, kind: str) -> tuple[int, str | None]:
    """The parameters `limit` and `after`."""
    known = ("limit", "after", *(("order", "purpose") if kind == "files" else ()))
    _refuse_other_parameters(request, known)
    limit, after = request.query_params.get("limit"), request.query_params.get("after")
    if limit is not None and (not re.fullmatch(r"[0-9]{1,5}", limit) or not 1 <= int(limit) <= _MAX_LISTED[kind]):
        raise Refused(f"expected 1 to {_MAX_LISTED[kind]}, found {_shown(limit)}", param="limit")
    pattern = _FILE_ID if kind == "files" else _BATCH_ID
    if after is not None and not pattern.fullmatch(after):
        raise NotThere("nothing with the id in `after`")
    return int(limit) if limit else _DEFAULT_LISTED, after


def _named(request: Request, pattern: re.Pattern[str], what: str) -> str:
    _refuse_other_parameters(request)
    object_id = str(request.path_params["id"])
    if not pattern.fullmatch(object_id):
        raise NotThere(f"no {what} {object_id[:60]!r}")
    return object_id


def _deed(key: ApiKey, request: Request, action: str, subject: str) -> Deed:
    return Deed("key", f"{key.name} ({key.prefix}…)", action, subject, address_of(request))


def _list(objects: list[dict[str, Any]], limit: int) -> Response:
    """A page of at most `limit` objects, of which one more was looked for."""
    shown = objects[:limit]
    ends = {"first_id": shown[0]["id"] if shown else None, "last_id": shown[-1]["id"] if shown else None}
    return JSONResponse({"object": "list", "data": shown, **ends, "has_more": len(objects) > limit})


def _second(at: datetime) -> int:
    return int(at.timestamp())


def _file_object(file: ApiFile) -> dict[str, Any]:
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.num_bytes,
        "created_at": _second(file.created_at),
        "expires_at": _second(file.expires_at),
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }


def _batch_object(batch: ApiBatch, spent: dict[str, Any] | None) -> dict[str, Any]:
    moments = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
    times = {f"{name}_at": getattr(batch, f"{name}_at") for name in moments}
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "errors": None if batch.errors is None else {"object": "list", "data": list(batch.errors)},
        "input_file_id": batch.input_file_id,
        "completion_window": batch.completion_window,
        "status": batch.status,
        "output_file_id": batch.output_file_id,
        "error_file_id": batch.error_file_id,
        "created_at": _second(batch.created_at),
        "expires_at": _second(batch.expires_at),
        **{name: None if at is None else _second(at) for name, at in times.items()},
        "request_counts": Progress.of(batch).request_counts,
        "metadata": batch.metadata,
        "model": None,
        "usage": _usage(**batch.used) if batch.used else None,
        "alphaloop": {**_end(Progress.of(batch).end), "spent": spent},
    }


def _end(end: PromisedEnd | None) -> dict[str, Any]:
    """When the batch is expected to end, or why that is not known; nulls where nothing was said."""
    times = {name: end and getattr(end, name) for name in ("ends_at", "earliest_at", "latest_at")}
    return {**{name: at and _second(at) for name, at in times.items()}, "why": end and end.why}


def _usage(input: int, output: int, reasoning: int, cached: int = 0) -> dict[str, Any]:
    totals = {"input_tokens": input, "output_tokens": output, "total_tokens": input + output}
    return totals | {
        "input_tokens_details": {"cached_tokens": cached},
        "output_tokens_details": {"reasoning_tokens": reasoning},
    }
