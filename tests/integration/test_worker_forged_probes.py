"""Probes steer what a task is measured by, so only those that the scheduler recorded are taken for probes."""

from __future__ import annotations

import json

import pytest

from alphaloop.messages import Purpose, Result, Status
from alphaloop.settings import Settings
from alphaloop.store.database import Database
from tests.fakes import FakeEngine
from tests.fixtures.drift import record_probes
from tests.fixtures.worker import Client, headers_of, running_worker

pytestmark = [pytest.mark.kafka, pytest.mark.postgres]

ID = "probe-code-20261122T000000Z-0-lookup"
GENUINE = {
    "job_id": ID,
    "purpose": "probe",
    "probe_drafter": "lookup",
    "probe_num_draft_tokens": 3,
    "body": {"prompt": "amber basil cedar", "max_tokens": 8, "temperature": 0.0},
}


def test_a_forged_probe_is_refused_and_does_not_take_the_genuine_ones_id(
    worker_settings: Settings, database: Database
) -> None:
    forged = [
        {**GENUINE, "body": {"prompt": "made to look good", "max_tokens": 500}},
        {**GENUINE, "job_id": "probe-code-20261123T000000Z-0-lookup"},
        {"job_id": ID, "purpose": "control", "prompt": "amber"},
    ]
    genuine = json.dumps(GENUINE).encode()
    record_probes(database, [("code", genuine)])
    client = Client(worker_settings)
    client.send("code", [json.dumps(one).encode() for one in forged], partition=0)
    client.send("code", [genuine], partition=0)
    with running_worker(worker_settings, FakeEngine()):
        (result,) = client.results(1)
        letters = client.read(["jobs.code.dlq"], lambda records: len(records) >= len(forged))
        answers = [Result.decode(record.value or b"") for record in client.refusals(len(forged))]
    assert (result.job_id, result.purpose, result.status) == (ID, Purpose.PROBE, Status.SUCCEEDED)
    assert sorted(answer.claimed_job_id for answer in answers) == sorted(one["job_id"] for one in forged)
    assert ID not in {answer.job_id for answer in answers}
    refused = [json.loads(letter.value or b"") for letter in letters]
    assert sorted(map(forged.index, refused)) == [0, 1, 2]
    reasons = [headers_of(letter) for letter in letters]
    assert {(one["__dlq.errors.exception"], one["__dlq.errors.field"]) for one in reasons} == {
        ("invalid_field", "purpose")
    }
