"""Jobs through a real broker, a real database and a whole worker: what comes back, and what is refused."""

from __future__ import annotations

import json
import threading

import pytest
from sqlalchemy import text

from alphaloop.kafka.topics import ensure_topics
from alphaloop.messages import Purpose, Result, Status
from alphaloop.settings import Settings
from alphaloop.store.database import Database
from tests.fakes import FakeEngine
from tests.fixtures.drift import record_probes
from tests.fixtures.worker import WAIT_S, Client, headers_of, running_worker, until

pytestmark = [pytest.mark.kafka, pytest.mark.postgres]


def job(number: int, **fields: object) -> bytes:
    plain = {"job_id": f"job-{number}", "prompt": f"complete function number {number}", "max_tokens": 24}
    return json.dumps({**plain, **fields}).encode()


def deeply(levels: int) -> bytes:
    return b'{"prompt": "x", "extra": ' + b"[" * levels + b"]" * levels + b"}"


BAD = {
    "malformed_message: not JSON": b"complete this function",
    "malformed_message: half JSON": b'{"prompt": "x"',
    "malformed_message: an array": b'["prompt"]',
    "malformed_message: empty": b"",
    "malformed_message: not UTF-8": b'{"prompt": "\xff\xfe"}',
    "malformed_message: not a number": b'{"prompt": "x", "temperature": NaN}',
    "malformed_message: nested": deeply(60),
    "malformed_message: nested past the parser": deeply(200_000),
    "malformed_message: 2 MB": json.dumps({"prompt": "x" * 2_000_000}).encode(),
    "invalid_field: a wrong type": b'{"prompt": "x", "max_tokens": "many"}',
    "invalid_field: a wrong range": b'{"prompt": "x", "temperature": -1}',
    "invalid_field: no prompt": b'{"max_tokens": 3}',
    "invalid_field: an empty prompt": b'{"prompt": ""}',
    "invalid_field: a blank prompt": b'{"prompt": " \\n "}',
    "invalid_field: a lone surrogate": b'{"prompt": "\\ud800"}',
    "invalid_field: another task": b'{"task": "sql", "prompt": "x"}',
    "invalid_field: another model": b'{"prompt": "x", "model": "gpt-5"}',
    "invalid_field: four texts": b'{"prompt": "x", "n": 4}',
    "prompt_too_long: longer than the context": json.dumps({"prompt": "word " * 150_000}).encode(),
}


def test_every_kind_of_bad_message_among_fifty_good_ones(worker_settings: Settings, database: Database) -> None:
    client = Client(worker_settings)
    good = [job(i) for i in range(50)]
    with running_worker(worker_settings, FakeEngine(num_slots=4)):
        client.send("code", [*good[:25], *BAD.values(), *good[25:]])
        results = client.results(50)
        client.send_to("jobs.code", job(0, max_tokens=7))  # the same job_id with another payload
        letters = client.read(["jobs.code.dlq"], lambda r: len(r) >= len(BAD) + 1)
        ensure_topics(worker_settings.kafka, ["nobody-knows"])
        client.send("nobody-knows", [b'{"prompt": "x"}'])
        (unknown,) = client.read(["jobs.nobody-knows.dlq"], bool)
        client.send("code", [job(3)])  # the same job_id with the same payload
        again = client.results(51)
        refused = [Result.decode(record.value or b"") for record in client.refusals(len(letters) + 1)]
    assert sorted(r.job_id for r in results) == sorted(f"job-{i}" for i in range(50))
    assert {r.status for r in results} == {Status.SUCCEEDED}
    reasons = {letter.value: headers_of(letter) for letter in letters}
    for kind, value in BAD.items():
        assert reasons[value]["__dlq.errors.exception"] == kind.split(":")[0], kind
        assert reasons[value]["__dlq.errors.topic"] == "jobs.code"
        assert reasons[value]["__dlq.errors.message"]
    assert reasons[job(0, max_tokens=7)]["__dlq.errors.exception"] == "job_conflict"
    why = headers_of(unknown)
    assert (why["__dlq.errors.exception"], why["__dlq.errors.field"]) == ("unknown_task", "task")
    place = [f"__dlq.errors.{name}" for name in ("topic", "partition", "offset")]
    left = {tuple(said[name] for name in place): said for said in map(headers_of, [*letters, unknown])}
    for result in refused:
        said = left.pop(tuple(map(str, (result.origin.topic, result.origin.partition, result.origin.offset))))
        assert (result.job_id, result.error.code) == (said["alphaloop-job-id"], said["__dlq.errors.exception"])
        assert result.claimed_job_id == ("job-0" if result.error.code == "job_conflict" else None)
    assert left == {}
    assert len({result.encode() for result in again}) == 50, "job-3 was answered with the same bytes"
    assert_counts_add_up(database, num_jobs=50)


def assert_counts_add_up(database: Database, *, num_jobs: int) -> None:
    """As many outcomes as jobs, no run counted twice, nothing left to publish, the rollup equal to its runs."""
    sums = "SELECT sum(num_tokens), sum(rounds), sum(array_sum(accepts)), sum(num_cropped) FROM "
    numbers = (
        "SELECT (SELECT count(*) FROM jobs WHERE outcome IS NOT NULL), (SELECT count(*) FROM decode_runs),"
        " (SELECT count(DISTINCT job_id) FROM decode_runs), (SELECT count(*) FROM outbox)"
    )
    with database.begin() as connection:
        ended, runs, distinct, unpublished = connection.execute(text(numbers)).one()
        whole = connection.execute(text(sums + "decode_runs")).one()
        rolled = connection.execute(text(sums + "acceptance_hourly")).one()
    assert (ended, runs, distinct, unpublished) == (num_jobs, num_jobs, num_jobs, 0)
    assert tuple(whole) == tuple(rolled)
    tokens, rounds, accepted, cropped = whole
    assert tokens == rounds + accepted - cropped


def test_a_lost_claim_is_not_recorded_but_answered_by_whoever_has_it(
    worker_settings: Settings, database: Database
) -> None:
    """A worker that slept past its lease wakes up: its text must not overwrite the other's outcome."""
    is_stepping, may_go_on = threading.Event(), threading.Event()

    def step_slowly() -> None:
        is_stepping.set()
        assert may_go_on.wait(WAIT_S)

    client = Client(worker_settings)
    client.send("code", [job(1)])
    with running_worker(worker_settings, FakeEngine(num_slots=4, before_step=step_slowly)) as zombie:
        assert is_stepping.wait(WAIT_S)
        takeover = "UPDATE jobs SET owner = 'another', attempt = attempt + 1, lease_expires_at = now() + interval '1 h'"
        database.change(text(takeover))
        may_go_on.set()
        fenced = zombie.worker.metrics.registry.get_sample_value
        until(lambda: fenced("alphaloop_outcomes_fenced_total") == 1.0, "the outcome was dropped")
        with database.begin() as connection:
            assert connection.execute(text("SELECT count(*) FROM decode_runs")).scalar_one() == 0
            connection.execute(text("UPDATE jobs SET lease_expires_at = now()"))
        client.send("code", [job(1)])
        (result,) = client.results(1)
    # The other worker has the second attempt. The third counts its crash, and the fourth is claimed alone.
    assert result.attempt == 4
    assert_counts_add_up(database, num_jobs=1)


PROBE_ID = "probe-code-20261122T000000Z-0-lookup"
GENUINE = {
    "job_id": PROBE_ID,
    "purpose": "probe",
    "probe_drafter": "lookup",
    "probe_num_draft_tokens": 3,
    "body": {"prompt": "amber basil cedar", "max_tokens": 8, "temperature": 0.0},
}


def test_a_forged_probe_is_refused_and_does_not_take_the_genuine_ones_id(
    worker_settings: Settings, database: Database
) -> None:
    """Probes steer what a task is measured by, so only those that the scheduler recorded are taken for probes."""
    forged = [
        {**GENUINE, "body": {"prompt": "made to look good", "max_tokens": 500}},
        {**GENUINE, "job_id": "probe-code-20261123T000000Z-0-lookup"},
        {"job_id": PROBE_ID, "purpose": "control", "prompt": "amber"},
    ]
    genuine = json.dumps(GENUINE).encode()
    record_probes(database, [("code", genuine)])
    client = Client(worker_settings)
    client.send("code", [json.dumps(one).encode() for one in forged], partition=0)
    client.send("code", [genuine], partition=0)
    with running_worker(worker_settings, FakeEngine(num_slots=4)):
        (result,) = client.results(1)
        letters = client.read(["jobs.code.dlq"], lambda records: len(records) >= len(forged))
        answers = [Result.decode(record.value or b"") for record in client.refusals(len(forged))]
    assert sorted(answer.claimed_job_id for answer in answers) == sorted(one["job_id"] for one in forged)
    assert PROBE_ID not in {answer.job_id for answer in answers}
    assert (result.job_id, result.purpose, result.status) == (PROBE_ID, Purpose.PROBE, Status.SUCCEEDED)
    refused = [json.loads(letter.value or b"") for letter in letters]
    assert sorted(map(forged.index, refused)) == [0, 1, 2]
    reasons = [headers_of(letter) for letter in letters]
    assert {(one["__dlq.errors.exception"], one["__dlq.errors.field"]) for one in reasons} == {
        ("invalid_field", "purpose")
    }
