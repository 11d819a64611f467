"""Two sides of probe results, compared over the prompts that both have: steady, fell, rose, or too little to say.

"Steady" is shown, not assumed: the whole interval of the change lies within ±margin (equivalence, Schuirmann 1987). A
move is one whose interval excludes zero and whose estimate exceeds the margin. Everything else is too little evidence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from alphaloop.acceptance import Interval
from alphaloop.measurements import DriftSubject
from scheduler.paired import PromptPair, alpha_change
from scheduler.verdicts import ProbeVerdict, Setup, State

#: A prompt and the k that it was measured at: α_1 moves a little with k, so only the same k is compared.
PromptKey = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Side:
    """Results under one setup: trials and accepts of position 1, by prompt."""

    measured_at: datetime
    setup: Setup
    counts: Mapping[PromptKey, tuple[int, int]]


def state_of(change: Interval, margin: float) -> State:
    """What an estimate of a change of α_1 shows."""
    if change.is_within(margin):
        return State.STEADY
    if change.high < 0 and change.mean < -margin:
        return State.FELL
    if change.low > 0 and change.mean > margin:
        return State.ROSE
    return State.TOO_LITTLE


def has_recovered(left: ProbeVerdict, margin: float) -> bool:
    """Whether the evidence excludes that a fall of more than `margin` is left."""
    return left.change is not None and left.change.low >= -margin


def shared_prompts(before: Side, after: Side) -> list[PromptPair]:
    """The prompts that both sides measured at the same k."""
    return [
        PromptPair(*before.counts[key], *after.counts[key])
        for key in sorted(before.counts.keys() & after.counts.keys())
    ]


def compare(task: str, drafter: str, before: Side, after: Side, margin: float) -> ProbeVerdict:
    """The verdict about the change from one side to the other; its subject is the draft of `after`."""
    pairs = shared_prompts(before, after)
    change = alpha_change(pairs)
    return ProbeVerdict(
        subject=DriftSubject(task, drafter, after.setup.draft_revision, after.setup.target_revision),
        state=State.TOO_LITTLE if change is None else state_of(change, margin),
        change=change,
        num_prompts=len(pairs),
        measured_before=before.measured_at,
        measured_after=after.measured_at,
        before=before.setup,
        after=after.setup,
        trials_before=sum(pair.trials_before for pair in pairs),
        accepts_before=sum(pair.accepts_before for pair in pairs),
        trials_after=sum(pair.trials_after for pair in pairs),
        accepts_after=sum(pair.accepts_after for pair in pairs),
    )
