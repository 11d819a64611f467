"""Whether a draft is stale: its latest probes compared with its first probes on the same prompts.

Two thresholds: the flag opens when α_1 fell by more than `drop` and the interval of the change excludes zero. The flag
closes when less than `recover` of the fall remains. In between it stays, so it does not flap.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby

from alphaloop.acceptance import Interval
from alphaloop.measurements import DriftSubject, ProbeResult
from scheduler.paired import PromptPair, alpha_change


@dataclass(frozen=True, slots=True)
class ProbeComparison:
    """The latest probe run of a subject against the first of its draft revision, prompt by prompt."""

    subject: DriftSubject
    pairs: tuple[PromptPair, ...]
    change: Interval  #: of α_1
    measured_before: datetime
    measured_after: datetime
    target_changed: bool
    engine_before: str
    engine_after: str

    @property
    def alpha_before(self) -> float:
        """α_1 of the reference run."""
        return sum(p.accepts_before for p in self.pairs) / sum(p.trials_before for p in self.pairs)

    @property
    def alpha_after(self) -> float:
        """α_1 of the latest run."""
        return sum(p.accepts_after for p in self.pairs) / sum(p.trials_after for p in self.pairs)


def is_stale(was_stale: bool, change: Interval, *, drop: float, recover: float) -> bool:
    """The state of the flag after `change` of α_1."""
    if was_stale:
        return change.mean <= -recover
    return change.mean < -drop and change.high < 0


def compare_probes(results: Iterable[ProbeResult]) -> list[ProbeComparison]:
    """For each (task, drafter): the latest probe run of its current draft against that draft's first, on the same set.

    Subjects probed only once, or without a trial on either side, are left out.
    """
    ordered = sorted(results, key=lambda r: (r.task, r.drafter, r.scheduled_for, r.position))
    found = []
    for _, group in groupby(ordered, key=lambda r: (r.task, r.drafter)):
        measured = list(group)
        last = measured[-1]
        comparison = _compare(
            [r for r in measured if (r.draft_revision, r.probe_set) == (last.draft_revision, last.probe_set)]
        )
        if comparison is not None:
            found.append(comparison)
    return found


def pooled_change(comparisons: Sequence[ProbeComparison]) -> Interval | None:
    """Change of α_1 over all tasks of one draft together; None without trials."""
    return alpha_change([pair for comparison in comparisons for pair in comparison.pairs])


def _compare(measured: Sequence[ProbeResult]) -> ProbeComparison | None:
    first, last = measured[0], measured[-1]
    if first.scheduled_for == last.scheduled_for:
        return None
    before = {r.position: r for r in reversed(measured) if r.target_revision == first.target_revision}
    after = {r.position: r for r in measured if r.scheduled_for == last.scheduled_for}
    pairs = tuple(
        PromptPair(*_position_1(before[position]), *_position_1(after[position]))
        for position in sorted(before.keys() & after.keys())
    )
    change = alpha_change(pairs)
    if change is None:
        return None
    return ProbeComparison(
        subject=DriftSubject(last.task, last.drafter, last.draft_revision, last.target_revision),
        pairs=pairs,
        change=change,
        measured_before=first.scheduled_for,
        measured_after=last.scheduled_for,
        target_changed=first.target_revision != last.target_revision,
        engine_before=first.engine,
        engine_after=last.engine,
    )


def _position_1(result: ProbeResult) -> tuple[int, int]:
    return (result.trials[0], result.accepts[0]) if result.trials else (0, 0)
