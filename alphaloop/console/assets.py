"""The style sheet, the script and the icon: read once, named by their content, so that browsers may keep them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib import resources

from starlette.requests import Request
from starlette.responses import Response

from alphaloop.console.page import NotFound


@dataclass(frozen=True, slots=True)
class Asset:
    """A file for the browser."""

    media_type: str
    content: bytes

    @property
    def version(self) -> str:
        """Changes with the content."""
        return hashlib.sha256(self.content).hexdigest()[:12]


@cache
def assets() -> dict[str, Asset]:
    """By name. The style is that of every page, and then the console's own."""
    own = resources.files("alphaloop.console").joinpath("static")
    shared = resources.files("alphaloop.pages").joinpath("style.css").read_bytes()
    return {
        "style.css": Asset("text/css", shared + own.joinpath("console.css").read_bytes()),
        "console.js": Asset("text/javascript", own.joinpath("console.js").read_bytes()),
        "icon.svg": Asset("image/svg+xml", own.joinpath("icon.svg").read_bytes()),
    }


def asset_url(name: str) -> str:
    """The address of a file, another one after each change."""
    return f"/static/{name}?{assets()[name].version}"


def serve(request: Request) -> Response:
    """A file. Raises NotFound."""
    found = assets().get(request.path_params["name"])
    if found is None:
        raise NotFound("no such file")
    is_current = request.url.query == found.version
    kept = "public, max-age=31536000, immutable" if is_current else "no-cache"
    return Response(found.content, media_type=found.media_type, headers={"Cache-Control": kept})
