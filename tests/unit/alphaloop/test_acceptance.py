from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alphaloop.acceptance import (
    AcceptanceCounts,
    InconsistentCounts,
    prompt_bucket,
    sampling_bucket,
)

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


def test_prompt_buckets_include_their_limit() -> None:
    assert [prompt_bucket(n) for n in (1, 256, 257, 1024, 4096, 4097)] == [
        "<=256",
        "<=256",
        "<=1024",
        "<=1024",
        "<=4096",
        ">4096",
    ]
