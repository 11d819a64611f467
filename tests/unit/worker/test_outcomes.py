"""The outcome of a decoded job: its result is written without the model, but is what the model would write."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import pytest

from alphaloop.acceptance import AcceptanceCounts
from alphaloop.deciding.policy import Decision, Reason
from alphaloop.messages import Mode, Result, Status
from tests.fakes import FakeEngine
from tests.fixtures.publishing import VANILLA, claimed_job
from worker.engine import DrafterCounts, Generation
from worker.recording import succeeded

NOW = datetime(2026, 11, 23, 12, 0, 0, 250_000, tzinfo=UTC)
LOOKUP = Decision(Mode.SPECULATIVE, "lookup", "rev-1", 3, Reason.FASTER, "1.3 times as fast")
LABELS = {"custom_id": "row-1", "batch_id": "night", "segment": "gold", "redrive_of": "failed-1"}


def generation(text: str, *, is_drafted: bool, draft_revision: str = "rev-1") -> Generation:
    counts = AcceptanceCounts(4, 1, 0, (3, 2), (3, 2), (2, 1)) if is_drafted else AcceptanceCounts(7, 7)
    drafted = DrafterCounts("lookup", draft_revision, 3, AcceptanceCounts(3, 0, 0, (3, 2), (3, 2), (2, 1)), (3, 2))
    return Generation(
        "a",
        text,
        tuple(range(7)),
        "stop",
        12,
        counts,
        0.25,
        1.5,
        1e-05,
        4,
        chances=(3, 2) if is_drafted else (),
        drafted=(drafted,) if is_drafted else (),
        num_vanilla_rounds=1 if is_drafted else 7,
    )


@pytest.mark.parametrize("text", ["", 'one\ntwo\t"three" \\ \x00', "naïve 東京 🙂"])
@pytest.mark.parametrize("labels", [{}, LABELS])
@pytest.mark.parametrize(("is_drafted", "decision"), [(False, VANILLA), (True, LOOKUP)])
@pytest.mark.parametrize("fields", [{}, {"stream": True}])
def test_a_result_is_what_its_model_writes(
    text: str, labels: dict[str, str], is_drafted: bool, decision: Decision, fields: dict[str, Any]
) -> None:
    claimed = claimed_job("a", attempt=2, **labels, **fields)
    outcome = succeeded(
        claimed,
        generation(text, is_drafted=is_drafted),
        decision,
        FakeEngine().identity,
        queue_s=0.0,
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
    assert result.decoding.accepts == ((2, 1) if is_drafted else ())


def test_a_drafter_without_a_revision_is_named_alone() -> None:
    decoded = generation("x", is_drafted=True, draft_revision="")
    outcome = succeeded(claimed_job("a"), decoded, LOOKUP, FakeEngine().identity, queue_s=0.5, now=NOW)
    result = Result.decode(outcome.result)
    assert outcome.result == result.encode()
    assert (result.decoding.drafter, result.decoding.draft_revision) == ("lookup", None)
