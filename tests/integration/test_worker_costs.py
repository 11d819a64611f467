"""What rounds really take reaches the decisions, the database, and the next worker."""

from __future__ import annotations

import json

import pytest

from alphaloop.settings import Settings
from alphaloop.store.costs import CostStore
from alphaloop.store.database import Database
from tests.fakes import FakeEngine
from tests.fixtures.worker import Client, running_worker

pytestmark = [pytest.mark.kafka, pytest.mark.postgres]

NUM_JOBS = 12


def test_a_device_slower_than_calibrated_is_learned_stored_and_known_to_the_next_worker(
    worker_settings: Settings, database: Database
) -> None:
    client, engine = Client(worker_settings), FakeEngine(num_slots=4, slowness=2.0)
    jobs = [
        json.dumps({"prompt": f"prompt {i}", "max_tokens": 64, "decoding": "vanilla"}).encode() for i in range(NUM_JOBS)
    ]
    with running_worker(worker_settings, engine) as worker:
        calibrated = worker.worker.costs.table
        client.send("code", jobs)
        client.results(NUM_JOBS)
    identity, revisions = engine.identity, {drafter.name: drafter.revision for drafter in engine.drafters}
    points = (
        CostStore(database)
        .load(identity.host, identity.device, identity.engine, identity.target_revision, revisions)
        .points
    )
    assert len(points) == len(calibrated.points)
    for point in points:
        if point.drafter is None:
            assert point.correction == pytest.approx(2.0)
        else:
            # Nothing measures the drafter, so its level moves towards the target's, a little in so few rounds.
            assert 1.0 <= point.correction < 1.5

    def refuse(drafter: str | None, batch: int, width: int, context: int) -> float:
        raise AssertionError("what is stored is not measured again")

    with running_worker(worker_settings, FakeEngine(num_slots=4, round_ms=refuse)) as worker:
        table = worker.worker.costs.table
        for batch, k in ((1, 0), (4, 8), (3, 2)):
            before = calibrated.rounds(batch).round_ms(None, k)
            assert before is not None
            assert table.rounds(batch).round_ms(None, k) == pytest.approx(2 * before)
