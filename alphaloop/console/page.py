"""A page: data, and the template that shows them. Its twin is the same data as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from jinja2 import Environment
from pydantic_core import to_jsonable_python
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from alphaloop.console import wording
from alphaloop.errors import AlphaloopError
from alphaloop.pages.templates import environment
from alphaloop.wording import json_text


@dataclass(frozen=True, slots=True)
class Page:
    """What a view found."""

    template: str
    title: str
    data: Mapping[str, Any]
    shown: Mapping[str, Any] = field(default_factory=dict)  #: what the template needs beside the data
    status: int = 200
    is_live: bool = True  #: whether the page is fetched anew while somebody looks at it
    has_twin: bool = True


class NotFound(AlphaloopError, LookupError):
    """There is nothing of this name."""

    code = "not_found"


class WrongRequest(AlphaloopError, ValueError):
    """A request that no link and no form of the console makes."""

    code = "wrong_request"


def wants_json(request: Request) -> bool:
    """Whether the JSON twin is asked for: `/tasks.json` or `/tasks?format=json`."""
    return request.url.path.endswith(".json") or request.query_params.get("format") == "json"


def respond(page: Page, request: Request, frame: Mapping[str, Any]) -> Response:
    """The page in the form that is asked for; `frame` is what stands around every page."""
    if wants_json(request):
        return as_json(page.data, page.status)
    template = _environment().get_template(page.template)
    around = {
        **frame,
        "title": page.title,
        "is_live": page.is_live,
        "json_url": _json_url(request) if page.has_twin else None,
    }
    return HTMLResponse(template.render({**page.data, **page.shown, **around}), page.status)


def as_json(data: Mapping[str, Any], status: int = 200) -> Response:
    """The data as JSON: times in ISO 8601, counts beside the rates that were computed from them."""
    content = json_text(to_jsonable_python(data, inf_nan_mode="null"), indent=2)
    return Response(content + "\n", status, media_type="application/json")


def _json_url(request: Request) -> str:
    path = request.url.path if request.url.path != "/" else "/now"
    query = f"?{request.url.query}" if request.url.query else ""
    return f"{path}.json{query}"


@cache
def _environment() -> Environment:
    made = environment("alphaloop.console", "templates")
    made.globals.update(wording.FOR_TEMPLATES)
    return made
