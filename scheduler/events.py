"""What becomes of drift events and of drafts in a run. Pure: findings and what is stored in, changes out.

A lasting fall is one event, whatever is learned of its cause. It closes by evidence, not for lack of it: probes must
show that nothing of the fall is left, or traffic that it is steady again. What comes back soon is the same event.

What it costs to leave a fall as it is: with the device time that a task has now, it would yield `tokens a second · (s
before / s now - 1)` more at the former speed-up s. Measured speed-ups are taken where both are known. Else the expected
ones: at the same cost of a round, the speed-ups are to each other as the tokens a round, 1 + α + … + α^k.

A draft leaves the decision when it no longer fits its target, and comes back when it recovered. Its status holds for
all its tasks, so it is judged over the probes of all of them together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from datetime import datetime, timedelta
from itertools import chain
from typing import Any, Final

from alphaloop.acceptance import Interval
from alphaloop.as_decoded import NextJob
from alphaloop.experiment.figures import TaskSpeedup
from alphaloop.store.decision_inputs import DraftStatus
from alphaloop.store.drift import DriftEvent, EventChange, EventContent, EventState
from alphaloop.wording import how_many, share_with_interval
from scheduler.causes import About, Cause, DriftFinding, Judged
from scheduler.drift.watching import State, TrafficVerdict
from scheduler.probe_history import (
    ProbeStep,
    ProbeVerdict,
    PromptPair,
    alpha_change,
    differences,
    has_recovered,
    shared_prompts,
)

#: An event that comes back so soon after its end is the same event.
REOPENED_WITHIN: Final = timedelta(days=7)
#: The fall of a probe's α_1, under a new target or of a new draft, that makes a draft stale.
STALE_DROP: Final = 0.10


@dataclass(frozen=True, slots=True)
class Flagged:
    """What a run changed."""

    num_opened: int  #: reopened ones too
    num_closed: int
    num_status_changes: int


def event_changes(
    judged: Mapping[About, Judged],
    events: Sequence[DriftEvent],
    cost: Callable[[DriftFinding], float | None],
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
    changes = []
    left_over = {event.id: event for event in events if event.closed_at is None}
    # What was found of a level that was accepted while this run went on is no longer asked; the next run knows of it.
    overtaken = {_about(event) for event in events if event.accepted_at is not None and event.accepted_at > now}
    for about, of_drafter in judged.items():
        if about in overtaken:
            continue
        # What comes after an accepted level is another event.
        own = [event for event in events if _about(event) == about and event.accepted_at is None]
        for finding in of_drafter.findings:
            event = _match(finding, of_drafter.findings, own)
            if event is not None:
                left_over.pop(event.id, None)
                own.remove(event)
            changes.append(_support(finding, event, cost(finding)))
    for event in left_over.values():
        because = _over(event, judged.get(_about(event)), now, forget_after)
        if because is not None:
            changes.append(EventChange(event.id, EventState.CLOSED, event.content, because))
    # First what ends: an event may take the cause that another one had.
    return sorted(changes, key=lambda change: change.state is not EventState.CLOSED)


def _about(event: DriftEvent) -> About:
    return event.subject.task, event.subject.drafter


def _match(finding: DriftFinding, findings: Sequence[DriftFinding], events: Sequence[DriftEvent]) -> DriftEvent | None:
    """The event that a finding is about.

    An open one with its cause, else an open one of the same time whose own cause was not found again, else one with its
    cause that was closed not long ago.
    """
    causes = {other.cause for other in findings}
    alike = sorted((event for event in events if event.cause == finding.cause), key=lambda e: -e.id)
    still_open = (event for event in alike if event.closed_at is None)
    same_time = (e for e in events if e.closed_at is None and e.cause not in causes and _is_same_time(e, finding))
    return next(chain(still_open, same_time, alike), None)


def _is_same_time(event: DriftEvent, finding: DriftFinding) -> bool:
    after, before = event.content.began_after, event.content.began_before
    if after is None or before is None or finding.began_after is None or finding.began_before is None:
        return False
    return after <= finding.began_before and finding.began_after <= before


def _support(finding: DriftFinding, event: DriftEvent | None, cost: float | None) -> EventChange:
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


def _is_later(finding: DriftFinding, event: DriftEvent, num_jobs_then: int | None) -> bool:
    """Whether probes were measured since the event was raised, or as many jobs again decoded."""
    probes = finding.left or finding.probes
    if probes is not None and probes.measured_after > event.raised_at:
        return True
    if finding.traffic is None or num_jobs_then is None:
        return False
    return finding.traffic.num_jobs_after >= 2 * max(num_jobs_then, 1)


def _content(finding: DriftFinding, cost: float | None, num_jobs_when_raised: int | None) -> EventContent:
    verdicts = {"traffic": finding.traffic, "probes": finding.probes, "left": finding.left}
    return EventContent(
        subject=finding.subject,
        cause=finding.cause.value,
        verdict=finding.sentence,
        action=finding.action,
        # `flagged_by` says which test must show that the event is over.
        evidence={
            "flagged_by": "probes" if finding.left is not None else "traffic",
            **{name: verdict and _summed_up(verdict) for name, verdict in verdicts.items()},
            "num_jobs_when_raised": num_jobs_when_raised,
        },
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
    for left in (step.left for step in judged.steps if step.across.measured_before.isoformat() == reference):
        if left.change is not None and has_recovered(left):
            mean, low, high = astuple(left.change)
            return (
                f"On {left.num_prompts} probe prompts, acceptance of {left.measured_after:%Y-%m-%d %H:%M} UTC is back "
                f"where it was before the fall: change {mean:+.2f} [{low:+.2f}, {high:+.2f}]."
            )
    return None


def _traffic_recovered(event: DriftEvent, judged: Judged) -> str | None:
    if event.subject != judged.subject:
        return "Another draft or target is in use: its jobs are a new history."
    segment = (event.content.evidence["traffic"] or {}).get("segment", "")
    verdict = next((v for v in judged.evidence.traffic if v.segment == segment), None)
    if verdict is None or verdict.state is not State.STEADY:
        return None
    return "Acceptance of its jobs is steady again, at the level from before the change."


# What is stored of the evidence: counts, intervals, times. No texts.


#: Fields of a verdict, as far as it has them.
_KEPT: Final = (
    "segment", "state", "num_prompts", "num_jobs_before", "num_jobs_after", "measured_before", "measured_after",
    "trials_before", "accepts_before", "trials_after", "accepts_after",
)  # fmt: skip


def _summed_up(verdict: TrafficVerdict | ProbeVerdict) -> dict[str, Any]:
    kept = {name: getattr(verdict, name) for name in _KEPT if hasattr(verdict, name)}
    change = verdict.change and [round(bound, 4) for bound in astuple(verdict.change)]
    return {n: v.isoformat() if isinstance(v, datetime) else v for n, v in kept.items()} | {"change": change}


# What a fall costs


@dataclass(frozen=True, slots=True)
class TaskPace:
    """How a task is decoded now."""

    tokens_per_s: float  #: of its traffic, by the clock, over the last day
    setting: NextJob | None
    measured_before: TaskSpeedup | None  #: as it was shown before the change
    measured_now: TaskSpeedup | None


def lost_tokens_per_s(finding: DriftFinding, pace: TaskPace) -> float | None:
    """Tokens a second that the fall costs; 0 for a rise, None where that is not known."""
    if pace.tokens_per_s <= 0:
        return None
    alphas = _alphas(finding)
    if alphas is not None and alphas[1] >= alphas[0]:
        return 0.0
    ratio = _measured(finding, pace) or _expected(finding, pace, alphas)
    return None if ratio is None else max(0.0, pace.tokens_per_s * (ratio - 1))


def _measured(finding: DriftFinding, pace: TaskPace) -> float | None:
    before, now = _speedup(finding, pace.measured_before), pace.measured_now
    if before is None or pace.setting is None:
        return None
    if pace.setting.mode == "vanilla":
        return before
    if now is None or finding.began_before is None or now.covers_from < finding.began_before:
        return None
    current = _speedup(finding, now)
    return current and before / current


def _speedup(finding: DriftFinding, measured: TaskSpeedup | None) -> float | None:
    if measured is None or measured.speedup is None or measured.subject.drafter != finding.subject.drafter:
        return None
    return measured.speedup.mean


def _expected(finding: DriftFinding, pace: TaskPace, alphas: tuple[float, float] | None) -> float | None:
    setting = pace.setting
    if alphas is None or setting is None or setting.drafter != finding.subject.drafter:
        return None
    before, after = (sum(alpha**i for i in range(setting.num_draft_tokens + 1)) for alpha in alphas)
    return before / after


def _alphas(finding: DriftFinding) -> tuple[float, float] | None:
    """α_1 before and after: of the jobs where they were tested, else of the probes."""
    for verdict in (finding.traffic, finding.left, finding.probes):
        if verdict is not None and verdict.trials_before and verdict.trials_after:
            return verdict.accepts_before / verdict.trials_before, verdict.accepts_after / verdict.trials_after
    return None


# Drafts

#: Drafter, draft revision, target revision.
Draft = tuple[str, str, str]


@dataclass(frozen=True, slots=True)
class StatusChange:
    """A draft revision that becomes stale or active."""

    drafter: str
    draft_revision: str
    target_revision: str
    status: DraftStatus
    reason: str


def status_changes(judged: Iterable[Judged], statuses: Mapping[Draft, DraftStatus]) -> list[StatusChange]:
    """Drafts whose α_1 fell by more than STALE_DROP when they or their target were new, and those that recovered.

    A draft comes back when the interval excludes that so much of the fall is left. A fault or another engine makes no
    draft stale. Only active and stale change into each other here.
    """
    pairs: dict[Draft, dict[str, list[PromptPair]]] = {}
    for of_drafter in judged:
        for step in of_drafter.all_steps:
            if _is_new_match(step):
                setup = step.newest.setup
                draft = of_drafter.subject.drafter, setup.draft_revision, setup.target_revision
                pairs.setdefault(draft, {})[of_drafter.subject.task] = shared_prompts(step.before, step.newest)
    changes = []
    for draft, by_task in sorted(pairs.items()):
        change = alpha_change([pair for of_task in by_task.values() for pair in of_task])
        status = statuses.get(draft)
        if change is None:
            continue
        if status is DraftStatus.ACTIVE and change.mean < -STALE_DROP and change.high < 0:
            changes.append(StatusChange(*draft, DraftStatus.STALE, _reason("fell by", change, by_task)))
        elif status is DraftStatus.STALE and change.low >= -STALE_DROP:
            changes.append(StatusChange(*draft, DraftStatus.ACTIVE, _reason("is back within", change, by_task)))
    return changes


def _is_new_match(step: ProbeStep) -> bool:
    """Whether the newest measurement is of the draft and target that this step brought together."""
    newest = step.newest.setup
    after = step.across.after
    return (after.draft_revision, after.target_revision) == (newest.draft_revision, newest.target_revision) and (
        differences(step.across.before, after) in (("target",), ("draft",))
    )


def _reason(verb: str, change: Interval, by_task: Mapping[str, list[PromptPair]]) -> str:
    num_prompts = sum(len(of_task) for of_task in by_task.values())
    fall = share_with_interval(Interval(max(0.0, -change.mean), -change.high, -change.low))
    return f"α₁ {verb} {fall} on {how_many(num_prompts, 'probe prompt')} of {how_many(len(by_task), 'task')}"
