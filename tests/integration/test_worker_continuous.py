"""The worker never waits for its slowest job: slots are filled at once, and results, cancellations and stops too."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import Connection, text

from alphaloop.deciding.goodput import DrafterState
from alphaloop.deciding.job_facts import Subject
from alphaloop.kafka.offsets import TopicPartition
from alphaloop.kafka.topics import CONTROL, RESULTS
from alphaloop.messages import Result, Status
from alphaloop.messages.topics import jobs_topic
from alphaloop.settings import Settings
from alphaloop.store.database import Database
from tests.fakes import FakeEngine
from tests.fixtures.broker import committed, lag
from tests.fixtures.postgres import count
from tests.fixtures.publishing import NOW
from tests.fixtures.worker import Client, RunningWorker, SteppedEngine, by_id, changed, running_worker, until
from tests.integration.test_worker_flow import assert_counts_add_up
from worker.feed import LEAST_AHEAD

pytestmark = [pytest.mark.kafka, pytest.mark.postgres]

CODE = TopicPartition("jobs.code", 0)
LONG = 2000  #: tokens, and rounds, of a job that is still running whenever a test looks


@pytest.fixture
def steady_claims(monkeypatch: pytest.MonkeyPatch) -> None:
    """No more than LEAST_AHEAD jobs are claimed ahead, however fast this machine is."""
    monkeypatch.setattr("worker.feed.AHEAD_S", 0.0)


def job(name: str, max_tokens: int = 4, **fields: object) -> bytes:
    plain = {"job_id": name, "prompt": f"complete {name}", "max_tokens": max_tokens, "decoding": "vanilla"}
    return json.dumps({**plain, **fields}).encode()


@contextmanager
def stepped_worker(settings: Settings, engine: SteppedEngine) -> Iterator[RunningWorker]:
    """A worker whose engine runs freely at the end, so that it can be drained."""
    with running_worker(settings, engine) as running:
        try:
            yield running
        finally:
            engine.run_freely()


def wait_until_claimed(running: RunningWorker, num_jobs: int) -> None:
    """Until the worker holds so many jobs. Before a first round is allowed, because short jobs would end meanwhile."""
    until(lambda: running.worker.leases.num_held == num_jobs, "all jobs are claimed")


def run_all_slots(running: RunningWorker, engine: SteppedEngine) -> set[str]:
    """Until a job runs in every slot, and others are claimed ahead; returns the names of all claimed jobs.

    How many are claimed at once depends on how many messages were read by then. With more than half of LEAST_AHEAD
    ready, and AHEAD_S = 0, none is claimed before the next round: what is held stays as it is.
    """
    wait_until_ready(running, LEAST_AHEAD // 2 + 1)
    while len(engine.wait_at_round()) < engine.load().num_slots:
        engine.allow()
    wait_until_ready(running, LEAST_AHEAD // 2 + 1)
    held = set(running.worker.leases.held())
    assert len(held) <= engine.load().num_slots + LEAST_AHEAD
    return held


def wait_until_ready(running: RunningWorker, num_jobs: int) -> None:
    """Until so many claimed jobs wait for a slot."""
    until(lambda: len(running.worker.feed.ready) >= num_jobs, "jobs are claimed ahead")


def started(engine: SteppedEngine) -> set[str]:
    """The jobs that were in the engine, or are now."""
    return {name for round_ in engine.rounds for name in round_} | set(engine.running)


def results_of(client: Client, *job_ids: str) -> dict[str, Result]:
    """Everything on the topic, once there is a result of each of these jobs."""
    return by_id(client.read([RESULTS], lambda records: set(job_ids) <= by_id(records).keys()))


def test_the_lag_counts_jobs_that_run_so_no_worker_that_decodes_seems_idle(worker_settings: Settings) -> None:
    """The long job holds the offset, so what ended behind it counts too: the lag errs on the side of more workers.

    It is computed as KEDA's scaler does with `offsetResetPolicy: earliest` (configs/kubernetes/keda).
    """
    kafka = worker_settings.kafka
    client, engine = Client(worker_settings), SteppedEngine(num_slots=2)
    shorts = {"short-0", "short-1"}
    client.send("code", [job("long", LONG), *map(job, sorted(shorts))], partition=0)
    with stepped_worker(worker_settings, engine) as running:
        engine.wait_at_round()
        wait_until_claimed(running, 3)
        while not (shorts <= started(engine) and set(engine.wait_at_round()) == {"long"}):
            engine.allow()
            engine.wait_at_round()
        results_of(client, *shorts)
        assert lag(kafka, kafka.group_id, CODE) == 3
    results_of(client, "long")
    assert lag(kafka, kafka.group_id, CODE) == 0


def test_a_freed_slot_is_filled_in_the_next_round_and_results_do_not_wait_for_the_slowest(
    worker_settings: Settings, database: Database
) -> None:
    client, engine = Client(worker_settings), SteppedEngine(num_slots=4)
    shorts = [f"short-{number}" for number in range(15)]
    client.send("code", [job("long", LONG), *(job(name, 2 + len(name) % 4) for name in shorts)], partition=0)
    with stepped_worker(worker_settings, engine) as running:
        engine.wait_at_round()
        until(lambda: running.worker.intake.num_in_flight == 16, "all jobs were delivered")
        while num_left := len(set(shorts) - started(engine)):
            wait_until_ready(running, min(4, num_left))
            engine.allow()
            assert len(engine.wait_at_round()) == 4 or set(shorts) <= started(engine), "a slot stayed empty"
        while set(engine.wait_at_round()) != {"long"}:
            engine.allow()
        results = results_of(client, *shorts)
        assert "long" not in results
        assert set(engine.running) == {"long"}
    assert results_of(client, "long")["long"].status is Status.SUCCEEDED
    assert_counts_add_up(database, num_jobs=16)


def test_a_running_job_ends_in_the_round_after_its_cancellation_was_read_under_a_full_buffer(
    worker_settings: Settings,
) -> None:
    settings = changed(worker_settings, worker={"max_buffered_bytes": 1 << 20})
    client, engine = Client(settings), SteppedEngine(num_slots=2)
    client.send("code", [job("job-0", LONG), job("job-1", LONG)], partition=0)
    with stepped_worker(settings, engine) as running:
        wait_until_claimed(running, 2)
        while len(engine.wait_at_round()) < 2:
            engine.allow()
        client.send("code", [job(f"more-{number}", prompt="x" * 50_000) for number in range(120)], partition=0)
        partitions = running.worker.intake._partitions
        full = [held for at, held in partitions.items() if at.topic == jobs_topic("code")]
        until(lambda: all(held.is_paused for held in full), "the topic's partitions are paused")
        client.send_to(CONTROL, b'{"action": "cancel", "job_id": "job-0"}')
        until(lambda: "job-0" in running.worker.leases.cancelled(), "the cancellation was read")
        num_before = len(engine.rounds)
        engine.allow()
        assert "job-0" not in engine.wait_at_round(lambda now: "job-0" not in now)
        assert len(engine.rounds) - num_before <= 2
        assert results_of(client, "job-0")["job-0"].status is Status.CANCELLED
        assert "job-1" in engine.running


@pytest.mark.usefixtures("steady_claims")
def test_a_stop_decodes_what_runs_and_gives_back_what_was_claimed_ahead(
    worker_settings: Settings, database: Database
) -> None:
    client, engine = Client(worker_settings), SteppedEngine(num_slots=4)
    names = [f"job-{number}" for number in range(30)]
    client.send("code", [job(name, 20) for name in names], partition=0)
    with stepped_worker(worker_settings, engine) as running:
        claimed = run_all_slots(running, engine)
        started = engine.running
        assert claimed == set(names[: len(claimed)])
        assert count(database, "jobs WHERE owner IS NOT NULL") == len(claimed)
        running.stop.set()
    assert {name for round_ in engine.rounds for name in round_} == set(started) == set(names[:4])
    results = results_of(client, *started)
    assert {name: result.status for name, result in results.items()} == dict.fromkeys(started, Status.SUCCEEDED)
    assert count(database, "jobs WHERE owner IS NOT NULL") == 0
    kafka = worker_settings.kafka
    assert committed(kafka, kafka.group_id, CODE) == [4]
    with running_worker(worker_settings, FakeEngine(num_slots=4)):
        results = results_of(client, *names)
    ahead = claimed - set(started)
    assert {name for name in names if results[name].attempt == 2} == ahead
    assert {name for name in names if results[name].attempt == 1} == set(names) - ahead
    assert count(database, "jobs WHERE num_crashes > 0") == 0
    assert_counts_add_up(database, num_jobs=30)


@pytest.mark.usefixtures("steady_claims")
def test_in_a_hurry_all_is_given_back_and_no_crash_counted(worker_settings: Settings, database: Database) -> None:
    client, engine = Client(worker_settings), SteppedEngine(num_slots=4)
    names = [f"job-{number}" for number in range(20)]
    client.send("code", [job(name, LONG) for name in names[:4]] + [job(name) for name in names[4:]], partition=0)
    with stepped_worker(worker_settings, engine) as running:
        claimed = run_all_slots(running, engine)
        running.stop.set()
        running.hurry.set()
    assert count(database, "jobs WHERE owner IS NOT NULL") == 0
    with running_worker(worker_settings, FakeEngine(num_slots=4)):
        results = results_of(client, *names)
    assert {result.status for result in results.values()} == {Status.SUCCEEDED}
    assert {name for name in names if results[name].attempt == 2} == claimed
    assert {name for name in names if results[name].attempt == 1} == set(names) - claimed
    assert count(database, "jobs WHERE num_crashes > 0") == 0


@pytest.mark.usefixtures("steady_claims")
def test_the_thread_that_decodes_asks_the_database_nothing(
    worker_settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unknown tasks, choices that change, trials that cost: other threads read and write for it."""
    settings = changed(worker_settings, policy={"explore_share": 0.5, "control_share": 0.1})
    asking, is_over = Counter[str](), threading.Event()

    def watch(name: str) -> None:
        connect = getattr(Database, name)

        def watched(database: Database) -> AbstractContextManager[Connection]:
            if not is_over.is_set():
                asking[threading.current_thread().name] += 1
            connected: AbstractContextManager[Connection] = connect(database)
            return connected

        monkeypatch.setattr(Database, name, watched)

    client = Client(settings)
    tasks = sorted(settings.tasks)[:3]
    drafters = (DrafterState("lookup", "fake-1", 8), DrafterState("small", "fake-2", 4))
    with running_worker(settings, FakeEngine(acceptance=(0.6, 0.3), drafters=drafters)) as running:
        watch("begin")
        watch("single")
        for number in range(1, 9):
            for task in tasks:
                client.send(task, [job(f"{task}-{number}", 40, decoding="auto")])
            results = client.results(number * len(tasks))
        is_over.set()
        budgets = [running.worker.decider.session.budget(Subject(task, "greedy")) for task in tasks]
    assert {result.decoding.reason for result in results if result.decoding} >= {"exploring"}
    assert all(budget is not None and budget.spent > 0 for budget in budgets)
    assert asking["feed"] > 0
    assert asking["background"] > 0
    assert asking["worker"] == 0


def test_no_queue_holds_more_bytes_than_it_may_but_for_one_job(worker_settings: Settings) -> None:
    settings = changed(worker_settings, worker={"max_buffered_bytes": 1 << 20})
    client, engine = Client(settings), SteppedEngine(num_slots=2)
    large = [job(f"job-{number}", 2, prompt="x" * 50_000) for number in range(90)]
    most = {"buffered": 0, "unread": 0, "waiting": 0, "claimed": 0}
    with stepped_worker(settings, engine) as running:
        parts = running.worker
        until(lambda: parts.intake.is_assigned, "the partitions are assigned")
        own = [held for at, held in parts.intake._partitions.items() if at.topic == jobs_topic("code")]
        assert own

        def measure() -> bool:
            held = sum(ready.num_bytes for _, ready in parts.feed._held)
            now = {
                "buffered": parts.intake._lanes[False].num_bytes,
                "unread": (1 << 20) - parts.feed._unread[False].room_bytes,
                "waiting": parts.feed.queue.load(is_high=False)[1] + held,
                "claimed": parts.feed.ready.num_bytes,
            }
            most.update({name: max(most[name], now[name]) for name in now})
            return all(held.is_paused for held in own) and most["waiting"] >= 1 << 20

        client.send("code", large, partition=0)
        until(measure, "memory is full and the partitions are paused")
        engine.run_freely()
        until(lambda: bool(measure() or parts.feed.num_waiting == 0) and len(engine.rounds) >= 30, "it goes on")
        results_of(client, *(f"job-{number}" for number in range(90)))
    # A job that was read is held as its message, as text and as tokens.
    limit = (1 << 20) + 2 * len(max(large, key=len)) + 2048
    assert max(most.values()) <= limit


def test_a_running_job_ends_as_expired_in_the_round_after_its_deadline(
    worker_settings: Settings, database: Database
) -> None:
    client, engine = Client(worker_settings), SteppedEngine(num_slots=2)
    deadline = datetime.now(UTC) + timedelta(days=1)
    client.send("code", [job("late", LONG, deadline=deadline.isoformat()), job("free", LONG)], partition=0)
    is_past = threading.Event()
    running = RunningWorker(worker_settings, engine, seed=1)
    running.worker.now = lambda: deadline if is_past.is_set() else NOW
    running.start()
    try:
        wait_until_claimed(running, 2)
        while set(engine.wait_at_round()) != {"late", "free"}:
            engine.allow()
        is_past.set()
        num_before = len(engine.rounds)
        engine.allow()
        assert engine.wait_at_round(lambda now: "late" not in now) == ("free",)
        assert len(engine.rounds) - num_before <= 2
        result = results_of(client, "late")["late"]
        assert (result.status, result.text, result.error and result.error.code) == (Status.EXPIRED, None, "expired")
    finally:
        engine.run_freely()
        running.close()
    assert results_of(client, "free")["free"].status is Status.SUCCEEDED
    assert database.scalar(text("SELECT array_agg(job_id) FROM decode_runs")) == ["free"]
