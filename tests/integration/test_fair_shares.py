"""A batch of one segment that came first keeps another segment's jobs waiting for few of its own, and loses none."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from alphaloop.kafka.offsets import Record, TopicPartition
from alphaloop.kafka.topics import RESULTS
from alphaloop.messages import Status
from alphaloop.settings import SegmentSettings, Settings
from alphaloop.store.database import Database
from tests.fakes import FakeEngine
from tests.fixtures.broker import lag
from tests.fixtures.worker import Client, SteppedEngine, by_id, running_worker, until
from tests.integration.test_worker_continuous import job, started, stepped_worker
from tests.integration.test_worker_flow import assert_counts_add_up
from worker.feed import LEAST_AHEAD

pytestmark = [pytest.mark.kafka, pytest.mark.postgres]

NUM_BATCH, NUM_OTHERS = 2000, 20


def keys_of(records: Sequence[Record]) -> set[str]:
    return {(record.key or b"").decode() for record in records}


def test_a_batch_that_came_first_holds_up_another_segment_by_few_jobs(
    worker_settings: Settings, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both lie in one partition, the batch is many times what a worker reads, and it is stopped in the midst."""
    monkeypatch.setattr("worker.feed.AHEAD_S", 0.0)
    monkeypatch.setattr("worker.feed.MAX_BUFFERED", 64)
    settings = worker_settings.model_copy(update={"segments": {"gold": SegmentSettings(weight=2.0)}})
    client, engine = Client(settings), SteppedEngine(num_slots=2)
    batch = [f"batch-{number}" for number in range(NUM_BATCH)]
    others = [f"gold-{number}" for number in range(NUM_OTHERS)]
    client.send("code", [job(name, 1, segment="batch") for name in batch], partition=0)
    client.send("code", [job(name, 1, segment="gold") for name in others], partition=0)
    with stepped_worker(settings, engine) as running:
        engine.wait_at_round()
        num_in_all = NUM_BATCH + NUM_OTHERS
        until(lambda: running.worker.intake.num_in_flight == num_in_all, "everything was delivered")
        until(lambda: not len(running.worker.intake._lanes[False]), "everything was taken")
        while not set(others) <= started(engine):
            engine.allow()
            engine.wait_at_round()
        num_before = len(started(engine) - set(others))
        # Half of what the others had, and what was claimed before their first job was read.
        assert num_before <= NUM_OTHERS // 2 + 4 * LEAST_AHEAD
        running.stop.set()
    with running_worker(settings, FakeEngine(num_slots=8)):
        # The second worker reads again what lies above the batch's first jobs, and answers it from the record.
        read = client.read([RESULTS], lambda found: len(found) >= num_in_all and len(keys_of(found)) >= num_in_all)
    assert keys_of(read) == {*batch, *others}
    assert {result.status for result in by_id(read).values()} == {Status.SUCCEEDED}
    assert_counts_add_up(database, num_jobs=num_in_all)
    assert lag(settings.kafka, settings.kafka.group_id, TopicPartition("jobs.code", 0)) == 0
