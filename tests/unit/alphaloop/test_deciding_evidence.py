from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import zip_longest

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alphaloop.acceptance import AcceptanceCounts
from alphaloop.deciding.evidence import SUMS, EvidenceSums, KeyEvidence

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
HALF_LIFE = timedelta(days=3)


def job(accepted: list[int], k: int, at: datetime = NOON) -> EvidenceSums:
    """A prefill, then a round of k tokens for each number of accepted ones."""
    counts = AcceptanceCounts().with_round(0, 0, num_emitted=1)
    for n in accepted:
        counts = counts.with_round(k, n, num_emitted=n + 1)
    return EvidenceSums.of_job(counts, k, at, counts.num_tokens, 30)


@st.composite
def jobs(draw: st.DrawFn) -> EvidenceSums:
    k = draw(st.integers(1, 6))
    accepted = draw(st.lists(st.integers(0, k), max_size=8))
    return job(accepted, k, NOON + timedelta(hours=draw(st.integers(-400, 400))))


def assert_close(left: EvidenceSums, right: EvidenceSums) -> None:
    assert left.as_of == right.as_of
    for name in SUMS:
        one, other = (its if isinstance(its := getattr(sums, name), tuple) else (its,) for sums in (left, right))
        for a, b in zip_longest(one, other, fillvalue=0.0):
            assert a == pytest.approx(b, rel=1e-9, abs=1e-9), name


def test_a_job_is_what_its_rounds_were_with_the_prefill_left_out() -> None:
    sums = job([2, 0, 3, 1], 3)
    assert (sums.jobs, sums.rounds, sums.offered, sums.tokens) == (1, 4, 4, 10)
    assert (sums.output_tokens, sums.prompt_tokens) == (11, 30)
    assert sums.chances == (4, 3, 2)
    assert sums.trials == (4, 3, 2)
    assert sums.accepts == (3, 2, 1)
    assert sums.chances_w2 == (16, 9, 4)
    assert sums.accepts_chances_w2 == (12, 6, 2)


def test_a_drafter_that_ends_early_had_the_chance_to_go_on() -> None:
    counts = AcceptanceCounts().with_round(0, 0, num_emitted=1)
    for num_proposed, num_accepted in ((2, 2), (0, 0), (1, 1)):
        counts = counts.with_round(num_proposed, num_accepted, num_emitted=num_accepted + 1)
    sums = EvidenceSums.of_job(counts, 8, NOON, counts.num_tokens)
    assert sums.chances == (3, 2, 1)  # the third token could have been proposed once, and was not
    assert sums.trials == (2, 1, 0)
    assert sums.offered == 2


@given(one=jobs(), hours=st.tuples(st.integers(0, 500), st.integers(0, 500)))
def test_fading_twice_is_fading_once(one: EvidenceSums, hours: tuple[int, int]) -> None:
    first, second = one.as_of + timedelta(hours=hours[0]), one.as_of + timedelta(hours=sum(hours))
    assert_close(one.faded(first, HALF_LIFE).faded(second, HALF_LIFE), one.faded(second, HALF_LIFE))


def test_the_recent_window_is_a_few_dozen_jobs_however_many_there_were() -> None:
    evidence = KeyEvidence.empty(NOON)
    for _ in range(300):
        evidence = evidence.with_job(job([1, 2], 3), HALF_LIFE)
    assert evidence.all.jobs == pytest.approx(300)
    assert evidence.recent.jobs == pytest.approx(1 / (1 - 2 ** (-1 / 16)), rel=1e-3)
    assert 40 < evidence.recent.effective_jobs < 50
    assert evidence.all.effective_jobs == pytest.approx(300)


def test_half_a_life_later_a_job_weighs_half_and_its_square_a_quarter() -> None:
    faded = job([3, 3], 3).faded(NOON + HALF_LIFE, HALF_LIFE)
    assert faded.jobs == pytest.approx(0.5)
    assert faded.accepts_w2 == pytest.approx((1.0, 1.0, 1.0))
    assert faded.effective_jobs == pytest.approx(1.0)


def test_what_the_last_jobs_contradict_is_forgotten_and_nothing_else() -> None:
    evidence = KeyEvidence.empty(NOON)
    for _ in range(200):
        evidence = evidence.with_job(job([3, 2, 3, 1, 3, 3, 2, 3, 3, 3] * 3, 3), HALF_LIFE)
    assert evidence.all.jobs == pytest.approx(200)
    for _ in range(12):
        evidence = evidence.with_job(job([0, 1, 0, 0, 0, 1, 0, 0, 0, 0] * 3, 3), HALF_LIFE)
    assert evidence.all.jobs < 40
    assert evidence.all.accepts[0] / evidence.all.chances[0] < 0.75  # from .97; two thirds of the jobs are the old ones
