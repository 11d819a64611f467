"""What becomes of drift events in a run. Pure: findings and stored events in, changes out.

A lasting fall is one event, whatever is learned of its cause. It closes by evidence, not for lack of it: probes must
show that nothing of the fall is left, or traffic that it is steady again. What comes back soon is the same event.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta

from alphaloop.store.drift import DriftEvent, EventChange, EventContent, EventState
from scheduler.causes.cause import Cause, Finding
from scheduler.causes.comparing import has_recovered
from scheduler.event_evidence import evidence_of
from scheduler.judging import About, Judged
from scheduler.verdicts import State


def changes(
    judged: Mapping[About, Judged],
    events: Sequence[DriftEvent],
    cost: Callable[[Finding], float | None],
    now: datetime,
    *,
    forget_after: timedelta,
) -> list[EventChange]:
    """Every change of this run.

    Args:
        judged: what was found, by task and drafter.
        events: the open ones, and those that closed so recently that they may reopen.
        cost: tokens a second that a finding costs; None where that is not known.
        forget_after: age of an event at which the measurements before it are gone.
    """
    found = []
    left_over = {event.id: event for event in events if event.closed_at is None}
    # What was found of a level that was accepted while this run went on is no longer asked; the next run knows of it.
    overtaken = {_about(event) for event in events if event.accepted_at is not None and event.accepted_at > now}
    for about, one in judged.items():
        if about in overtaken:
            continue
        # What comes after an accepted level is another event.
        own = [event for event in events if _about(event) == about and event.accepted_at is None]
        for finding in one.findings:
            event = _match(finding, one.findings, own)
            if event is not None:
                left_over.pop(event.id, None)
                own.remove(event)
            found.append(_support(finding, event, cost(finding)))
    for event in left_over.values():
        because = _over(event, judged.get(_about(event)), now, forget_after)
        if because is not None:
            found.append(EventChange(event.id, EventState.CLOSED, event.content, because))
    # First what ends: an event may take the cause that another one had.
    return sorted(found, key=lambda change: change.state is not EventState.CLOSED)


def _about(event: DriftEvent) -> About:
    return event.subject.task, event.subject.drafter


def _match(finding: Finding, findings: Sequence[Finding], events: Sequence[DriftEvent]) -> DriftEvent | None:
    """The event that a finding is about.

    An open one with its cause, else an open one of the same time whose own cause was not found again, else one with its
    cause that was closed not long ago.
    """
    causes = {other.cause for other in findings}
    for event in sorted(events, key=lambda e: -e.id):
        if event.closed_at is None and event.cause == finding.cause:
            return event
    for event in events:
        if event.closed_at is None and event.cause not in causes and _is_same_time(event, finding):
            return event
    return next((e for e in sorted(events, key=lambda e: -e.id) if e.cause == finding.cause), None)


def _is_same_time(event: DriftEvent, finding: Finding) -> bool:
    after, before = event.content.began_after, event.content.began_before
    if after is None or before is None or finding.began_after is None or finding.began_before is None:
        return False
    return after <= finding.began_before and finding.began_after <= before


def _support(finding: Finding, event: DriftEvent | None, cost: float | None) -> EventChange:
    """A finding opens an event, or says more of one."""
    num_jobs = finding.traffic.num_jobs_after if finding.traffic is not None else None
    raised = _content(finding, cost, num_jobs)
    if event is None:
        return EventChange(None, EventState.OPENED, raised, finding.sentence)
    if event.closed_at is not None:
        return EventChange(event.id, EventState.REOPENED, raised, finding.sentence)
    if event.cause != finding.cause:
        if finding.cause is Cause.TOO_LITTLE_EVIDENCE:  # less is known now than before
            return EventChange(event.id, None, event.content, "")
        return EventChange(event.id, EventState.EXPLAINED, raised, finding.sentence)
    num_jobs_then = event.content.evidence.get("num_jobs_when_raised")
    is_news = event.confirmed_at is None and _is_later(finding, event, num_jobs_then)
    state = EventState.CONFIRMED if is_news else None
    return EventChange(event.id, state, _content(finding, cost, num_jobs_then), finding.sentence)


def _is_later(finding: Finding, event: DriftEvent, num_jobs_then: int | None) -> bool:
    """Whether probes were measured since the event was raised, or as many jobs again decoded."""
    probes = finding.left or finding.probes
    if probes is not None and probes.measured_after > event.raised_at:
        return True
    if finding.traffic is None or num_jobs_then is None:
        return False
    return finding.traffic.num_jobs_after >= 2 * max(num_jobs_then, 1)


def _content(finding: Finding, cost: float | None, num_jobs_when_raised: int | None) -> EventContent:
    return EventContent(
        subject=finding.subject,
        cause=finding.cause.value,
        verdict=finding.sentence,
        action=finding.action,
        evidence=evidence_of(finding) | {"num_jobs_when_raised": num_jobs_when_raised},
        lost_tokens_per_s=cost,
        began_after=finding.began_after,
        began_before=finding.began_before,
    )


def _over(event: DriftEvent, judged: Judged | None, now: datetime, forget_after: timedelta) -> str | None:
    """Why an event without a finding is over; None while that is not shown."""
    if now - event.raised_at >= forget_after:
        return "The measurements from before it are deleted: what is measured now is the norm."
    if judged is None:
        return None
    if event.content.evidence["flagged_by"] == "probes":
        return _probes_recovered(event, judged)
    return _traffic_recovered(event, judged)


def _probes_recovered(event: DriftEvent, judged: Judged) -> str | None:
    reference = event.content.evidence["probes"]["measured_before"]
    for step in judged.steps:
        if step.across.measured_before.isoformat() != reference or step.left.change is None:
            continue
        if has_recovered(step.left, judged.evidence.margin):
            change = step.left.change
            return (
                f"On {step.left.num_prompts} probe prompts, acceptance of {step.left.measured_after:%Y-%m-%d %H:%M} "
                f"UTC is back where it was before the fall: change {change.mean:+.2f} [{change.low:+.2f}, "
                f"{change.high:+.2f}]."
            )
    return None


def _traffic_recovered(event: DriftEvent, judged: Judged) -> str | None:
    if (event.subject.draft_revision, event.subject.target_revision) != (
        judged.subject.draft_revision,
        judged.subject.target_revision,
    ):
        return "Another draft or target is in use: its jobs are a new history."
    segment = (event.content.evidence["traffic"] or {}).get("segment", "")
    verdict = next((v for v in judged.evidence.traffic if v.segment == segment), None)
    if verdict is None or verdict.state is not State.STEADY:
        return None
    return "Acceptance of its jobs is steady again, at the level from before the change."
