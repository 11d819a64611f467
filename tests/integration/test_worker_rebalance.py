"""Who gets what first, on a real broker: partitions that go to another worker, and the lane of high jobs."""

from __future__ import annotations

from typing import cast

import pytest
from sqlalchemy import text

from alphaloop.kafka.consumer import Consumer
from alphaloop.kafka.offsets import Record
from alphaloop.kafka.topics import ensure_topics
from alphaloop.messages import Status
from alphaloop.messages.topics import high_topic
from alphaloop.settings import Settings
from alphaloop.store.database import Database
from tests.fakes import FakeEngine
from tests.fixtures.worker import Client, RunningWorker, SteppedEngine, changed, kafka_extra, running_worker, until
from tests.integration.test_worker_continuous import LONG, job, results_of, started, stepped_worker, wait_until_claimed
from tests.integration.test_worker_flow import assert_counts_add_up
from worker.feed import LEAST_AHEAD

pytestmark = [pytest.mark.kafka, pytest.mark.postgres]

NAMES = [f"job-{number}" for number in range(4)]


def run_two(worker: RunningWorker, engine: SteppedEngine) -> None:
    """Until two jobs run, and two more are claimed."""
    wait_until_claimed(worker, 4)
    while len(engine.wait_at_round()) < 2:
        engine.allow()


def hand_over_everything(worker: RunningWorker) -> None:
    """Have the group revoke all partitions of a worker that goes on."""
    intake = worker.worker.intake
    number, source = intake.assignment_number, cast(Consumer, intake.source)

    def unsubscribe_and_poll(timeout_s: float) -> Record | None:
        """In the thread that polls, because the client's call waits for the callback that runs there."""
        source.poll = poll  # type: ignore[method-assign]
        source._client.unsubscribe()
        return poll(timeout_s)

    poll, source.poll = source.poll, unsubscribe_and_poll  # type: ignore[method-assign]
    until(lambda: intake.assignment_number > number, "the rebalance has begun")


def test_what_runs_ends_before_its_partition_goes_and_is_decoded_once(
    worker_settings: Settings, database: Database
) -> None:
    client, engine, other = Client(worker_settings), SteppedEngine(num_slots=2), FakeEngine(num_slots=4)
    client.send("code", [job(name, 5) for name in NAMES], partition=0)
    with stepped_worker(worker_settings, engine) as first:
        run_two(first, engine)
        running = engine.running
        hand_over_everything(first)
        with running_worker(worker_settings, other) as second:
            assert not second.worker.intake.is_assigned, "the new owner waits"
            engine.run_freely()
            until(lambda: second.worker.intake.is_assigned, "the new owner has the partitions")
            results = results_of(client, *NAMES)
    assert {result.status for result in results.values()} == {Status.SUCCEEDED}
    attempts = {name: results[name].attempt for name in NAMES}
    assert attempts == {name: 1 if name in running else 2 for name in NAMES}
    assert {name for round_ in engine.rounds for name in round_} == set(running), "what had not started went back"
    assert_counts_add_up(database, num_jobs=4)


def test_what_outlasts_the_rebalance_is_given_back_uncounted_and_decoded_by_the_new_owner(
    worker_settings: Settings, database: Database
) -> None:
    # A lease is renewed when half of it is over: one that runs out on a busy machine would count as a crash.
    settings = changed(kafka_extra(worker_settings, max_poll_interval_ms=6000), worker={"lease_s": 6.0})
    client, engine = Client(settings), SteppedEngine(num_slots=2)
    client.send("code", [job(name, LONG) for name in NAMES], partition=0)
    with stepped_worker(settings, engine) as first:
        run_two(first, engine)
        hand_over_everything(first)
        with running_worker(settings, FakeEngine(num_slots=4)) as second:
            until(lambda: second.worker.intake.is_assigned, "the new owner has the partitions")
            engine.allow()
            results = results_of(client, *NAMES)
            until(lambda: first.worker.leases.num_held == 0, "the first worker knows that it holds nothing")
    assert {(result.status, result.attempt) for result in results.values()} == {(Status.SUCCEEDED, 2)}
    assert database.scalar(text("SELECT max(num_crashes) FROM jobs")) == 0
    assert_counts_add_up(database, num_jobs=4)


NUM_NORMAL = 120


def num_high_in_flight(running: RunningWorker) -> int:
    held = running.worker.intake._partitions.values()
    return sum(one.watermark.num_in_flight for one in held if one.is_high)


def test_high_jobs_overtake_a_backlog_that_fills_every_buffer(worker_settings: Settings) -> None:
    """The queue and the buffer of the normal lane are full, its partitions are paused, and the high lane gets in."""
    settings = changed(worker_settings, worker={"max_buffered_bytes": 1 << 20})
    client, engine = Client(settings), SteppedEngine(num_slots=1)
    ensure_topics(settings.kafka, (), high=["code"])
    large = [job(f"normal-{number}", 1, prompt="x" * 50_000) for number in range(NUM_NORMAL)]
    client.send("code", large, partition=0)
    high = [f"high-{number}" for number in range(3)]
    with stepped_worker(settings, engine) as running:
        engine.wait_at_round()
        partitions = running.worker.intake._partitions
        until(lambda: any(held.is_paused for held in partitions.values()), "the backlog is paused")
        for name in high:
            client.send_to(high_topic("code"), job(name, 1))
        until(lambda: num_high_in_flight(running) == len(high), "the high jobs came")
        until(lambda: not len(running.worker.intake._lanes[True]), "the high jobs were taken")
        while not set(high) <= started(engine):
            engine.allow()
            engine.wait_at_round()
        num_before = len([name for name in started(engine) if name.startswith("normal")])
        # Those claimed before they came, and the share of the normal lane.
        assert num_before <= 2 * LEAST_AHEAD + 4
        engine.run_freely()
        results = results_of(client, *high, *(f"normal-{number}" for number in range(NUM_NORMAL)))
    assert {result.status for result in results.values()} == {Status.SUCCEEDED}
