"""Sums of a request as counts: whatever they are spread over, they stay the sums, and tokens a round follow."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alphaloop.acceptance import PREFILL, AcceptanceCounts, EvidenceKey, counts_from_sums
from alphaloop.deciding.evidence import EvidenceSums, KeyEvidence, together
from alphaloop.deciding.inference import PairPosterior, infer
from alphaloop.deciding.posterior import Posterior

NOW = datetime(2026, 11, 1, tzinfo=UTC)
KEY = EvidenceKey("code", "t", "e", "greedy", "<=256", "", "ngram", "r1")
HALF_LIFE = timedelta(days=3)


def decoded(rng: random.Random, alphas: tuple[float, ...], reach: float, num_rounds: int) -> AcceptanceCounts:
    """A job of drafts of full length, or none, of which no round is cut."""
    counts = PREFILL
    for _ in range(num_rounds):
        accepted = 0
        proposed = len(alphas) if rng.random() < reach else 0
        while accepted < proposed and rng.random() < alphas[accepted]:
            accepted += 1
        counts = counts.with_round(proposed, accepted, num_emitted=accepted + 1)
    return counts


@given(
    alphas=st.lists(st.floats(0.0, 1.0), min_size=1, max_size=8).map(tuple),
    reach=st.floats(0.0, 1.0),
    num_rounds=st.integers(0, 120),
    seed=st.integers(0, 1000),
)
def test_the_sums_come_back(alphas: tuple[float, ...], reach: float, num_rounds: int, seed: int) -> None:
    exact = decoded(random.Random(seed), alphas, reach, num_rounds)
    found = counts_from_sums(exact.num_tokens, sum(exact.proposed), exact.num_accepted, len(alphas))
    assert found is not None
    assert (found.rounds, found.num_tokens, found.num_accepted) == (
        exact.rounds,
        exact.num_tokens,
        exact.num_accepted,
    )
    assert (found.num_empty_rounds, found.num_cropped) == (exact.num_empty_rounds, 0)
    assert sum(found.proposed) == sum(exact.proposed)


@given(st.integers(1, 300), st.integers(0, 400), st.integers(0, 400), st.integers(1, 8))
def test_whatever_a_server_tells_gives_counts_or_none(tokens: int, proposed: int, accepted: int, k: int) -> None:
    found = counts_from_sums(tokens, proposed, accepted, k)
    if found is not None:
        assert (found.num_tokens, found.num_accepted) == (tokens, accepted)


@pytest.mark.parametrize("sums", [(10, 4, 5, 4), (3, 8, 4, 4), (0, 0, 0, 4), (5, -1, -1, 4), (30, 29, 29, 1)])
def test_impossible_sums_are_no_counts(sums: tuple[int, int, int, int]) -> None:
    assert counts_from_sums(*sums) is None


def test_a_last_round_that_was_cut_is_known_by_its_missing_tokens() -> None:
    found = counts_from_sums(6, 8, 5, 4)
    assert found is not None
    assert (found.rounds, found.num_cropped, found.accepts) == (3, 2, (2, 1, 1, 1))


def posterior(jobs: list[AcceptanceCounts], k: int) -> Posterior:
    sums = together([EvidenceSums.of_job(job, k, NOW, job.num_tokens) for job in jobs], HALF_LIFE)
    pair = PairPosterior.unknown(k)
    return infer({KEY: KeyEvidence(sums, sums)}, KEY, k, pair)


def test_tokens_a_round_are_as_sure_as_with_counts_by_position() -> None:
    """Jobs differ in α, which falls with the position; the sums give tokens at the server's k as the counts do."""
    rng, exact, summed = random.Random(5), [], []
    for _ in range(60):
        level = rng.gauss(0.0, 0.08)
        counts = decoded(rng, tuple(min(0.98, max(0.02, a + level)) for a in (0.75, 0.65, 0.5, 0.45)), 0.8, 40)
        exact.append(counts)
        found = counts_from_sums(counts.num_tokens, sum(counts.proposed), counts.num_accepted, 4)
        assert found is not None
        summed.append(found)
    by_position, by_sums = posterior(exact, 4), posterior(summed, 4)
    mean = sum(job.num_tokens - 1 for job in exact) / sum(job.rounds - 1 for job in exact)
    assert by_sums.tokens[4] == pytest.approx(by_position.tokens[4], rel=0.02)
    assert abs(by_sums.tokens[4] - mean) < 2 * by_sums.tokens_sd[4]
    assert 0.5 < by_sums.tokens_sd[4] / by_position.tokens_sd[4] < 2.0
