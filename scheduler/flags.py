"""Which drift events open and close, and which drafts become stale or active again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from alphaloop.acceptance import Interval
from alphaloop.measurements import DriftSubject
from alphaloop.settings import SchedulerSettings
from alphaloop.store.drift import OpenEvent
from scheduler.causes import Finding, explain
from scheduler.counts import Counts, subject_of
from scheduler.cusum import Drift, watch
from scheduler.staleness import ProbeComparison, compare_probes, is_stale, pooled_change

ACTIVE, STALE = "active", "stale"


@dataclass(frozen=True, slots=True)
class Verdicts:
    """The results of the drift tests."""

    findings: tuple[Finding, ...]
    evaluated: frozenset[tuple[str, str]]  #: (task, drafter) of everything that could be tested
    comparisons: tuple[ProbeComparison, ...]
    current_drafts: Mapping[tuple[str, str], str]  #: draft revision in use by (task, drafter)


@dataclass(frozen=True, slots=True)
class StatusChange:
    """A draft revision that becomes stale or active."""

    drafter: str
    draft_revision: str
    target_revision: str
    status: str
    reason: str


def judge(counts: Counts, events: Sequence[OpenEvent], settings: SchedulerSettings) -> Verdicts:
    """Test the traffic and the probes of every drafter in use, and name the cause of drift."""
    traffic = _watch_traffic(counts, settings)
    comparisons = {c.subject: c for c in compare_probes(counts.probes)}
    flagged = {
        (e.subject.task, e.subject.drafter, e.subject.draft_revision)
        for e in events
        if e.evidence.get("flagged_by") == "probes"
    }
    findings = []
    for subject in sorted(traffic.keys() | comparisons.keys()):
        probes = comparisons.get(subject)
        was_stale = (subject.task, subject.drafter, subject.draft_revision) in flagged
        fell = probes is not None and is_stale(
            was_stale, probes.change, drop=settings.stale_drop, recover=settings.stale_recover
        )
        finding = explain(subject, traffic.get(subject), probes, probes_fell=fell)
        if finding is not None:
            findings.append(finding)
    tested = {subject for subject, drift in traffic.items() if drift is not None} | comparisons.keys()
    return Verdicts(
        findings=tuple(findings),
        evaluated=frozenset((s.task, s.drafter) for s in tested),
        comparisons=tuple(comparisons.values()),
        current_drafts=counts.current_drafts(),
    )


def events_to_close(events: Iterable[OpenEvent], verdicts: Verdicts) -> list[OpenEvent]:
    """Open events that the tests no longer support.

    An event stays open if its subject could not be tested, or if probes opened it and no probes can be compared. An
    event about a draft that another revision has replaced is closed.
    """
    supported = {(finding.subject, finding.cause.value) for finding in verdicts.findings}
    compared = {(c.subject.task, c.subject.drafter) for c in verdicts.comparisons}
    over = []
    for event in events:
        about = (event.subject.task, event.subject.drafter)
        decidable = compared if event.evidence.get("flagged_by") == "probes" else verdicts.evaluated
        is_replaced = verdicts.current_drafts.get(about, event.subject.draft_revision) != event.subject.draft_revision
        if is_replaced or ((event.subject, event.cause) not in supported and about in decidable):
            over.append(event)
    return over


def status_changes(
    comparisons: Iterable[ProbeComparison], statuses: Mapping[tuple[str, str, str], str], settings: SchedulerSettings
) -> list[StatusChange]:
    """Drafts whose status changes, judged over all their tasks together, because the status holds for all of them.

    `statuses` is by (drafter, draft revision, target revision). Only active and stale change into each other here.
    """

    def draft(comparison: ProbeComparison) -> tuple[str, str, str]:
        subject = comparison.subject
        return subject.drafter, subject.draft_revision, subject.target_revision

    changes = []
    for key, group in groupby(sorted(comparisons, key=draft), key=draft):
        status = statuses.get(key)
        compared = list(group)
        change = pooled_change(compared)
        if status not in (ACTIVE, STALE) or change is None:
            continue
        stale = is_stale(status == STALE, change, drop=settings.stale_drop, recover=settings.stale_recover)
        if stale != (status == STALE):
            changes.append(StatusChange(*key, STALE if stale else ACTIVE, _reason(change, compared, stale)))
    return changes


def _watch_traffic(counts: Counts, settings: SchedulerSettings) -> dict[DriftSubject, Drift | None]:
    """The clearest sign of drift over the streams of each subject.

    Position 1 and all positions are tested side by side, each at twice the run length, so that both together keep
    the stated one.
    """
    found: dict[DriftSubject, Drift | None] = {}
    for stream, jobs in counts.current_streams().items():
        width = max((len(job.trials) for job in jobs), default=0)
        for num_positions in (1, width) if width > 1 else (1,):
            drift = watch(
                jobs,
                false_alarm_jobs=settings.drift_false_alarm_jobs * (2 if width > 1 else 1),
                min_jobs=settings.drift_min_jobs,
                num_positions=num_positions,
            )
            subject = subject_of(stream)
            found[subject] = _clearer(found.get(subject), drift)
    return found


def _clearer(one: Drift | None, other: Drift | None) -> Drift | None:
    if one is None or other is None:
        return one or other
    return max(one, other, key=lambda drift: (drift.is_alarm, drift.statistic / drift.threshold))


def _reason(change: Interval, compared: Sequence[ProbeComparison], stale: bool) -> str:
    num_prompts = sum(len(c.pairs) for c in compared)
    where = f"on {num_prompts} probe prompts of {len(compared)} task{'s' if len(compared) > 1 else ''}"
    if stale:
        return f"alpha_1 fell by {-change.mean:.2f} ({-change.high:.2f} to {-change.low:.2f}) {where}"
    return f"alpha_1 is back within {max(0.0, -change.mean):.2f} of its reference {where}"
