"""Decay and the standard error of history, on sums made from jobs that are known one by one."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alphaloop.acceptance import AcceptanceCounts
from alphaloop.store.history import _evidence, _tokens_per_round_se
from tests.fixtures.runs import simulated_counts

JOB = st.tuples(st.integers(0, 2**32), st.lists(st.floats(0, 1), min_size=0, max_size=5), st.integers(0, 12))
HOURS = st.lists(st.tuples(st.floats(1e-6, 1.0), st.lists(JOB, min_size=1, max_size=4)), min_size=1, max_size=5)


def hour(jobs: Sequence[AcceptanceCounts]) -> SimpleNamespace:
    """The row of acceptance_hourly that holds those jobs."""
    total = sum(jobs, AcceptanceCounts())
    return SimpleNamespace(
        num_jobs=len(jobs), num_draft_tokens=len(total.proposed), rounds=total.rounds,
        num_empty_rounds=total.num_empty_rounds, num_cropped=total.num_cropped, num_tokens=total.num_tokens,
        proposed=list(total.proposed), trials=list(total.trials), accepts=list(total.accepts),
        rounds_sq=sum(j.rounds**2 for j in jobs), tokens_sq=sum(j.num_tokens**2 for j in jobs),
        rounds_tokens=sum(j.rounds * j.num_tokens for j in jobs),
    )  # fmt: skip


@given(HOURS)
def test_decayed_counts_stay_consistent(hours: list[tuple[float, list[tuple[int, list[float], int]]]]) -> None:
    weighed = [
        (weight, hour([simulated_counts(random.Random(s), alphas, n) for s, alphas, n in jobs]))
        for weight, jobs in hours
    ]
    evidence = _evidence(weighed)  # AcceptanceCounts refuses what no rounds can produce
    assert evidence.counts.rounds == pytest.approx(sum(w * row.rounds for w, row in weighed), abs=0.51)
    assert evidence.num_jobs == pytest.approx(sum(w * row.num_jobs for w, row in weighed), abs=0.51)
    assert evidence.tokens_per_round_se is None or evidence.tokens_per_round_se >= 0


def test_the_standard_error_is_the_textbooks_ratio_estimator(rng: random.Random) -> None:
    """Cochran 1977, §6.4, straight from the jobs: prefills left out, no expansion into sums."""
    jobs = [simulated_counts(rng, [0.8, 0.6], rng.randint(1, 20)) for _ in range(40)]
    r = [job.rounds - 1 for job in jobs]
    t = [job.num_tokens - 1 for job in jobs]
    ratio = sum(t) / sum(r)
    variance = sum((ti - ratio * ri) ** 2 for ti, ri in zip(t, r, strict=True)) / (len(jobs) - 1)
    expected = math.sqrt(variance / len(jobs)) / statistics.mean(r)
    assert _tokens_per_round_se([(1.0, hour(jobs[:15])), (1.0, hour(jobs[15:]))]) == pytest.approx(expected)


def test_the_standard_error_is_the_spread_that_repetition_shows(rng: random.Random) -> None:
    """Jobs differ in their own α, so their tokens are not independent: the spread over jobs is what counts."""

    def repeat() -> tuple[float, float]:
        jobs = [simulated_counts(rng, [rng.choice((0.2, 0.9))] * 3, rng.randint(5, 15)) for _ in range(60)]
        row = hour(jobs)
        error = _tokens_per_round_se([(1.0, row)])
        assert error is not None
        return (row.num_tokens - row.num_jobs) / (row.rounds - row.num_jobs), error

    ratios, errors = zip(*(repeat() for _ in range(200)), strict=True)
    assert statistics.mean(errors) == pytest.approx(statistics.stdev(ratios), rel=0.25)


def test_one_job_or_only_prefills_have_no_standard_error(rng: random.Random) -> None:
    assert _tokens_per_round_se([(1.0, hour([simulated_counts(rng, [0.5], 9)]))]) is None
    assert _tokens_per_round_se([(1.0, hour([simulated_counts(rng, [], 0)] * 3))]) is None
