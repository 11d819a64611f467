"""What a round costs and what it brings.

A round of k drafted tokens takes draft time plus one target pass of width k + 1. Both are measured on the device, at a
few (batch, width) points, and interpolated in between: a pass of width 8 may cost hardly more than one of width 1 (a
GPU, or a CPU reading its weights from memory), or eight times as much, and only the device knows.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CostPoint:
    """Median time of one whole round at one shape: `width` target positions for each of `batch` sequences.

    `drafter` is None for the target's own time; otherwise the point is the time that drafter needs to propose
    `width - 1` tokens for each of `batch` sequences.
    """

    drafter: str | None
    batch: int
    width: int
    median_ms: float
    num_samples: int


class CostTable:
    """Measured costs, interpolated linearly in batch and width, held constant outside what was measured."""

    def __init__(self, points: Iterable[CostPoint]) -> None:
        self._by_drafter: dict[str | None, dict[int, list[tuple[int, float]]]] = {}
        for point in sorted(points, key=lambda p: (p.batch, p.width)):
            self._by_drafter.setdefault(point.drafter, {}).setdefault(point.batch, []).append(
                (point.width, point.median_ms)
            )

    @property
    def is_empty(self) -> bool:
        """Whether the target was never measured."""
        return not self._by_drafter.get(None)

    def round_ms(
        self, drafter: str | None, batch: int, num_draft_tokens: int, *, proposing: float = 1.0
    ) -> float | None:
        """Expected milliseconds of one round of `batch` sequences at k = `num_draft_tokens`; None when never measured.

        `proposing` is the probability that a sequence gets a proposal at all: look-up often has none. Sequences being
        independent, a pass is k + 1 wide with probability 1 - (1 - proposing)^batch, and 1 wide otherwise. The
        drafter's own time is paid either way; one that was never measured makes the cost unknown rather than free.
        """
        narrow, wide = self._lookup(None, batch, 1), self._lookup(None, batch, num_draft_tokens + 1)
        if narrow is None or wide is None or drafter is None or num_draft_tokens == 0:
            return wide
        draft = self._lookup(drafter, batch, num_draft_tokens + 1)
        if draft is None:
            return None
        anybody = 1 - (1 - proposing) ** batch
        return draft + anybody * wide + (1 - anybody) * narrow

    def _lookup(self, drafter: str | None, batch: int, width: int) -> float | None:
        by_batch = self._by_drafter.get(drafter)
        if not by_batch:
            return None
        batches = sorted(by_batch)
        return _interpolate([(b, _interpolate(by_batch[b], width)) for b in batches], batch)


def expected_tokens_per_round(reach: Sequence[float], acceptance: Sequence[float]) -> float:
    """Expected tokens of a round: 1 + Σ_i Π_{j≤i} reach_j · α_j.

    `reach[j]` is the probability that position j was proposed, given that all before it were accepted;
    `acceptance[j]` is α_j. With reach 1 and constant α this is Leviathan et al. 2023, (1 - α^(k+1)) / (1 - α).
    """
    tokens, through = 1.0, 1.0
    for r, a in zip(reach, acceptance, strict=True):
        through *= r * a
        tokens += through
    return tokens


def _interpolate(points: Sequence[tuple[int, float]], x: int) -> float:
    position = bisect_left(points, x, key=lambda point: point[0])
    if position == 0:
        return points[0][1]
    if position == len(points):
        return points[-1][1]
    (x0, y0), (x1, y1) = points[position - 1], points[position]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
