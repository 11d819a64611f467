"""Drafters of the same weights take the same time: one of them is measured and corrected, the others have its times.

Measured apart they would differ by the noise of two measurements, and only the one that is used would be put right by
its rounds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from alphaloop.cost import CostPoint
from alphaloop.deciding.goodput import DrafterState


def timed_by(drafters: Sequence[DrafterState]) -> dict[str, str]:
    """Which of its kin each drafter has its times from: the one with the longest drafts, the first of several.

    Drafters that are measured themselves are not in it.
    """
    longest: dict[str, DrafterState] = {}
    for drafter in drafters:
        known = longest.get(drafter.shared_weights)
        if drafter.shared_weights and (known is None or drafter.max_draft_tokens > known.max_draft_tokens):
            longest[drafter.shared_weights] = drafter
    whose = {drafter.name: longest[drafter.shared_weights].name for drafter in drafters if drafter.shared_weights}
    return {name: other for name, other in whose.items() if name != other}


def with_shared_weights(points: Iterable[CostPoint], timed: Mapping[str, str]) -> tuple[CostPoint, ...]:
    """What was measured, and the same under the name of everyone who has those times; `timed` is `timed_by`'s."""
    measured = [point for point in points if point.drafter not in timed]
    theirs = (
        replace(point, drafter=name) for name, other in timed.items() for point in measured if point.drafter == other
    )
    return (*measured, *theirs)
