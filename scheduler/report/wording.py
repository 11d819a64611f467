"""The report's words, the same in the terminal and on the page."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Final

from scheduler.report.data import DriftLine, Estimate, Report, TaskLine

#: A system without a job for so long is called idle.
IDLE: Final = timedelta(hours=1)


def how(line: TaskLine) -> str:
    """How a task is decoded, in at most two words."""
    if line.mode == "speculative" and line.drafter:
        return line.drafter
    return line.mode or "-"


def share(value: float) -> str:
    """`.72`."""
    return f"{value:.2f}".removeprefix("0")


def estimate(value: Estimate | None) -> str:
    """`.72 [.65 .78]`, or a dash."""
    if value is None:
        return "-"
    return f"{share(value.mean)} [{share(value.low)} {share(value.high)}]"


def words(name: str) -> str:
    """A cause, a kind or a verdict as people say it."""
    return name.replace("_", " ")


def costs(line: DriftLine) -> str:
    """What it costs to do nothing."""
    if line.lost_tokens_per_s is None:
        return "cost not known"
    return f"costs {line.lost_tokens_per_s:.3g} tokens/s" if line.lost_tokens_per_s else "costs nothing"


def moment(at: datetime) -> str:
    """`2026-11-21 06:00 UTC`."""
    return f"{at:%Y-%m-%d %H:%M} UTC"


def freshness(report: Report) -> tuple[str, ...]:
    """How old the newest job is, and until when the report is the newest one."""
    last = report.last_decoded_at
    if last is None:
        told = ["No job of traffic was ever decoded."]
    elif report.created_at - last > IDLE:
        told = [f"No job was decoded for {_span(report.created_at - last)}: the last one at {moment(last)}."]
    else:
        told = [f"The last job was decoded at {moment(last)}."]
    if report.next_due is not None:
        told.append(f"The next run is due at {moment(report.next_due)}: from then on this report is old.")
    return tuple(told)


def _span(length: timedelta) -> str:
    hours = int(length.total_seconds() // 3600)
    return f"{hours // 24} days" if hours >= 48 else f"{hours} hour{'' if hours == 1 else 's'}"
