"""A worker with vLLM inside, on a real broker and a real database; the package `vllm` is one of the documented form."""

from __future__ import annotations

import pytest
from sqlalchemy import text

from alphaloop.errors import EngineSick
from alphaloop.kafka.topics import CONTROL
from alphaloop.messages import Mode, Status
from alphaloop.settings import Settings
from alphaloop.store.database import Database
from tests.fakes import FakeEngine
from tests.fixtures.fake_vllm import FakeVllm, engine_in_process
from tests.fixtures.worker import Client, RunningWorker, running_worker, until
from tests.integration.test_worker_servers import attempts, job

pytestmark = [pytest.mark.kafka, pytest.mark.postgres]


def test_jobs_are_decoded_by_the_route_of_their_decision_and_outlive_their_engine(
    worker_settings: Settings, database: Database
) -> None:
    """The plain engine dies in the middle: its jobs are decoded again, by its next life or by the other engine."""
    fake, client = FakeVllm(round_s=0.002), Client(worker_settings)
    with engine_in_process(fake) as engine, running_worker(worker_settings, engine) as running:
        plain, _ = fake.lives
        forced = [job(number, decoding=("speculative", "vanilla")[number % 2]) for number in range(20)]
        fake.is_held = True  # else the jobs may end before the engine does
        client.send("code", forced)
        until(lambda: plain.engine.load().num_running > 0, "jobs are in the engine")
        plain.die()
        fake.is_held = False
        by_id = {result.job_id: result for result in client.results(20)}
        until(lambda: len(fake.lives) == 3, "the engine is started again")
        fake.is_held = True  # else they may end before their cancellation comes
        client.send("code", [job(20, stream=True), job(21, max_tokens=400)])
        until(lambda: running.worker.engine.load().num_running == 2, "they are decoded")
        client.send_to(CONTROL, b'{"action": "cancel", "job_id": "job-21"}')
        client.results(21)
        fake.is_held = False
        statuses = {result.job_id: result.status for result in client.results(22)}
        assert (statuses["job-20"], statuses["job-21"]) == (Status.SUCCEEDED, Status.CANCELLED)
    assert len(fake.lives) == 3
    assert all(life.is_shut_down for life in fake.lives), "the worker's end is theirs"
    assert {result.status for result in by_id.values()} == {Status.SUCCEEDED}
    for number in range(20):
        decoding = by_id[f"job-{number}"].decoding
        assert decoding is not None
        assert decoding.mode == (Mode.SPECULATIVE, Mode.VANILLA)[number % 2]
        assert decoding.engine == "vllm-0.32.0"
        assert bool(sum(decoding.proposed)) == (number % 2 == 0)
    assert {found[1] for found in attempts(database).values()} == {0}
    assert {attempts(database)[f"job-{number}"] for number in range(20)} == {(1, 0)}, "a death counts against no job"
    with database.begin() as connection:
        runs = connection.execute(text("SELECT count(DISTINCT job_id), count(*) FROM decode_runs")).one()
    assert runs[0] == runs[1]


def test_an_engine_that_never_comes_back_ends_the_worker_and_costs_no_job_an_attempt(
    worker_settings: Settings, database: Database
) -> None:
    fake, client = FakeVllm(round_s=0.002), Client(worker_settings)
    with engine_in_process(fake, plain=False) as engine:
        client.send("code", [job(number) for number in range(30)])
        sick = RunningWorker(worker_settings, engine, seed=1)
        fake.is_held = True  # else the jobs may end before the engine does
        sick.start()
        until(lambda: fake.engine.engine.load().num_running > 0, "jobs are in the engine")
        fake.num_failing_starts = 1000
        fake.engine.die()
        until(lambda: sick.error is not None, "the worker ended by itself")
        with pytest.raises(EngineSick, match="vLLM at speculative was started 3 times and finished no text"):
            sick.close()
    with database.begin() as connection:
        held = connection.execute(
            text("SELECT count(*) FROM jobs WHERE status = 'failed' OR lease_expires_at > clock_timestamp()")
        ).scalar_one()
        counted = connection.execute(text("SELECT max(num_crashes), max(num_failures) FROM jobs")).one()
    assert (held, tuple(counted)) == (0, (0, 0))
    with running_worker(worker_settings, FakeEngine(num_slots=4)):
        results = client.results(30)
    assert {result.status for result in results} == {Status.SUCCEEDED}


def test_a_request_that_kills_the_engine_is_found_out(worker_settings: Settings, database: Database) -> None:
    """Each time it is decoded the engine dies; innocent jobs beside it all succeed, and the worker goes on."""
    fake, client = FakeVllm(round_s=0.002), Client(worker_settings)
    with engine_in_process(fake, plain=False) as engine, running_worker(worker_settings, engine):
        fake.deadly = "deadly"
        client.send("code", [job(0, prompt="a deadly prompt"), *(job(number) for number in range(1, 10))])
        by_id = {result.job_id: result for result in client.results(10)}
    killer = by_id.pop("job-0")
    assert killer.status is Status.FAILED
    assert killer.error is not None
    assert killer.error.code == "request_kills_server"
    assert {result.status for result in by_id.values()} == {Status.SUCCEEDED}
    assert len(fake.lives) == 5, "four deaths"
