"""The lane `jobs.<task>.high` through a real broker: it overtakes a backlog, and does not starve it."""

from __future__ import annotations

import pytest

from alphaloop.messages import Status
from alphaloop.messages.topics import high_topic
from alphaloop.settings import Settings
from tests.fixtures.worker import Client, RunningWorker, SteppedEngine, until
from tests.integration.test_worker_continuous import job, results_of, started, stepped_worker, with_worker
from worker.feed import LEAST_AHEAD

pytestmark = [pytest.mark.kafka, pytest.mark.postgres]

NUM_NORMAL = 60


def num_high_in_flight(running: RunningWorker) -> int:
    held = running.worker.intake._partitions.values()
    return sum(one.watermark.num_in_flight for one in held if one.is_high)


def test_high_jobs_overtake_a_backlog_that_fills_every_buffer(worker_settings: Settings) -> None:
    """The queue and the buffer of the normal lane are full, its partitions are paused, and the high lane gets in."""
    settings = with_worker(worker_settings, max_buffered=4)
    client, engine = Client(settings), SteppedEngine(num_slots=1)
    client.send("code", [job(f"normal-{number}", 1) for number in range(NUM_NORMAL)], partition=0)
    high = [f"high-{number}" for number in range(3)]
    with stepped_worker(settings, engine) as running:
        engine.wait_at_round()
        partitions = running.worker.intake._partitions
        until(lambda: any(held.is_paused for held in partitions.values()), "the backlog is paused")
        for name in high:
            client.send_to(high_topic("code"), job(name, 1))
        until(lambda: num_high_in_flight(running) == len(high), "the high jobs came")
        until(lambda: not len(running.worker.intake._high), "the high jobs were taken")
        while not set(high) <= started(engine):
            engine.allow()
            engine.wait_at_round()
        num_before = len([name for name in started(engine) if name.startswith("normal")])
        # Those claimed before they came, and the share of the normal lane.
        assert num_before <= 2 * LEAST_AHEAD + 4
        engine.run_freely()
        results = results_of(client, *high, *(f"normal-{number}" for number in range(NUM_NORMAL)))
    assert {result.status for result in results.values()} == {Status.SUCCEEDED}
