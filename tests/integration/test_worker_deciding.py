"""A flag on a drafter, and its end, reach the decisions of a whole worker while it runs."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from alphaloop.messages import Mode, Result
from alphaloop.settings import Settings
from alphaloop.store.database import Database
from alphaloop.store.drafts import DraftRegistry, DraftStatus
from tests.fakes import FakeEngine
from tests.fixtures.worker import Client, RunningWorker, running_worker, until

pytestmark = [pytest.mark.kafka, pytest.mark.postgres]

NUM_JOBS = 12


@pytest.fixture
def settings(worker_settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Nothing is explored, so every decision is what history says; nobody looks again without being told."""
    policy = worker_settings.policy.model_copy(update={"explore_share": 0.0, "control_share": 0.0})
    monkeypatch.setattr("worker.assembly.EVIDENCE_POLL_S", 3600.0)
    return worker_settings.model_copy(update={"policy": policy})


def jobs(prefix: str, num_jobs: int, **fields: object) -> list[bytes]:
    return [
        json.dumps({"job_id": f"{prefix}-{n}", "prompt": f"text number {n}", "max_tokens": 64, **fields}).encode()
        for n in range(num_jobs)
    ]


def decode(client: Client, sent: Sequence[bytes], count: int, task: str = "code") -> list[Result]:
    """Send jobs, and return their results; `count` is how many there are with all sent before."""
    client.send(task, sent)
    ids = {json.loads(value)["job_id"] for value in sent}
    return [result for result in client.results(count) if result.job_id in ids]


def reasons(results: Sequence[Result]) -> set[tuple[str, str]]:
    return {(result.decoding.mode, result.decoding.reason) for result in results if result.decoding is not None}


def is_flagged(worker: RunningWorker, engine: FakeEngine) -> bool:
    (drafter,) = engine.drafters
    return worker.worker.decider._evidence_cache.is_stale(drafter.name, drafter.revision)


def test_a_stale_flag_and_its_end_reach_a_running_worker(settings: Settings, database: Database) -> None:
    client, engine, registry = Client(settings), FakeEngine(acceptance=(0.95,)), DraftRegistry(database)
    (drafter,) = engine.drafters
    named = (drafter.name, drafter.revision, engine.identity.target_revision)
    with running_worker(settings, engine) as worker:
        decode(client, jobs("measured", NUM_JOBS, decoding="speculative"), NUM_JOBS)
        before = decode(client, jobs("before", 1), NUM_JOBS + 1)
        registry.set_status(*named, DraftStatus.STALE, "its acceptance fell")
        until(lambda: is_flagged(worker, engine), "the flag is seen")
        flagged = decode(client, jobs("flagged", 1), NUM_JOBS + 2)
        registry.set_status(*named, DraftStatus.ACTIVE, "trained anew")
        until(lambda: not is_flagged(worker, engine), "the promotion is seen")
        after = decode(client, jobs("after", 1), NUM_JOBS + 3)
    assert reasons(before) == reasons(after) == {(Mode.SPECULATIVE, "faster")}
    assert reasons(flagged) == {(Mode.VANILLA, "stale_draft")}
