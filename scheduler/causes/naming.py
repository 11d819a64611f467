"""Names the cause of a move from the evidence. A pure function: `explain(evidence)`.

The probes are asked first, because their prompts never change. What happened between the two probe runs around a fall
names the cause: a new target, a new draft, another engine, or nothing on record. Traffic is asked next: where it moved
and the probes are shown to be steady across that very time, the jobs have changed. Probes from before the change cannot
show that. Where two things changed at once, or the probes are too few or too old, this is said instead of a guess.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from alphaloop.measurements import DriftSubject
from scheduler.causes import wording
from scheduler.causes.cause import Cause, Finding, Incident
from scheduler.causes.moves import Move, move_of
from scheduler.causes.probe_history import ProbeHistory, Step, differences
from scheduler.verdicts import ProbeVerdict, State, TrafficVerdict

_BY_DIFFERENCE = {
    (): Cause.FAULT,
    ("target",): Cause.DRAFT_STALE,
    ("draft",): Cause.BAD_DRAFT,
    ("engine",): Cause.SETUP_CHANGED,
}


@dataclass(frozen=True, slots=True)
class Evidence:
    """All that is known of a drafter in a task."""

    subject: DriftSubject  #: with the revisions in use
    traffic: tuple[TrafficVerdict, ...]  #: of all segments together, and by segment
    probes: ProbeHistory
    elsewhere: tuple[ProbeHistory, ...]  #: of the same drafter in other tasks
    incidents: tuple[Incident, ...]  #: of this drafter in this task
    margin: float  #: change of α_1 that does not matter


def explain(evidence: Evidence) -> list[Finding]:
    """What is wrong: at most one finding a cause.

    A rise that the probes share is no finding: something was repaired.
    """
    findings = [_from_step(step, evidence) for step in evidence.probes.falls()]
    move = move_of(evidence.traffic, evidence.margin)
    if move is not None:
        own = evidence.probes.across(move.changed_after, move.changed_before)
        explaining = [f for f in findings if _explains(f, move, own)]
        if explaining:
            findings = [replace(f, traffic=move.told) if f is explaining[-1] else f for f in findings]
        else:
            findings += _from_traffic(move, own, evidence)
    found: dict[Cause, Finding] = {}
    for finding in findings:
        # The first has the oldest reference: it is over last.
        found.setdefault(finding.cause, finding)
    return list(found.values())


def _from_step(step: Step, evidence: Evidence) -> Finding:
    return Finding(
        subject=step.left.subject,
        cause=_cause_across(step.across, evidence.incidents),
        sentence=wording.fall_of_probes(step.across, evidence.incidents),
        action=wording.action_after(step.across, _cause_across(step.across, evidence.incidents)),
        began_after=step.began_after,
        began_before=step.began_before,
        traffic=None,
        probes=step.across,
        left=step.left,
    )


def _explains(finding: Finding, move: Move, own: ProbeVerdict | None) -> bool:
    """Whether a fall of the probes and a fall of traffic are the same.

    They are if the probes had not fallen wholly before, or if they may have fallen further across that time.
    """
    if move.state is not State.FELL or move.mix is not None or finding.began_before is None:
        return False
    return finding.began_before >= move.changed_after or (own is not None and own.state is State.TOO_LITTLE)


def _from_traffic(move: Move, own: ProbeVerdict | None, evidence: Evidence) -> list[Finding]:
    """What traffic alone has shown, judged by `own`: its probes on both sides of the change."""
    if move.mix is not None:
        return [_finding(move, Cause.MIX_SHIFT, wording.mix_shift(move, move.mix), wording.MIX_ACTION, evidence)]
    seen = [incident for incident in evidence.incidents if incident.at >= move.changed_after]
    if seen:
        return [_finding(move, Cause.FAULT, wording.incident(move, seen), wording.FAULT_ACTION, evidence, own)]
    if own is None or own.state is State.TOO_LITTLE:
        return [_with_other_tasks(move, own, evidence)]
    if own.state is not move.state:
        return [
            _finding(
                move, Cause.TRAFFIC_CHANGED, wording.traffic_changed(move, own), wording.JOBS_ACTION, evidence, own
            )
        ]
    if own.state is State.ROSE:
        return []
    cause = _cause_across(own, evidence.incidents)
    sentence = wording.fall_of_probes(own, evidence.incidents)
    return [_finding(move, cause, sentence, wording.action_after(own, cause), evidence, own)]


def _with_other_tasks(move: Move, own: ProbeVerdict | None, evidence: Evidence) -> Finding:
    """The drafter's own probes say nothing of the change. Where its probes in other tasks fell, theirs is the cause."""
    across = (history.across(move.changed_after, move.changed_before) for history in evidence.elsewhere)
    fallen = [verdict for verdict in across if verdict is not None and verdict.state is State.FELL]
    causes = {_cause_across(verdict, ()) for verdict in fallen}
    if move.state is State.FELL and len(causes) == 1:
        cause = causes.pop()
        return _finding(
            move, cause, wording.fell_elsewhere(move, fallen), wording.action_after(fallen[0], cause), evidence, own
        )
    newest = evidence.probes.newest
    sentence = wording.too_little(move, own, newest.measured_at if newest else None)
    return _finding(
        move, Cause.TOO_LITTLE_EVIDENCE, sentence, wording.what_would_tell(own, newest, evidence.margin), evidence, own
    )


def _cause_across(verdict: ProbeVerdict, incidents: Sequence[Incident]) -> Cause:
    changed = differences(verdict.before, verdict.after)
    if changed not in ((), ("engine",)) and any(i.at >= verdict.measured_before for i in incidents):
        return Cause.TOO_LITTLE_EVIDENCE  # the engine gave wrong tokens meanwhile: that alone lowers acceptance
    return _BY_DIFFERENCE.get(changed, Cause.TOO_LITTLE_EVIDENCE)


def _finding(
    move: Move, cause: Cause, sentence: str, action: str, evidence: Evidence, probes: ProbeVerdict | None = None
) -> Finding:
    return Finding(
        evidence.subject, cause, sentence, action, move.changed_after, move.changed_before, move.told, probes, None
    )
