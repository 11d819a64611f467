"""Task memory as its users have it: a real model in a process that is killed with -9, and another that goes on."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from alphaloop.kafka.topics import RESULTS
from alphaloop.messages import Body, Job, encode_job
from alphaloop.settings import Settings
from alphaloop.store.database import Database
from tests.fixtures.models import SMOLLM2
from tests.fixtures.worker import Client, by_id, until

pytestmark = [pytest.mark.kafka, pytest.mark.postgres]

PROMPTS = (
    "Why is the sky blue?",
    "Name three rivers.",
    "What is a prime number?",
    "Write a greeting to a new colleague.",
)
MAX_TOKENS = 32


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_first_batch_after_kill_9_is_drafted_as_the_last_one_before(
    worker_settings: Settings, processes: Any, database: Database, tmp_path: Path
) -> None:
    """Answers come again, so what look-up finds of them is what is remembered."""
    assert worker_settings.postgres.url is not None
    servers = {
        "KAFKA_BOOTSTRAP_SERVERS": worker_settings.kafka.bootstrap_servers or "",
        "DATABASE_URL": worker_settings.postgres.url.get_secret_value(),
    }
    settings = {
        "ALPHALOOP_KAFKA__GROUP_ID": worker_settings.kafka.group_id,
        "ALPHALOOP_KAFKA__SESSION_TIMEOUT_MS": str(worker_settings.kafka.session_timeout_ms),
        "ALPHALOOP_MODELS__TARGET__SOURCE": SMOLLM2,
        "ALPHALOOP_MODELS__TARGET__DTYPE": "float32",
        "ALPHALOOP_MODELS__DRAFTERS": '{"lookup": {"memory": true}}',
        "ALPHALOOP_WORKER__CALIBRATION_BUDGET_S": "0",
        "ALPHALOOP_WORKER__LEASE_S": "5",
    }
    for folder in (tmp_path, tmp_path / "again"):
        folder.mkdir(exist_ok=True)
        (folder / "tasks.toml").write_text('[tasks.code]\nmemory = "segment"\n', encoding="utf-8")
    client = Client(worker_settings)
    sent = 0

    def batch(name: str) -> None:
        """The same prompts as every time, as new jobs, one text behind the other."""
        nonlocal sent
        bodies = [{"messages": [{"role": "user", "content": one}], "max_tokens": MAX_TOKENS} for one in PROMPTS]
        jobs = [
            Job(job_id=f"{name}-{n}", task="code", decoding="speculative", body=Body.model_validate(body))
            for n, body in enumerate(bodies)
        ]
        client.send("code", [encode_job(job) for job in jobs])
        sent += len(jobs)

    def acceptance(name: str, prompts: Collection[int] = range(len(PROMPTS))) -> float:
        """Draft tokens that were accepted, a round, of the batch's jobs with these prompts."""
        runs = database.rows(
            text("SELECT accepts, rounds FROM decode_runs WHERE job_id = ANY(:names)"),
            {"names": [f"{name}-{n}" for n in prompts]},
        )
        assert len(runs) == len(prompts)
        return sum(sum(accepts) for accepts, _ in runs) / sum(rounds for _, rounds in runs)

    killed = processes("worker", servers, **settings)
    killed.event("worker_ready")
    for name in ("first", "before"):
        batch(name)
        client.read([RESULTS], lambda records: len(by_id(records)) >= sent)
    batch("after")
    until(lambda: database.scalar(text("SELECT count(*) FROM jobs WHERE status = 'running'")) > 0, "it decodes")
    killed.process.kill()
    killed.process.wait(30)
    ended = {row.job_id for row in database.rows(text("SELECT job_id FROM decode_runs"))}
    again = [n for n in range(len(PROMPTS)) if f"after-{n}" not in ended]
    assert again, "jobs were interrupted"
    processes("worker", servers, "again", **settings)
    client.read([RESULTS], lambda records: len(by_id(records)) >= sent)
    assert acceptance("before") > 2 * acceptance("first"), "answers are found again"
    assert acceptance("after", again) >= 0.95 * acceptance("before", again), "the same prompts"
