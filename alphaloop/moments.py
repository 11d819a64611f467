"""Moments in options: `2026-09-01`, `2026-09-01T12:30`, `90m`, `2h`, `3d`."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Final

from alphaloop.errors import ConfigError

FORMS: Final = "2026-09-01, 2026-09-01T12:30, with +02:00 if not UTC; or 90m, 2h, 3d ago"
_AGO: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([smhdw])(?:\s+ago)?")
_UNITS: Final = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


def moment(text: str, now: datetime, option: str) -> datetime:
    """The moment that `text` says, UTC where it names no zone. Raises ConfigError naming `option`."""
    written = text.strip()
    try:
        if ago := _AGO.fullmatch(written):
            return now - timedelta(**{_UNITS[ago[2]]: float(ago[1])})
        found = datetime.fromisoformat(written)
        found = found.replace(tzinfo=UTC) if found.tzinfo is None else found.astimezone(UTC)
    except (ValueError, OverflowError):
        raise ConfigError(f"{option}: expected a time, found {text[:60]!r}", hint=FORMS) from None
    if found > now:
        raise ConfigError(f"{option}: expected a time in the past, found {shown(found)}", hint=FORMS)
    return found


def shown(when: datetime) -> str:
    """`2026-09-01 12:30:05 UTC`."""
    return when.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
