"""One k for all requests by batch size: ranges without gaps, within what was measured, the fastest k of each size."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alphaloop.costs import CostKind, CostPoint, CostTable
from alphaloop.deciding.batch_sizes import BatchSizes, WeighedTask, draft_lengths_by_batch
from alphaloop.deciding.goodput import MIN_SPEEDUP, DrafterState, JobSize, weigh
from tests.fixtures.deciding import inferred

DRAFT = DrafterState("draft", "r1", 6, num_endpoints=3, num_vanilla_endpoints=2, num_places=4, num_vanilla_places=4)
ALONE = DrafterState("draft", "r1", 6)
NGRAM = DrafterState("draft", "r1", 4, least_draft_tokens=4)

batches = st.sets(st.integers(1, 24), min_size=1, max_size=4)
milliseconds = st.floats(1.0, 60.0)


@st.composite
def tables(draw: st.DrawFn) -> CostTable:
    """Any times at any shapes: of a device, or of a server whose rounds are timed whole."""
    is_served = draw(st.booleans())
    points = []
    for name, sizes in ((None, draw(batches)), ("draft", draw(batches))):
        kind = CostKind.SERVED if is_served and name else CostKind.ROUND
        for batch in sizes:
            widths = draw(st.sets(st.integers(2, 8), min_size=1, max_size=3)) | (set() if name else {1})
            points += [CostPoint(name, batch, width, draw(milliseconds), 5, kind=kind) for width in widths]
    return CostTable(points)


tasks = st.lists(st.tuples(st.floats(0.05, 1.0), st.floats(0.05, 0.95)), min_size=1, max_size=3).map(
    lambda given: [
        WeighedTask(weight / sum(w for w, _ in given), inferred(alpha, k=6), JobSize(100.0, 80.0))
        for weight, alpha in given
    ]
)


def by_size(ranges: tuple[BatchSizes, ...]) -> dict[int, int]:
    return {size: each.num_draft_tokens for each in ranges for size in range(each.first, each.last + 1)}


@given(tables(), tasks, st.sampled_from([DRAFT, NGRAM]), st.none() | st.integers(1, 30))
def test_ranges_go_from_1_to_what_was_measured_without_gaps(
    costs: CostTable, weighed: list[WeighedTask], drafter: DrafterState, most: int | None
) -> None:
    ranges = draft_lengths_by_batch(weighed, drafter, costs, most=most)
    measured = [costs.measured(None), costs.measured("draft")]
    last = min(max(plane) for plane in measured)
    last = last if most is None else min(last, most)
    first = max(min(plane) for plane in measured)
    assert bool(ranges) == (first <= last)
    assert [size for each in ranges for size in range(each.first, each.last + 1)] == [*range(1, last + 1)][
        : last * bool(ranges)
    ]
    for size, k in by_size(ranges).items():
        below = [max(s for s in plane if s <= size) for plane in measured] if size >= first else []
        above = [min(s for s in plane if s >= size) for plane in measured] if size >= first else []
        if size < first:
            assert k == 0, "nothing was measured there"
        elif k:
            assert drafter.least_draft_tokens <= k <= drafter.max_draft_tokens
            for near in (below[1], above[1]):
                assert measured[1][near][0] <= k + 1 <= measured[1][near][-1], "no width beyond those measured"
            if not costs.is_served("draft"):
                assert all(k + 1 <= measured[0][near][-1] for near in (below[0], above[0]))
    for before, after in itertools.pairwise(ranges):
        assert before.num_draft_tokens != after.num_draft_tokens or before.at_first is None
    for each in ranges:
        if each.num_draft_tokens:
            assert each.at_first is not None
            assert each.at_first.low <= each.at_first.mean <= each.at_first.high
            assert each.at_first.mean >= MIN_SPEEDUP


@given(tables(), st.floats(0.05, 0.95))
def test_of_one_task_the_k_is_the_one_that_decisions_weigh_best_within_a_hundredth(
    costs: CostTable, alpha: float
) -> None:
    posterior = inferred(alpha, k=6)
    size = JobSize(100.0, 80.0)
    for each in draft_lengths_by_batch([WeighedTask(1.0, posterior, size)], ALONE, costs):
        if each.num_draft_tokens and each.at_last is not None:
            (own,) = [
                a
                for a in weigh({"draft": posterior}, [ALONE], costs, each.last, size)
                if a.num_draft_tokens == each.num_draft_tokens
            ]
            assert (each.at_last.mean, each.at_last.low) == pytest.approx((own.speedup, own.speedup_low))


def linear(most_width: int = 7, *, draft_ms: float = 1.0, each_ms: float = 0.5) -> CostTable:
    """A pass takes 20 ms and some for each token; measured at 1, 4 and 16."""
    points = []
    for batch in (1, 4, 16):
        points += [CostPoint(None, batch, width, 20.0 + each_ms * batch * width, 5) for width in (1, 4, most_width)]
        points += [CostPoint("draft", batch, width, draft_ms * (width - 1), 5) for width in (2, most_width)]
    return CostTable(points)


def test_k_falls_with_the_batch_size_and_ends_in_vanilla() -> None:
    ranges = draft_lengths_by_batch([WeighedTask(1.0, inferred(0.7, k=6))], ALONE, linear(each_ms=3.0))
    lengths = [each.num_draft_tokens for each in ranges]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > 2
    assert lengths[-1] == 0
    assert ranges[-1].last == 16


def test_equal_sizes_are_one_range() -> None:
    flat = CostTable(
        CostPoint(name, batch, width, ms, 5)
        for batch in (1, 8)
        for name, width, ms in ((None, 1, 20.0), (None, 7, 20.0), ("draft", 2, 1.0), ("draft", 7, 1.0))
    )
    (every,) = draft_lengths_by_batch([WeighedTask(1.0, inferred(0.8, k=6))], ALONE, flat)
    assert (every.first, every.last, every.num_draft_tokens) == (1, 8, 6)
    (never,) = draft_lengths_by_batch([WeighedTask(1.0, inferred(0.02, k=6))], ALONE, linear())
    assert (never.first, never.last, never.num_draft_tokens) == (1, 16, 0)


def test_drafts_end_at_the_widest_pass_that_was_measured() -> None:
    (every,) = draft_lengths_by_batch([WeighedTask(1.0, inferred(0.95, k=6))], ALONE, linear(4, each_ms=0.01))
    assert every.num_draft_tokens == 3


def test_tasks_count_by_their_share_of_the_tokens() -> None:
    """A task that never accepts makes drafts a loss where it has most of the tokens."""
    good, bad = inferred(0.9, k=6), inferred(0.01, k=6)
    costs = linear(each_ms=2.0)
    of_good, of_bad = (
        draft_lengths_by_batch([WeighedTask(part, good), WeighedTask(1 - part, bad)], ALONE, costs)
        for part in (0.95, 0.05)
    )
    assert of_good[0].num_draft_tokens > 0
    assert {each.num_draft_tokens for each in of_bad} == {0}
    (alone,) = [
        a for a in weigh({"draft": good}, [ALONE], costs, 1) if a.num_draft_tokens == of_good[0].num_draft_tokens
    ]
    (lost,) = [a for a in weigh({"draft": bad}, [ALONE], costs, 1) if a.num_draft_tokens == of_good[0].num_draft_tokens]
    assert of_good[0].at_first is not None
    assert of_good[0].at_first.mean == pytest.approx(1 / (0.95 / alone.speedup + 0.05 / lost.speedup))


def test_without_costs_of_both_nothing_is_said() -> None:
    only_vanilla = CostTable([CostPoint(None, 1, 1, 20.0, 5)])
    apart = CostTable([CostPoint(None, 1, 1, 20.0, 5), CostPoint("draft", 4, 2, 1.0, 5)])
    for costs in (CostTable(()), only_vanilla, apart):
        assert draft_lengths_by_batch([WeighedTask(1.0, inferred(0.8, k=6))], ALONE, costs) == ()
