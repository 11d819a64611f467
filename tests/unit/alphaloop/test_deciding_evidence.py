"""Evidence: sums over jobs and how they fade, and how long a task's texts are.

A text that a limit cut says only how long it is at least, and a job counts once.
"""

from __future__ import annotations

import random
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import zip_longest

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alphaloop.acceptance import AcceptanceCounts, EvidenceKey
from alphaloop.deciding.evidence import SUMS, EvidenceSnapshot, EvidenceSums, JobLengths, KeyEvidence, Place
from alphaloop.deciding.goodput import DrafterState
from alphaloop.messages import Mode
from alphaloop.store.decision_inputs import pack, unpack
from alphaloop.store.job_counts import DecodeRun, JobCounts, ShadowRun
from tests.fixtures.runs import ENGINE, TARGET, decode_run, shadow_run, simulated_counts, vanilla_counts

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
    twice, once = one.faded(first, HALF_LIFE).faded(second, HALF_LIFE), one.faded(second, HALF_LIFE)
    assert twice.as_of == once.as_of
    for name in SUMS:
        left, right = (its if isinstance(its := getattr(sums, name), tuple) else (its,) for sums in (twice, once))
        for a, b in zip_longest(left, right, fillvalue=0.0):
            assert a == pytest.approx(b, rel=1e-9, abs=1e-9), name


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


LOOKUP = DrafterState("lookup", "draft-1", 8)
VANILLA = EvidenceKey("code", TARGET, ENGINE, "greedy", "<=256")


def text_of(num_tokens: int, *, is_cut: bool, age: timedelta = timedelta(0)) -> EvidenceSums:
    counts = AcceptanceCounts(rounds=num_tokens, num_empty_rounds=num_tokens)
    return EvidenceSums.of_job(counts, 0, NOON - age, num_tokens, 40, is_cut=is_cut)


def lengths(*texts: EvidenceSums) -> JobLengths:
    snapshot = EvidenceSnapshot(HALF_LIFE)
    for one in texts:
        snapshot.add([(VANILLA, one)])
    return snapshot.lengths("code", [LOOKUP], NOON)


_lengths = st.lists(st.integers(1, 400), min_size=1, max_size=12)


@given(ended=_lengths, cut=_lengths, days=st.integers(0, 20))
def test_a_text_that_was_cut_never_makes_others_shorter(ended: list[int], cut: list[int], days: int) -> None:
    before = lengths(*(text_of(n, is_cut=False) for n in ended))
    all_texts = [text_of(n, is_cut=False) for n in ended]
    all_texts += [text_of(n, is_cut=True, age=timedelta(days=days)) for n in cut]
    after = lengths(*sorted(all_texts, key=lambda one: one.as_of))
    assert after.output_tokens >= before.output_tokens * (1 - 1e-9)


@given(ended=_lengths)
def test_without_cut_texts_it_is_their_mean(ended: list[int]) -> None:
    found = lengths(*(text_of(n, is_cut=False) for n in ended))
    assert found.output_tokens == pytest.approx(sum(ended) / len(ended))
    assert found.jobs == pytest.approx(len(ended))


def shadows_of(run: DecodeRun, **fields: bool) -> tuple[ShadowRun, ...]:
    """Of two drafters that were scored on it."""
    counts = simulated_counts(random.Random(1), [0.7, 0.5], 20)
    return tuple(shadow_run(run, counts, name, **fields) for name in ("lookup", "small"))


def test_a_job_counts_once_however_many_drafters_were_scored_on_it() -> None:
    run = decode_run(vanilla_counts(50), mode=Mode.VANILLA, at=NOON)
    shadows = shadows_of(run)
    snapshot = EvidenceSnapshot(HALF_LIFE)
    for number in range(4):
        snapshot.add(JobCounts(str(number), 1, run, shadows).evidence)
    drafters = [LOOKUP, DrafterState("small", "draft-1", 8)]
    found = snapshot.lengths("code", drafters, NOON)
    assert found.jobs == pytest.approx(4)
    assert (found.output_tokens, found.prompt_tokens) == (pytest.approx(50), pytest.approx(40))


@pytest.mark.parametrize("is_cut", [False, True])
def test_where_the_run_is_no_evidence_one_of_the_other_rows_counts_for_the_length(is_cut: bool) -> None:
    run = replace(decode_run(vanilla_counts(50), mode=Mode.VANILLA, at=NOON), is_counted=False, is_cut=is_cut)
    (_, first), (_, second) = JobCounts("one", 1, run, shadows_of(run, is_drafted=True)).evidence
    assert (first.texts, first.ends, first.output_tokens) == (1, 0 if is_cut else 1, 50)
    assert (second.texts, second.ends, second.output_tokens) == (0, 0, 0)


def test_stored_evidence_keeps_what_was_cut() -> None:
    snapshot = EvidenceSnapshot(HALF_LIFE)
    snapshot.add([(VANILLA, text_of(6, is_cut=True)), (VANILLA, text_of(90, is_cut=False))])
    (evidence,) = snapshot.leaves(Place("code"), NOON).values()
    assert unpack(pack(evidence), evidence.all.as_of) == evidence
    assert (evidence.all.texts, evidence.all.ends) == (2, 1)
