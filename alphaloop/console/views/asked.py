"""What the address of a page asks for, checked."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime

from starlette.requests import Request

from alphaloop import moments
from alphaloop.console.page import WrongRequest
from alphaloop.errors import ConfigError

_MAX_CHARS = 300


def text(request: Request, name: str) -> str:
    """A parameter of the address; empty without one. Raises WrongRequest if it is too long or not text."""
    found = request.query_params.get(name, "").strip()
    if len(found) > _MAX_CHARS or "\x00" in found:
        raise WrongRequest(f"{name}: expected at most {_MAX_CHARS} characters of text")
    return found


def moment(request: Request, name: str) -> datetime | None:
    """A moment of the address, with its zone; None without one. Raises WrongRequest."""
    found = text(request, name)
    if not found:
        return None
    try:
        at = datetime.fromisoformat(found.replace(" ", "+"))
    except ValueError:
        at = None
    if at is None or at.tzinfo is None:
        raise WrongRequest(f"{name}: expected a moment with its zone, such as 2026-11-23T07:00:00Z")
    return at


def past(asked: Mapping[str, str], name: str) -> datetime | None:
    """A moment of the past as people write it, `2h` or `2026-11-01`; None without one. Raises WrongRequest."""
    try:
        return moments.moment(asked[name], datetime.now(UTC), name) if name in asked else None
    except ConfigError as error:
        raise WrongRequest(error.message, hint=error.hint) from None
