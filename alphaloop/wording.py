"""Figures, names and foreign texts as every screen writes them, and moments as people write them.

Screens are the terminal, the report and the console. An option takes `2026-09-01`, `2026-09-01T12:30`, `90m`, `2h` or
`3d`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from alphaloop.acceptance import Interval
from alphaloop.errors import ConfigError

#: What a terminal acts upon instead of showing it (C0, DEL, C1), what turns the direction of the text around it, other
#: line ends, and halves of UTF-16 pairs, which no encoding can write.
_ACTING: Final = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")

_MAX_DECIMALS: Final = 12


def harmless(text: str) -> str:
    """A text as a screen may show it: whatever would act upon the screen is written out, `\\x1b`, `\\u202e`.

    Line breaks and tabs stay, because they belong to texts; `one_line` is for names.
    """
    return _ACTING.sub(_written_out, text.replace("\r\n", "\n"))


def one_line(text: str) -> str:
    """A foreign name or message as a part of one line: line breaks and tabs are written out, too."""
    return harmless(text).replace("\n", "\\n").replace("\t", "\\t")


def json_text(value: Any, *, indent: int | None = None) -> str:
    """JSON as a screen may show it: the same value, with what `harmless` writes out as `\\u` escapes."""
    encoded = json.dumps(value, indent=indent, ensure_ascii=False, default=str)
    return _ACTING.sub(lambda match: match[0] if match[0] == "\n" else f"\\u{ord(match[0]):04x}", encoded)


def _written_out(match: re.Match[str]) -> str:
    character = match[0]
    if character in "\n\t":
        return character
    return f"\\x{ord(character):02x}" if ord(character) < 0x100 else f"\\u{ord(character):04x}"


def share(value: float | None) -> str:
    """A share or a ratio in two digits, `0.71`; `-` where there is none."""
    return "-" if value is None else f"{value:.2f}"


def share_with_interval(interval: Interval | None) -> str:
    """`0.71 [0.64 0.77]`, or `-`."""
    return "-" if interval is None else f"{share(interval.mean)} [{share(interval.low)} {share(interval.high)}]"


def rate(value: float | None) -> str:
    """Tokens a second, `-` where nothing was decoded."""
    return "-" if value is None else f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def counts(by_name: Mapping[str, int]) -> str:
    """`12 succeeded, 1 failed`."""
    return ", ".join(f"{number} {name}" for name, number in by_name.items() if number) or "none"


def money(amount: float, currency: str) -> str:
    """`1,234.50 EUR`, `0.000069 EUR`: small amounts with two significant digits."""
    num_decimals = 2 if abs(amount) >= 1 or amount == 0 else 1 - math.floor(math.log10(abs(amount)))
    return f"{amount:,.{min(num_decimals, _MAX_DECIMALS)}f} {currency}".rstrip()


def money_with_interval(amount: Interval, currency: str) -> str:
    """`1.60 EUR [0.069 3.82]`."""
    return f"{money(amount.mean, currency)} [{money(amount.low, '')} {money(amount.high, '')}]"


def spent(device_s: float, cost: float | None, currency: str) -> str:
    """`12.5 device seconds, 0.0087 EUR`; without a price the seconds alone."""
    seconds = f"{device_s:,.1f}" if device_s >= 10 or not device_s else f"{device_s:.2g}"
    return f"{seconds} device seconds" + ("" if cost is None else f", {money(cost, currency)}")


def how_many(number: int, noun: str) -> str:
    """`1 job`, `1,234 jobs`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def counted_apart(num_probes: int, num_controls: int) -> str:
    """`4 probes, 4 controls`: what is not traffic, beside the jobs; empty without any."""
    kinds = (("probe", num_probes), ("control", num_controls))
    return ", ".join(how_many(number, name) for name, number in kinds if number)


def acceptance_of(drafter: str | None, in_force: str | None, lengths: str, *more: str) -> str:
    """`k up to 5`: what acceptance was measured with; `lookup, k up to 5, json` if another is in force, of a form."""
    return ", ".join(filter(None, (drafter if drafter != in_force else "", lengths, *more)))


def named(drafter: str | None, num_draft_tokens: int) -> str:
    """`lookup k=5`, or `vanilla`."""
    return f"{drafter} k={num_draft_tokens}" if drafter else "vanilla"


def span(seconds: float) -> str:
    """`12 s`, `4 min`, `3 h`, `5 days`: in one unit."""
    if seconds < 120:
        return f"{max(0, round(seconds))} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h" if seconds < 2 * 86_400 else f"{seconds / 86_400:.0f} days"


def minute(at: datetime) -> str:
    """`2026-11-21 06:00 UTC`."""
    return f"{at:%Y-%m-%d %H:%M} UTC"


def expected_end(ends_at: datetime, earliest_at: datetime, latest_at: datetime, now: datetime) -> str:
    """`ends 02:40, 02:31 to 02:55 UTC`; a moment of another day than `now` has the date."""

    def clock(at: datetime) -> str:
        is_today = at.astimezone(UTC).date() == now.astimezone(UTC).date()
        return at.astimezone(UTC).strftime("%H:%M" if is_today else "%Y-%m-%d %H:%M")

    return f"ends {clock(ends_at)}, {clock(earliest_at)} to {clock(latest_at)} UTC"


def second(at: datetime) -> str:
    """`2026-09-01 12:30:05 UTC`."""
    return at.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def words(name: str) -> str:
    """A cause, a kind, a reason or a verdict as people say it: without its underscores."""
    return name.replace("_", " ").replace(",", ", ")


def sentence(text: str) -> str:
    """A text with a capital at its beginning and a full stop at its end."""
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") or not text else ".")


FORMS: Final = "2026-09-01, 2026-09-01T12:30, with +02:00 if not UTC; or 90m, 2h, 3d ago"
FORMS_AHEAD: Final = "90m, 2h, 3d from now; or 2026-09-01, 2026-09-01T12:30, with +02:00 if not UTC"
_AHEAD: Final = re.compile(r"(?:in\s+)?(\d+(?:\.\d+)?)\s*([smhdw])")
_AGO: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([smhdw])(?:\s+ago)?")
_UNITS: Final = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


def moment_ago(text: str, now: datetime, option: str) -> datetime:
    """The moment that `text` says, UTC where it names no zone. Raises ConfigError naming `option`."""
    moment = _read(text, now, option, _AGO, -1, FORMS)
    if moment > now:
        raise ConfigError(f"{option}: expected a time in the past, found {second(moment)}", hint=FORMS)
    return moment


def moment_ahead(text: str, now: datetime, option: str) -> datetime:
    """The moment after `now` that `text` says: of a duration, so long from now. Raises ConfigError naming `option`."""
    moment = _read(text, now, option, _AHEAD, 1, FORMS_AHEAD)
    if moment <= now:
        raise ConfigError(f"{option}: expected a time in the future, found {second(moment)}", hint=FORMS_AHEAD)
    return moment


def _read(text: str, now: datetime, option: str, duration: re.Pattern[str], sign: int, forms: str) -> datetime:
    written = text.strip()
    try:
        if match := duration.fullmatch(written):
            return now + sign * timedelta(**{_UNITS[match[2]]: float(match[1])})
        when = datetime.fromisoformat(written)
        return when.replace(tzinfo=UTC) if when.tzinfo is None else when.astimezone(UTC)
    except (ValueError, OverflowError):
        raise ConfigError(f"{option}: expected a time, found {text[:60]!r}", hint=forms) from None
