"""A sick engine, on a real broker and a real database: no job fails, none is counted as tried, others take over."""

from __future__ import annotations

import json

import pytest
from sqlalchemy import text

from alphaloop.errors import EngineSick
from alphaloop.messages import Status
from alphaloop.settings import Settings
from alphaloop.store.database import Database
from tests.fakes import FakeEngine
from tests.fixtures.worker import Client, RunningWorker, running_worker, until
from tests.integration.test_worker_flow import assert_counts_add_up

pytestmark = [pytest.mark.kafka, pytest.mark.postgres]


def test_jobs_of_a_sick_engine_are_given_back_and_decoded_by_the_next_worker(
    worker_settings: Settings, database: Database
) -> None:
    sick_from = 6

    def step() -> None:
        if engine.num_steps > sick_from:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    names = [f"job-{number}" for number in range(40)]
    client, engine = Client(worker_settings), FakeEngine(num_slots=4, before_step=step)
    jobs = [{"job_id": name, "prompt": f"complete {name}", "max_tokens": 4, "decoding": "vanilla"} for name in names]
    client.send("code", [json.dumps(job).encode() for job in jobs])
    sick = RunningWorker(worker_settings, engine, seed=1)
    sick.start()
    until(lambda: sick.error is not None, "the worker ended by itself")
    assert sick.worker.end_reason is not None
    assert "RuntimeError" in sick.worker.end_reason
    with pytest.raises(EngineSick):
        sick.close()
    with database.begin() as connection:
        num_held = connection.execute(
            text("SELECT count(*) FROM jobs WHERE status = 'failed' OR lease_expires_at > clock_timestamp()")
        ).scalar_one()
    assert num_held == 0, "nothing failed, and no claim is left"
    with running_worker(worker_settings, FakeEngine(num_slots=4)):
        results = client.results(40)
    assert {result.job_id for result in results} == set(names)
    assert {result.status for result in results} == {Status.SUCCEEDED}
    with database.begin() as connection:
        counted = connection.execute(text("SELECT max(num_crashes), max(num_failures) FROM jobs")).one()
    assert tuple(counted) == (0, 0)
    assert_counts_add_up(database, num_jobs=40)
