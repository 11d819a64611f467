"""What changed between two reports. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime

from alphaloop.as_decoded import at_load
from alphaloop.measurements import DriftSubject
from alphaloop.store.drift import EventState, PastState
from alphaloop.store.incidents import KnownIncident
from alphaloop.store.workers import ServerLife
from alphaloop.switchback.speedup import Verdict
from alphaloop.switchback.wording import figure
from alphaloop.wording import words
from scheduler.report.data import ChangeKind, ChangeLine, Changes, DraftLine, Report, TaskLine
from scheduler.report.wording import moment


def changes_between(
    before: Report | None,
    now: Report,
    states: Sequence[tuple[DriftSubject, PastState]],
    closed: Sequence[KnownIncident],
    servers: Sequence[ServerLife],
) -> Changes:
    """Changes since the report `before`. `states` and `closed` are what became of flags and incidents since then.

    Flags and incidents come from their tables and not from the two reports, because one of them may have come and gone
    in a run that failed before its report. `servers` are lives of inference servers that began since then.
    """
    if before is None:
        return Changes()
    lines = [
        *_incidents(before.created_at, now, closed),
        *_flags(states),
        *_servers(servers),
        *_drafts(before.drafts, now.drafts),
        *_choices(before.tasks, now.tasks),
        *_speedups(before.tasks, now.tasks),
    ]
    return Changes(since=before.created_at, lines=tuple(lines))


def _incidents(since: datetime, now: Report, closed: Sequence[KnownIncident]) -> Iterable[ChangeLine]:
    for line in now.incidents:
        if line.opened_at > since:
            told = f"{line.task}: incident opened, {words(line.kind)}: {line.sentence}"
            yield ChangeLine(kind=ChangeKind.INCIDENT, about=line.task, sentence=told)
    for one in closed:
        what = "opened and closed" if one.opened_at > since else "closed"
        told = f"{one.found.task}: incident {what}, {words(one.found.kind)}, because later probes were right."
        yield ChangeLine(kind=ChangeKind.INCIDENT, about=one.found.task, sentence=told)


def _flags(states: Sequence[tuple[DriftSubject, PastState]]) -> Iterable[ChangeLine]:
    """One line a flag, with every state that it went through."""
    by_event: dict[int, list[tuple[DriftSubject, PastState]]] = {}
    for subject, state in states:
        by_event.setdefault(state.event_id, []).append((subject, state))
    for event_id, passed in by_event.items():
        subject, last = passed[-1]
        steps = ", then ".join(dict.fromkeys(state.state.value for _, state in passed))
        told = f"{subject.task}, {subject.drafter}: flag {event_id} ({words(last.cause)}) was {steps}"
        if last.state is EventState.CLOSED:
            told += f": {last.sentence}"
        elif last.state is EventState.ACKNOWLEDGED:
            told += f" by {last.actor}"
        yield ChangeLine(kind=ChangeKind.FLAG, about=subject.task, sentence=_ended(told))


def _servers(lives: Sequence[ServerLife]) -> Iterable[ChangeLine]:
    for life in lives:
        told = f"endpoint {life.endpoint}: {life.changed}"
        yield ChangeLine(kind=ChangeKind.SERVER, about=life.endpoint, sentence=_ended(told))


def _drafts(before: Sequence[DraftLine], now: Sequence[DraftLine]) -> Iterable[ChangeLine]:
    statuses = {_draft(line): line.status for line in before}
    for line in now:
        earlier = statuses.get(_draft(line))
        if line.status == earlier:
            continue
        name = f"{line.drafter} {line.draft_revision} for target {line.target_revision}"
        told = f"{name} is {line.status}, was {earlier}" if earlier else f"{name} is new and {line.status}"
        if line.status_reason:
            told += f": {line.status_reason}"
        yield ChangeLine(kind=ChangeKind.DRAFT, about=line.drafter, sentence=_ended(told))


def _choices(before: Sequence[TaskLine], now: Sequence[TaskLine]) -> Iterable[ChangeLine]:
    earlier = {line.task: line for line in before}
    for line in now:
        past = earlier.get(line.task)
        if past is not None and _setting(past) == _setting(line):
            continue
        if line.next_running is None:
            told = f"{line.task} was last decided to be decoded {_setting(line)}, "
        else:
            told = f"The next job of {line.task} would be decoded {_setting(line)} {at_load(line.next_job)}, "
        told += f"before {_setting(past)}." if past is not None else "and the task was not in the last report."
        yield ChangeLine(kind=ChangeKind.CHOICE, about=line.task, sentence=told)


def _speedups(before: Sequence[TaskLine], now: Sequence[TaskLine]) -> Iterable[ChangeLine]:
    earlier = {line.task: _verdict(line) for line in before}
    for line in now:
        past, verdict = earlier.get(line.task, Verdict.NO_VERDICT_YET), _verdict(line)
        if past == verdict:
            continue
        told = f"{line.task}: measured speed-up {figure(line.measured)}, {words(verdict)}; before {words(past)}."
        if verdict is Verdict.NO_VERDICT_YET:
            told = f"{line.task}: the measured speed-up is not known any more; before {words(past)}."
        yield ChangeLine(kind=ChangeKind.SPEEDUP, about=line.task, sentence=told)


def _verdict(line: TaskLine) -> Verdict:
    return line.measured.verdict if line.measured else Verdict.NO_VERDICT_YET


def _setting(line: TaskLine) -> str:
    if line.mode is None:
        return "in a way that is not known"
    return f"with {line.drafter} k={line.num_draft_tokens}" if line.mode == "speculative" else line.mode


def _draft(line: DraftLine) -> tuple[str, str, str]:
    return line.drafter, line.draft_revision, line.target_revision


def _ended(sentence: str) -> str:
    return sentence if sentence.endswith(".") else f"{sentence}."


def told_changes(changes: Changes) -> str:
    """What stands above the list of changes, or in its place."""
    if changes.since is None:
        return "This is the first report, or the first of this version: there is none to compare with."
    if not changes.lines:
        return f"Nothing changed since the report of {moment(changes.since)}."
    return f"Since the report of {moment(changes.since)}:"
