"""The drift test: its claimed rate of false alarms, its delay, and what must not alarm it."""

from __future__ import annotations

import random
from datetime import UTC, datetime
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alphaloop.measurements import DecodedJob
from scheduler.cusum import Drift, average_run_length, cusum_threshold, watch

AT = datetime(2026, 1, 1, tzinfo=UTC)


def drawn_job(
    rng: random.Random, alpha: float, *, correlation: float = 0.0, num_draft_tokens: int = 3, fall: float = 0.0
) -> DecodedJob:
    """A text of 12 to 100 tokens. A job's own α is beta distributed; α_i falls by `fall` a position."""
    if correlation:
        weight = 1 / correlation - 1
        alpha = rng.betavariate(alpha * weight, (1 - alpha) * weight)
    num_tokens = rng.randint(12, 100)
    trials, accepts = [0] * num_draft_tokens, [0] * num_draft_tokens
    emitted = 1
    while emitted < num_tokens:
        emitted += 1
        for i in range(num_draft_tokens):
            if emitted >= num_tokens:
                break
            trials[i] += 1
            if rng.random() >= max(0.0, alpha - fall * i):
                break
            accepts[i] += 1
            emitted += 1
    return DecodedJob(AT, num_draft_tokens, "faster", tuple(trials), tuple(accepts), num_tokens, 1.0)


def seen(drift: Drift | None) -> Drift:
    assert drift is not None
    return drift


def test_the_threshold_is_siegmunds() -> None:
    # Hawkins and Olwell 1998, table of h for a two-sided CUSUM at κ = .5: ARL 370 at h = 4.77, 1000 at h = 5.76.
    assert cusum_threshold(370) == pytest.approx(4.77, abs=0.03)
    assert cusum_threshold(1000) == pytest.approx(5.76, abs=0.03)
    assert average_run_length(cusum_threshold(2000)) == pytest.approx(2000, rel=1e-6)


@given(st.floats(10, 1e6), st.floats(1.01, 10))
def test_fewer_false_alarms_need_a_higher_threshold(jobs: float, factor: float) -> None:
    assert cusum_threshold(jobs * factor) > cusum_threshold(jobs)


@pytest.mark.parametrize("num_positions", [1, 3])
@pytest.mark.parametrize("alpha", [0.3, 0.7, 0.9])
def test_false_alarms_come_as_seldom_as_claimed(
    alpha: float, num_positions: int, rng: random.Random, seed: int
) -> None:
    claimed, num_jobs, num_alarms = 200, 0, 0
    for _ in range(60):
        jobs = [drawn_job(rng, alpha, correlation=0.1, fall=0.08) for _ in range(400)]
        drift = seen(watch(jobs, false_alarm_jobs=claimed, min_jobs=8, num_positions=num_positions))
        num_jobs, num_alarms = num_jobs + drift.num_jobs - 8, num_alarms + drift.num_alarms
    measured = num_jobs / max(num_alarms, 1)
    print(f"seed {seed}: α {alpha}, {num_positions} positions: claimed {claimed} jobs, measured {measured:.0f}")
    assert claimed / 2.2 < measured < claimed * 2.2


def test_a_fall_of_a_tenth_is_found_soon(rng: random.Random, seed: int) -> None:
    delays = []
    for _ in range(40):
        before = [drawn_job(rng, 0.75, correlation=0.05) for _ in range(150)]
        after = [drawn_job(rng, 0.65, correlation=0.05) for _ in range(150)]
        delay = next(
            n
            for n in range(2, 151, 2)
            if n == 150 or seen(watch([*before, *after[:n]], false_alarm_jobs=2000, min_jobs=8)).direction < 0
        )
        delays.append(delay)
    print(f"seed {seed}: .75 to .65 found after {mean(delays):.0f} jobs on average, {max(delays)} at most")
    assert mean(delays) < 50


def test_a_fall_is_dated_and_measured(rng: random.Random) -> None:
    jobs = [drawn_job(rng, 0.85) for _ in range(200)] + [drawn_job(rng, 0.5) for _ in range(40)]
    drift = seen(watch(jobs, false_alarm_jobs=2000, min_jobs=8))
    assert (drift.is_alarm, drift.direction) == (True, -1)
    assert 0 < drift.statistic <= drift.threshold
    assert 35 <= drift.num_jobs_since_change <= 60
    assert drift.alpha_before == pytest.approx(0.85, abs=0.05)
    assert drift.alpha_after is not None
    assert drift.alpha_after < 0.65


def test_a_rise_is_found_too(rng: random.Random) -> None:
    jobs = [drawn_job(rng, 0.4) for _ in range(150)] + [drawn_job(rng, 0.75) for _ in range(40)]
    assert seen(watch(jobs, false_alarm_jobs=2000, min_jobs=8)).direction == 1


def test_the_alarm_ends_after_recovery(rng: random.Random) -> None:
    jobs = [drawn_job(rng, 0.85) for _ in range(200)] + [drawn_job(rng, 0.5) for _ in range(60)]
    assert seen(watch(jobs, false_alarm_jobs=50_000, min_jobs=8)).direction < 0
    jobs += [drawn_job(rng, 0.85) for _ in range(100)]
    drift = seen(watch(jobs, false_alarm_jobs=50_000, min_jobs=8))
    assert not drift.is_alarm
    assert drift.num_alarms >= 1


@pytest.mark.parametrize("num_positions", [1, 8])
def test_another_draft_length_is_not_drift(num_positions: int, rng: random.Random) -> None:
    """accepted / proposed falls from .8 to .42 here, and pooled α falls too: neither is what is tested."""
    jobs = [drawn_job(rng, 0.8, num_draft_tokens=1, fall=0.05) for _ in range(150)]
    jobs += [drawn_job(rng, 0.8, num_draft_tokens=8, fall=0.05) for _ in range(150)]
    drift = seen(watch(jobs, false_alarm_jobs=50_000, min_jobs=8, num_positions=num_positions))
    assert drift.num_alarms == 0


def test_too_few_jobs_say_nothing(rng: random.Random) -> None:
    jobs = [drawn_job(rng, 0.8) for _ in range(8)]
    nothing_proposed = DecodedJob(AT, 3, "faster", (), (), 50, 1.0)
    assert watch([*jobs, nothing_proposed, nothing_proposed], false_alarm_jobs=2000, min_jobs=8) is None


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_a_spotless_reference_does_not_divide_by_zero(alpha: float, rng: random.Random) -> None:
    steady = [drawn_job(rng, alpha) for _ in range(60)]
    assert not seen(watch(steady, false_alarm_jobs=200, min_jobs=8)).is_alarm
    moved = steady + [drawn_job(rng, 0.5) for _ in range(30)]
    assert seen(watch(moved, false_alarm_jobs=2000, min_jobs=8)).is_alarm


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30), st.integers(1, 200)), max_size=60))
def test_any_counts_are_taken(drawn: list[tuple[int, int, int]]) -> None:
    jobs = [DecodedJob(AT, 1, "faster", (max(n, a),), (min(n, a),), num_tokens, 1.0) for n, a, num_tokens in drawn]
    drift = watch(jobs, false_alarm_jobs=100, min_jobs=2)
    if drift is not None:
        assert 0 <= drift.statistic <= drift.threshold
        assert drift.accepts_before <= drift.trials_before
        assert drift.accepts_after <= drift.trials_after
        assert drift.is_alarm == (drift.direction != 0)
