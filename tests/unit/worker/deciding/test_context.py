"""The decision context of prepared jobs (memory, refusals, patterns, targets), and which snapshots are written."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any, Final, cast
from uuid import uuid4

import pytest

from alphaloop.costs import CostTable
from alphaloop.deciding.decision import Decision, Reason
from alphaloop.deciding.evidence import EvidenceSnapshot
from alphaloop.deciding.goodput import DrafterState
from alphaloop.deciding.inference import Posteriors
from alphaloop.deciding.job_facts import Subject, TaskRules
from alphaloop.deciding.session import DecisionSession
from alphaloop.deciding.snapshot import SessionFacts, Snapshot
from alphaloop.engine import CacheMemory, PreparedJob, Sampling
from alphaloop.errors import StoreUnavailable
from alphaloop.messages import Decoding, Origin, Purpose, parse_job
from alphaloop.store.decisions import SnapshotStore
from benchmarks.policy.ours import ChoicesInMemory
from tests.fakes import FakeEngine
from tests.fixtures.costs import Store
from tests.fixtures.deciding import some_snapshot
from tests.fixtures.simulated import Clock
from worker.admission import lane_of
from worker.deciding.decider import WRITE_EVERY_S, SnapshotJournal, conditions_of, facts_of, subject_of

NOW: Final = datetime(2026, 5, 4, 12, tzinfo=UTC)
SMALL: Final = DrafterState("small", "draft-1", 4, cache_bytes_per_token=1 << 10)


class ShortEngine(FakeEngine):
    """One draft model; so much memory is free, and prompts of `context` tokens and more it cannot read."""

    def __init__(self, free: int, context: int = 10**9) -> None:
        super().__init__(drafters=(SMALL,))
        self._free, self._context = free, context

    def memory(self) -> CacheMemory:
        """Of what is free the target takes 4 KiB a token, in steps of 128, and a pass 1 KiB a row."""
        return CacheMemory(self._free, 0, 1 << 40, 4 << 10, {"small": 1 << 10}, 128, 1 << 10)

    def unserved(self, jobs: Sequence[PreparedJob]) -> Mapping[str, str]:
        shortest = min(len(job.token_ids) for job in jobs)
        return {"small": f"prompts of {shortest} tokens"} if shortest >= self._context else {}


def prepare(num_prompt: int, **fields: Any) -> PreparedJob:
    value = json.dumps({"task": "code", "body": {"prompt": "x"}, **fields}).encode()
    job = parse_job(value, Origin("test", "jobs.code", 0, num_prompt), task="code")
    return PreparedJob(job, (1,) * num_prompt, Sampling(max_tokens=100, temperature=0.0))


def decided(engine: FakeEngine, jobs: Sequence[PreparedJob], num_running: int = 0) -> Decision:
    session = DecisionSession(
        "target",
        "engine",
        Posteriors(EvidenceSnapshot(timedelta(days=3))),
        choices=ChoicesInMemory(),
        budgets=None,
        costs=lambda: CostTable([]),
        drafters=lambda: engine.drafters,
        num_slots=4,
    )
    num_running = num_running or len(jobs)
    first, *_ = session.decide(
        subject_of(lane_of(jobs[0].job, jobs[0].sampling)),
        [facts_of(job) for job in jobs],
        TaskRules(),
        num_running=num_running,
        now=NOW,
        conditions=conditions_of(engine, jobs, num_running),
    )
    return first


def test_a_draft_without_room_beside_the_target_is_refused_with_the_arithmetic() -> None:
    jobs = [prepare(900), prepare(100)]
    # The target: 2 x 1024 positions x 4 KiB = 8 MiB. The passes: 2 x 5 rows x 1 KiB. The draft: 2 x 1000 x 1 KiB.
    enough = (8 << 20) + 2 * 5 * 1024 + 2 * 1000 * 1024
    assert decided(ShortEngine(enough), jobs).reason is Reason.NO_COSTS, "nothing but the costs is missing"
    short = decided(ShortEngine(enough - 1), jobs)
    assert short.reason is Reason.NO_MEMORY
    assert "2 sequences x 1000 tokens x 1024 bytes" in short.explanation
    crowded = decided(ShortEngine(enough), jobs, num_running=3)
    assert crowded.reason is Reason.NO_MEMORY, "a third sequence needs room too"


def test_prompts_that_no_drafter_can_serve_are_told() -> None:
    refused = decided(ShortEngine(1 << 40, context=100), [prepare(100), prepare(300)])
    assert (refused.reason, refused.drafter) == (Reason.CANNOT_SERVE, None)
    assert "prompts of 100 tokens" in refused.explanation
    assert decided(ShortEngine(1 << 40, context=100), [prepare(99)]).reason is Reason.NO_COSTS


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, Subject("code", "greedy")),
        ({"decoding": "vanilla"}, Subject("code", "greedy", Decoding.VANILLA)),
        (
            {"purpose": "probe", "probe_drafter": "small", "probe_num_draft_tokens": 3},
            Subject("code", "greedy", purpose=Purpose.PROBE, probe_drafter="small", probe_num_draft_tokens=3),
        ),
        ({"purpose": "control"}, Subject("code", "greedy", purpose=Purpose.CONTROL)),
    ],
)
def test_a_keys_empty_fields_are_none(fields: dict[str, Any], expected: Subject) -> None:
    one = prepare(9, **fields)
    assert subject_of(lane_of(one.job, one.sampling)) == expected


def decision() -> Snapshot:
    return replace(some_snapshot(), decision_id=uuid4(), decided_at=NOW)


def journal_of(store: Store, clock: Clock) -> SnapshotJournal:
    facts = SessionFacts("w", "h", "d", "e", "t", 4, timedelta(days=3), 0.02)
    return SnapshotJournal(cast(SnapshotStore, SimpleNamespace(add=store)), facts, clock=clock)


def test_decisions_are_written_once_a_second() -> None:
    journal = journal_of(store := Store(), clock := Clock())
    assert not journal.is_due
    journal.note(decision())
    assert journal.is_due
    journal.write()
    journal.note(decision())
    assert not journal.is_due
    clock.pass_s(WRITE_EVERY_S)
    assert journal.is_due
    journal.write()
    assert len(store.saved) == 2


def test_decisions_wait_for_a_database_that_is_away_and_the_oldest_are_dropped(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("worker.deciding.decider.MOST_WAITING", 3)
    journal = journal_of(store := Store(), clock := Clock())
    store.is_away = True
    noted = [decision() for _ in range(5)]
    for one in noted:
        journal.note(one)
        with caplog.at_level(logging.WARNING), pytest.raises(StoreUnavailable):
            journal.write()
    store.is_away = False
    clock.pass_s(WRITE_EVERY_S)
    assert journal.is_due
    journal.write()
    (rows,) = store.saved
    assert [row.decision_id for row in rows] == [one.decision_id for one in noted[2:]]
    assert [record.getMessage() for record in caplog.records] == ["1 decisions not recorded"] * 2
