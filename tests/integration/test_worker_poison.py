"""A job that kills every worker that decodes it: it alone is given up, and every other job succeeds."""

from __future__ import annotations

import json
import subprocess

import pytest
from sqlalchemy import text

from alphaloop.kafka.consumer import Consumer
from alphaloop.kafka.offsets import Record
from alphaloop.kafka.topics import RESULTS
from alphaloop.messages import Result, Status
from alphaloop.settings import Settings
from alphaloop.store.database import Database
from tests.fixtures.doomed_worker import DIED, doomed_worker
from tests.fixtures.worker import WAIT_S, Client, headers_of, until

pytestmark = [pytest.mark.kafka, pytest.mark.postgres]

NUM_JOBS = 24


def job(number: int) -> bytes:
    return json.dumps({"job_id": f"job-{number}", "prompt": f"complete {number}", "max_tokens": 6}).encode()


def num_ended(database: Database) -> int:
    with database.begin() as connection:
        return int(connection.execute(text("SELECT count(*) FROM jobs WHERE outcome IS NOT NULL")).scalar_one())


def everything(settings: Settings, topic: str) -> list[Record]:
    """All that lies on a topic now."""
    consumer = Consumer(settings.kafka, group_id="unused")
    records: list[Record] = []
    try:
        consumer.assign_from([topic], at="earliest")
        num_records = sum(high - low for low, high in map(consumer.watermarks, consumer.assignment()))
        while len(records) < num_records:
            if (record := consumer.poll(WAIT_S)) is not None:
                records.append(record)
    finally:
        consumer.close()
    return records


def works_until_done_or_dead(process: subprocess.Popen[str], database: Database) -> bool:
    """Whether everything is done."""
    until(lambda: process.poll() is not None or num_ended(database) == NUM_JOBS, "all is done or the worker is dead")
    return process.poll() is None


def test_only_the_job_that_kills_workers_is_given_up(worker_settings: Settings, database: Database) -> None:
    """Slots and claims ahead hold a dozen jobs whenever the poison strikes. They are suspects, and run alone."""
    settings = worker_settings.model_copy(
        update={
            "kafka": worker_settings.kafka.model_copy(update={"session_timeout_ms": 1500}),
            "worker": worker_settings.worker.model_copy(update={"lease_s": 1.0, "suspect_delay_s": 0.2}),
        }
    )
    client = Client(settings)
    client.send("code", [job(number) for number in range(NUM_JOBS)], partition=0)
    num_deaths, is_done = 0, False
    while not is_done:
        with doomed_worker(settings, "job-5") as process:
            is_done = works_until_done_or_dead(process, database)
        assert is_done or process.returncode == DIED
        num_deaths += not is_done
    assert num_deaths == 1 + settings.worker.max_attempts, "the first death may have been any job's fault"
    names = {f"job-{number}" for number in range(NUM_JOBS)}
    records = client.read([RESULTS], lambda found: {(record.key or b"").decode() for record in found} == names)
    by_id = {result.job_id: result for result in (Result.decode(record.value or b"") for record in records)}
    poison = by_id.pop("job-5")
    assert (poison.status, poison.error and poison.error.code) == (Status.FAILED, "attempts_exhausted")
    assert {name: result.status for name, result in by_id.items() if result.status is not Status.SUCCEEDED} == {}
    letters = everything(settings, "jobs.code.dlq")
    assert {letter.value for letter in letters} == {job(5)}
    headers = headers_of(letters[0])
    assert headers["__dlq.errors.exception"] == "attempts_exhausted"
    assert (headers["alphaloop-job-id"], headers["alphaloop-outcome"]) == ("job-5", "failed")
