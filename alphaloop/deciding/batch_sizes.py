"""One draft length for all requests of a server, by its batch size, for a server that takes only that. Pure.

vLLM's `num_speculative_tokens_per_batch_size` sets k by the number of requests in a step, whatever their tasks are. So
the tasks are weighed together. Let w_t be the share of task t in the tokens, and s_t(k, n) the speed-up that decisions
expect of k drafts over vanilla while n requests run (goodput.py). Then

    speed-up(k, n) = 1 / Σ_t w_t / s_t(k, n)

which is the time of all tokens in vanilla over their time with drafts, where a token takes every task the same time in
vanilla. Its bounds are those of the s_t in the same formula, as if all tasks erred to one side: the costs err together.

Only what lies between measured points is weighed: a batch size between the least and the greatest that were measured,
and a k whose widths were measured at the batch sizes on both sides.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from alphaloop.acceptance import Interval
from alphaloop.costs import CostTable
from alphaloop.deciding.goodput import MIN_SPEEDUP, DrafterState, JobSize, weigh
from alphaloop.deciding.posterior import Posterior

#: Vanilla over itself.
_EVEN = Interval(1.0, 1.0, 1.0)


@dataclass(frozen=True, slots=True)
class WeighedTask:
    """A task of the server."""

    share: float  #: of the tokens of all; the shares add up to 1
    posterior: Posterior  #: of the drafter
    size: JobSize | None = None


class BatchSizes(NamedTuple):
    """Batch sizes in a row with one k."""

    first: int
    last: int
    num_draft_tokens: int  #: 0: vanilla
    at_first: Interval | None  #: the speed-up over vanilla; None where nothing was measured
    at_last: Interval | None


def draft_lengths_by_batch(
    tasks: Sequence[WeighedTask], drafter: DrafterState, costs: CostTable, *, most: int | None = None
) -> tuple[BatchSizes, ...]:
    """Ranges from 1 to the greatest batch size that was measured, and at most to `most`, without a gap.

    Sizes below the least that was measured are vanilla. Each k is the fastest, and 0 where no k is at least
    `MIN_SPEEDUP` times as fast as vanilla; the k of the size before stays while it loses less than that. Empty where
    nothing was measured of vanilla or of the drafter at one batch size.
    """
    drafter = replace(drafter, num_endpoints=1, num_vanilla_endpoints=1, num_places=None, num_vanilla_places=None)
    sizes = measured_sizes(drafter, costs, most)
    if not sizes:
        return ()
    ranges = [BatchSizes(1, sizes.start - 1, 0, None, None)] if sizes.start > 1 else []
    k = 0
    for batch in sizes:
        gains = _gains(tasks, drafter, costs, batch)
        k = _chosen(gains, k)
        last = ranges[-1] if ranges else None
        if last is not None and last.at_last is not None and last.num_draft_tokens == k:
            ranges[-1] = last._replace(last=batch, at_last=gains[k])
        else:
            ranges.append(BatchSizes(batch, batch, k, gains[k], gains[k]))
    return tuple(ranges)


def measured_sizes(drafter: DrafterState, costs: CostTable, most: int | None = None) -> range:
    """Batch sizes between the least and the greatest at which both vanilla and the drafter were measured."""
    planes = [costs.measured(None), costs.measured(drafter.name)]
    if not all(planes):
        return range(0)
    last = min(max(plane) for plane in planes)
    return range(max(min(plane) for plane in planes), (last if most is None else min(last, most)) + 1)


def _chosen(gains: Mapping[int, Interval], before: int) -> int:
    best = min(gains, key=lambda k: (-gains[k].mean, k))
    if gains[best].mean < MIN_SPEEDUP:
        return 0
    stays = before in gains and gains[before].mean >= max(MIN_SPEEDUP, gains[best].mean / MIN_SPEEDUP)
    return before if stays else best


def _gains(tasks: Sequence[WeighedTask], drafter: DrafterState, costs: CostTable, batch: int) -> dict[int, Interval]:
    """The speed-up by each k that may be weighed at this batch size."""
    by_task: list[tuple[float, dict[int, Interval]]] = []
    for task in tasks:
        weighed = weigh({drafter.name: task.posterior}, [drafter], costs, batch, task.size)
        own = {a.num_draft_tokens: Interval(a.speedup, a.speedup_low, a.speedup_high) for a in weighed if a.drafter}
        by_task.append((task.share, own))
    gains = {0: _EVEN}
    for k in _lengths(drafter, costs, batch):
        if all(k in own for _, own in by_task):
            each = [(share, own[k]) for share, own in by_task]
            mean, low, high = (
                1 / sum(share / getattr(gain, bound) for share, gain in each) for bound in ("mean", "low", "high")
            )
            gains[k] = Interval(mean, low, high)
    return gains


def _lengths(drafter: DrafterState, costs: CostTable, batch: int) -> range:
    """Draft lengths whose rounds lie between measured widths, at the measured batch sizes on both sides of this one."""
    own_first, own_last = _widths(costs.measured(drafter.name), batch)
    first, last = max(own_first - 1, drafter.least_draft_tokens), min(own_last - 1, drafter.max_draft_tokens)
    if not costs.is_served(drafter.name):
        last = min(last, _widths(costs.measured(None), batch)[1] - 1)
    return range(int(first), int(last) + 1)


def _widths(plane: Mapping[int, Sequence[float]], batch: int) -> tuple[float, float]:
    sizes = sorted(plane)
    after = bisect_left(sizes, batch)
    near = [sizes[after]] if sizes[after] == batch else sizes[after - 1 : after + 1]
    return max(plane[size][0] for size in near), min(plane[size][-1] for size in near)
