"""The load curve finds what load costs, and fleets keep what they promise: over random arrivals."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from alphaloop.capacity.curve import Arrivals, DecodedJobs, LoadCurve, arrivals_of
from alphaloop.capacity.fleet import PERIOD_S, FleetRun, busiest, least_fleet, play, work_by_period

CURVE = LoadCurve((1.0, 4.0, 8.0), (1.0, 1.3, 2.0))
FLAT = LoadCurve((1.0, 8.0), (1.0, 1.0))

arrivals = st.lists(
    st.builds(
        Arrivals,
        at_s=st.integers(0, 7200).map(float),
        alone_s=st.integers(1, 900).map(float),
        number=st.integers(1, 20),
    ),
    min_size=1,
    max_size=25,
).map(lambda found: sorted(found, key=lambda coming: coming.at_s))
slots = st.integers(1, 12)


def decoded(load: float, wall_s: float, *, task: str = "code", device: str = "gpu", number: int = 10) -> DecodedJobs:
    """Jobs of a hundred tokens each."""
    return DecodedJobs(task, device, False, 0.0, number, 1, 100 * number, wall_s, load)


def hours_alone(found: list[Arrivals]) -> float:
    return math.fsum(coming.alone_s * coming.number for coming in found)


@given(arrivals, slots, st.integers(1, 6))
def test_more_devices_end_nothing_later(found: list[Arrivals], num_slots: int, num_devices: int) -> None:
    few, more = (
        play(found, CURVE, num_devices=number, num_slots=num_slots) for number in (num_devices, num_devices + 1)
    )
    assert more.slowest_s <= few.slowest_s * (1 + 1e-9)


@given(arrivals, slots, st.integers(60, 3000), st.integers(1, 3000))
def test_a_longer_deadline_needs_no_more_devices(
    found: list[Arrivals], num_slots: int, deadline_s: int, longer_s: int
) -> None:
    # Arrivals that only the longer deadline counts are left out of both.
    found = [coming for coming in found if coming.alone_s <= deadline_s]
    short, long = (
        least_fleet(found, CURVE, num_slots=num_slots, deadline_s=seconds)
        for seconds in (deadline_s, deadline_s + longer_s)
    )
    assert long.num_devices <= short.num_devices


@given(arrivals, slots, st.integers(60, 3000))
def test_the_least_fleet_keeps_the_deadline_and_none_smaller_does(
    found: list[Arrivals], num_slots: int, deadline_s: int
) -> None:
    least = least_fleet(found, CURVE, num_slots=num_slots, deadline_s=deadline_s)
    assert least.num_late == 0
    assert least.slowest_s <= deadline_s + 0.01
    for number in range(1, least.num_devices):
        assert play(found, CURVE, num_devices=number, num_slots=num_slots, deadline_s=deadline_s).num_late > 0


@given(arrivals, st.integers(1, 6))
def test_a_device_with_one_slot_is_busy_for_exactly_the_work(found: list[Arrivals], num_devices: int) -> None:
    run = play(found, CURVE, num_devices=num_devices, num_slots=1)
    assert run.total_busy_s == pytest.approx(hours_alone(found))
    assert all(busy_s <= num_devices * PERIOD_S * (1 + 1e-9) for busy_s in run.busy_s)


@given(arrivals, slots)
def test_busy_time_lies_between_full_and_single_devices(found: list[Arrivals], num_slots: int) -> None:
    run = play(found, CURVE, num_devices=3, num_slots=num_slots)
    alone_s, full = hours_alone(found), CURVE.at(num_slots) / num_slots
    assert alone_s * full * (1 - 1e-9) <= run.total_busy_s <= alone_s * (1 + 1e-9)


@given(arrivals, slots, st.floats(1.01, 4.0))
def test_faster_decoding_needs_no_more_devices(found: list[Arrivals], num_slots: int, speedup: float) -> None:
    now, faster = (
        least_fleet(each, CURVE, num_slots=num_slots, deadline_s=900.0)
        for each in (found, [coming.faster(speedup) for coming in found])
    )
    assert faster.num_devices <= now.num_devices


def test_first_in_is_first_out_at_the_speed_of_the_load() -> None:
    found = [Arrivals(0.0, 100.0, 2), Arrivals(10.0, 50.0, 1)]
    run = play(found, LoadCurve((1.0, 2.0), (1.0, 1.5)), num_devices=1, num_slots=2)
    # Two at 1.5 end at 150 s; the third waits for them and then takes 50 s alone.
    assert run.slowest_s == pytest.approx(190.0)
    assert run.busy_s == pytest.approx((200.0,))
    assert play(found, FLAT, num_devices=1, num_slots=3).slowest_s == pytest.approx(100.0)


def test_the_rest_of_an_arrival_goes_before_later_ones() -> None:
    run = play([Arrivals(0.0, 100.0, 3), Arrivals(10.0, 50.0, 1)], FLAT, num_devices=1, num_slots=1)
    assert run.slowest_s == pytest.approx(340.0), "the later one ends last, at 350 s"


def test_one_arrival_may_be_too_long_and_delays_no_plan() -> None:
    found = [Arrivals(0.0, 5000.0, 1), Arrivals(0.0, 10.0, 1)]
    least = least_fleet(found, FLAT, num_slots=2, deadline_s=60.0)
    assert (least.num_devices, least.num_late, least.slowest_s) == (1, 0, 10.0)
    assert least.total_busy_s == pytest.approx(5000.0), "it is decoded all the same"


def test_busy_time_is_summed_by_quarters_of_an_hour() -> None:
    run = play([Arrivals(850.0, 100.0, 1), Arrivals(4000.0, 10.0, 1)], FLAT, num_devices=1, num_slots=1)
    assert run == FleetRun(1, 0, 100.0, (50.0, 50.0, 0.0, 0.0, pytest.approx(10.0)))  # type: ignore[arg-type]


def test_the_busiest_window_has_the_most_work_of_full_devices() -> None:
    found = [Arrivals(0.0, 90.0, 1), Arrivals(4000.0, 60.0, 1), Arrivals(4500.0, 40.0, 2), Arrivals(7600.0, 50.0, 1)]
    window = busiest(found, CURVE, num_slots=8, length_s=3600.0)
    assert (window.begins_s, window.device_s) == pytest.approx((4000.0, 140 * 2.0 / 8)), "the end is not in it"
    longer = busiest(found, CURVE, num_slots=8, length_s=3601.0)
    assert (longer.begins_s, longer.num_devices) == pytest.approx((4000.0, 190 * 2.0 / 8 / 3601))


@given(arrivals, slots)
def test_work_by_periods_is_all_the_work_of_full_devices(found: list[Arrivals], num_slots: int) -> None:
    work = work_by_period(found, CURVE, num_slots=num_slots)
    assert math.fsum(work) == pytest.approx(hours_alone(found) * CURVE.at(num_slots) / num_slots)
    assert len(work) == 1 + int(found[-1].at_s / PERIOD_S)
    assert all(
        (work[period] > 0) == any(int(each.at_s / PERIOD_S) == period for each in found) for period in range(len(work))
    )


def test_the_curve_is_measured_within_tasks_whatever_ran_when() -> None:
    """`long` runs at night at a full device, with three times the time a token: its load is not to blame for that."""
    rng = np.random.default_rng(7)
    jobs = []
    for load in (1.0, 2.0, 4.0, 8.0):
        for task, token_s, number in (("chat", 0.01, 40 / load), ("long", 0.03, 5 * load)):
            wall_s = 100 * token_s * CURVE.at(load) * float(rng.uniform(0.99, 1.01))
            jobs.append(decoded(load, wall_s, task=task, number=round(number)))
    curve = LoadCurve.of_jobs(jobs)
    assert curve.loads == (1.0, 2.0, 4.0, 8.0)
    assert curve.slowness == pytest.approx([CURVE.at(load) for load in curve.loads], rel=0.03)
    works = [arrivals_of(each, curve).alone_s for each in jobs if each.task == "chat"]
    assert works == pytest.approx([1.0] * 4, rel=0.03), "a job's work does not depend on the load at which it ran"


def test_loads_at_which_no_task_can_be_compared_gain_nothing() -> None:
    curve = LoadCurve.of_jobs([decoded(1.0, 1.0, task="chat"), decoded(4.0, 9.0, task="long")])
    assert curve.slowness == (1.0, 4.0)
    of_two_devices = LoadCurve.of_jobs([decoded(1.0, 1.0, device="slow"), decoded(4.0, 0.2, device="fast")])
    assert of_two_devices.slowness == (1.0, 4.0)


def test_unseen_loads_are_taken_for_the_worse() -> None:
    curve = LoadCurve((2.0, 4.0), (1.0, 1.5))
    assert [curve.at(load) for load in (1.0, 2.0, 3.0, 4.0, 8.0)] == [1.0, 1.0, 1.25, 1.5, 3.0]


@pytest.mark.parametrize(("measured", "taken"), [(0.5, 1.0), (7.0, 4.0)])
def test_a_load_makes_no_sequence_faster_and_no_device_slower(measured: float, taken: float) -> None:
    assert LoadCurve.of_jobs([decoded(1.0, 1.0), decoded(4.0, measured)]).slowness == (1.0, taken)


def test_a_few_jobs_make_no_curve_unless_there_are_no_others() -> None:
    few = decoded(4.0, 2.0, number=4)
    assert LoadCurve.of_jobs([decoded(1.0, 1.0), few]).loads == (1.0,)
    assert LoadCurve.of_jobs([few]) == LoadCurve((4.0,), (1.0,))
    several = replace(few, num_texts=2)
    assert LoadCurve.of_jobs([decoded(1.0, 1.0), several]).loads == (1.0, 4.0), "each text is a sequence"
    assert arrivals_of(several, CURVE).number == 8
