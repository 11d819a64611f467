"""What stored snapshots say of decisions and of their jobs, in a real PostgreSQL."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Final
from uuid import UUID

import pytest

from alphaloop.deciding.decision import DraftSetting
from alphaloop.deciding.snapshot import SessionFacts, SnapshotEncoder
from alphaloop.messages import Mode
from alphaloop.store.database import Database
from alphaloop.store.decisions import SnapshotRow, SnapshotStore
from alphaloop.store.traffic import TrafficStore
from tests.fixtures.deciding import some_snapshot
from tests.fixtures.history import record_runs
from tests.fixtures.runs import decode_run, simulated_counts, vanilla_counts

pytestmark = pytest.mark.postgres

NOON: Final = datetime.now(UTC).replace(microsecond=0) - timedelta(hours=2)
MINUTE: Final = timedelta(minutes=1)
FACTS: Final = SessionFacts("w", "h", "d", "e", "t", 4, timedelta(days=3), 0.02)


def row(number: int, *, task: str = "code", bucket: str = "greedy", running: int = 4, text: str = "") -> SnapshotRow:
    """The `number`th decision: a minute after the one before."""
    at = NOON + number * MINUTE
    document = SnapshotEncoder(FACTS).encode(replace(some_snapshot(), decided_at=at))
    return SnapshotRow(at, UUID(int=number), task, bucket, running, text or document)


def test_the_last_decision_up_to_a_moment_is_found(database: Database) -> None:
    store = SnapshotStore(database)
    rows = [row(1), row(2, running=1), row(3, bucket="t<=0.5"), row(4, task="chat"), row(5)]
    store.add(rows)
    store.add(rows)  # again, as after a lost answer

    def last(until: int, **more: int) -> int | None:
        found = store.last("code", "greedy", NOON + until * MINUTE, **more)
        return None if found is None else found.snapshot.decision_id.int

    assert [last(until) for until in (0, 1, 4, 9)] == [None, 1, 2, 5]
    assert [last(4, running=running) for running in (1, 2, 3, 4, 5)] == [2, None, 1, 1, None]
    found = store.last("code", "greedy", NOON + MINUTE)
    assert (found.facts, found.snapshot.decided_at, found.snapshot.context.num_running) == (FACTS, NOON + MINUTE, 4)
    assert store.first_and_last() == (NOON + MINUTE, NOON + 5 * MINUTE)
    assert store.first_and_last("chat") == (NOON + 4 * MINUTE,) * 2
    assert store.first_and_last("sql") is None


def test_decisions_come_in_order_with_the_jobs_that_were_decoded(database: Database, rng: random.Random) -> None:
    store = SnapshotStore(database)
    store.add([row(2), row(1), row(3, task="chat")])
    at = NOON + 3 * MINUTE
    drafted = replace(decode_run(simulated_counts(rng, [0.8] * 3, 10), at=at), decode_batch_id=UUID(int=1))
    vanilla = replace(decode_run(vanilla_counts(20), mode=Mode.VANILLA, at=at), decode_batch_id=UUID(int=1))
    other = replace(vanilla, decode_batch_id=UUID(int=9))
    record_runs(database, {"a": drafted, "b": drafted, "c": vanilla, "d": other})
    found = list(store.between(NOON, at))
    assert [stored.snapshot.decision_id.int for stored, _ in found] == [1, 2]
    by_setting = {jobs.setting: jobs for jobs in found[0][1]}
    assert by_setting.keys() == {DraftSetting("lookup", 3), DraftSetting()}
    both = by_setting[DraftSetting("lookup", 3)]
    assert (both.num_jobs, both.num_tokens) == (2, 2 * drafted.num_tokens)
    assert both.device_s == pytest.approx(2 * drafted.device_s)
    assert found[1][1] == []
    assert [len(jobs) for _, jobs in store.between(NOON, at + MINUTE, task="chat")] == [0]
    assert store.num_without(NOON, at + MINUTE) == 1
    assert store.num_without(NOON, at + MINUTE, task="chat") == 0
    of_job = store.of_job("a")
    assert of_job.snapshot.decision_id == UUID(int=1)
    assert store.of_job("d") is None
    assert store.kind_of_job("a") == (drafted.key.segment, drafted.key.prompt_bucket, "")
    assert store.kind_of_job("nonesuch") is None
    assert TrafficStore(database).tasks() == ["code"]


def test_a_snapshot_of_another_release_is_read_without_its_new_fields_or_left_out(database: Database) -> None:
    store = SnapshotStore(database)
    content = json.loads(row(1).snapshot)
    newer = {**content, "version": 99, "new": {"a": 1}}
    newer["groups"] = [{**group, "new": 1} for group in content["groups"]]
    lacking = [
        {name: value for name, value in content.items() if name != left_out}
        for left_out in ("engine", "drafters", "context", "groups", "costs", "seen", "is_split")
    ]
    (group, *_) = content["groups"]
    wrong = [
        {**content, name: value}
        for name, value in (
            *(("half_life", "soon"), ("drafters", 1), ("context", []), ("costs", 1), ("seen", ["lookup"])),
            *(("groups", []), ("groups", {}), ("groups", [{**group, "decision": "vanilla"}])),
            *(("groups", [{**group, "posteriors": []}]), ("incumbent", 1), ("budget", "much")),
        )
    ]
    store.add([row(number, text=json.dumps(other)) for number, other in enumerate((content, newer, *lacking, *wrong))])
    read = [stored.snapshot for stored, _ in store.between(NOON, NOON + timedelta(hours=1))]
    assert [snapshot.decision_id.int for snapshot in read] == [0, 1]
    known, with_new_fields = map(SnapshotEncoder(FACTS).encode, read)
    assert known == with_new_fields
    for number in range(2, 2 + len(lacking) + len(wrong)):
        assert store.last("code", "greedy", NOON + number * MINUTE) is None
