"""Findings in sentences that their owner can act on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import datetime
from typing import Final

from alphaloop.acceptance import Interval
from scheduler.causes.cause import Cause, Incident
from scheduler.causes.comparing import Side
from scheduler.causes.moves import Move
from scheduler.causes.probe_history import differences
from scheduler.verdicts import ProbeVerdict, Setup, State, TrafficVerdict

JOBS_ACTION: Final = (
    "Nothing is broken, and decisions adapt. Ask the senders what changed. If the change stays, train a draft on the "
    "new jobs or try another drafter."
)
MIX_ACTION: Final = "Nothing is broken, and decisions adapt: other segments send more of the jobs than before."
FAULT_ACTION: Final = (
    "Look at the engine: restart one worker and probe again. If the restart heals it, report the engine, and restart "
    "the workers until it is repaired."
)
_ACTIONS: Final = {
    Cause.FAULT: FAULT_ACTION,
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


def fall_of_probes(probes: ProbeVerdict, incidents: Sequence[Incident]) -> str:
    """`On the same 8 probe prompts … Between these two measurements the target model changed …`."""
    seen = [i for i in incidents if i.at >= probes.measured_before]
    return f"{_probes(probes)} {_what_changed(probes.before, probes.after)}{_incidents(seen)}"


def traffic_changed(move: Move, probes: ProbeVerdict) -> str:
    """The jobs have changed, and the probes show that the draft has not."""
    how = "steady" if probes.state is State.STEADY else "better"
    return (
        f"{_traffic(move)} On {probes.num_prompts} fixed probe prompts the draft was {how} across that time "
        f"({_change(probes.change)}): the jobs have changed, not the draft."
    )


def mix_shift(move: Move, within: Interval) -> str:
    """The segments have other shares."""
    return (
        f"{_traffic(move)} Inside the segments, by their shares now, the change is {_change(within)}: most of it is "
        "their shares of the jobs."
    )


def incident(move: Move, seen: Sequence[Incident]) -> str:
    """The engine was seen to err."""
    return f"{_traffic(move)}{_incidents(seen)} So the engine is the first suspect, whatever the probes say."


def fell_elsewhere(move: Move, fallen: Sequence[ProbeVerdict]) -> str:
    """Other tasks' probes fell at the same time."""
    tasks = ", ".join(sorted(v.subject.task for v in fallen))
    return (
        f"{_traffic(move)} Its own probes do not reach across that time, but those of {tasks} fell too. "
        f"{_what_changed(fallen[0].before, fallen[0].after)}"
    )


def too_little(move: Move, probes: ProbeVerdict | None, newest: datetime | None) -> str:
    """Whether the jobs or the draft changed is open."""
    if probes is not None:
        why = f"The probes do not tell: on {probes.num_prompts} prompts the change was {_change(probes.change)}."
    elif newest is None:
        why = "This task was never probed with this drafter."
    elif newest < move.changed_before:
        why = f"The newest probes, of {_time(newest)}, were measured before the change, and say nothing about it."
    else:
        why = "The first probes were measured after the change began, so there is nothing to compare them with."
    return f"{_traffic(move)} {why} Whether the jobs or the draft changed is open."


def what_would_tell(probes: ProbeVerdict | None, newest: Side | None, margin: float) -> str:
    """The measurement that would decide."""
    if newest is None:
        return "Register a probe set for the task: `alphaloop probes add`."
    if probes is None:
        return "Wait for the probes that are due: they are sent at once."
    if probes.change is None or probes.num_prompts < 2:
        return "Register a probe set whose prompts stay: the two measurements share too few."
    half = (probes.change.high - probes.change.low) / 2
    needed = max(probes.num_prompts + 1, math.ceil(probes.num_prompts * (half / margin) ** 2))
    return f"Register more probe prompts: about {needed} would show a change of {margin:.2f}."


def action_after(probes: ProbeVerdict, cause: Cause) -> str:
    """What may be done about a fall of the probes."""
    before = probes.before.engine if cause is Cause.SETUP_CHANGED else f"{probes.before.draft_revision:.12}"
    return _ACTIONS[cause].format(before=before)


def _probes(probes: ProbeVerdict) -> str:
    before, after = probes.accepts_before / probes.trials_before, probes.accepts_after / probes.trials_after
    return (
        f"On the same {probes.num_prompts} probe prompts of {probes.subject.task}, {probes.subject.drafter} got "
        f"{after:.0%} of its first tokens accepted at {_time(probes.measured_after)}, instead of {before:.0%} at "
        f"{_time(probes.measured_before)} (change {_change(probes.change)})."
    )


def _what_changed(before: Setup, after: Setup) -> str:
    changed = [_CHANGES[name].format(before, after) for name in differences(before, after)]
    if not changed:
        return "Neither the models nor the engine changed on record in between: suspect the engine or the machine."
    told = f"In between {' and '.join(changed)}"
    return f"{told}." if len(changed) == 1 else f"{told}, so which of these is to blame is open."


def _traffic(move: Move) -> str:
    told = move.told
    verb = "fell" if move.state is State.FELL else "rose"
    where = f"{told.subject.drafter} on {told.subject.task}{f' ({_segments(move.segments)})' if move.segments else ''}"
    when = f"between {_time(move.changed_after)} and {_time(move.changed_before)}"
    text = f"Acceptance of {where} {verb}{_from_to(told)} {when}."
    return f"{text} The mean over all segments hides it." if move.is_hidden else text


def _from_to(told: TrafficVerdict) -> str:
    if not told.trials_before or not told.trials_after:
        return ""
    before, after = told.accepts_before / told.trials_before, told.accepts_after / told.trials_after
    return f" from {before:.0%} to {after:.0%}, change {_change(told.change)},"


def _segments(moved: Sequence[TrafficVerdict]) -> str:
    named = ", ".join(v.segment for v in moved[:3])
    return f"segments {named}{' and others' if len(moved) > 3 else ''}" if len(moved) > 1 else f"segment {named}"


def _incidents(seen: Sequence[Incident]) -> str:
    if not seen:
        return ""
    first = min(seen)
    return (
        f" {len(seen)} incident{'s were' if len(seen) > 1 else ' was'} recorded since {_time(first.at)} ({first.kind})."
    )


def _change(change: Interval | None) -> str:
    if change is None:
        return "unknown"
    mean, low, high = (f"{round(value, 2) + 0.0:+.2f}" for value in (change.mean, change.low, change.high))
    return f"{mean} [{low}, {high}]"


def _time(at: datetime) -> str:
    return f"{at:%Y-%m-%d %H:%M} UTC"
