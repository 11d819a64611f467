"""Moments in options: `2026-09-01`, `2026-09-01T12:30`, `90m`, `2h`, `3d`."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Final

from alphaloop.errors import ConfigError

FORMS: Final = "2026-09-01, 2026-09-01T12:30, with +02:00 if not UTC; or 90m, 2h, 3d ago"
FORMS_AHEAD: Final = "90m, 2h, 3d from now; or 2026-09-01, 2026-09-01T12:30, with +02:00 if not UTC"
_AHEAD: Final = re.compile(r"(?:in\s+)?(\d+(?:\.\d+)?)\s*([smhdw])")
_AGO: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([smhdw])(?:\s+ago)?")
_UNITS: Final = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


def moment(text: str, now: datetime, option: str) -> datetime:
    """The moment that `text` says, UTC where it names no zone. Raises ConfigError naming `option`."""
    found = _read(text, now, option, _AGO, -1, FORMS)
    if found > now:
        raise ConfigError(f"{option}: expected a time in the past, found {shown(found)}", hint=FORMS)
    return found


def moment_ahead(text: str, now: datetime, option: str) -> datetime:
    """The moment after `now` that `text` says: of a duration, so long from now. Raises ConfigError naming `option`."""
    found = _read(text, now, option, _AHEAD, 1, FORMS_AHEAD)
    if found <= now:
        raise ConfigError(f"{option}: expected a time in the future, found {shown(found)}", hint=FORMS_AHEAD)
    return found


def _read(text: str, now: datetime, option: str, duration: re.Pattern[str], sign: int, forms: str) -> datetime:
    written = text.strip()
    try:
        if found := duration.fullmatch(written):
            return now + sign * timedelta(**{_UNITS[found[2]]: float(found[1])})
        when = datetime.fromisoformat(written)
        return when.replace(tzinfo=UTC) if when.tzinfo is None else when.astimezone(UTC)
    except (ValueError, OverflowError):
        raise ConfigError(f"{option}: expected a time, found {text[:60]!r}", hint=forms) from None


def shown(when: datetime) -> str:
    """`2026-09-01 12:30:05 UTC`."""
    return when.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
