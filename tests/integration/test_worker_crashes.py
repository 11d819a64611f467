"""A crash after each point of the order in which an outcome is recorded (decision 0003), turned by hand."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

import pytest
from sqlalchemy import text

from alphaloop.errors import BrokerUnavailable
from alphaloop.kafka.consumer import Consumer
from alphaloop.kafka.offsets import Record
from alphaloop.kafka.topics import RESULTS
from alphaloop.messages import Result
from alphaloop.settings import Settings
from alphaloop.store.database import Database
from tests.fakes import FakeEngine
from tests.fixtures.worker import Client, RunningWorker, running_worker, until

pytestmark = [pytest.mark.kafka, pytest.mark.postgres]

VALUE = json.dumps({"job_id": "job-1", "prompt": "complete this function", "max_tokens": 6}).encode()
LAST = json.dumps({"job_id": "last", "prompt": "and this one", "max_tokens": 2}).encode()


class MortalConsumer(Consumer):
    """A consumer whose process may die: a dead one commits nothing any more."""

    is_dead = False

    def commit(self, offsets: Any) -> None:
        if self.is_dead:
            raise BrokerUnavailable("this process is dead")
        super().commit(offsets)


class Crash(Exception):
    """Stands for kill -9."""


def crash(*_: object, **__: object) -> NoReturn:
    raise Crash


class HandTurnedWorker(RunningWorker):
    """A worker without threads, except the one that polls Kafka."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings, FakeEngine(num_slots=4), seed=1)
        self.worker.intake.start()

    def claim(self) -> None:
        feed = self.worker.feed
        until(lambda: bool(feed.turn() or len(feed.ready)), "the job is claimed")

    def decode(self) -> None:
        while not len(self.worker.recorder):
            self.worker.run_once(0.0)

    def record(self) -> None:
        assert self.worker.recorder.turn(0.0) == 1

    def publish(self) -> None:
        assert self.worker.publisher.turn(0.0) == 1

    def commit(self) -> None:
        """Leaving the group commits what is finished."""
        self.close()


@contextmanager
def hand_turned(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Iterator[HandTurnedWorker]:
    """A worker that is dropped at the end: what it had in hand is lost, and so is what it did not commit."""
    with monkeypatch.context() as patched:
        patched.setattr("worker.intake.polling.Consumer", MortalConsumer)
        worker = HandTurnedWorker(settings)
    try:
        yield worker
    finally:
        MortalConsumer.is_dead = True
        worker.close()
        MortalConsumer.is_dead = False


#: Decision 0003: what was done before the crash, what is made to fail, and the attempt whose outcome is recorded.
CRASHES: dict[str, tuple[tuple[str, ...], str | None, int]] = {
    "1 claim": (("claim",), None, 2),
    "2 decode": (("claim", "decode"), None, 2),
    "3 record": (("claim", "decode", "record"), None, 1),
    "4 publish": (("claim", "decode", "record", "publish"), "alphaloop.store.outcomes.Outbox.delete", 1),
    "5 confirm": (("claim", "decode", "record", "publish"), "worker.intake.polling.Intake.finish", 1),
    "6 complete": (("claim", "decode", "record", "publish"), None, 1),
    "7 commit": (("claim", "decode", "record", "publish", "commit"), None, 1),
}


@pytest.mark.parametrize("point", list(CRASHES))
def test_after_a_crash_there_is_one_outcome_and_its_result_is_published(
    point: str, worker_settings: Settings, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    done, failing, attempt = CRASHES[point]
    client = Client(worker_settings)
    client.send("code", [VALUE], partition=0)
    with hand_turned(worker_settings, monkeypatch) as dying, monkeypatch.context() as patched:
        MortalConsumer.is_dead = point != "7 commit"
        if failing:
            patched.setattr(failing, crash)
        with suppress(Crash):
            for name in done:
                getattr(dying, name)()
    database.change(text("UPDATE jobs SET lease_expires_at = now() WHERE status = 'running'"))

    engine = FakeEngine(num_slots=4)
    with running_worker(worker_settings, engine):
        client.send("code", [LAST], partition=0)

        def has_both(records: list[Record]) -> bool:
            return {b"job-1", b"last"} <= {record.key for record in records}

        records = client.read([RESULTS], has_both)
    values = {record.value for record in client.read([RESULTS], has_both) if record.key == b"job-1"}
    assert len(values) == 1, "what is published again is the recorded outcome, byte for byte"
    (value,) = values
    recorded = Result.decode(value or b"").attempt
    row = database.one(text("SELECT status, attempt FROM jobs WHERE job_id = 'job-1'"))
    assert tuple(row) == ("succeeded", recorded)
    # A suspect that was claimed together with the other job is given back and claimed again, alone.
    assert recorded in ({attempt} if attempt == 1 else {attempt, attempt + 1})
    runs = dict(database.rows(text("SELECT job_id, count(*) FROM decode_runs GROUP BY job_id")))  # type: ignore[arg-type]
    assert runs == {"job-1": 1, "last": 1}
    num_published = sum(record.key == b"job-1" for record in records)
    assert num_published <= (2 if point in ("4 publish", "5 confirm", "6 complete") else 1)
    if point == "7 commit":
        assert engine.num_steps == 2, "nothing is left to do but the last job"
