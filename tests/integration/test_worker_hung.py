"""A worker that hangs or whose engine is sick, on real servers: it is found, and others decode its jobs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
from sqlalchemy import text

from alphaloop import liveness
from alphaloop.errors import EngineSick, WorkerThreadDied
from alphaloop.liveness import Watchdog
from alphaloop.messages import Status
from alphaloop.settings import Settings
from alphaloop.store.database import Database, Listener
from tests.fakes import FakeEngine
from tests.fixtures.worker import WAIT_S, Client, RunningWorker, SteppedEngine, changed, running_worker, until
from tests.integration.test_worker_continuous import job, results_of, wait_until_claimed
from tests.integration.test_worker_flow import assert_counts_add_up

pytestmark = [pytest.mark.kafka, pytest.mark.postgres]


def leases(database: Database) -> tuple[int, int]:
    """How many jobs are held by a valid lease, and how many are claimed by somebody at all."""
    query = "SELECT count(*) FILTER (WHERE lease_expires_at > clock_timestamp()), count(owner) FROM jobs"
    row = database.one(text(f"{query} WHERE status = 'running'"))
    return int(row[0]), int(row[1])


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "TICK_S", 0.05)
    monkeypatch.setattr(liveness, "GRACE_S", 0.2)


@pytest.mark.usefixtures("impatient")
def test_the_jobs_of_a_hung_step_are_let_go_and_decoded_by_another_worker(
    worker_settings: Settings, database: Database
) -> None:
    settings = changed(worker_settings, worker={"max_step_s": 0.5, "lease_s": 1.5})
    names = [f"job-{number}" for number in range(6)]
    client, engine = Client(settings), SteppedEngine(num_slots=2)
    client.send("code", [job(name) for name in names], partition=0)
    hung = RunningWorker(settings, engine, seed=1)
    ended = threading.Event()
    dog = Watchdog(hung.worker.threads.liveness, last_orders=hung.worker.give_back_unstarted, end=ended.set)
    hung.start()
    engine.wait_at_round()
    wait_until_claimed(hung, len(names))
    dog.start()
    assert ended.wait(WAIT_S)
    dog.close()
    wrong = hung.worker.threads.unhealthy()
    assert wrong.startswith("the engine's step has not moved for")
    assert hung.worker.unready() == wrong
    until(lambda: leases(database)[0] == 0, "no lease is renewed any more")
    assert leases(database)[1] == len(engine.running), "what never started was given back"
    hung.worker.intake.close(WAIT_S)  # as the end of the process does
    with running_worker(worker_settings, FakeEngine(num_slots=4)):
        results = results_of(client, *names)
    assert {result.status for result in results.values()} == {Status.SUCCEEDED}
    engine.run_freely()
    hung.close()
    assert_counts_add_up(database, num_jobs=6)


def test_a_thread_that_hangs_is_named(worker_settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """All stop in a call that they make in every turn, as in a server's answer that never comes; then each goes on."""
    monkeypatch.setattr("worker.background.MAX_SILENCE_S", 1.0)
    running = RunningWorker(worker_settings, FakeEngine(num_slots=2), seed=1)
    parts = running.worker
    calls: dict[str, tuple[object, str]] = {
        "control": (parts.threads.intakes[1], "take"),
        "feed": (parts.intake, "take"),
        "recording": (parts.recorder._waiting, "take"),
        "publishing": (parts.publisher.queue, "take"),
        "background": (parts.background._queue, "take"),
        "leases": (parts.leases, "check_cancelled"),
        "watch": (Listener, "wait"),
    }

    @contextmanager
    def hung(owner: object, method: str) -> Iterator[threading.Event]:
        may_go_on, call = threading.Event(), getattr(owner, method)

        def hang(*args: object, **options: object) -> object:
            assert may_go_on.wait(WAIT_S)
            return call(*args, **options)

        with monkeypatch.context() as patched:
            patched.setattr(owner, method, hang)
            try:
                yield may_go_on
            finally:
                may_go_on.set()

    running.start()
    try:
        with ExitStack() as stack:
            hangs = {name: stack.enter_context(hung(*call)) for name, call in calls.items()}
            for name, may_go_on in hangs.items():
                said = f"the thread {name} has not moved"
                until(lambda said=said: said in (parts.threads.unhealthy() or ""), said)  # type: ignore[misc]
                may_go_on.set()
            until(lambda: parts.threads.unhealthy() is None, "all move again")
    finally:
        running.close()


def test_a_thread_of_the_leases_that_dies_ends_the_worker_and_is_seen(
    worker_settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = RunningWorker(changed(worker_settings, worker={"lease_s": 0.3}), FakeEngine(num_slots=2), seed=1)

    def die() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(running.worker.leases, "renew_due", die)
    running.start()
    until(lambda: running.error is not None, "the worker ended by itself")
    assert (running.worker.threads.unhealthy() or "").startswith("the thread leases ended")
    with pytest.raises(WorkerThreadDied, match="leases"):
        running.close()


def test_jobs_of_a_sick_engine_are_given_back_and_decoded_by_the_next_worker(
    worker_settings: Settings, database: Database
) -> None:
    sick_from = 6

    def step() -> None:
        if engine.num_steps > sick_from:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    names = [f"job-{number}" for number in range(40)]
    client, engine = Client(worker_settings), FakeEngine(num_slots=4, before_step=step)
    client.send("code", [job(name) for name in names])
    sick = RunningWorker(worker_settings, engine, seed=1)
    sick.start()
    until(lambda: sick.error is not None, "the worker ended by itself")
    assert sick.worker.end_reason is not None
    assert "RuntimeError" in sick.worker.end_reason
    with pytest.raises(EngineSick):
        sick.close()
    num_held = database.scalar(
        text("SELECT count(*) FROM jobs WHERE status = 'failed' OR lease_expires_at > clock_timestamp()")
    )
    assert num_held == 0, "nothing failed, and no claim is left"
    with running_worker(worker_settings, FakeEngine(num_slots=4)):
        results = client.results(40)
    assert {result.job_id for result in results} == set(names)
    assert {result.status for result in results} == {Status.SUCCEEDED}
    counted = database.one(text("SELECT max(num_crashes), max(num_failures) FROM jobs"))
    assert tuple(counted) == (0, 0)
    assert_counts_add_up(database, num_jobs=40)
