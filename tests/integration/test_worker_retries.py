"""Jobs that fail are tried again through retry topics; a job that kills every worker is given up, and no other."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from sqlalchemy import text

from alphaloop.engine import Step
from alphaloop.errors import DecodeFailed
from alphaloop.kafka.topics import RESULTS, cluster_id, ensure_topics
from alphaloop.messages import Origin, Status, derived_job_id
from alphaloop.messages.headers import RetryHeaders
from alphaloop.messages.topics import high_topic, retry_topic
from alphaloop.settings import Settings
from alphaloop.store.database import Database
from tests.fakes import FakeEngine
from tests.fixtures.doomed_worker import DIED, doomed_worker
from tests.fixtures.postgres import count
from tests.fixtures.worker import (
    Client,
    by_id,
    changed,
    everything,
    headers_of,
    running_worker,
    until,
)

pytestmark = [pytest.mark.kafka, pytest.mark.postgres]

#: The database's time is known to half a round trip, of a second at most (DatabaseClock).
CLOCK_S = 0.5
GOOD = [json.dumps({"job_id": f"good-{n}", "prompt": f"complete {n}", "max_tokens": 6}).encode() for n in range(6)]


class UnluckyEngine(FakeEngine):
    """A step with a job that is to fail fails; `failing` says how often, by the first word of the prompt."""

    def __init__(self, failing: dict[str, int]) -> None:
        super().__init__(num_slots=4)
        self._left = Counter(failing)

    def step(self) -> Step:
        for sequence in self._running:
            prompt = str(sequence.prepared.job.body.messages or "")
            for word in self._left:
                if f"{word} " in prompt and self._left[word]:
                    self._left[word] -= len(self._running) == 1
                    raise DecodeFailed("no luck")
        return super().step()


def asking(prompt: str, **fields: object) -> bytes:
    return json.dumps({"prompt": prompt, "max_tokens": 6, **fields}).encode()


def row_of(database: Database, job_id: str) -> tuple[str, int, int]:
    query = text("SELECT status, num_failures, num_crashes FROM jobs WHERE job_id = :job_id")
    status, num_failures, num_crashes = database.one(query, {"job_id": job_id})
    return status, num_failures, num_crashes


def test_a_job_that_fails_twice_succeeds_under_its_derived_id(worker_settings: Settings, database: Database) -> None:
    settings = changed(worker_settings, kafka={"retry_delays_s": (1, 2)})
    client = Client(settings)
    value, trace = asking("unlucky one"), ("traceparent", b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
    engine = UnluckyEngine({"unlucky": 2})
    client.send("code", [*GOOD[:3]], partition=0)
    client.send("code", [value], partition=0, headers=[trace])
    client.send("code", [*GOOD[3:]], partition=0)
    with running_worker(settings, engine) as running:
        records = client.read([RESULTS], lambda found: len(by_id(found)) == 7)
        until(lambda: running.worker.intake.num_in_flight == 0, "every delivery is finished")
    (sent,) = [one for one in client.read(["jobs.code"], lambda found: len(found) == 7) if one.value == value]
    origin = Origin(cluster_id(settings.kafka), "jobs.code", 0, sent.offset, sent.timestamp_ms)
    job_id = derived_job_id(origin, value)
    results = by_id(records)
    assert {result.status for result in results.values()} == {Status.SUCCEEDED}
    assert results.keys() == {*(f"good-{number}" for number in range(6)), job_id}
    assert row_of(database, job_id) == ("succeeded", 2, 0)
    (result,) = [record for record in records if record.key == job_id.encode()]
    assert headers_of(result)["traceparent"] == trace[1].decode()
    for number, delay_s in ((1, 1), (2, 2)):
        (waited,) = client.read([retry_topic("code", delay_s)], lambda found: bool(found))
        said = RetryHeaders.read(waited.headers)
        assert (waited.value, waited.key) == (value, None)
        assert (said.topic, said.partition, said.offset, said.timestamp_ms) == (
            "jobs.code",
            0,
            sent.offset,
            sent.timestamp_ms,
        )
        assert (said.num_failures, said.reason) == (number, "decode_failed")
    recorded_at = results[job_id].recorded_at.timestamp()
    assert recorded_at >= said.not_before_ms / 1000 - CLOCK_S, "the second retry was not tried before it was due"
    assert (recorded_at - (sent.timestamp_ms or 0) / 1000) >= 3 - CLOCK_S


def test_after_its_last_try_a_job_has_failed_and_is_a_dead_letter(
    worker_settings: Settings, database: Database
) -> None:
    settings = changed(worker_settings, kafka={"retry_delays_s": (1,)})
    client = Client(settings)
    bad = asking("bad one", job_id="bad")
    ensure_topics(settings.kafka, (), high=["code"])
    client.send_to(high_topic("code"), bad)
    client.send("code", GOOD)
    with running_worker(settings, UnluckyEngine({"bad": 99})):
        results = by_id(client.read([RESULTS], lambda found: len(by_id(found)) == 7))
        (letter,) = client.read(["jobs.code.dlq"], lambda found: bool(found))
    failed = results.pop("bad")
    assert (failed.status, failed.error and failed.error.code) == (Status.FAILED, "decode_failed")
    assert {result.status for result in results.values()} == {Status.SUCCEEDED}
    assert row_of(database, "bad") == ("failed", 1, 0)
    headers = headers_of(letter)
    assert letter.value == bad
    assert headers["__dlq.errors.topic"] == high_topic("code"), "where it was sent, not where it waited"
    assert (headers["__dlq.errors.exception"], headers["alphaloop-job-id"]) == ("decode_failed", "bad")
    assert not [name for name in headers if name.startswith("alphaloop-retry-")]


NUM_JOBS = 24


def job(number: int) -> bytes:
    return json.dumps({"job_id": f"job-{number}", "prompt": f"complete {number}", "max_tokens": 6}).encode()


def test_only_the_job_that_kills_workers_is_given_up(worker_settings: Settings, database: Database) -> None:
    """Slots and claims ahead hold a dozen jobs whenever the poison strikes. They are suspects, and run alone."""
    leases = {"lease_s": 1.0, "max_attempts": 2}
    settings = changed(worker_settings, kafka={"session_timeout_ms": 1500}, worker=leases)
    client = Client(settings)
    client.send("code", [job(number) for number in range(NUM_JOBS)], partition=0)
    num_deaths, ended = 0, "jobs WHERE outcome IS NOT NULL"
    while count(database, ended) < NUM_JOBS:
        with doomed_worker(settings, "job-5") as process:
            until(lambda its=process: not its.is_alive() or count(database, ended) == NUM_JOBS, "it is done or dead")  # type: ignore[misc]
            num_deaths += not process.is_alive()
        assert process.exitcode in (0, DIED)
    assert num_deaths == 1 + settings.worker.max_attempts, "the first death may have been any job's fault"
    names = {f"job-{number}" for number in range(NUM_JOBS)}
    records = client.read([RESULTS], lambda found: {(record.key or b"").decode() for record in found} == names)
    results = by_id(records)
    poison = results.pop("job-5")
    assert (poison.status, poison.error and poison.error.code) == (Status.FAILED, "attempts_exhausted")
    assert {name: result.status for name, result in results.items() if result.status is not Status.SUCCEEDED} == {}
    letters = everything(settings.kafka, "jobs.code.dlq")
    assert {letter.value for letter in letters} == {job(5)}
    headers = headers_of(letters[0])
    assert headers["__dlq.errors.exception"] == "attempts_exhausted"
    assert (headers["alphaloop-job-id"], headers["alphaloop-outcome"]) == ("job-5", "failed")
