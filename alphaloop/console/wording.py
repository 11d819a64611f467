"""What the console's templates write with beyond the words of every page: names and times, relative to now."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Final

from markupsafe import Markup, escape

from alphaloop.wording import harmless

_MINUTE, _HOUR, _DAY = 60, 3600, 86_400


def span(seconds: float) -> str:
    """`12 s`, `4 min`, `3 h`, `5 days`: in one unit."""
    if seconds < 2 * _MINUTE:
        return f"{max(0, round(seconds))} s"
    if seconds < 2 * _HOUR:
        return f"{seconds / _MINUTE:.0f} min"
    return f"{seconds / _HOUR:.0f} h" if seconds < 2 * _DAY else f"{seconds / _DAY:.0f} days"


def ago(at: datetime | None, now: datetime | None = None) -> Markup:
    """`4 min ago`, with the moment itself behind it; a dash without one."""
    if at is None:
        return Markup("–")
    seconds = ((now or datetime.now(UTC)) - at).total_seconds()
    told = f"{span(seconds)} ago" if seconds >= 0 else f"in {span(-seconds)}"
    return _time(at, told)


def stamp(at: datetime | str | None) -> Markup:
    """`2026-11-23 07:00:12`, in UTC; a dash without one."""
    if at is None:
        return Markup("–")
    moment = (datetime.fromisoformat(at) if isinstance(at, str) else at).astimezone(UTC)
    return _time(moment, f"{moment:%Y-%m-%d %H:%M:%S}")


def breaks(name: str) -> Markup:
    """A name that may be broken behind its underscores, hyphens and points."""
    shown = escape(harmless(name))
    for mark in ("_", "-", "."):
        shown = shown.replace(mark, mark + Markup("<wbr>"))
    return shown


def _time(at: datetime, told: str) -> Markup:
    iso = at.astimezone(UTC).isoformat(timespec="seconds")
    return Markup('<time datetime="{}" title="{} UTC">{}</time>').format(iso, f"{at.astimezone(UTC):%F %T}", told)


FOR_TEMPLATES: Final[Mapping[str, Callable[..., Any]]] = {"ago": ago, "breaks": breaks, "span": span, "stamp": stamp}
