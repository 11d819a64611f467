"""A whole worker whose drafter raises: every job succeeds at its first attempt, and people see why it is vanilla."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from alphaloop.kafka.topics import RESULTS
from alphaloop.messages import Result, Status
from alphaloop.settings import Settings
from alphaloop.store.database import Database
from alphaloop.store.workers import WorkerStore, running
from engine.open_drafters import MOST_IN_A_ROW
from engine.own import TransformersEngine
from tests.fixtures.worker import Client, running_worker, until

pytestmark = [pytest.mark.kafka, pytest.mark.postgres, pytest.mark.model]

NUM_JOBS = 24


def test_jobs_of_a_broken_drafter_succeed_and_the_worker_says_why_they_are_vanilla(
    worker_settings: Settings,
    database: Database,
    tiny_engine: Callable[..., TransformersEngine],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = Client(worker_settings)
    explanations: set[str] = set()

    def texts(engine: TransformersEngine, prefix: str) -> dict[str, Any]:
        values = [
            f'{{"job_id": "{prefix}{i}", "prompt": "one two one two {i % 6}", "max_tokens": 24, '
            f'"decoding": "{"vanilla" if prefix == "v" else "speculative"}", "temperature": 0}}'.encode()
            for i in range(NUM_JOBS)
        ]
        with running_worker(worker_settings, engine) as worker:
            client.send("code", values)
            records = client.read(
                [RESULTS], lambda found: sum((one.key or b"").startswith(prefix.encode()) for one in found) >= NUM_JOBS
            )
            if prefix == "s":
                until(
                    lambda: bool((found := running(WorkerStore(database).seen())) and found.setup.ended), "it says so"
                )
                ended = running(WorkerStore(database).seen())
                assert "KeyError" in ended.setup.ended["lookup"]
                registry: CollectorRegistry = worker.worker.metrics.registry
                labels = {"drafter": "lookup"}
                num_failures = registry.get_sample_value("alphaloop_drafter_failures_total", labels)
                assert num_failures is not None
                assert num_failures >= MOST_IN_A_ROW
        found = [Result.decode(one.value or b"") for one in records if (one.key or b"").startswith(prefix.encode())]
        assert {(one.status, one.attempt) for one in found} == {(Status.SUCCEEDED, 1)}
        explanations.update(one.decoding.explanation for one in found if one.decoding)
        return {one.job_id[1:]: one.text for one in found}

    vanilla = texts(tiny_engine(num_slots=4), "v")
    engine = tiny_engine(num_slots=4)

    def broken(asks: Sequence[Any]) -> None:
        raise KeyError("one two")

    monkeypatch.setattr(engine._drafters["lookup"], "propose", broken)
    assert texts(engine, "s") == vanilla
    assert any("lookup cannot serve any job: it failed 3 times in a row" in one for one in explanations), explanations
