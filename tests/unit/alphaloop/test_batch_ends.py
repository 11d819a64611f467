"""When batches end: shares, what lies before them, what is not known, and what earlier promises change."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from alphaloop.batches.ends import (
    ArrivalCourse,
    Kept,
    LatelyDecoded,
    OpenBatch,
    Outlook,
    PromiseCorrection,
    Situation,
    arrivals_of,
    divided,
    outlooks,
    quarter_of,
)

NOW = 1_000_000.0
CHAT, CODE, NIGHT = ("chat", ""), ("code", ""), ("code", "night")


def decoded(
    line: tuple[str, str], num: int = 100, device_s: float = 1.0, batch_id: str | None = None, spread: float = 0.0
) -> list[LatelyDecoded]:
    rng = random.Random(1)
    times = [device_s * (1 + spread * rng.uniform(-1, 1)) for _ in range(num)]
    return [
        LatelyDecoded(*line, batch_id, NOW - 500 - number, NOW - number, 8 * each, each)
        for number, each in enumerate(times)
    ]


def situation(*batches: OpenBatch, lately: Sequence[LatelyDecoded] | None = None, **others: object) -> Situation:
    jobs = [*decoded(CHAT), *decoded(CODE), *decoded(NIGHT, batch_id="b0")] if lately is None else lately
    given: dict[str, object] = {"num_workers": 1, "num_unfinished": {}, "arrivals": {CHAT: none(), CODE: none()}}
    return Situation(now_s=NOW, batches=batches, lately=jobs, **(given | others))  # type: ignore[arg-type]


def none() -> ArrivalCourse:
    return ArrivalCourse([0.0] * 24)


def night(num_open: float = 1000, name: str = "b1", created_s: float = NOW - 1) -> OpenBatch:
    return OpenBatch(name, created_s, {NIGHT: num_open})


def median_s(given: Situation, name: str = "b1") -> float:
    outlook = outlooks(given)[name]
    assert outlook.why is None
    return outlook.median_s


def test_a_batch_alone_takes_its_device_seconds_over_the_workers() -> None:
    assert median_s(situation(night())) == pytest.approx(1000, rel=0.05)
    assert median_s(situation(night(), num_workers=4)) == pytest.approx(250, rel=0.15)


def test_what_waits_of_other_tasks_and_segments_counts_by_weight() -> None:
    busy = {"chat": 10_000, "code": 11_000}
    assert median_s(situation(night(), num_unfinished=busy)) == pytest.approx(4000, rel=0.1), "a quarter of the device"
    given = situation(night(), num_unfinished=busy, task_weight=lambda task: {"code": 3.0}.get(task, 1.0))
    assert median_s(given) == pytest.approx(2667, rel=0.1)
    given = situation(night(), num_unfinished=busy, segment_weight=lambda segment: 3.0 if segment else 1.0)
    assert median_s(given) == pytest.approx(2667, rel=0.1)


def test_arrivals_of_others_take_the_device_and_those_of_its_own_line_come_after_it() -> None:
    half = ArrivalCourse([1800.0] * 24)
    assert median_s(situation(night(), arrivals={CHAT: half, CODE: none()})) == pytest.approx(2000, rel=0.1)
    assert median_s(situation(night(), arrivals={CHAT: none(), CODE: none(), NIGHT: half})) == pytest.approx(
        1000, rel=0.05
    )


def test_jobs_of_its_line_that_were_decoded_before_it_go_on_overtaking() -> None:
    came_later = [replace(job, arrived_s=job.decoded_s) for job in decoded(NIGHT, num=50)]
    lately = [*came_later, *(replace(job, decoded_s=NOW - 2 * n) for n, job in enumerate(decoded(CODE, num=50)))]
    old = night(created_s=NOW - 400)
    assert median_s(situation(old, lately=lately)) > 1.3 * median_s(situation(night(), lately=lately))


def test_an_older_batch_of_the_segment_goes_first() -> None:
    given = situation(night(name="new"), night(name="old", created_s=NOW - 3600))
    assert median_s(given, "old") == pytest.approx(1000, rel=0.05)
    assert median_s(given, "new") == pytest.approx(2000, rel=0.05)


def test_messages_of_open_batches_do_not_wait_before_them_a_second_time() -> None:
    lately = decoded(NIGHT)
    assert median_s(situation(night(), lately=lately, num_unfinished={"code": 1000})) == pytest.approx(1000, rel=0.05)
    two = night(500, "new"), night(500, "old", created_s=NOW - 100)
    given = situation(*two, lately=lately, num_unfinished={"code": 1000})
    assert median_s(given, "new") == pytest.approx(1000, rel=0.05)
    given = situation(*two, lately=lately, num_unfinished={"code": 3000})
    assert median_s(given, "new") == pytest.approx(3000, rel=0.05), "2,000 of no batch were sent before it"


def test_a_small_batch_ends_when_the_worker_with_the_most_of_it_has_done_its_part() -> None:
    """Eight jobs over four workers at random: one has about four of them, not two."""
    given = situation(night(8), lately=decoded(NIGHT, device_s=100.0), num_workers=4)
    assert 300 <= median_s(given) <= 500


def test_the_end_is_as_uncertain_as_the_lengths_of_the_jobs_that_are_left() -> None:
    lately = [replace(job, wall_s=job.device_s) for job in decoded(NIGHT, num=200, device_s=10.0, spread=0.9)]
    outlook = outlooks(situation(night(25), lately=lately))["b1"]
    lengths_sd = 0.9 / math.sqrt(3)  # of one job, over its mean: lengths are uniform
    expected = math.sqrt(lengths_sd**2 * (1 / 25 + 1 / 200) + 0.03**2)
    assert outlook.sd_s / outlook.median_s == pytest.approx(expected, rel=0.4)
    few = outlooks(situation(night(4), lately=lately))["b1"]
    assert few.sd_s / few.median_s > 1.5 * outlook.sd_s / outlook.median_s


def test_arrivals_that_come_together_make_the_end_less_certain() -> None:
    sd_s = {}
    for dispersion in (1.0, 400.0):
        course = ArrivalCourse([1800.0] * 24, dispersion)
        sd_s[dispersion] = outlooks(situation(night(), arrivals={CHAT: course, CODE: none()}))["b1"].sd_s
    assert sd_s[400.0] > 1.3 * sd_s[1.0]


def test_a_batch_ends_with_its_window_at_the_latest() -> None:
    outlook = outlooks(situation(replace(night(), deadline_s=NOW + 300)))["b1"]
    assert PromiseCorrection.of([]).interval_s(outlook) == (300, 300, 300)
    busy = situation(replace(night(), deadline_s=NOW + 300), num_unfinished={"code": 10**8}, lately=decoded(NIGHT))
    assert outlooks(busy)["b1"].why is None
    over = outlooks(situation(replace(night(), deadline_s=NOW - 5)))["b1"]
    assert PromiseCorrection.of([]).interval_s(over) == (0, 0, 0)


def test_its_own_jobs_say_what_the_others_will_take() -> None:
    mine = decoded(NIGHT, num=200, device_s=3.0, batch_id="b1")
    assert median_s(situation(night(), lately=[*decoded(CHAT), *decoded(NIGHT), *mine])) > 2500


def test_jobs_that_had_the_device_for_themselves_do_not_say_what_a_full_one_takes() -> None:
    alone = [replace(job, wall_s=8.0, device_s=8.0) for job in decoded(NIGHT)]
    full = [replace(job, decoded_s=job.decoded_s - 1000) for job in decoded(NIGHT)]
    assert median_s(situation(night(), lately=[*alone, *full])) == pytest.approx(1000, rel=0.05)


def test_uneven_lengths_and_few_jobs_widen_the_outlook() -> None:
    uneven = [*decoded(CHAT), *decoded(NIGHT, spread=0.9)]
    sure, unsure = outlooks(situation(night())), outlooks(situation(night(), lately=uneven))
    few = outlooks(situation(night(20), lately=uneven))
    assert sure["b1"].sd_s < unsure["b1"].sd_s
    assert unsure["b1"].sd_s / unsure["b1"].median_s < few["b1"].sd_s / few["b1"].median_s


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (situation(night(), num_workers=0), "no worker runs"),
        (situation(night(), lately=[]), "no job has ended"),
        (situation(night(), arrivals={NIGHT: none()}, num_unfinished={"code": 3_000_000}), "more than 14 days"),
    ],
)
def test_it_says_why_an_end_is_not_known(given: Situation, why: str) -> None:
    if "14 days" in why:
        given = replace(given, lately=decoded(NIGHT))
    outlook = outlooks(given)["b1"]
    assert outlook.why is not None
    assert why in outlook.why
    assert math.isnan(outlook.median_s)


def test_the_same_situation_has_the_same_outlook() -> None:
    given = situation(night(), lately=[*decoded(CHAT, spread=0.5), *decoded(NIGHT, spread=0.5)])
    assert outlooks(given) == outlooks(given)


def test_promises_that_were_missed_widen_the_next_interval_and_late_ends_shift_it() -> None:
    outlook = Outlook(1000.0, 50.0)
    calibrations = {
        "before": PromiseCorrection.of([]),
        "good": PromiseCorrection.of([Kept(str(n), 1000, 50, 1000 + 50 * (-1) ** n) for n in range(100)]),
        "bad": PromiseCorrection.of([Kept(str(n), 1000, 50, 1000 + 200 * (-1) ** n) for n in range(100)]),
        "late": PromiseCorrection.of([Kept(str(n), 1000, 50, 1100) for n in range(100)]),
    }
    intervals_s = {name: calibration.interval_s(outlook) for name, calibration in calibrations.items()}
    widths = {name: high_s - low_s for name, (_, low_s, high_s) in intervals_s.items()}
    assert widths["bad"] > 3 * widths["good"]
    assert widths["late"] < widths["good"] < widths["before"]
    middle_s, low_s, high_s = intervals_s["late"]
    assert middle_s == pytest.approx(1096, abs=1)
    assert low_s < 1000 + 100 < high_s


def test_a_batch_counts_once_however_many_promises_it_had() -> None:
    kept = [Kept("a", 1000, 50, 1000)] + [Kept("b", 1000, 50, 1300)] * 50
    assert PromiseCorrection.of(kept) == PromiseCorrection.of(kept[:2])


def test_a_quarter_in_which_promises_were_missed_by_more_has_wider_intervals() -> None:
    """Late in a batch a few long jobs count for more, so what early promises say holds for early ones."""
    kept = [
        Kept(str(n), 1000, 50, 1000 + 50 * (3 if quarter == 3 else 1) * (-1) ** n, quarter)
        for n in range(100)
        for quarter in range(4)
    ]
    corrections = PromiseCorrection.by_quarter(kept)
    assert [each.scale for each in corrections] == pytest.approx([1, 1, 1, 3], rel=0.1)
    assert [each.num_batches for each in corrections] == [100] * 4
    unseen = PromiseCorrection.by_quarter(kept[0::4])
    assert unseen[3].scale == pytest.approx(PromiseCorrection.of(kept[0::4]).scale), "before its own, what all say"
    assert [PromiseCorrection.by_quarter([])[n] for n in range(4)] == [PromiseCorrection.of([])] * 4


@pytest.mark.parametrize(
    ("num_open", "num_total", "quarter"),
    [(100, 100, 0), (76, 100, 0), (75, 100, 1), (25, 100, 3), (0, 7, 3), (0, 0, 3)],
)
def test_quarters_are_of_the_requests_that_have_ended(num_open: int, num_total: int, quarter: int) -> None:
    assert quarter_of(num_open, num_total) == quarter


def test_one_death_of_a_worker_does_not_make_every_later_interval_useless() -> None:
    kept = [Kept(str(n), 1000, 50, 1000) for n in range(50)]
    dead = PromiseCorrection.of([*kept, Kept("dead", 100, 1, 100_000)])
    assert dead.scale < 2


def test_shares_are_max_min_fair_by_weight() -> None:
    wanted = np.array([[10.0, 1.0, 10.0], [1.0, 1.0, 1.0]])
    got = divided(wanted, np.array([1.0, 1.0, 3.0]), np.array([9.0, 9.0]))
    assert got[0] == pytest.approx([2.0, 1.0, 6.0])
    assert got[1] == pytest.approx([1.0, 1.0, 1.0]), "none gets more than it wants"


def test_arrivals_follow_the_course_of_days_at_the_level_of_the_last_hours() -> None:
    course = {hour: 100.0 if hour % 24 >= 12 else 20.0 for hour in range(48, 96)}
    found = arrivals_of({CHAT: course}, 48, 96)[CHAT]
    assert found.num_by_hour[13] == pytest.approx(100)
    assert found.num_by_hour[3] == pytest.approx(20)
    doubled = arrivals_of({CHAT: {hour: 2 * n if hour >= 93 else n for hour, n in course.items()}}, 48, 96)[CHAT]
    assert 20 < doubled.num_by_hour[3] < 40
    unseen = arrivals_of({CHAT: {hour: 100.0 for hour in range(60, 64)}}, 60, 64)[CHAT]
    assert unseen.num_by_hour == pytest.approx([100.0] * 24)
    assert not arrivals_of({CHAT: {64: 7.0}}, 60, 64), "an hour that is not over counts for nothing"


def test_jobs_that_come_together_have_a_greater_dispersion() -> None:
    rng = np.random.default_rng(1)
    single = {hour: float(n) for hour, n in enumerate(rng.poisson(50, 200))}
    together = {hour: 25.0 * n for hour, n in enumerate(rng.poisson(2, 200))}
    found = arrivals_of({CHAT: single, CODE: together}, 0, 200)
    assert found[CHAT].dispersion == pytest.approx(1, abs=0.3)
    assert found[CODE].dispersion == pytest.approx(25, rel=0.3)
