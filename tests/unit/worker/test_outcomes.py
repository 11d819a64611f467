"""The outcome of a decoded job: its result, and what counts where it drafted in some rounds only or with several."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import pytest

from alphaloop.acceptance import PREFILL, AcceptanceCounts, ProposerCounts, counts_from_sums
from alphaloop.deciding.decision import Decision, Reason
from alphaloop.deciding.evidence import EvidenceSums
from alphaloop.deciding.goodput import Alternative, DrafterState
from alphaloop.engine import DrafterCounts, Generation, PreparedJob, Sampling, Served, ShadowCounts
from alphaloop.messages import Purpose, Result, Status
from alphaloop.server_identity import Granularity
from alphaloop.store.job_counts import CountSource
from alphaloop.store.outcomes import Outcome
from alphaloop.wording import named, words
from engine.proposal import RoundCounts
from tests.fakes import FakeEngine
from tests.fixtures.answers import ALL
from tests.fixtures.models import VANILLA, decision, make_job
from tests.fixtures.publishing import claimed_job
from worker.admission import lane_of
from worker.recording import succeeded

NOW = datetime(2026, 1, 1, 12, 0, 0, 250_000, tzinfo=UTC)
ENGINE = FakeEngine(
    num_slots=1,
    acceptance=(0.8, 0.6),
    drafters=(DrafterState("lookup", "look-1", 8), DrafterState("model", "model-1", 8)),
)
CLAIMED = claimed_job("a")


def outcome_of(generation: Generation, prepared: PreparedJob, decided: Decision = VANILLA) -> Outcome:
    ready = replace(CLAIMED.ready, prepared=prepared, lane=lane_of(prepared.job, prepared.sampling))
    claimed = replace(CLAIMED, ready=ready)
    return succeeded(claimed, generation, decided, ENGINE.identity, queue_s=0.0, now=NOW)


def decode(
    number: int, schedule: Sequence[tuple[str | None, int]] = (), purpose: Purpose = Purpose.TRAFFIC
) -> tuple[Generation, PreparedJob]:
    """A job of which round i is drafted as schedule[i % len] says; it begins vanilla."""
    job = make_job(f"prompt {number}", number).model_copy(update={"purpose": purpose})
    prepared = ENGINE.prepare(job, Sampling(max_tokens=64, temperature=0.0))
    ENGINE.admit(prepared, VANILLA)
    num_rounds = 0
    while True:
        if schedule:
            ENGINE.redraft(job.job_id, *schedule[num_rounds % len(schedule)])
        step = ENGINE.step()
        num_rounds += 1
        if step.finished:
            return step.finished[0], prepared


LABELS = {"custom_id": "row-1", "batch_id": "night", "segment": "gold", "redrive_of": "failed-1"}


@pytest.mark.parametrize("text", ["", 'one\ntwo\t"three" \\ \x00', "naïve 東京 🙂"])
@pytest.mark.parametrize("labels", [{}, LABELS])
@pytest.mark.parametrize(
    "draft_revision", [None, "", "rev-1"], ids=["vanilla", "drafter without a revision", "drafted"]
)
@pytest.mark.parametrize("fields", [{}, {"stream": True}])
def test_a_result_is_what_its_model_writes(
    text: str, labels: dict[str, str], draft_revision: str | None, fields: dict[str, Any]
) -> None:
    """It is written without the model."""
    is_drafted = draft_revision is not None
    decoded, _ = decode(1, [("lookup", 3)] if is_drafted else ())
    drafted = tuple(replace(one, draft_revision=draft_revision or "") for one in decoded.drafted)
    outcome = succeeded(
        claimed_job("a", attempt=2, **labels, **fields),
        replace(decoded, text=text, drafted=drafted, device_s=1e-05),
        decision("lookup", 3) if is_drafted else VANILLA,
        ENGINE.identity,
        queue_s=0.5,
        now=NOW,
        decode_batch_id=UUID(int=1),
    )
    result = Result.decode(outcome.result)
    assert outcome.result == result.encode()
    assert result.status is Status.SUCCEEDED
    assert outcome.status == "succeeded"
    assert result.text == text
    assert {name: getattr(result, name) for name in LABELS} == dict.fromkeys(LABELS) | labels
    assert result.num_chunks == (0 if fields else None)
    assert result.recorded_at == NOW
    assert result.decoding.drafter == ("lookup" if is_drafted else None)
    assert result.decoding.draft_revision == (draft_revision or None)
    assert result.decoding.accepts == decoded.counts.accepts
    assert any(decoded.counts.accepts) == is_drafted


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("num_reasoning_tokens", [None, 0, 7])
def test_choices_are_recorded_as_the_model_writes_them(name: str, num_reasoning_tokens: int | None) -> None:
    decoded, prepared = decode(1)
    choices = ALL[name]
    told = {"choices": choices, "finish_reason": choices[0].finish_reason}
    text = choices[0].said.content
    outcome = outcome_of(replace(decoded, text=text or "", num_reasoning_tokens=num_reasoning_tokens, **told), prepared)
    result = Result.decode(outcome.result)
    assert outcome.result == result.encode()
    assert (result.text, result.choices, result.finish_reason) == (text, choices, choices[0].finish_reason)
    details = result.usage.completion_tokens_details
    assert (details and details.reasoning_tokens) == num_reasoning_tokens
    assert outcome.run.is_cut == any(choice.finish_reason == "length" for choice in choices)


def sums_by_drafter(outcome: Outcome) -> dict[str, EvidenceSums]:
    found = {key.drafter: sums for key, sums in outcome.counted.evidence}
    assert len(found) == len(outcome.counted.evidence), "a job counts once under each key"
    return found


def check_own_rounds(sums: EvidenceSums, one: DrafterCounts) -> None:
    counts = one.counts
    assert (sums.jobs, sums.rounds, sums.tokens) == (1, counts.rounds, counts.num_tokens)
    assert (sums.offered, sums.trials, sums.accepts) == (
        counts.rounds - counts.num_empty_rounds,
        counts.trials,
        counts.accepts,
    )
    padding = (0,) * (len(counts.trials) - len(one.chances))
    assert sums.chances == (*one.chances, *padding), "behind its reach nothing was possible"


def test_each_drafter_of_a_job_counts_with_its_own_rounds_alone() -> None:
    schedule = [("lookup", 2), ("lookup", 2), ("lookup", 4), (None, 0), ("lookup", 0), ("model", 1)]
    for number in range(20):
        generation, prepared = decode(number, schedule)
        outcome = outcome_of(generation, prepared)
        sums = sums_by_drafter(outcome)
        assert sums.keys() == {one.drafter for one in generation.drafted}
        for one in generation.drafted:
            check_own_rounds(sums[one.drafter], one)
        lengths = [its.output_tokens for its in sums.values() if its.texts]
        assert lengths == [len(generation.token_ids)], "a job's length is that of its whole text, and counts once"
        assert outcome.run.key.drafter == "lookup", "most rounds are"
        assert outcome.run.num_draft_tokens == 4
        assert outcome.run.counts == generation.counts
        assert {outcome.counted.source(shadow) for shadow in outcome.shadows} == {CountSource.DRAFTED}
        assert all(shadow.chances for shadow in outcome.shadows), "parts of rounds are no whole scores"


def test_a_job_that_one_drafter_decoded_throughout_counts_as_its_run_says() -> None:
    generation, prepared = decode(1, [("lookup", 3)])
    outcome = outcome_of(generation, prepared)
    assert outcome.shadows == ()
    assert (outcome.run.key.drafter, outcome.run.key.draft_revision, outcome.run.mode) == (
        "lookup",
        "look-1",
        "speculative",
    )
    check_own_rounds(sums_by_drafter(outcome)["lookup"], generation.drafted[0])


def test_a_job_that_never_drafted_is_vanilla_whatever_was_decided() -> None:
    generation, prepared = decode(1, [("lookup", 0)])
    outcome = outcome_of(generation, prepared, decision("lookup", 3))
    assert (outcome.run.key.drafter, outcome.run.mode, outcome.run.num_draft_tokens) == ("", "vanilla", 0)
    assert outcome.shadows == ()


@pytest.mark.parametrize(
    ("schedule", "decided", "reason", "low", "said"),
    [
        ([("lookup", 2)], ("lookup", 2), Reason.FASTER, 1.2, "expected_faster"),
        ([("lookup", 2)], ("lookup", 2), Reason.FASTER, 0.9, "not_surely_faster"),
        ([("lookup", 2)], None, Reason.NOT_FASTER, None, "decided_otherwise"),
        ([("lookup", 0)], ("lookup", 2), Reason.FASTER, 1.2, "decided_otherwise"),
        ([("lookup", 0)], ("lookup", 2), Reason.EXPLORING, 0.8, "exploring"),
        ([], None, Reason.NOT_FASTER, None, "not_faster"),
    ],
)
def test_the_reason_of_a_result_is_one_for_its_mode(
    schedule: list[tuple[str, int]],
    decided: tuple[str, int] | None,
    reason: Reason,
    low: float | None,
    said: str,
) -> None:
    """What was decided for another mode stands in the explanation; `faster` alone is said of what was measured."""
    generation, prepared = decode(1, schedule)
    made = replace(decision(*decided) if decided else VANILLA, reason=reason, explanation="because")
    if decided and low is not None:
        made = replace(made, alternatives=(Alternative(*decided, 2.0, 40.0, 1.1, low, 1.5),))
    outcome = outcome_of(generation, prepared, made)
    decoding = Result.decode(outcome.result).decoding
    assert decoding is not None
    assert decoding.reason == outcome.run.reason == said
    first = f"{named(made.drafter, made.num_draft_tokens)} at first ({words(reason)}): "
    is_as_decided = (decoding.mode == "speculative") == (made.drafter is not None)
    assert decoding.explanation == ("" if is_as_decided else first) + "because"


def test_a_score_of_the_whole_text_takes_the_place_of_some_of_its_rounds() -> None:
    generation, prepared = decode(1, [("lookup", 2), (None, 0), ("model", 2)])
    score = ShadowCounts("lookup", "look-1", 8, PREFILL + AcceptanceCounts(40, 0, 0, (40,), (40,), (20,)))
    sums = sums_by_drafter(outcome_of(replace(generation, shadows=(score,)), prepared))
    assert sums["lookup"].rounds == 40
    (of_model,) = (one for one in generation.drafted if one.drafter == "model")
    check_own_rounds(sums["model"], of_model)


def test_acceptance_and_tokens_a_round_are_those_of_a_drafter_that_had_every_round(seed: int) -> None:
    """Many jobs that change drafters by lot, the last round of each censored, beside jobs that draft throughout."""
    rng = random.Random(seed)
    alphas = (0.7, 0.4)
    total: dict[str, EvidenceSums] = {}
    generation, prepared = decode(0)
    for kind in ("throughout", "by lot"):
        sums = EvidenceSums(NOW)
        for _ in range(700):
            counts = RoundCounts()
            counts.num_vanilla_rounds += 1
            num_tokens, is_drafted, length = 1, True, rng.randint(10, 40)
            while num_tokens < length:
                if kind == "by lot" and rng.random() < 0.3:
                    is_drafted = not is_drafted
                if not is_drafted:
                    counts.num_vanilla_rounds += 1
                    num_tokens += 1
                    continue
                accepted = next((i for i, alpha in enumerate(alphas) if rng.random() > alpha), len(alphas))
                # The text ends by itself at `length`, which may lie inside the accepted tokens.
                num_emitted = min(accepted + 1, length - num_tokens)
                counts.take_drafted(
                    ENGINE.drafters[0], 2, num_asked=2, num_proposed=2, num_accepted=accepted, num_emitted=num_emitted
                )
                num_tokens += num_emitted
            job = replace(
                generation,
                counts=counts.total,
                chances=counts.chances,
                drafted=counts.drafted,
                num_vanilla_rounds=counts.num_vanilla_rounds,
            )
            sums += sums_by_drafter(outcome_of(job, prepared)).get("lookup", EvidenceSums(NOW))
        total[kind] = sums
    for sums in total.values():
        for alpha, accepts, chances in zip(alphas, sums.accepts, sums.chances, strict=True):
            # Rounds are independent here. Six standard errors.
            assert abs(accepts / chances - alpha) < 6 * (alpha * (1 - alpha) / chances) ** 0.5
    rate = {kind: sums.tokens / sums.rounds for kind, sums in total.items()}
    assert rate["by lot"] == pytest.approx(rate["throughout"], rel=0.03)


def served_text(num_proposed: int, num_accepted: int, granularity: Granularity = "sums", **more: Any) -> Generation:
    """A text of 81 tokens of a server that drafts with k = 4 and reports these sums."""
    generation, _ = decode(1)
    counts = counts_from_sums(81, num_proposed, num_accepted, 4) or AcceptanceCounts(81, 81)
    own = replace(counts, rounds=counts.rounds - 1, num_empty_rounds=counts.num_empty_rounds - 1)
    said = {"num_proposed": num_proposed, "num_accepted": num_accepted, "granularity": granularity, **more}
    served = Served("here", "lookup", "llama_cpp-1-sums", 4, 1.0, None, None, None, **said)
    drafted = (DrafterCounts("lookup", "llama_cpp-1-sums", 4, own, ()),) if served.is_counted else ()
    return replace(generation, counts=counts, served=served, drafted=drafted, num_vanilla_rounds=1, shadows=())


@pytest.mark.parametrize(("purpose", "num_evidence"), [(Purpose.TRAFFIC, 1), (Purpose.PROBE, 1), (Purpose.CONTROL, 0)])
def test_sums_that_a_server_reported_are_the_runs_counts_and_its_evidence(purpose: Purpose, num_evidence: int) -> None:
    _, prepared = decode(1, purpose=purpose)
    outcome = outcome_of(served_text(100, 40), prepared)
    said = Result.decode(outcome.result).decoding
    assert (said.rounds, said.num_empty_rounds, said.positions) == (41, 16, "estimated")
    assert (sum(said.proposed), sum(said.accepts)) == (100, 40)
    assert Result.decode(outcome.result).encode() == outcome.result
    assert outcome.run.counts.accepts == said.accepts
    assert outcome.shadows == ()
    assert len(outcome.counted.evidence) == num_evidence
    for key, sums in outcome.counted.evidence:
        assert (key.drafter, key.draft_revision) == ("lookup", "llama_cpp-1-sums")
        assert sum(sums.accepts) / sums.rounds == pytest.approx(1.0)


def test_a_result_says_whose_positions_were_only_reached() -> None:
    _, prepared = decode(1)
    assert Result.decode(outcome_of(served_text(100, 40, "reached"), prepared).result).decoding.positions == "reached"
    assert b'"positions"' not in outcome_of(served_text(100, 40, "lengths"), prepared).result


def test_a_result_says_nothing_of_rounds_that_nobody_counted() -> None:
    """Else it would say that no round drafted."""
    _, prepared = decode(1)
    outcome = outcome_of(served_text(0, 0, "nothing", is_counted=False), prepared)
    said = Result.decode(outcome.result).decoding
    assert (said.drafter, said.rounds, said.num_empty_rounds) == ("lookup", None, None)
    assert outcome.counted.evidence == []


def test_forced_tokens_a_form_and_proposers_are_recorded() -> None:
    """Of two drafters' rounds each row has its own forced tokens; the text's length is what rounds had to yield."""
    generation, prepared = decode(1, [("lookup", 2), ("model", 2)])
    first, second = generation.drafted
    drafted = replace(first, counts=replace(first.counts, num_forced=5)), second
    counts = replace(generation.counts, num_forced=5)
    mixed = ProposerCounts("lookup", (9,), (4,)), ProposerCounts("grammar", (0, 4), (0, 3))
    changed = replace(generation, counts=counts, drafted=drafted, proposers=mixed)
    outcome = outcome_of(changed, replace(prepared, sampling=replace(prepared.sampling, form_bucket="json,tools")))
    run = outcome.run
    assert (run.key.form_bucket, run.counts.num_forced, run.proposers) == ("json,tools", 5, mixed)
    assert run.num_tokens == generation.counts.num_tokens + 5
    assert {row.key.form_bucket for row in outcome.shadows} == {"json,tools"}
    assert [row.counts.num_forced for row in outcome.shadows] == [5, 0]
    assert {row.num_output_tokens for row in outcome.shadows} == {generation.counts.num_tokens}
    result = Result.decode(outcome.result)
    assert result.decoding.num_forced == 5
    assert result.usage.completion_tokens == run.num_tokens
    assert result.encode() == outcome.result
    plain = outcome_of(generation, prepared)
    assert b"num_forced" not in plain.result
    assert run.evidence.output_tokens == plain.run.evidence.output_tokens
    assert sums_by_drafter(outcome)["lookup"].tokens == sums_by_drafter(plain)["lookup"].tokens
