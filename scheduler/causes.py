"""Names the cause of drift from the evidence. `judge` is a run; `explain(evidence)` is one drafter in one task. Pure.

The probes are asked first, because their prompts never change. What happened between the two probe runs around a fall
names the cause: a new target, a new draft, another engine, or nothing on record. Traffic is asked next: where it moved
and the probes are shown to be steady across that very time, the jobs have changed. Probes from before the change cannot
show that. Where two things changed at once, or the probes are too few or too old, this is said instead of a guess.

A mean over segments can move while no segment does (a shift of the mix), and stay while every segment moves (Simpson
1951). So the segments are looked at before the mean is believed.

Findings are sentences that their owner can act on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum
from typing import Final

from alphaloop.acceptance import Interval
from alphaloop.measurements import AcceptedLevel, DriftSubject
from alphaloop.wording import minute, share
from scheduler.drift.memory import ALPHA_MARGIN
from scheduler.drift.watching import State, TrafficVerdict, state_of
from scheduler.probe_history import ProbeHistory, ProbeSetup, ProbeStep, ProbeVerdict, Side, differences


class Cause(StrEnum):
    """Why acceptance moved: a word for SQL and metrics."""

    TRAFFIC_CHANGED = "traffic_changed"  #: other prompts; the draft is as good as before
    MIX_SHIFT = "mix_shift"  #: other shares of the segments; each segment is steady
    DRAFT_STALE = "draft_stale"  #: a new target, which the draft does not match
    BAD_DRAFT = "bad_draft"  #: a new draft, worse than its predecessor under the same target
    SETUP_CHANGED = "setup_changed"  #: another engine, engine version, dtype or setting
    FAULT = "fault"  #: the engine or its environment: nothing changed on record
    TOO_LITTLE_EVIDENCE = "too_little_evidence"


_BY_DIFFERENCE = {
    (): Cause.FAULT,
    ("target",): Cause.DRAFT_STALE,
    ("draft",): Cause.BAD_DRAFT,
    ("engine",): Cause.SETUP_CHANGED,
}
#: Task and drafter.
About = tuple[str, str]


@dataclass(frozen=True, slots=True, order=True)
class SeenIncident:
    """Something that must not happen, whatever acceptance is: an engine gave another text than it should have."""

    at: datetime
    task: str
    drafter: str  #: empty where vanilla decoding was wrong
    kind: str


@dataclass(frozen=True, slots=True)
class DriftFinding:
    """A move of acceptance with its cause; becomes a drift event while it lasts."""

    subject: DriftSubject
    cause: Cause
    sentence: str
    action: str  #: what the owner may do
    began_after: datetime | None  #: it began between these two moments
    began_before: datetime | None
    traffic: TrafficVerdict | None
    probes: ProbeVerdict | None  #: across the change
    left: ProbeVerdict | None  #: from before the change until the newest probes; None where only traffic moved


@dataclass(frozen=True, slots=True)
class DrafterEvidence:
    """All that is known of a drafter in a task."""

    subject: DriftSubject  #: with the revisions in use
    traffic: tuple[TrafficVerdict, ...]  #: of all segments together, and by segment
    probes: ProbeHistory
    elsewhere: tuple[ProbeHistory, ...]  #: of the same drafter in other tasks
    incidents: tuple[SeenIncident, ...]  #: of this drafter in this task


@dataclass(frozen=True, slots=True)
class Judged:
    """One drafter in one task."""

    evidence: DrafterEvidence
    steps: tuple[ProbeStep, ...]
    findings: tuple[DriftFinding, ...]
    all_steps: tuple[ProbeStep, ...]  #: also from before a level was accepted: what a draft's status rests on

    @property
    def subject(self) -> DriftSubject:
        """With the revisions in use."""
        return self.evidence.subject


def judge(
    traffic: Sequence[TrafficVerdict],
    probes: Sequence[ProbeHistory],
    incidents: Sequence[SeenIncident],
    in_use: Mapping[About, DriftSubject],
    accepted: Mapping[About, AcceptedLevel],
) -> dict[About, Judged]:
    """Judge everything that was decoded or probed. `traffic` is of the revisions `in_use`.

    Where a level was accepted, nothing from before the change to it is compared with.
    """
    whole = {(history.task, history.drafter): history for history in probes}
    histories = {about: history.since(accepted.get(about)) for about, history in whole.items()}
    verdicts: dict[About, list[TrafficVerdict]] = {}
    for verdict in traffic:
        verdicts.setdefault((verdict.subject.task, verdict.subject.drafter), []).append(verdict)
    judged = {}
    for about in sorted(histories.keys() | verdicts.keys()):
        task, drafter = about
        history = histories.get(about) or ProbeHistory(task, drafter, (), {})
        evidence = DrafterEvidence(
            subject=in_use[about],
            traffic=tuple(verdicts.get(about, ())),
            probes=history,
            elsewhere=tuple(h for (other, name), h in histories.items() if name == drafter and other != task),
            incidents=tuple(i for i in incidents if i.task == task and i.drafter in ("", drafter)),
        )
        all_steps = tuple(whole.get(about, history).steps())
        judged[about] = Judged(evidence, tuple(history.steps()), tuple(explain(evidence)), all_steps)
    return judged


def explain(evidence: DrafterEvidence) -> list[DriftFinding]:
    """What is wrong: at most one finding a cause.

    A rise that the probes share is no finding: something was repaired.
    """
    findings = []
    for step in evidence.probes.falls():
        cause, sentence, action = _of_probes(step.across, evidence)
        findings.append(
            DriftFinding(
                subject=step.left.subject,
                cause=cause,
                sentence=sentence,
                action=action,
                began_after=step.began_after,
                began_before=step.began_before,
                traffic=None,
                probes=step.across,
                left=step.left,
            )
        )
    move = move_of(evidence.traffic)
    if move is not None:
        own = evidence.probes.across(move.changed_after, move.changed_before)
        explaining = [f for f in findings if _explains(f, move, own)]
        if explaining:
            findings = [replace(f, traffic=move.verdict) if f is explaining[-1] else f for f in findings]
        else:
            findings += _from_traffic(move, own, evidence)
    by_cause: dict[Cause, DriftFinding] = {}
    for finding in findings:
        # The first has the oldest reference: it is over last.
        by_cause.setdefault(finding.cause, finding)
    return list(by_cause.values())


def _explains(finding: DriftFinding, move: Move, own: ProbeVerdict | None) -> bool:
    """Whether a fall of the probes and a fall of traffic are the same.

    They are if the probes had not fallen wholly before, or if they may have fallen further across that time.
    """
    if move.state is not State.FELL or move.mix is not None or finding.began_before is None:
        return False
    return finding.began_before >= move.changed_after or (own is not None and own.state is State.TOO_LITTLE)


def _from_traffic(move: Move, own: ProbeVerdict | None, evidence: DrafterEvidence) -> list[DriftFinding]:
    """What traffic alone has shown, judged by `own`: its probes on both sides of the change."""
    if move.mix is not None:
        shifted = (
            f"{_traffic(move)} Inside the segments, by their shares now, the change is {_change(move.mix)}: most of it "
            "is their shares of the jobs."
        )
        return [_finding(move, Cause.MIX_SHIFT, shifted, _MIX_ACTION, evidence)]
    seen = [incident for incident in evidence.incidents if incident.at >= move.changed_after]
    if seen:
        erred = f"{_traffic(move)}{_incidents(seen)} So the engine is the first suspect, whatever the probes say."
        return [_finding(move, Cause.FAULT, erred, _FAULT_ACTION, evidence, own)]
    if own is None or own.state is State.TOO_LITTLE:
        return [_with_other_tasks(move, own, evidence)]
    if own.state is not move.state:
        how = "steady" if own.state is State.STEADY else "better"
        changed = (
            f"{_traffic(move)} On {own.num_prompts} fixed probe prompts the draft was {how} across that time "
            f"({_change(own.change)}): the jobs have changed, not the draft."
        )
        return [_finding(move, Cause.TRAFFIC_CHANGED, changed, _JOBS_ACTION, evidence, own)]
    if own.state is State.ROSE:
        return []
    return [_finding(move, *_of_probes(own, evidence), evidence, own)]


def _with_other_tasks(move: Move, own: ProbeVerdict | None, evidence: DrafterEvidence) -> DriftFinding:
    """The drafter's own probes say nothing of the change. Where its probes in other tasks fell, theirs is the cause."""
    across = (history.across(move.changed_after, move.changed_before) for history in evidence.elsewhere)
    fallen = [verdict for verdict in across if verdict is not None and verdict.state is State.FELL]
    causes = {_cause_across(verdict, ()) for verdict in fallen}
    if move.state is State.FELL and len(causes) == 1:
        cause, tasks = causes.pop(), ", ".join(sorted(v.subject.task for v in fallen))
        sentence = (
            f"{_traffic(move)} Its own probes do not reach across that time, but those of {tasks} fell too. "
            f"{_what_changed(fallen[0].before, fallen[0].after)}"
        )
        return _finding(move, cause, sentence, _action_after(fallen[0], cause), evidence, own)
    newest = evidence.probes.newest
    sentence = _say_too_little(move, own, newest.measured_at if newest else None)
    action = _what_would_tell(own, newest)
    return _finding(move, Cause.TOO_LITTLE_EVIDENCE, sentence, action, evidence, own)


def _cause_across(verdict: ProbeVerdict, incidents: Sequence[SeenIncident]) -> Cause:
    changed = differences(verdict.before, verdict.after)
    if changed not in ((), ("engine",)) and any(i.at >= verdict.measured_before for i in incidents):
        return Cause.TOO_LITTLE_EVIDENCE  # the engine gave wrong tokens meanwhile: that alone lowers acceptance
    return _BY_DIFFERENCE.get(changed, Cause.TOO_LITTLE_EVIDENCE)


def _of_probes(fallen: ProbeVerdict, evidence: DrafterEvidence) -> tuple[Cause, str, str]:
    """What a fall of its own probes says: the cause, the sentence, and what may be done."""
    cause = _cause_across(fallen, evidence.incidents)
    seen = [i for i in evidence.incidents if i.at >= fallen.measured_before]
    sentence = f"{_probes(fallen)} {_what_changed(fallen.before, fallen.after)}{_incidents(seen)}"
    return cause, sentence, _action_after(fallen, cause)


def _finding(
    move: Move, cause: Cause, sentence: str, action: str, evidence: DrafterEvidence, probes: ProbeVerdict | None = None
) -> DriftFinding:
    return DriftFinding(
        subject=evidence.subject,
        cause=cause,
        sentence=sentence,
        action=action,
        began_after=move.changed_after,
        began_before=move.changed_before,
        traffic=move.verdict,
        probes=probes,
        left=None,
    )


# Whether a task's traffic moved

_MOVED: Final = (State.FELL, State.ROSE)
#: Share of the trials after a change that segments with an estimate must have, to speak for all.
MOST: Final = 0.75


@dataclass(frozen=True, slots=True)
class Move:
    """A change of a task's traffic."""

    verdict: TrafficVerdict  #: of all segments together; of the clearest segment where only segments moved
    changed_after: datetime
    changed_before: datetime
    segments: tuple[TrafficVerdict, ...]  #: that moved this way, the clearest first
    mix: Interval | None = None  #: what happened inside segments, where it is the mix that moved

    @property
    def state(self) -> State:
        """FELL or ROSE."""
        return self.verdict.state


def move_of(verdicts: Sequence[TrafficVerdict]) -> Move | None:
    """The move that the verdicts about a (task, drafter) show, or None.

    The verdict without a segment is that of all segments together.
    """
    overall = next((v for v in verdicts if not v.segment), None)
    segments = [v for v in verdicts if v.segment]
    clearest = sorted(segments, key=lambda v: abs(v.change.mean) * v.trials_after if v.change else 0.0, reverse=True)
    by_state = {state: [v for v in clearest if v.state is state] for state in _MOVED}
    if overall is None or overall.state not in _MOVED:
        hidden = by_state[State.FELL] or by_state[State.ROSE]  # all segments together do not show it
        return _move(hidden[0], hidden) if hidden else None
    against = by_state[State.ROSE if overall.state is State.FELL else State.FELL]
    if 2 * sum(v.trials_after for v in against) > sum(v.trials_after for v in segments):
        return _move(against[0], against)
    within = within_change(segments) if len(segments) > 1 else None
    is_mix = _is_mix(overall, within)
    move = _move(overall, [] if is_mix else by_state[overall.state])
    return replace(move, mix=within) if is_mix and move is not None else move


def within_change(segments: Sequence[TrafficVerdict]) -> Interval | None:
    """What of the change happened inside segments: Σ share after · change. None where too few have an estimate.

    Direct standardisation with the shares after the change. The rest of the change of the mean is the mix's. Segments
    without an estimate, because they are new or thin, are left out while the others have most of the trials.
    """
    estimated = [(v.trials_after, v.change) for v in segments if v.change is not None]
    total = sum(trials for trials, _ in estimated)
    if not total or total < MOST * sum(v.trials_after for v in segments):
        return None
    mean = sum(trials / total * change.mean for trials, change in estimated)
    half = math.hypot(*(trials / total * (change.high - change.low) / 2 for trials, change in estimated))
    return Interval(mean, mean - half, mean + half)


def _is_mix(overall: TrafficVerdict, within: Interval | None) -> bool:
    """Whether the shares of the segments explain the move.

    It is excluded that all of it happened inside segments, by the best estimate less than half of it did, and it is not
    shown that any did. Thin segments, of which none alone could be shown to be steady, are enough for this.
    """
    if within is None or overall.change is None:
        return False
    sign = -1 if overall.state is State.FELL else 1
    whole = sign * overall.change.mean
    is_small = max(sign * within.low, sign * within.high) < whole and sign * within.mean < whole / 2
    return is_small and state_of(within) is not overall.state


def _move(verdict: TrafficVerdict, segments: Sequence[TrafficVerdict]) -> Move | None:
    """The move, or None where no verdict says when it was."""
    after = [v.changed_after for v in (verdict, *segments) if v.changed_after is not None]
    before = [v.changed_before for v in (verdict, *segments) if v.changed_before is not None]
    return Move(verdict, min(after), max(before), tuple(segments)) if after and before else None


# Sentences

_JOBS_ACTION: Final = (
    "Nothing is broken, and decisions adapt. Ask the senders what changed. If the change stays, train a draft on the "
    "new jobs or try another drafter."
)
_MIX_ACTION: Final = "Nothing is broken, and decisions adapt: other segments send more of the jobs than before."
_FAULT_ACTION: Final = (
    "Look at the engine: restart one worker and probe again. If the restart heals it, report the engine, and restart "
    "the workers until it is repaired."
)
_ACTIONS: Final = {
    Cause.FAULT: _FAULT_ACTION,
    Cause.DRAFT_STALE: "Train the draft on the new target (`alphaloop draft train`) or name another drafter.",
    Cause.BAD_DRAFT: "Serve the former draft {before} again, or train the new one further.",
    Cause.SETUP_CHANGED: "Compare what the change brings with what the fall costs; to undo it, go back to {before}.",
    Cause.TOO_LITTLE_EVIDENCE: "Change one thing at a time: undo one of these changes, and probe again.",
}
_CHANGES: Final = {
    "target": "the target model changed from {0.target_revision:.12} to {1.target_revision:.12}",
    "draft": "the draft changed from {0.draft_revision:.12} to {1.draft_revision:.12}",
    "engine": "the engine changed from {0.engine} to {1.engine}",
}


def _say_too_little(move: Move, probes: ProbeVerdict | None, newest: datetime | None) -> str:
    """Whether the jobs or the draft changed is open."""
    if probes is not None:
        why = f"The probes do not tell: on {probes.num_prompts} prompts the change was {_change(probes.change)}."
    elif newest is None:
        why = "This task was never probed with this drafter."
    elif newest < move.changed_before:
        why = f"The newest probes, of {minute(newest)}, were measured before the change, and say nothing about it."
    else:
        why = "The first probes were measured after the change began, so there is nothing to compare them with."
    return f"{_traffic(move)} {why} Whether the jobs or the draft changed is open."


def _what_would_tell(probes: ProbeVerdict | None, newest: Side | None) -> str:
    """The measurement that would decide."""
    if newest is None:
        return "Register a probe set for the task: `alphaloop probes register`."
    if probes is None:
        return "Wait for the probes that are due: they are sent at once."
    if probes.change is None or probes.num_prompts < 2:
        return "Register a probe set whose prompts stay: the two measurements share too few."
    half = (probes.change.high - probes.change.low) / 2
    needed = max(probes.num_prompts + 1, math.ceil(probes.num_prompts * (half / ALPHA_MARGIN) ** 2))
    return f"Register more probe prompts: about {needed} would show a change of {ALPHA_MARGIN:.2f}."


def _action_after(probes: ProbeVerdict, cause: Cause) -> str:
    """What may be done about a fall of the probes."""
    before = probes.before.engine if cause is Cause.SETUP_CHANGED else f"{probes.before.draft_revision:.12}"
    return _ACTIONS[cause].format(before=before)


def _probes(probes: ProbeVerdict) -> str:
    before, after = probes.accepts_before / probes.trials_before, probes.accepts_after / probes.trials_after
    subject = probes.subject
    return (
        f"On the same {probes.num_prompts} probe prompts of {subject.task}, acceptance of {subject.drafter}'s first "
        f"tokens was {share(after)} at {minute(probes.measured_after)}, and {share(before)} at "
        f"{minute(probes.measured_before)} (change {_change(probes.change)})."
    )


def _what_changed(before: ProbeSetup, after: ProbeSetup) -> str:
    changed = [_CHANGES[name].format(before, after) for name in differences(before, after)]
    if not changed:
        return "Neither the models nor the engine changed on record in between: suspect the engine or the machine."
    sentence = f"In between {' and '.join(changed)}"
    return f"{sentence}." if len(changed) == 1 else f"{sentence}, so which of these is to blame is open."


def _traffic(move: Move) -> str:
    verdict, verb = move.verdict, "fell" if move.state is State.FELL else "rose"
    segments = f" ({_segments(move.segments)})" if move.segments else ""
    where = f"{verdict.subject.drafter} on {verdict.subject.task}{segments}"
    when = f"between {minute(move.changed_after)} and {minute(move.changed_before)}"
    text = f"Acceptance of {where} {verb}{_from_to(verdict)} {when}."
    return f"{text} The mean over all segments hides it." if verdict.segment else text


def _from_to(verdict: TrafficVerdict) -> str:
    if not verdict.trials_before or not verdict.trials_after:
        return ""
    before, after = verdict.accepts_before / verdict.trials_before, verdict.accepts_after / verdict.trials_after
    return f" from {share(before)} to {share(after)}, change {_change(verdict.change)},"


def _segments(moved: Sequence[TrafficVerdict]) -> str:
    named = ", ".join(v.segment for v in moved[:3])
    return f"segments {named}{' and others' if len(moved) > 3 else ''}" if len(moved) > 1 else f"segment {named}"


def _incidents(seen: Sequence[SeenIncident]) -> str:
    if not seen:
        return ""
    first, were = min(seen), "incidents were" if len(seen) > 1 else "incident was"
    return f" {len(seen)} {were} recorded since {minute(first.at)} ({first.kind})."


def _change(change: Interval | None) -> str:
    if change is None:
        return "unknown"
    mean, low, high = (f"{round(value, 2) + 0.0:+.2f}" for value in (change.mean, change.low, change.high))
    return f"{mean} [{low} {high}]"
