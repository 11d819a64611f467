"""A page: data, and the template that shows them. Its twin is the same data as JSON.

Also what every page needs: what its address asks for, checked, and names and times as its template writes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from typing import Any

from jinja2 import Environment
from markupsafe import Markup
from pydantic_core import to_jsonable_python
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from alphaloop.errors import AlphaloopError, ConfigError, UnknownName
from alphaloop.pages.drawing import environment, kept_together
from alphaloop.wording import json_text, moment_ago, span

_MAX_CHARS = 300


@dataclass(frozen=True, slots=True)
class Page:
    """What a view found."""

    template: str
    title: str
    data: Mapping[str, Any]
    shown: Mapping[str, Any] = field(default_factory=dict)  #: what the template needs beside the data
    status: int = 200
    is_live: bool = True  #: whether the page is fetched anew while a browser shows it
    has_twin: bool = True


class WrongRequest(AlphaloopError, ValueError):
    """A request that no link and no form of the console makes."""


def wants_json(request: Request) -> bool:
    """Whether the JSON twin is asked for: `/tasks.json` or `/tasks?format=json`."""
    return request.url.path.endswith(".json") or request.query_params.get("format") == "json"


def respond(page: Page, request: Request, frame: Mapping[str, Any]) -> Response:
    """The page in the form that is asked for; `frame` is what stands around every page."""
    if wants_json(request):
        return as_json(page.data, page.status)
    template = templates().get_template(page.template)
    path = request.url.path if request.url.path != "/" else "/now"
    twin = f"{path}.json" + (f"?{request.url.query}" if request.url.query else "")
    around = {
        **frame,
        "title": page.title,
        "is_live": page.is_live,
        "json_url": twin if page.has_twin else None,
    }
    return HTMLResponse(template.render({**page.data, **page.shown, **around}), page.status)


def as_json(data: Mapping[str, Any], status: int = 200) -> Response:
    """The data as JSON: times in ISO 8601, counts beside the rates that were computed from them."""
    content = json_text(to_jsonable_python(data, inf_nan_mode="null"), indent=2)
    return Response(content + "\n", status, media_type="application/json")


@cache
def templates() -> Environment:
    """The console's templates, with the names and times that they write."""
    made = environment("alphaloop.console", "templates")
    made.globals.update(ago=ago, span=span, stamp=stamp)
    return made


def ago(at: datetime | None) -> Markup:
    """`4 min ago`, with the moment itself as its title; a dash without one."""
    if at is None:
        return Markup("–")
    seconds = (datetime.now(UTC) - at).total_seconds()
    return _time(at, kept_together(f"{span(seconds)} ago" if seconds >= 0 else f"in {span(-seconds)}"))


def stamp(at: datetime | str | None) -> Markup:
    """`2026-11-23 07:00:12`, in UTC; a dash without one."""
    if at is None:
        return Markup("–")
    moment = (datetime.fromisoformat(at) if isinstance(at, str) else at).astimezone(UTC)
    return _time(moment, f"{moment:%Y-%m-%d %H:%M:%S}")


def _time(at: datetime, shown: str) -> Markup:
    iso = at.astimezone(UTC).isoformat(timespec="seconds")
    return Markup('<time datetime="{}" title="{} UTC">{}</time>').format(iso, f"{at.astimezone(UTC):%F %T}", shown)


def text(request: Request, name: str) -> str:
    """A parameter of the address; empty without one. Raises WrongRequest if it is too long or not text."""
    value = request.query_params.get(name, "").strip()
    if len(value) > _MAX_CHARS or "\x00" in value:
        raise WrongRequest(f"{name}: expected at most {_MAX_CHARS} characters of text")
    return value


def named(request: Request, what: str) -> str:
    """The id of what the address is about. Raises UnknownName without one, WrongRequest."""
    if not (object_id := text(request, "id")):
        raise UnknownName(f"name a {what}: /{what}?id=…")
    return object_id


def moment(request: Request, name: str) -> datetime | None:
    """A moment of the address, with its zone; None without one. Raises WrongRequest."""
    value = text(request, name)
    if not value:
        return None
    try:
        at = datetime.fromisoformat(value.replace(" ", "+"))
    except ValueError:
        at = None
    if at is None or at.tzinfo is None:
        raise WrongRequest(f"{name}: expected a moment with its zone, such as 2026-11-23T07:00:00Z")
    return at


def past(asked: Mapping[str, str], name: str) -> datetime | None:
    """A moment of the past as people write it, `2h` or `2026-11-01`; None without one. Raises WrongRequest."""
    try:
        return moment_ago(asked[name], datetime.now(UTC), name) if name in asked else None
    except ConfigError as error:
        raise WrongRequest(error.message, hint=error.hint) from None


def address_of(request: Request) -> str | None:
    """Where a request came from; behind a proxy, the proxy's address."""
    return request.client.host if request.client else None
