"""The report's words, the same in the terminal and on the page."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Final

from alphaloop.switchback.wording import draft_lengths
from alphaloop.wording import acceptance_of, counted_apart, share
from scheduler.report.data import DriftLine, Report, TaskLine
from scheduler.report.part import Estimate

#: A system without a job for so long is called idle.
IDLE: Final = timedelta(hours=1)
#: Gaps that the report names.
MAX_GAPS: Final = 10


def estimate(value: Estimate | None) -> str:
    """`.72 [.65 .78]`, or a dash."""
    if value is None:
        return "-"
    return f"{share(value.mean)} [{share(value.low)} {share(value.high)}]"


def measured_with(line: TaskLine) -> str:
    """The k behind a line's acceptance, the drafter where another one is in force, and whether probes showed it."""
    source = "probes, " if line.acceptance_from == "probes" else ""
    return source + acceptance_of(line.acceptance_drafter, line.drafter, draft_lengths(line.alpha_num_draft_tokens))


def apart_from_traffic(report: Report) -> str:
    """Probes and controls of the last day, which are in no figure of traffic."""
    probes, controls = (sum(getattr(line, name) for line in report.tasks) for name in ("num_probes", "num_controls"))
    return f"Apart from them: {counted_apart(probes, controls) or 'no probe'}."


def costs(line: DriftLine) -> str:
    """What it costs to do nothing."""
    if line.lost_tokens_per_s is None:
        return "cost not known"
    return f"costs {line.lost_tokens_per_s:.3g} tokens/s" if line.lost_tokens_per_s else "costs nothing"


def moment(at: datetime) -> str:
    """`2026-11-21 06:00 UTC`."""
    return f"{at:%Y-%m-%d %H:%M} UTC"


def saved(line: TaskLine) -> str:
    """What speculation saved a task in the last day: device seconds by its speed-up, and passes."""
    passes = f"{line.num_saved_passes:,} target passes in the last day"
    time = line.saved_device_s
    if time is None:
        return f"device time not known, {passes}"
    return f"{time.mean:,.0f} s [{time.low:,.0f} {time.high:,.0f}] of device time, {passes}"


def money(amount: float, currency: str) -> str:
    """`1,234.50 EUR`; small amounts with two digits that say something."""
    shown = f"{amount:,.2f}" if abs(amount) >= 1 or amount == 0 else f"{amount:.2g}"
    return f"{shown} {currency}".rstrip()


def cost_of_jobs(line: TaskLine, currency: str) -> str:
    """What jobs of a task cost, and what speculation saved."""
    its = line.cost
    if its is None or its.per_1000_jobs is None or its.per_million_tokens is None:
        return "no job in the last day"
    jobs, tokens = money(its.per_1000_jobs, currency), money(its.per_million_tokens, currency)
    return f"{jobs} per 1,000 jobs, {tokens} per million tokens; {cost_saved(line, currency)}"


def cost_saved(line: TaskLine, currency: str) -> str:
    """What speculation saved a task in the last day, in money."""
    its = line.cost.saved if line.cost is not None else None
    if its is None:
        return "saved: not known"
    low, high = (money(bound, "") for bound in (its.low, its.high))
    return f"saved {money(its.mean, currency)} [{low} {high}] in the last day"


def cost_of_all(report: Report) -> str:
    """What all jobs of the last day cost, or why that is not known."""
    price, currency = report.device_cost_per_hour, report.currency
    if price is None:
        return "Not set: report.device_cost_per_hour, the price of a device."
    all_jobs, probes = (money(s * price / 3600, currency) for s in (report.device_s, report.probe_spent_device_s))
    return (
        f"All jobs of the last day took {report.device_s:,.0f} device seconds, at {money(price, currency)} an hour "
        f"{all_jobs}, of which probes {probes}."
    )


def probe_spend(report: Report) -> str:
    """What probes took of the device."""
    told = f"In the last day probes took {report.probe_spent_device_s:,.0f} of {report.device_s:,.0f} device seconds"
    return f"{told} ({report.probe_spent_device_s / report.device_s:.1%})." if report.device_s > 0 else f"{told}."


def gap_lines(report: Report) -> tuple[str, ...]:
    """When nobody measured: the newest gaps, the newest first."""
    return tuple(f"{moment(gap.begins)} to {moment(gap.ends)}" for gap in report.gaps[: -MAX_GAPS - 1 : -1])


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
