"""The report's sentences, the same in the terminal and on the page; and what changed between two reports. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from typing import Final

from alphaloop.as_decoded import at_load
from alphaloop.experiment.estimate import Verdict
from alphaloop.experiment.wording import draft_lengths, figure
from alphaloop.measurements import DriftSubject
from alphaloop.prices import NO_PRICE
from alphaloop.store.drift import EventState, KnownIncident, PastState
from alphaloop.store.workers import ServerLife
from alphaloop.wording import (
    acceptance_of,
    counted_apart,
    how_many,
    minute,
    money,
    money_with_interval,
    one_line,
    span,
    spent,
    words,
)
from scheduler.report.data import (
    ChangeKind,
    ChangeLine,
    Changes,
    DraftLine,
    DriftLine,
    DriftReport,
    SpentLine,
    TaskLine,
)

#: A system without a job for so long is called idle.
IDLE: Final = timedelta(hours=1)
#: Gaps that the report names.
MAX_GAPS: Final = 10


def measured_with(line: TaskLine) -> str:
    """The k of a line's acceptance, the drafter where another one is in force, and whether probes showed it."""
    source = "probes, " if line.acceptance_from == "probes" else ""
    lengths = draft_lengths(line.alpha_num_draft_tokens)
    return source + acceptance_of(line.acceptance_drafter, line.drafter, lengths, line.form_bucket, line.alpha_counted)


def apart_from_traffic(report: DriftReport) -> str:
    """Probes and controls of the last day, which are in no figure of traffic."""
    probes, controls = (sum(getattr(line, name) for line in report.tasks) for name in ("num_probes", "num_controls"))
    return f"Apart from them: {counted_apart(probes, controls) or 'no probe'}."


def costs(line: DriftLine) -> str:
    """What it costs to do nothing."""
    if line.lost_tokens_per_s is None:
        return "cost not known"
    return f"costs {line.lost_tokens_per_s:.3g} tokens/s" if line.lost_tokens_per_s else "costs nothing"


def saved(line: TaskLine) -> str:
    """What speculation saved a task in the last day: device seconds by its speed-up, and passes."""
    passes = f"{line.num_saved_passes:,} target passes in the last day"
    time = line.saved_device_s
    if time is None:
        return f"device time not known, {passes}"
    return f"{time.mean:,.0f} s [{time.low:,.0f} {time.high:,.0f}] of device time, {passes}"


def cost_of_jobs(line: TaskLine, currency: str) -> str:
    """What jobs of a task cost, and what speculation saved."""
    cost = line.cost
    if cost is None or cost.per_1000_jobs is None or cost.per_million_tokens is None:
        return "no job in the last day"
    jobs, tokens = money(cost.per_1000_jobs, currency), money(cost.per_million_tokens, currency)
    return f"{jobs} per 1,000 jobs, {tokens} per million tokens; {cost_saved(line, currency)}"


def cost_saved(line: TaskLine, currency: str) -> str:
    """What speculation saved a task in the last day, in money."""
    saved_money = line.cost.saved if line.cost is not None else None
    if saved_money is None:
        return "saved: not known"
    return f"saved {money_with_interval(saved_money, currency)} in the last day"


def cost_of_owner(line: SpentLine, currency: str) -> str:
    """What jobs of a segment, key or batch took."""
    took = spent(line.device_s, line.cost, currency)
    return f"{line.by} {one_line(line.name)}: {how_many(line.num_jobs, 'job')}, {took}"


def cost_of_all(report: DriftReport) -> str:
    """What all jobs of the last day cost, or why that is not known."""
    if report.cost is None or report.probe_cost is None:
        return NO_PRICE
    all_jobs, probes = (money(amount, report.currency) for amount in (report.cost, report.probe_cost))
    return (
        f"All jobs of the last day took {report.device_s:,.0f} device seconds, which cost {all_jobs}, of which probes "
        f"{probes}."
    )


def none_sent(report: DriftReport) -> str:
    """Why a run sent no probe."""
    if not report.num_probe_sets:
        return "No task has a probe set, so a stale draft cannot be distinguished from changed traffic."
    if report.probes_waiting:
        return "None: all that were due wait for the budget."
    return "None was due: no drafter that can be measured lacks fresh evidence."


def probe_spend(report: DriftReport) -> str:
    """What probes took of the device."""
    sentence = (
        f"In the last day probes took {report.probe_spent_device_s:,.0f} of {report.device_s:,.0f} device seconds"
    )
    return (
        f"{sentence} ({report.probe_spent_device_s / report.device_s:.1%})." if report.device_s > 0 else f"{sentence}."
    )


def gap_lines(report: DriftReport) -> tuple[str, ...]:
    """When nothing was measured: the newest gaps, the newest first."""
    return tuple(f"{minute(gap.begins)} to {minute(gap.ends)}" for gap in report.gaps[: -MAX_GAPS - 1 : -1])


def freshness(report: DriftReport) -> tuple[str, ...]:
    """How old the newest job is, and until when the report is the newest one."""
    last = report.last_decoded_at
    if last is None:
        sentences = ["No job of traffic was ever decoded."]
    elif report.created_at - last > IDLE:
        silence = span((report.created_at - last).total_seconds())
        sentences = [f"No job was decoded for {silence}: the last one at {minute(last)}."]
    else:
        sentences = [f"The last job was decoded at {minute(last)}."]
    if report.next_due is not None:
        sentences.append(f"The next run is due at {minute(report.next_due)}: from then on this report is old.")
    return tuple(sentences)


def changes_between(
    before: DriftReport,
    now: DriftReport,
    states: Sequence[tuple[DriftSubject, PastState]],
    closed: Sequence[KnownIncident],
    servers: Sequence[ServerLife],
) -> Changes:
    """Changes since the report `before`. `states` and `closed` are what became of flags and incidents since then.

    Flags and incidents come from their tables and not from the two reports, because one of them may have come and gone
    in a run that failed before its report. `servers` are lives of inference servers that began since then.
    """
    lines = [
        *_incidents(before.created_at, now, closed),
        *_flags(states),
        *_servers(servers),
        *_drafts(before.drafts, now.drafts),
        *_choices(before.tasks, now.tasks),
        *_speedups(before.tasks, now.tasks),
    ]
    return Changes(since=before.created_at, lines=tuple(lines))


def _incidents(since: datetime, now: DriftReport, closed: Sequence[KnownIncident]) -> Iterable[ChangeLine]:
    for line in now.incidents:
        if line.opened_at > since:
            sentence = f"{line.task}: incident opened, {words(line.kind)}: {line.sentence}"
            yield ChangeLine(kind=ChangeKind.INCIDENT, about=line.task, sentence=sentence)
    for incident in closed:
        what = "opened and closed" if incident.opened_at > since else "closed"
        sentence = (
            f"{incident.found.task}: incident {what}, {words(incident.found.kind)}, because later probes were right."
        )
        yield ChangeLine(kind=ChangeKind.INCIDENT, about=incident.found.task, sentence=sentence)


def _flags(states: Sequence[tuple[DriftSubject, PastState]]) -> Iterable[ChangeLine]:
    """One line a flag, with every state that it went through."""
    by_event: dict[int, list[tuple[DriftSubject, PastState]]] = {}
    for subject, state in states:
        by_event.setdefault(state.event_id, []).append((subject, state))
    for event_id, passed in by_event.items():
        subject, last = passed[-1]
        steps = ", then ".join(dict.fromkeys(state.state.value for _, state in passed))
        sentence = f"{subject.task}, {subject.drafter}: flag {event_id} ({words(last.cause)}) was {steps}"
        if last.state is EventState.CLOSED:
            sentence += f": {last.sentence}"
        elif last.state is EventState.ACKNOWLEDGED:
            sentence += f" by {last.actor}"
        yield ChangeLine(kind=ChangeKind.FLAG, about=subject.task, sentence=_ended(sentence))


def _servers(lives: Sequence[ServerLife]) -> Iterable[ChangeLine]:
    for life in lives:
        sentence = _ended(f"endpoint {life.endpoint}: {life.changed}")
        yield ChangeLine(kind=ChangeKind.SERVER, about=life.endpoint, sentence=sentence)


def _drafts(before: Sequence[DraftLine], now: Sequence[DraftLine]) -> Iterable[ChangeLine]:
    statuses = {line.name: line.status for line in before}
    for line in now:
        if line.status == (earlier := statuses.get(line.name)):
            continue
        sentence = (
            f"{line.name} is {line.status}, was {earlier}" if earlier else f"{line.name} is new and {line.status}"
        )
        if line.status_reason:
            sentence += f": {line.status_reason}"
        yield ChangeLine(kind=ChangeKind.DRAFT, about=line.drafter, sentence=_ended(sentence))


def _choices(before: Sequence[TaskLine], now: Sequence[TaskLine]) -> Iterable[ChangeLine]:
    earlier = {line.task: line for line in before}
    for line in now:
        past = earlier.get(line.task)
        if past is not None and _setting(past) == _setting(line):
            continue
        if line.next_running is None:
            sentence = f"{line.task} was last decided to be decoded {_setting(line)}, "
        else:
            sentence = f"The next job of {line.task} would be decoded {_setting(line)} {at_load(line.next_job)}, "
        sentence += f"before {_setting(past)}." if past is not None else "and the task was not in the last report."
        yield ChangeLine(kind=ChangeKind.CHOICE, about=line.task, sentence=sentence)


def _speedups(before: Sequence[TaskLine], now: Sequence[TaskLine]) -> Iterable[ChangeLine]:
    earlier = {line.task: _verdict(line) for line in before}
    for line in now:
        past, verdict = earlier.get(line.task, Verdict.NO_VERDICT_YET), _verdict(line)
        if past == verdict:
            continue
        sentence = f"{line.task}: measured speed-up {figure(line.measured)}, {words(verdict)}; before {words(past)}."
        if verdict is Verdict.NO_VERDICT_YET:
            sentence = f"{line.task}: the measured speed-up is not known any more; before {words(past)}."
        yield ChangeLine(kind=ChangeKind.SPEEDUP, about=line.task, sentence=sentence)


def _verdict(line: TaskLine) -> Verdict:
    return line.measured.verdict if line.measured else Verdict.NO_VERDICT_YET


def _setting(line: TaskLine) -> str:
    if line.mode is None:
        return "in a way that is not known"
    return f"with {line.drafter} k={line.num_draft_tokens}" if line.mode == "speculative" else line.mode


def _ended(told: str) -> str:
    return told if told.endswith(".") else f"{told}."


def told_changes(changes: Changes) -> str:
    """What stands above the list of changes, or in its place."""
    if changes.since is None:
        return "This is the first report, or the first of this version: there is none to compare with."
    if not changes.lines:
        return f"Nothing changed since the report of {minute(changes.since)}."
    return f"Since the report of {minute(changes.since)}:"
