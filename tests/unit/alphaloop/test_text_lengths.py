"""How long a task's texts are: a text that a limit cut says only how long it is at least, and a job counts once."""

from __future__ import annotations

import random
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alphaloop.acceptance import AcceptanceCounts, EvidenceKey
from alphaloop.deciding.evidence import EvidenceSnapshot, EvidenceSums, JobLengths, Place
from alphaloop.deciding.goodput import DrafterState
from alphaloop.messages import Mode
from alphaloop.store.acceptance_state import pack, unpack
from alphaloop.store.decode_runs import DecodeRun, JobCounts, ShadowRun
from tests.fixtures.runs import ENGINE, TARGET, decode_run, shadow_run, simulated_counts, vanilla_counts

NOW = datetime(2026, 11, 26, tzinfo=UTC)
HALF_LIFE = timedelta(days=3)
LOOKUP = DrafterState("lookup", "draft-1", 8)
VANILLA = EvidenceKey("code", TARGET, ENGINE, "greedy", "<=256")


def text_of(num_tokens: int, *, is_cut: bool, age: timedelta = timedelta(0)) -> EvidenceSums:
    counts = AcceptanceCounts(rounds=num_tokens, num_empty_rounds=num_tokens)
    return EvidenceSums.of_job(counts, 0, NOW - age, num_tokens, 40, is_cut=is_cut)


def lengths(*texts: EvidenceSums) -> JobLengths:
    snapshot = EvidenceSnapshot(HALF_LIFE)
    for one in texts:
        snapshot.add([(VANILLA, one)])
    return snapshot.lengths("code", [LOOKUP], NOW)


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
    run = decode_run(vanilla_counts(50), mode=Mode.VANILLA, at=NOW)
    shadows = shadows_of(run)
    snapshot = EvidenceSnapshot(HALF_LIFE)
    for number in range(4):
        snapshot.add(JobCounts(str(number), 1, run, shadows).evidence)
    drafters = [LOOKUP, DrafterState("small", "draft-1", 8)]
    found = snapshot.lengths("code", drafters, NOW)
    assert found.jobs == pytest.approx(4)
    assert (found.output_tokens, found.prompt_tokens) == (pytest.approx(50), pytest.approx(40))


@pytest.mark.parametrize("is_cut", [False, True])
def test_where_the_run_is_no_evidence_one_of_the_other_rows_counts_for_the_length(is_cut: bool) -> None:
    run = replace(decode_run(vanilla_counts(50), mode=Mode.VANILLA, at=NOW), is_counted=False, is_cut=is_cut)
    (_, first), (_, second) = JobCounts("one", 1, run, shadows_of(run, is_drafted=True)).evidence
    assert (first.texts, first.ends, first.output_tokens) == (1, 0 if is_cut else 1, 50)
    assert (second.texts, second.ends, second.output_tokens) == (0, 0, 0)


def test_stored_evidence_keeps_what_was_cut() -> None:
    snapshot = EvidenceSnapshot(HALF_LIFE)
    snapshot.add([(VANILLA, text_of(6, is_cut=True)), (VANILLA, text_of(90, is_cut=False))])
    (evidence,) = snapshot.leaves(Place("code"), NOW).values()
    assert unpack(pack(evidence), evidence.all.as_of) == evidence
    assert (evidence.all.texts, evidence.all.ends) == (2, 1)
