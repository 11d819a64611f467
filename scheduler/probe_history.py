"""All probes of a drafter in a task, as a chain of comparisons between neighbours.

Every setup is compared with itself, its first measurement with its last, and with the setup that it replaced, right at
the replacement. So each fall stands where it happened: a change of the target on one day is not blamed for a fault that
began on a later day under the same target. Prompts are matched by their text, so that another version of a probe set
goes on where the last one ended.

Two sides are compared over the prompts that both have. "Steady" is shown, not assumed: the whole interval of the
change lies within ±margin (equivalence, Schuirmann 1987). A move is one whose interval excludes zero and whose
estimate exceeds the margin. Everything else is too little evidence.

Pairing removes the variance between prompts, by far the largest one, so a few prompts are as precise as hundreds of
unpaired jobs. Intervals are Student's over linearised ratios (Cochran 1977, §6.4), with one degree of freedom less than
prompts. The unit is the prompt, because tokens inside a prompt are correlated.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from datetime import datetime
from itertools import groupby
from operator import attrgetter
from typing import Final, NamedTuple, Self

from alphaloop.acceptance import Interval, t95
from alphaloop.measurements import AcceptedLevel, DriftSubject, ProbeResult
from scheduler.drift.memory import ALPHA_MARGIN
from scheduler.drift.watching import State, state_of

#: Measurements on each side of a change of traffic that are added up.
_ADDED_UP: Final = 3
#: A prompt and the k that it was measured at: α_1 moves a little with k, so only the same k is compared.
PromptKey = tuple[str, int]


@dataclass(frozen=True, slots=True)
class ProbeSetup:
    """Everything that decoded a probe and may change acceptance."""

    target_revision: str
    draft_revision: str
    engine: str  #: engine, its version, dtype and settings


@dataclass(frozen=True, slots=True)
class Side:
    """Results under one setup: trials and accepts of position 1, by prompt."""

    measured_at: datetime
    setup: ProbeSetup
    counts: Mapping[PromptKey, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class ProbeVerdict:
    """What the probes of a subject show, on prompts that both runs share."""

    subject: DriftSubject
    state: State
    change: Interval | None  #: of α_1, now less then
    num_prompts: int
    measured_before: datetime
    measured_after: datetime
    before: ProbeSetup
    after: ProbeSetup
    trials_before: int
    accepts_before: int
    trials_after: int
    accepts_after: int


@dataclass(frozen=True, slots=True)
class ProbeStep:
    """One link of the chain. Where `across.before` and `across.after` are the same setup, nothing changed on record."""

    across: ProbeVerdict
    left: ProbeVerdict  #: from before the step until the newest measurement
    began_after: datetime  #: the fall lies between these two measurements
    began_before: datetime
    before: Side
    newest: Side


@dataclass(frozen=True, slots=True)
class ProbeHistory:
    """The measurements of a (task, drafter), oldest first: the results of a scheduled run under one setup each."""

    task: str
    drafter: str
    measurements: tuple[Side, ...]
    parents: Mapping[str, str]  #: by draft revision, the draft that it was trained to follow

    @classmethod
    def of(cls, task: str, drafter: str, results: Iterable[ProbeResult], parents: Mapping[str, str]) -> Self:
        """The history that these results of one task and drafter make, in any order."""
        key = attrgetter("scheduled_for", "target_revision", "draft_revision", "engine")
        measurements = [
            Side(
                at,
                ProbeSetup(*setup),
                {(r.prompt_id, r.num_draft_tokens): (r.trials[0], r.accepts[0]) for r in group if r.trials},
            )
            for (at, *setup), group in groupby(sorted(results, key=key), key=key)
        ]
        return cls(task, drafter, tuple(m for m in measurements if m.counts), parents)

    @property
    def newest(self) -> Side | None:
        """The last measurement."""
        return self.measurements[-1] if self.measurements else None

    def since(self, level: AcceptedLevel | None) -> Self:
        """What is left when a level was accepted: its newest measurement after the change, and what came later."""
        if level is None:
            return self
        at, changed_before = level.at, level.changed_before
        shown = [m.measured_at for m in self.measurements if changed_before and changed_before <= m.measured_at <= at]
        begins = max(shown, default=at)
        return replace(self, measurements=tuple(m for m in self.measurements if m.measured_at >= begins))

    def steps(self) -> list[ProbeStep]:
        """Every link, in the order of the setups."""
        steps = []
        for setup in dict.fromkeys(m.setup for m in self.measurements):
            own = [m for m in self.measurements if m.setup == setup]
            earlier = [m for m in self.measurements if m.measured_at < own[0].measured_at]
            if earlier:
                was = self._predecessor(setup, earlier)
                before = _each_prompt([m for m in earlier if m.setup == was])
                steps.append(self._step(before, own[0], (before.measured_at, own[0].measured_at)))
            if len(own) > 1:
                before = _each_prompt(own[-2::-1])  # of every prompt the oldest result
                steps.append(self._step(before, own[-1], self._onset(before, own)))
        return steps

    def falls(self) -> list[ProbeStep]:
        """Steps that fell, and of which the newest measurement does not show that they are over."""
        return [s for s in self.steps() if s.across.state is State.FELL and not has_recovered(s.left)]

    def across(self, after: datetime, before: datetime) -> ProbeVerdict | None:
        """What was measured since `before`, against what was measured until `after`; None where either is missing.

        The last measurements of the last setup on each side are added up, because texts differ at near-ties. A fall
        that has healed since is one all the same: then the first measurement after the change counts.
        """
        earlier = [m for m in self.measurements if m.measured_at <= after]
        later = [m for m in self.measurements if m.measured_at >= before]
        if not earlier or not later:
            return None
        was = _sum([m for m in earlier if m.setup == earlier[-1].setup][-_ADDED_UP:])
        since = [m for m in later if m.setup == later[-1].setup]
        first, last = self.compare(was, since[0]), self.compare(was, _sum(since[-_ADDED_UP:]))
        has_healed = last.state is not State.FELL or has_recovered(self.compare(was, since[-1]))
        return first if first.state is State.FELL and has_healed else last

    def _predecessor(self, setup: ProbeSetup, earlier: Sequence[Side]) -> ProbeSetup:
        """The setup to compare a new one with: one that differs in as little as possible, the newest of these.

        Among drafts, the one that this draft was trained to follow comes first.
        """
        parent = self.parents.get(setup.draft_revision)
        return min(
            reversed(earlier), key=lambda m: (len(differences(m.setup, setup)), m.setup.draft_revision != parent)
        ).setup

    def _onset(self, reference: Side, own: Sequence[Side]) -> tuple[datetime, datetime]:
        """The last measurement that had not fallen, and the one after it."""
        for sound, fallen in zip(own[-2::-1], own[:0:-1], strict=True):
            if sound is own[0] or self.compare(reference, sound).state is not State.FELL:
                return sound.measured_at, fallen.measured_at
        return own[0].measured_at, own[-1].measured_at

    def _step(self, before: Side, after: Side, began: tuple[datetime, datetime]) -> ProbeStep:
        newest = self.measurements[-1]
        return ProbeStep(self.compare(before, after), self.compare(before, newest), *began, before, newest)

    def compare(self, before: Side, after: Side) -> ProbeVerdict:
        """The verdict about the change from one side to the other; its subject is the draft of `after`."""
        pairs = shared_prompts(before, after)
        change = alpha_change(pairs)
        return ProbeVerdict(
            subject=DriftSubject(self.task, self.drafter, after.setup.draft_revision, after.setup.target_revision),
            state=state_of(change),
            change=change,
            num_prompts=len(pairs),
            measured_before=before.measured_at,
            measured_after=after.measured_at,
            before=before.setup,
            after=after.setup,
            **_sums(pairs)._asdict(),
        )


def probe_histories(
    results: Iterable[ProbeResult],
    parents: Mapping[tuple[str, str], str],
    targets: Mapping[str, str] | None = None,
) -> list[ProbeHistory]:
    """The histories of every (task, drafter). `parents` is by (drafter, draft revision).

    `targets`: by revision, the name of each target that is served now. A task that was bound to another one begins
    anew there: what the targets accept is not compared.
    """
    about = attrgetter("task", "drafter")
    histories = []
    for (task, drafter), results_of in groupby(sorted(results, key=about), key=about):
        of_drafter = {draft: parent for (name, draft), parent in parents.items() if name == drafter}
        histories.append(ProbeHistory.of(task, drafter, _of_one_target(list(results_of), targets or {}), of_drafter))
    return histories


def _of_one_target(results: Sequence[ProbeResult], targets: Mapping[str, str]) -> list[ProbeResult]:
    """Those of the target of the newest; a revision that no worker serves any more may be one of its own."""
    newest = targets.get(max(results, key=attrgetter("scheduled_for")).target_revision)
    return [r for r in results if newest is None or targets.get(r.target_revision, newest) == newest]


def differences(before: ProbeSetup, after: ProbeSetup) -> tuple[str, ...]:
    """What changed between two setups: of target, draft and engine."""
    parts = zip(("target", "draft", "engine"), astuple(before), astuple(after), strict=True)
    return tuple(name for name, was, now in parts if was != now)


def _each_prompt(own: Sequence[Side]) -> Side:
    """The last result of every prompt in measurements of one setup."""
    return replace(own[-1], counts={key: counts for m in own for key, counts in m.counts.items()})


def _sum(measurements: Sequence[Side]) -> Side:
    """The counts of several measurements of one setup, by prompt; as old as the last one."""
    counts: dict[PromptKey, tuple[int, int]] = {}
    for measurement in measurements:
        for key, (trials, accepts) in measurement.counts.items():
            known = counts.get(key, (0, 0))
            counts[key] = (known[0] + trials, known[1] + accepts)
    return Side(measurements[-1].measured_at, measurements[-1].setup, counts)


# Two sides compared


def has_recovered(left: ProbeVerdict) -> bool:
    """Whether the evidence excludes that a fall of more than ALPHA_MARGIN is left."""
    return left.change is not None and left.change.low >= -ALPHA_MARGIN


def shared_prompts(before: Side, after: Side) -> list[PromptPair]:
    """The prompts that both sides measured at the same k."""
    shared = sorted(before.counts.keys() & after.counts.keys())
    return [PromptPair(*before.counts[key], *after.counts[key]) for key in shared]


class PromptPair(NamedTuple):
    """Trials and accepts of position 1 on one prompt, before and after."""

    trials_before: int
    accepts_before: int
    trials_after: int
    accepts_after: int


def alpha_change(pairs: Sequence[PromptPair]) -> Interval | None:
    """Change of α_1 from before to after, with its 95 % interval; None when either side was never tested.

    With a single prompt nothing is known about the spread, and the interval is the whole range.
    """
    trials_before, accepts_before, trials_after, accepts_after = _sums(pairs)
    if not trials_before or not trials_after:
        return None
    before, after = accepts_before / trials_before, accepts_after / trials_after
    influences = [
        (p.accepts_after - after * p.trials_after) / trials_after
        - (p.accepts_before - before * p.trials_before) / trials_before
        for p in pairs
    ]
    num, change, margin = len(pairs), after - before, math.inf
    if num > 1:
        margin = t95(num - 1) * math.sqrt(num / (num - 1) * sum(influence**2 for influence in influences))
    return Interval(change, max(-1.0, change - margin), min(1.0, change + margin))


def _sums(pairs: Sequence[PromptPair]) -> PromptPair:
    return PromptPair(*map(sum, zip(*pairs, strict=True))) if pairs else PromptPair(0, 0, 0, 0)
