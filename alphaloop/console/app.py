"""The console as a web application: addresses, who may see them, what those who signed in may do, and the server.

A page is a function of `tasks`, `jobs`, `batches` or `reports`; an action is a form of a page.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import threading
import uuid
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache
from importlib import resources
from typing import Any, Final
from urllib.parse import quote, urlencode

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import alphaloop
from alphaloop.batches.advancing import Advancing
from alphaloop.console import batches, cost, jobs, reports, tasks
from alphaloop.console.connections import Connection
from alphaloop.console.openai_api import OpenAIApi
from alphaloop.console.page import Page, WrongRequest, address_of, respond, wants_json
from alphaloop.console.reading import REFRESH_S, Sources
from alphaloop.console.sessions import COOKIE, Session, Sessions, TooManyFailures, is_token_of
from alphaloop.errors import AlphaloopError, BrokerError, StoreError, StoreUnavailable, UnknownName
from alphaloop.kafka.producer import request_cancellation
from alphaloop.liveness import listening, url_of
from alphaloop.outcomes.reading import find_jobs
from alphaloop.settings import Settings, TasksFile
from alphaloop.store.api import Deed, write_down
from alphaloop.store.drift import DriftEventStore, IncidentStore

log = logging.getLogger(__name__)
View = Callable[[Sources, Request], Page | Response]
VIEWS: Final[dict[str, View]] = {
    "/now": tasks.now,
    "/tasks": tasks.tasks,
    "/tasks/{task}": tasks.task,
    "/jobs": jobs.jobs,
    "/job": jobs.job,
    "/batches": batches.batches,
    "/batch": batches.batch,
    "/dead-letters": jobs.letters,
    "/dead-letter": jobs.letter,
    "/dead-letters/redrive": jobs.redrive,
    "/cost": cost.cost,
    "/drift": reports.drift,
    "/drift/{event:int}": reports.drift_event,
    "/drafts": reports.drafts,
    "/reports": reports.reports,
    "/report": reports.report,
}
_STATUS: Final[tuple[tuple[type[AlphaloopError], int], ...]] = (
    (UnknownName, 404),
    (WrongRequest, 400),
    (TooManyFailures, 429),
    (StoreUnavailable, 503),
    (BrokerError, 503),
)
_MAX_FIELD_BYTES: Final = 16_384
_CHALLENGE: Final = {"WWW-Authenticate": 'Basic realm="alphaloop console"'}
Fields = Mapping[str, str]
#: Carries an action out, and returns the address of the page that shows what came of it.
Action = Callable[[Sources, Session, Request, Fields], str]
_MAX_NOTE_CHARS: Final = 2000
_HEADERS: Final[Mapping[str, str]] = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
    ),
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Referrer-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
#: In order: address, name, key after g.
_PLACES: Final = (
    ("/", "Now", "n"),
    ("/tasks", "Tasks", "t"),
    ("/jobs", "Jobs", "j"),
    ("/batches", "Batches", "b"),
    ("/dead-letters", "Dead letters", "l"),
    ("/cost", "Cost", "c"),
    ("/drift", "Drift", "d"),
    ("/drafts", "Drafts", "f"),
    ("/reports", "Reports", "r"),
)
#: What the addresses below a place begin with, where that is not the place's own.
_BELOW: Final = {"/jobs": "/job", "/batches": "/batch", "/reports": "/report", "/dead-letters": "/dead-letter"}
_STOP_S: Final = 5.0
#: Turns of the loop in which connections become known that were accepted before.
_LAST_TURNS: Final = 10


class ConsoleServer:
    """Listens from its construction on, until it is closed."""

    def __init__(self, settings: Settings, tasks_file: TasksFile | None = None) -> None:
        """Raises ConfigError where the port is taken, or no database is configured."""
        self._sources = Sources.of(settings, tasks_file)
        self._socket = listening(settings.console.http_host, settings.console.http_port, "console.http_port")
        self.listens_at: Final = url_of(*self._socket.getsockname()[:2])
        self.url: Final = settings.console.public_url or self.listens_at  #: what people type
        owner = f"console-{uuid.uuid4().hex}"
        self._advancing = Advancing(settings, self._sources.database, owner=owner)
        logging.getLogger("uvicorn").setLevel(logging.WARNING)
        config = uvicorn.Config(
            Console(self._sources, self._advancing).app(),
            http=Connection,
            loop="asyncio",
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=15,
            timeout_graceful_shutdown=1,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=asyncio.run, args=(self._serve(),), name="console", daemon=True)
        self._thread.start()
        self._advancing.start()

    async def _serve(self) -> None:
        await self._server.serve(sockets=[self._socket])
        # uvicorn leaves open who still reads when the time for that is over, and who was just accepted.
        for _ in range(_LAST_TURNS):
            for connection in set(self._server.server_state.connections):
                connection.transport.abort()
            await asyncio.sleep(0)

    def close(self) -> None:
        """Stop serving, and give the connections back."""
        self._server.should_exit = True
        self._advancing.close(_STOP_S)
        self._thread.join(_STOP_S)
        self._socket.close()
        self._sources.close()


class Console:
    """Answers requests: who asks, what they ask for, and the page around it."""

    def __init__(self, sources: Sources, advancing: Advancing) -> None:
        self._sources, self._advancing = sources, advancing
        self._settings = sources.settings.console
        self._sessions = Sessions(self._settings)
        self._streams = jobs.Streams()

    def app(self) -> Starlette:
        """The application."""
        routes = [Route("/", self._of(tasks.now)), Route("/static/{name}", self._open(_serve))]
        for path, view in VIEWS.items():
            # The twin first, because a task's name is a segment of a path, and JSON's ends in .json.
            routes += [Route(f"{path}.json", self._of(view)), Route(path, self._of(view))]
        routes += [
            Route("/job/stream", self._stream),
            Route("/batch/file", self._of(batches.file)),
            Route("/batches", self._upload, methods=["POST"]),
            *(Route(path, self._doing(action), methods=["POST"]) for path, action in ACTIONS.items()),
            Route("/sign-in", self._open(lambda r: self._sign_in_page(r, r.query_params.get("to"), is_wrong=False))),
            Route("/sign-in", self._sign_in, methods=["POST"]),
            Route("/sign-out", self._sign_out, methods=["POST"]),
        ]
        hosts = self._settings.hosts
        return Starlette(
            routes=routes,
            middleware=[
                Middleware(_SafeHeaders),
                # Before the host is looked at: no page of another site has a key.
                Middleware(OpenAIApi, sources=self._sources, advancing=self._advancing),
                Middleware(TrustedHostMiddleware, allowed_hosts=list(hosts or ("*",)), www_redirect=False),
            ],
            exception_handlers={HTTPException: self._refuse},
        )

    def _of(self, view: View) -> Callable[[Request], Response]:
        """The page of a view, for those who may see it."""

        def answer(request: Request) -> Response:
            session = self._session(request)
            if session is None and self._sessions.are_needed:
                return self._turn_away(request)
            shown = view(self._sources, request)
            return respond(shown, request, self._frame(request, session)) if isinstance(shown, Page) else shown

        return self._open(answer)

    async def _stream(self, request: Request) -> Response:
        """The text of a job while it is decoded."""
        reads: list[jobs.Read] = []

        def look(request: Request) -> Response:
            if self._sessions.are_needed and self._session(request) is None:
                return Response(status_code=204)  # after which a browser does not ask again
            reads.append(jobs.follow_job(self._sources, request))
            return Response()

        refused = await run_in_threadpool(self._open(look), request)
        return self._streams.answer(reads[0]) if reads else refused

    def _doing(self, action: Action) -> Callable[[Request], Awaitable[Response]]:
        """Carry an action out, for a form that was made for the session of whoever sends it."""

        async def do(request: Request) -> Response:
            form = await request.form(max_files=0, max_fields=10, max_part_size=_MAX_FIELD_BYTES)
            fields = {name: value for name, value in form.items() if isinstance(value, str)}
            session = self._sessions.of_cookie(request.cookies.get(COOKIE))
            if session is None or not is_token_of(session, fields.get("token", "")):
                return self._sign_in_first(request)
            return await self._acted(request, lambda: action(self._sources, session, request, fields))

        return do

    async def _acted(self, request: Request, act: Callable[[], str]) -> Response:
        """Carry it out in another thread; then the page whose address it returns."""
        return await run_in_threadpool(self._open(lambda _: RedirectResponse(act(), 303)), request)

    async def _upload(self, request: Request) -> Response:
        """Take a batch file. Nothing of it is read before it is known who sends it and how large it is."""
        session = self._sessions.of_cookie(request.cookies.get(COOKIE))
        if session is None:
            return self._sign_in_first(request)
        try:
            batches.check_size(request, self._settings.max_batch_mb)
            async with batches.received(request, session) as upload:
                if upload is None:
                    return self._sign_in_first(request)
                address = address_of(request)
                return await self._acted(request, lambda: batches.submit(self._sources, session, upload, address))
        except WrongRequest as error:
            return self._error(request, 400, error.message, error.hint)

    def _sign_in_first(self, request: Request) -> Response:
        return self._error(request, 403, "sign in, and send the form again", None)

    def _open(self, answer: Callable[[Request], Response]) -> Callable[[Request], Response]:
        """`answer` for anyone, with our errors in words."""

        def in_words(request: Request) -> Response:
            try:
                return answer(request)
            except AlphaloopError as error:
                status = next((status for kind, status in _STATUS if isinstance(error, kind)), 500)
                return self._error(request, status, error.message, error.hint)
            except Exception as error:
                # Only its class: the text of a foreign exception may quote a prompt.
                log.error("a page failed: %s", type(error).__name__, extra={"action": "console_failed"})
                return self._error(request, 500, f"this page failed: {type(error).__name__}", None)

        return in_words

    def _session(self, request: Request) -> Session | None:
        return self._sessions.of_cookie(request.cookies.get(COOKIE)) or self._sessions.of_header(
            request.headers.get("authorization")
        )

    def _turn_away(self, request: Request) -> Response:
        if wants_json(request):
            answer = self._error(request, 401, "a name and a password are needed", None)
            answer.headers.update(_CHALLENGE)
            return answer
        wanted = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        return RedirectResponse(f"/sign-in?to={quote(wanted, safe='')}", 303)

    async def _sign_in(self, request: Request) -> Response:
        form = await request.form(max_files=0, max_fields=5, max_part_size=4096)
        name, password, to = (str(form.get(field, "")) for field in ("username", "password", "to"))

        def answer(request: Request) -> Response:
            session = self._sessions.sign_in(name, password)
            if session is None:
                return self._sign_in_page(request, to, is_wrong=True)
            with suppress(StoreError):  # whoever looks why the database is away must be let in without it
                _write_down(self._sources, session, request, "signed_in", "")
            welcome = RedirectResponse(_inside(to), 303)
            # Strict: a link on another site opens the console signed out, and no form there can act here.
            welcome.set_cookie(
                COOKIE, session.cookie, httponly=True, samesite="strict", secure=self._settings.is_https, path="/"
            )
            return welcome

        return await run_in_threadpool(self._open(answer), request)

    def _sign_in_page(self, request: Request, to: str | None, *, is_wrong: bool) -> Response:
        data, status = {"to": _inside(to), "is_wrong": is_wrong}, 401 if is_wrong else 200
        page = Page("sign_in.html.j2", "Sign in", data, status=status, is_live=False, has_twin=False)
        return respond(page, request, self._frame(request, None))

    async def _sign_out(self, request: Request) -> Response:
        if (session := self._sessions.of_cookie(request.cookies.get(COOKIE))) is not None:
            self._sessions.end(session)
        answer = RedirectResponse("/sign-in", 303)
        answer.delete_cookie(COOKIE, path="/")
        return answer

    def _frame(self, request: Request, session: Session | None) -> dict[str, Any]:
        """What stands around every page."""
        return {
            "places": _PLACES,
            "here": _place_of(request.url.path),
            "session": session,
            "is_open": not self._sessions.are_needed,
            "version": alphaloop.__version__,
            "asset_url": _asset_url,
            "refresh_s": REFRESH_S,
        }

    def _error(self, request: Request, status: int, message: str, hint: str | None) -> Response:
        page = Page("error.html.j2", "Error", {"error": {"message": message, "hint": hint}}, status=status)
        return respond(page, request, self._frame(request, None))

    async def _refuse(self, request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        message = {404: "there is no such page", 405: "this address takes no such request"}.get(
            status, "request refused"
        )
        return self._error(request, status, message, None)


def _inside(to: str | None) -> str:
    """An address of the console; `/` for any other."""
    return to if to and to.startswith("/") and not to.startswith(("//", "/\\")) else "/"


def _place_of(path: str) -> str | None:
    """The place to which an address belongs."""
    below = (place for place, *_ in _PLACES[1:] if path.startswith(_BELOW.get(place, place)))
    return next(below, "/" if path in ("/", "/now") else None)


def acknowledge(sources: Sources, session: Session, request: Request, fields: Fields) -> str:
    """Take note of an open drift event, as `alphaloop drift ack` does, or of an open incident.

    Raises WrongRequest, UnknownName.
    """
    ((kind, number),) = request.path_params.items()
    by, note = fields.get("by", "").strip(), fields.get("note", "").strip()
    if not 0 < len(by) <= 200 or len(note) > _MAX_NOTE_CHARS:
        raise WrongRequest(f"expected a name of 1 to 200 characters and a note of at most {_MAX_NOTE_CHARS}")
    store = (DriftEventStore if kind == "event" else IncidentStore)(sources.database)
    store.acknowledge(min(number, 2**63 - 1), by, note, datetime.now(UTC))
    _write_down(sources, session, request, f"{'drift' if kind == 'event' else kind}_acknowledged", str(number))
    if kind == "incident":
        _log(session, "incident_acknowledged", f"incident {number}")
        return "/drift"
    _log(session, "drift_acknowledged", f"drift event {number}")
    return f"/drift/{number}"


def cancel(sources: Sources, session: Session, request: Request, fields: Fields) -> str:
    """Ask the workers to cancel a job, as `alphaloop cancel` does, or all of a batch that has not ended.

    Raises WrongRequest, UnknownName, BrokerError, StoreError.
    """
    if not 0 < len(name := fields.get("id", "")) <= 200:
        raise WrongRequest("expected an id")
    is_batch = request.url.path == "/batch/cancel"
    action = "batch_cancelled" if is_batch else "job_cancelled"
    deed = Deed("login", session.username, action, name, address_of(request))
    about = f"job {name}"
    if is_batch:
        about = f"batch {name}, {batches.cancel(sources, deed)} jobs"
    elif find_jobs(sources.settings, sources.database, [name])[0].is_open:
        write_down(sources.database, deed)
        request_cancellation(sources.settings.kafka, [name])
    else:
        raise UnknownName(f"no job {name!r} that has not ended was found")
    _log(session, action, about)
    return f"/{'batch' if is_batch else 'job'}?id={quote(name, safe='')}&asked=cancel"


def redrive(sources: Sources, session: Session, request: Request, fields: Fields) -> str:
    """Send dead letters again, as `alphaloop dlq redrive` does. Raises as `jobs.run`."""
    asked = {name: value for name in jobs.FILTERS if (value := fields.get(name, "").strip())}
    deed = Deed("login", session.username, "letters_redriven", urlencode(asked), address_of(request))
    done = jobs.run(sources, asked, fields.get("set", ""), again=fields.get("again") == "1", deed=deed)
    _log(session, "letters_redriven", f"{done.num_sent} dead letters")
    if "at" in asked:
        return f"/dead-letter?{urlencode({'at': asked['at']})}"
    shown = {name: value for name, value in asked.items() if name != "until"}
    return f"/dead-letters?{urlencode({**shown, 'sent': done.num_sent})}"


def _write_down(sources: Sources, session: Session, request: Request, action: str, subject: str) -> None:
    """Before what cannot be undone is done, so that nothing is done of which the audit knows nothing."""
    write_down(sources.database, Deed("login", session.username, action, subject, address_of(request)))


def _log(session: Session, action: str, about: str) -> None:
    log.info("%s, by %s in the console", about, session.username, extra={"action": action})


ACTIONS: Final[Mapping[str, Action]] = {
    "/drift/{event:int}/acknowledge": acknowledge,
    "/incidents/{incident:int}/acknowledge": acknowledge,
    "/job/cancel": cancel,
    "/batch/cancel": cancel,
    "/dead-letters/redrive": redrive,
}


class _SafeHeaders:
    """Adds the headers that an answer does not have already."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve."""

        async def send_safe(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        app = self._app
        if {b"content-length", b"transfer-encoding"} <= {name for name, _ in scope.get("headers", ())}:
            # A proxy between may read the other one, and then take what is left for a request (RFC 9112, 6.3).
            message = "expected Content-Length or Transfer-Encoding, found both\n"
            app = PlainTextResponse(message, 400, {"Connection": "close"})
        await app(scope, receive, send_safe if scope["type"] == "http" else send)


@cache
def _assets() -> dict[str, tuple[str, bytes, str]]:
    """By name: media type, content, and a version that changes with it. The style is every page's, then our own."""
    own = resources.files("alphaloop.console").joinpath("static")
    shared = resources.files("alphaloop.pages").joinpath("style.css").read_bytes()
    assets = {
        "style.css": ("text/css", shared + own.joinpath("console.css").read_bytes()),
        "console.js": ("text/javascript", own.joinpath("console.js").read_bytes()),
        "icon.svg": ("image/svg+xml", own.joinpath("icon.svg").read_bytes()),
    }
    return {name: (kind, content, hashlib.sha256(content).hexdigest()[:12]) for name, (kind, content) in assets.items()}


def _asset_url(name: str) -> str:
    """The address of a file, another one after each change, so that browsers may keep it."""
    return f"/static/{name}?{_assets()[name][2]}"


def _serve(request: Request) -> Response:
    """A file. Raises UnknownName."""
    asset = _assets().get(request.path_params["name"])
    if asset is None:
        raise UnknownName("no such file")
    media_type, content, version = asset
    kept = "public, max-age=31536000, immutable" if request.url.query == version else "no-cache"
    return Response(content, media_type=media_type, headers={"Cache-Control": kept})
