"""How reliable expected speed-ups were: the pairs of a drafter in a task, counted for screens. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from alphaloop.switchback.expectation import ExpectationPair
from alphaloop.switchback.student import t95


@dataclass(frozen=True, slots=True)
class Reliability:
    """The pairs of one drafter in one task together, with the draft lengths and the load of their rounds."""

    task: str
    drafter: str
    num_pairs: int
    num_held: int  #: shown intervals that hold the measured speed-up; 95 % of them should
    ratio: float  #: measured over expected as shown, geometric mean
    ratio_bounds: tuple[float, float] | None  #: 95 %, pairs as the unit; None with one pair
    min_num_draft_tokens: int
    max_num_draft_tokens: int
    mean_running: float


def by_drafter(pairs: Iterable[ExpectationPair]) -> dict[tuple[str, str], list[ExpectationPair]]:
    """Pairs by task and drafter, in order of their names; pairs stay in their order."""
    found: dict[tuple[str, str], list[ExpectationPair]] = {}
    for pair in sorted(pairs, key=lambda one: (one.subject.task, one.subject.drafter)):
        found.setdefault((pair.subject.task, pair.subject.drafter), []).append(pair)
    return found


def reliability(pairs: Sequence[ExpectationPair]) -> Reliability:
    """Of pairs of one task and drafter, at least one."""
    log_ratios = [pair.log_ratio for pair in pairs]
    mean, num = fmean(log_ratios), len(log_ratios)
    margin = t95(num - 1) * stdev(log_ratios) / math.sqrt(num) if num > 1 else None
    return Reliability(
        task=pairs[0].subject.task,
        drafter=pairs[0].subject.drafter,
        num_pairs=num,
        num_held=sum(pair.is_held for pair in pairs),
        ratio=math.exp(mean),
        ratio_bounds=None if margin is None else (math.exp(mean - margin), math.exp(mean + margin)),
        min_num_draft_tokens=min(pair.min_num_draft_tokens for pair in pairs),
        max_num_draft_tokens=max(pair.max_num_draft_tokens for pair in pairs),
        mean_running=fmean(pair.mean_running for pair in pairs),
    )
