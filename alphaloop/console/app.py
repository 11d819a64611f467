"""The application: addresses, who may see them, and what stands around every page."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final
from urllib.parse import quote

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

import alphaloop
from alphaloop.console import assets, uploading
from alphaloop.console.actions import ACTIONS, Action
from alphaloop.console.headers import SafeHeaders
from alphaloop.console.page import NotFound, Page, WrongRequest, respond, wants_json
from alphaloop.console.places import PLACES, place_of
from alphaloop.console.sessions import COOKIE, Session, Sessions, TooManyFailures, is_token_of
from alphaloop.console.sources import REFRESH_S, Sources
from alphaloop.console.streaming import Read, Streams
from alphaloop.console.views import batches, drafts, drift, jobs, letters, now, reports, task, tasks
from alphaloop.errors import AlphaloopError, BrokerError, StoreUnavailable
from alphaloop.store.drift import NoSuchEvent
from alphaloop.store.incidents import NoSuchIncident

log = logging.getLogger(__name__)

View = Callable[[Sources, Request], Page | Response]
VIEWS: Final[dict[str, View]] = {
    "/now": now.now,
    "/tasks": tasks.tasks,
    "/tasks/{task}": task.task,
    "/jobs": jobs.jobs,
    "/job": jobs.job,
    "/batches": batches.batches,
    "/batch": batches.batch,
    "/dead-letters": letters.letters,
    "/dead-letter": letters.letter,
    "/dead-letters/redrive": letters.redrive,
    "/drift": drift.drift,
    "/drift/{event:int}": drift.drift_event,
    "/drafts": drafts.drafts,
    "/reports": reports.reports,
    "/report": reports.report,
}
_STATUS: Final[tuple[tuple[type[AlphaloopError], int], ...]] = (
    (NotFound, 404),
    (NoSuchEvent, 404),
    (NoSuchIncident, 404),
    (WrongRequest, 400),
    (TooManyFailures, 429),
    (StoreUnavailable, 503),
    (BrokerError, 503),
)
_MAX_FIELD_BYTES: Final = 16_384
_CHALLENGE: Final = {"WWW-Authenticate": 'Basic realm="alphaloop console"'}


class Console:
    """Answers requests: who asks, what they ask for, and the page around it."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._settings = sources.settings.console
        self._sessions = Sessions(self._settings)
        self._streams = Streams()

    def app(self) -> Starlette:
        """The application."""
        routes = [Route("/", self._of(now.now)), Route("/static/{name}", self._open(assets.serve))]
        for path, view in VIEWS.items():
            # The twin first, because a task's name is a segment of a path, and JSON's ends in .json.
            routes += [Route(f"{path}.json", self._of(view)), Route(path, self._of(view))]
        routes += [
            Route("/job/stream", self._stream),
            Route("/batch/file", self._of(batches.file)),
            Route("/batches", self._upload, methods=["POST"]),
            *(Route(path, self._doing(action), methods=["POST"]) for path, action in ACTIONS.items()),
            Route("/sign-in", self._open(self._ask_to_sign_in)),
            Route("/sign-in", self._sign_in, methods=["POST"]),
            Route("/sign-out", self._sign_out, methods=["POST"]),
        ]
        hosts = self._settings.hosts
        return Starlette(
            routes=routes,
            middleware=[
                Middleware(SafeHeaders),
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
            found = view(self._sources, request)
            return respond(found, request, self._frame(request, session)) if isinstance(found, Page) else found

        return self._open(answer)

    async def _stream(self, request: Request) -> Response:
        """The text of a job while it is decoded."""
        found: list[Read] = []

        def look(request: Request) -> Response:
            if self._sessions.are_needed and self._session(request) is None:
                return Response(status_code=204)  # after which a browser does not ask again
            found.append(jobs.follow_job(self._sources, request))
            return Response()

        refused = await run_in_threadpool(self._open(look), request)
        return self._streams.answer(found[0]) if found else refused

    def _doing(self, action: Action) -> Callable[[Request], Awaitable[Response]]:
        """Carry an action out, for a form that was made for the session of whoever sends it."""

        async def do(request: Request) -> Response:
            form = await request.form(max_files=0, max_fields=10, max_part_size=_MAX_FIELD_BYTES)
            fields = {name: value for name, value in form.items() if isinstance(value, str)}
            session = self._sessions.of_cookie(request.cookies.get(COOKIE))
            if session is None or not is_token_of(session, fields.get("token", "")):
                return self._sign_in_first(request)
            signed_in = session

            def answer(request: Request) -> Response:
                return RedirectResponse(action(self._sources, signed_in, request, fields), 303)

            return await run_in_threadpool(self._open(answer), request)

        return do

    async def _upload(self, request: Request) -> Response:
        """Take a batch file. Nothing of it is read before it is known who sends it and how large it is."""
        session = self._sessions.of_cookie(request.cookies.get(COOKIE))
        if session is None:
            return self._sign_in_first(request)
        try:
            uploading.check_size(request, self._settings.max_batch_mb)
            async with uploading.received(request, session) as upload:
                if upload is None:
                    return self._sign_in_first(request)

                def answer(request: Request) -> Response:
                    return RedirectResponse(uploading.submit(self._sources, session, upload), 303)

                return await run_in_threadpool(self._open(answer), request)
        except WrongRequest as error:
            return self._error(request, 400, error.message, error.hint)

    def _sign_in_first(self, request: Request) -> Response:
        return self._error(request, 403, "sign in, and send the form again", None)

    def _open(self, answer: Callable[[Request], Response]) -> Callable[[Request], Response]:
        """`answer` for everybody, with our errors in words."""

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

    def _ask_to_sign_in(self, request: Request) -> Response:
        return self._sign_in_page(request, _inside(request.query_params.get("to")), is_wrong=False)

    async def _sign_in(self, request: Request) -> Response:
        form = await request.form(max_files=0, max_fields=5, max_part_size=4096)
        name, password, to = (str(form.get(field, "")) for field in ("username", "password", "to"))

        def answer(request: Request) -> Response:
            session = self._sessions.sign_in(name, password)
            if session is None:
                return self._sign_in_page(request, _inside(to), is_wrong=True)
            welcome = RedirectResponse(_inside(to), 303)
            # Strict: a link on another site opens the console signed out, and no form there can act here.
            welcome.set_cookie(
                COOKIE, session.cookie, httponly=True, samesite="strict", secure=self._settings.is_https, path="/"
            )
            return welcome

        return await run_in_threadpool(self._open(answer), request)

    def _sign_in_page(self, request: Request, to: str, *, is_wrong: bool) -> Response:
        data, status = {"to": to, "is_wrong": is_wrong}, 401 if is_wrong else 200
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
            "places": PLACES,
            "here": place_of(request.url.path),
            "session": session,
            "is_open": not self._sessions.are_needed,
            "version": alphaloop.__version__,
            "asset_url": assets.asset_url,
            "refresh_s": REFRESH_S,
        }

    def _error(self, request: Request, status: int, message: str, hint: str | None) -> Response:
        page = Page("error.html.j2", "Error", {"error": {"message": message, "hint": hint}}, status=status)
        return respond(page, request, self._frame(request, None))

    async def _refuse(self, request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        told = {404: "there is no such page", 405: "this address takes no such request"}.get(status, "request refused")
        return self._error(request, status, told, None)


def _inside(to: str | None) -> str:
    """An address of the console; `/` for any other."""
    return to if to and to.startswith("/") and not to.startswith(("//", "/\\")) else "/"
