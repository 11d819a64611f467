"""Counts of rounds, and counts told from a server's sums: whatever these are spread over, they stay the sums."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alphaloop.acceptance import (
    PREFILL,
    AcceptanceCounts,
    EvidenceKey,
    InconsistentCounts,
    ProposerCounts,
    counts_from_sums,
    form_bucket,
    prompt_bucket,
    sampling_bucket,
)
from alphaloop.deciding.evidence import EvidenceSums, KeyEvidence, together
from alphaloop.deciding.inference import PairPosterior, infer
from alphaloop.deciding.posterior import Posterior

Round = tuple[int, int, int]


@st.composite
def rounds(draw: st.DrawFn) -> Round:
    """A round that can happen: proposed, accepted of it, and how many of accepted + 1 tokens belong to the text."""
    proposed = draw(st.integers(0, 8))
    accepted = draw(st.integers(0, proposed))
    return proposed, accepted, draw(st.integers(0, accepted + 1))


def total(sequence: Sequence[Round]) -> AcceptanceCounts:
    counts = AcceptanceCounts()
    for proposed, accepted, emitted in sequence:
        counts = counts.with_round(proposed, accepted, num_emitted=emitted)
    return counts


@given(st.lists(rounds(), max_size=30))
def test_the_counts_of_any_rounds_add_up(sequence: list[Round]) -> None:
    counts = total(sequence)
    assert counts.rounds == len(sequence)
    assert counts.num_tokens == sum(emitted for _, _, emitted in sequence)
    for proposed, trials, accepts in zip(counts.proposed, counts.trials, counts.accepts, strict=True):
        assert proposed >= trials >= accepts
    assert all(later <= earlier for earlier, later in zip(counts.accepts, counts.trials[1:], strict=False))
    assert (counts.proposed[0] if counts.proposed else 0) == counts.rounds - counts.num_empty_rounds


@given(st.lists(rounds(), max_size=12), st.lists(rounds(), max_size=12), st.lists(rounds(), max_size=12))
def test_adding_is_the_same_in_any_order(a: list[Round], b: list[Round], c: list[Round]) -> None:
    assert total(a) + total(b) == total(a + b) == total(b) + total(a)
    assert (total(a) + total(b)) + total(c) == total(a) + (total(b) + total(c))
    assert total(a) + AcceptanceCounts() == total(a)


def test_one_round_counts_each_position_once() -> None:
    counts = AcceptanceCounts().with_round(5, 2, num_emitted=3)
    assert counts == AcceptanceCounts(
        rounds=1, proposed=(1, 1, 1, 1, 1), trials=(1, 1, 1, 0, 0), accepts=(1, 1, 0, 0, 0)
    )
    assert (counts.num_accepted, counts.num_trials, counts.num_tokens) == (2, 3, 3)
    assert [counts.alpha_at(i) for i in range(1, 7)] == [1, 1, 0, None, None, None]


def test_a_round_cut_inside_its_accepted_tokens_is_censored_at_the_cut() -> None:
    counts = AcceptanceCounts().with_round(5, 4, num_emitted=2)
    assert (counts.proposed, counts.trials, counts.accepts) == ((1, 1), (1, 1), (1, 1))
    assert (counts.num_tokens, counts.num_cropped) == (2, 1)


def test_a_tree_whose_accepted_path_ends_at_a_leaf_was_not_tested_below_it() -> None:
    counts = AcceptanceCounts().with_round(3, 1, num_emitted=2, num_tested=1)
    assert (counts.proposed, counts.trials, counts.accepts) == ((1, 1, 1), (1, 0, 0), (1, 0, 0))
    rejected = AcceptanceCounts().with_round(3, 1, num_emitted=2, num_tested=2)
    assert rejected == AcceptanceCounts().with_round(3, 1, num_emitted=2)


@pytest.mark.parametrize(
    ("rounds", "num_tokens", "trials"),
    [
        ([(0, 0, 1, 4)], 5, ()),  # a vanilla round and what was forced behind it
        ([(3, 2, 3, 2)], 5, (1, 1, 1)),
        ([(3, 2, 1, 0)], 1, (1,)),  # the text ended inside: forced tokens behind the end are none of it
        ([(3, 2, 2, 1)], 3, (1, 1)),
        ([(0, 0, 1, 1), (2, 0, 1, 3)], 6, (1, 0)),
    ],
)
def test_forced_tokens_are_tokens_and_nothing_else(
    rounds: list[tuple[int, int, int, int]], num_tokens: int, trials: tuple[int, ...]
) -> None:
    """Of each round: proposed, accepted, emitted, forced."""
    counts, without = AcceptanceCounts(), AcceptanceCounts()
    for proposed, accepted, emitted, forced in rounds:
        counts = counts.with_round(proposed, accepted, num_emitted=emitted, num_forced=forced)
        without = without.with_round(proposed, accepted, num_emitted=emitted)
    assert (counts.num_tokens, counts.trials) == (num_tokens, trials)
    assert counts == replace(without, num_forced=counts.num_forced)
    assert counts.num_tokens - without.num_tokens == counts.num_forced == sum(forced for *_, forced in rounds)


@pytest.mark.parametrize(("trials", "accepts"), [((1,), ()), ((1,), (2,)), ((2, 1), (1, -1)), ((-1,), (-1,))])
def test_counts_of_a_proposer_that_cannot_be_are_refused(trials: tuple[int, ...], accepts: tuple[int, ...]) -> None:
    with pytest.raises(InconsistentCounts, match="grammar"):
        ProposerCounts("grammar", trials, accepts)
    assert ProposerCounts("grammar", (0, 0, 3), (0, 0, 2)), "a proposer may begin behind another's tokens"


@pytest.mark.parametrize("num_tested", [0, 3])
def test_depths_that_cannot_have_been_tested_are_refused(num_tested: int) -> None:
    with pytest.raises(InconsistentCounts, match="tested"):
        AcceptanceCounts().with_round(3, 1, num_emitted=2, num_tested=num_tested)


@pytest.mark.parametrize(
    "wrong",
    [
        {"rounds": 1, "proposed": (2,), "trials": (1,), "accepts": (1,)},
        {"rounds": 2, "proposed": (1,), "trials": (2,), "accepts": (1,)},
        {"rounds": 2, "proposed": (2,), "trials": (1,), "accepts": (2,)},
        {"rounds": 2, "proposed": (2,), "trials": (1,), "accepts": (-1,)},
        {"rounds": 3, "num_empty_rounds": 2, "proposed": (2,), "trials": (1,), "accepts": (1,)},
        {"rounds": 3, "proposed": (2, 3), "trials": (2, 1), "accepts": (2, 1)},
        {"rounds": 3, "proposed": (3, 3), "trials": (3, 3), "accepts": (2, 1)},
        {"rounds": 3, "proposed": (3, 3), "trials": (3,), "accepts": (2,)},
        {"rounds": -1},
        {"rounds": 1, "num_empty_rounds": 2},
        {"rounds": 1, "num_empty_rounds": -1},
        {"rounds": 1, "num_cropped": 2},
        {"rounds": 1, "num_cropped": -1},
        {"rounds": 1, "num_forced": -1},
    ],
)
def test_counts_that_no_rounds_produce_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(InconsistentCounts):
        AcceptanceCounts(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(("proposed", "accepted", "emitted"), [(2, 3, 4), (3, 1, 3), (3, 1, -1), (-1, 0, 1)])
def test_rounds_that_cannot_happen_are_refused(proposed: int, accepted: int, emitted: int) -> None:
    with pytest.raises(InconsistentCounts):
        AcceptanceCounts().with_round(proposed, accepted, num_emitted=emitted)


def test_positions_count_from_one() -> None:
    counts = AcceptanceCounts().with_round(2, 1, num_emitted=2)
    for position in (0, -1):
        with pytest.raises(InconsistentCounts):
            counts.alpha_at(position)


@pytest.mark.parametrize(
    ("temperature", "also", "bucket"),
    [
        (0.0, {"is_cut": True, "is_reproducible": True}, "greedy"),
        (0.0, {"is_adjusted": True}, "greedy,adjusted"),
        (0.5, {}, "t<=0.5"),
        (0.51, {}, "t<=1.0"),
        (1.0, {"is_cut": True}, "t<=1.0,cut"),
        (1.01, {}, "t>1.0"),
        (1e-9, {}, "t<=0.5"),
        (1.0, {"is_reproducible": True}, "t<=1.0,seeded"),
        (0.7, {"is_cut": True, "is_reproducible": True, "is_adjusted": True}, "t<=1.0,cut,seeded,adjusted"),
    ],
)
def test_sampling_buckets(temperature: float, also: dict[str, bool], bucket: str) -> None:
    assert sampling_bucket(temperature, **also) == bucket


@pytest.mark.parametrize(
    ("constraint", "has_tools", "has_images", "bucket"),
    [
        (None, False, False, ""),
        ("json_schema", False, False, "json"),
        ("grammar", True, True, "grammar,tools,images"),
        (None, True, False, "tools"),
        (None, False, True, "images"),
    ],
)
def test_form_buckets(constraint: str | None, has_tools: bool, has_images: bool, bucket: str) -> None:
    assert form_bucket(constraint=constraint, has_tools=has_tools, has_images=has_images) == bucket


def test_prompt_buckets_include_their_limit() -> None:
    assert [prompt_bucket(n) for n in (1, 256, 257, 1024, 4096, 4097)] == [
        "<=256",
        "<=256",
        "<=1024",
        "<=1024",
        "<=4096",
        ">4096",
    ]


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
    for name in ("rounds", "num_tokens", "num_accepted", "num_empty_rounds"):
        assert getattr(found, name) == getattr(exact, name), name
    assert found.num_cropped == 0
    assert sum(found.proposed) == sum(exact.proposed)


@given(st.integers(1, 300), st.integers(0, 400), st.integers(0, 400), st.integers(1, 8))
def test_whatever_a_server_tells_gives_counts_or_none(tokens: int, proposed: int, accepted: int, k: int) -> None:
    found = counts_from_sums(tokens, proposed, accepted, k)
    if found is not None:
        assert (found.num_tokens, sum(found.proposed), found.num_accepted) == (tokens, proposed, accepted)


def test_where_all_was_accepted_no_position_accepted_more_than_was_proposed_there() -> None:
    """Three drafts of six and one of a single token."""
    found = counts_from_sums(24, 19, 19, 6)
    assert (found.rounds, found.num_empty_rounds) == (5, 1)
    assert found.proposed == found.trials == found.accepts == (4, 3, 3, 3, 3, 3)


@pytest.mark.parametrize("sums", [(10, 4, 5, 4), (3, 8, 4, 4), (0, 0, 0, 4), (5, -1, -1, 4), (30, 29, 29, 1)])
def test_impossible_sums_are_no_counts(sums: tuple[int, int, int, int]) -> None:
    assert counts_from_sums(*sums) is None


def test_a_last_round_that_was_cut_is_known_by_its_missing_tokens() -> None:
    found = counts_from_sums(6, 8, 5, 4)
    assert (found.rounds, found.num_cropped, found.accepts) == (3, 2, (2, 1, 1, 1))


def posterior(jobs: list[AcceptanceCounts], k: int) -> Posterior:
    key, now = EvidenceKey("code", "t", "e", "greedy", "<=256", "", "ngram", "r1"), datetime(2026, 11, 1, tzinfo=UTC)
    sums = together([EvidenceSums.of_job(job, k, now, job.num_tokens) for job in jobs], timedelta(days=3))
    return infer({key: KeyEvidence(sums, sums)}, key, k, PairPosterior.unknown(k))


def test_tokens_a_round_are_as_sure_as_with_counts_by_position() -> None:
    """Jobs differ in α, which falls with the position; the sums give tokens at the server's k as the counts do."""
    rng, exact, summed = random.Random(5), [], []
    for _ in range(60):
        level = rng.gauss(0.0, 0.08)
        counts = decoded(rng, tuple(min(0.98, max(0.02, a + level)) for a in (0.75, 0.65, 0.5, 0.45)), 0.8, 40)
        exact.append(counts)
        summed.append(counts_from_sums(counts.num_tokens, sum(counts.proposed), counts.num_accepted, 4))
    by_position, by_sums = posterior(exact, 4), posterior(summed, 4)
    mean = sum(job.num_tokens - 1 for job in exact) / sum(job.rounds - 1 for job in exact)
    assert by_sums.tokens[4] == pytest.approx(by_position.tokens[4], rel=0.02)
    assert abs(by_sums.tokens[4] - mean) < 2 * by_sums.tokens_sd[4]
    assert 0.5 < by_sums.tokens_sd[4] / by_position.tokens_sd[4] < 2.0
