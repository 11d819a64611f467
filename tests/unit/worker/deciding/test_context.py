"""What a decision is told of prompts, memory and segments, and how it is stored."""

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
from tests.fixtures.publishing import ready_job
from tests.fixtures.simulated import Clock
from worker.admission import lane_of
from worker.deciding.decider import WRITE_EVERY_S, SnapshotJournal, conditions_of, facts_of, subject_of
from worker.deciding.evidence_cache import MOST_SEGMENTS, SegmentsApart, kept_apart

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


def test_prompts_that_no_drafter_can_serve_are_named() -> None:
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


NOON = datetime(2026, 3, 1, tzinfo=UTC)
IDLE = timedelta(days=3)


class World:
    """The time, and the segments of which there is evidence."""

    def __init__(self) -> None:
        self.now, self.known = NOON, dict[str, datetime]()
        known, now = (lambda task: self.known if task == "code" else {}), (lambda: self.now)
        self.keeps = SegmentsApart(known, idle=IDLE, now=now).keeps


@pytest.fixture
def world() -> World:
    return World()


def test_a_task_keeps_so_many_segments_apart_and_pools_the_others(world: World) -> None:
    kept = [world.keeps("code", f"made-up-{number}") for number in range(5000)]
    assert sum(kept) == MOST_SEGMENTS
    assert kept[:MOST_SEGMENTS] == [True] * MOST_SEGMENTS, "the first are in use and stay"
    assert world.keeps("code", "made-up-0")
    assert world.keeps("code", ""), "jobs without a segment are the pool"
    assert world.keeps("sql", "gold"), "another task has segments of its own"


def test_a_segment_in_use_outlives_any_number_of_new_ones(world: World) -> None:
    for day in range(20):
        world.now = NOON + timedelta(days=day)
        assert world.keeps("code", "gold")
        for number in range(500):
            world.keeps("code", f"day-{day}-{number}")


def test_the_one_used_last_longest_ago_makes_room(world: World) -> None:
    for number in range(MOST_SEGMENTS):
        world.now = NOON + timedelta(hours=number)
        assert world.keeps("code", f"old-{number}")
    world.now = NOON + IDLE - timedelta(seconds=1)
    assert not world.keeps("code", "new")
    world.now = NOON + IDLE
    assert world.keeps("code", "new")
    assert not world.keeps("code", "old-0")
    assert world.keeps("code", "old-1")


def test_segments_that_other_workers_know_count(world: World) -> None:
    world.known.update({f"theirs-{number}": NOON for number in range(MOST_SEGMENTS - 1)})
    assert world.keeps("code", "mine")
    assert world.keeps("code", "theirs-0")
    assert not world.keeps("code", "one more")


def test_of_many_uses_the_segments_used_last_are_kept() -> None:
    uses = [(f"s{number}", NOON + timedelta(seconds=number)) for number in range(300)]
    uses += [("", NOON - IDLE), ("s0", NOON + IDLE)]
    recent = {f"s{number}" for number in range(301 - MOST_SEGMENTS, 300)}
    assert kept_apart(uses) == {"", "s0", *recent}
    assert kept_apart(uses[:3]) == {"", "s0", "s1", "s2"}


def test_a_pooled_job_is_decided_from_its_tasks_evidence_and_adds_to_it() -> None:
    apart = ready_job("a", segment="gold")
    assert (apart.prepared.segment, facts_of(apart.prepared).segment) == ("gold", "gold")
    pooled = ready_job("b", segment="gold", keeps_apart=lambda task, segment: False)
    assert (pooled.prepared.segment, facts_of(pooled.prepared).segment) == ("", "")
    assert pooled.job.segment == "gold", "the result still says it"
