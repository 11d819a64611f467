"""How many workers are enough: for deadlines, for other work, and what no number meets."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alphaloop.batches.ends import ArrivalCourse, OpenBatch, Situation
from alphaloop.batches.enough import MOST_LATE, NOT_KNOWN, Enough
from tests.unit.alphaloop.test_batch_ends import CHAT, CODE, NIGHT, NOW, decoded, night, none, situation

HOUR_S = 3600.0
UNEVEN = [*decoded(CHAT, spread=0.5), *decoded(CODE, spread=0.5), *decoded(NIGHT, spread=0.5)]


def due(num_open: float, within_s: float, name: str = "b1") -> OpenBatch:
    return replace(night(num_open, name), deadline_s=NOW + within_s)


def search(given: Situation, drain_within_s: float = HOUR_S) -> Enough:
    return Enough(given, drain_within_s)


def per_hour(num: float) -> ArrivalCourse:
    return ArrivalCourse([num] * 24)


def test_requests_that_one_worker_cannot_end_in_time_are_late_and_two_are_enough() -> None:
    """10,000 device seconds are due in 7,200 s: what is left of them then is late."""
    found = search(situation(due(10_000, 2 * HOUR_S)))
    with_one = found.with_workers(1).due["night"]
    assert with_one.num_due == 10_000
    assert with_one.late == pytest.approx(0.28, abs=0.03)
    assert with_one.num_hopeless == 0
    assert with_one.until_s == NOW + 2 * HOUR_S
    assert found.least_for_deadlines() == found.least() == 2
    assert found.with_workers(2).due["night"].late <= MOST_LATE


def test_every_segment_is_judged_alone() -> None:
    gold = OpenBatch("gold", NOW - 1, {("code", "gold"): 100.0}, NOW + 60)
    found = search(situation(due(2000, 10 * HOUR_S), gold)).with_workers(1)
    assert found.due["gold"].late > 0.3
    assert found.due["night"].late <= MOST_LATE
    assert not found.meets_deadlines


@pytest.mark.parametrize(
    "batch",
    [
        pytest.param(due(10**6, 25 * HOUR_S), id="later than a day"),
        pytest.param(due(10**6, -1), id="over"),
        pytest.param(due(0, HOUR_S), id="nothing open"),
    ],
)
def test_deadlines_beyond_a_day_and_past_ones_are_not_judged(batch: OpenBatch) -> None:
    found = search(situation(batch))
    assert found.with_workers(1).due == found.with_workers(0).due == {}
    assert found.least_for_deadlines() == 0


def test_no_number_meets_a_deadline_that_is_nearer_than_a_request_takes() -> None:
    """A request takes 8 s on a full device. Such requests ask for no worker."""
    found = search(situation(due(10_000, 5), due(100, HOUR_S, "b2")))
    late = found.with_workers(500).due["night"]
    assert late.num_hopeless == late.num_late == 10_000
    assert found.least_for_deadlines() is not None
    assert (late.late, late.hopeless) == (10_000 / 10_100, 10_000 / 10_100)


def test_work_without_a_deadline_is_through_so_fast_after_it_came() -> None:
    """20,000 device seconds wait."""
    waiting = situation(num_unfinished={"chat": 10_000, "code": 10_000}, lately=UNEVEN)
    assert search(waiting).least() in (6, 7)
    assert search(waiting, 2 * HOUR_S).least() in (3, 4)
    batch = situation(night(20_000), lately=UNEVEN)
    assert search(batch).least() in (6, 7)
    older = situation(night(20_000, created_s=NOW - HOUR_S / 2), lately=UNEVEN)
    assert search(older).least() in (11, 12, 13), "half of its time is over"


def test_what_is_expected_to_come_is_served_too() -> None:
    arriving = {CHAT: per_hour(9000), CODE: per_hour(1800)}
    found = search(situation(arrivals=arriving, lately=UNEVEN)).least()
    assert found == 3, "three device hours an hour: the queue grows with two"
    assert search(situation(arrivals={CHAT: per_hour(900), CODE: none()}, lately=UNEVEN)).least() == 1


def test_without_work_and_arrivals_none_is_needed() -> None:
    idle = situation(arrivals={CHAT: per_hour(1800)}, lately=[])
    assert search(idle).least() == 0
    long_ago = [replace(job, arrived_s=NOW - 2 * HOUR_S) for job in UNEVEN]
    assert search(situation(lately=long_ago)).least() == 0
    assert search(situation(lately=UNEVEN)).least() == 1, "something came in the last hour"


def test_without_a_decoded_job_it_is_not_known() -> None:
    found = search(situation(due(100, HOUR_S), lately=[]))
    assert found.why_not_known == NOT_KNOWN
    assert found.least() is None
    assert found.least_for_deadlines() is None
    with pytest.raises(ValueError, match="no job has ended"):
        found.with_workers(1)
    assert found.with_workers(0).due["night"].late == 1, "without a worker everything is late, whatever it costs"


def test_beyond_the_most_workers_it_is_not_known() -> None:
    assert search(situation(due(10**8, HOUR_S))).least() is None


@pytest.mark.parametrize("hint", [1, 2, 5, 40, 5000])
def test_the_search_finds_the_same_number_from_anywhere(hint: int) -> None:
    assert search(situation(due(30_000, 2 * HOUR_S), lately=UNEVEN)).least(hint) == 5


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    num_open=st.integers(1, 20_000),
    within_s=st.integers(30, 80_000),
    num_waiting=st.integers(0, 20_000),
    arriving=st.integers(0, 5000),
    num_workers=st.integers(1, 20),
    more=st.integers(1, 20),
)
def test_more_workers_never_make_it_worse(
    num_open: int, within_s: int, num_waiting: int, arriving: int, num_workers: int, more: int
) -> None:
    """Beyond what other draws of the same futures differ by."""
    made = situation(
        due(num_open, within_s),
        num_unfinished={"chat": num_waiting},
        arrivals={CHAT: per_hour(arriving), CODE: none()},
        lately=UNEVEN,
    )
    found = search(made)
    few, many = found.with_workers(num_workers), found.with_workers(num_workers + more)
    assert many.due["night"].late <= few.due["night"].late + 0.05
    assert many.undone <= few.undone + 0.05
    assert found.with_workers(0).due["night"].late == 1
