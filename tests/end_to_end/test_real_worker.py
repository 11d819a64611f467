"""The worker as its users run it: a real model in a process of its own that is killed with -9, and a foreign client."""

from __future__ import annotations

import shutil
import subprocess
from typing import Any

import pytest
from sqlalchemy import text

from alphaloop.engine import Sampling
from alphaloop.kafka.topics import RESULTS, list_topics
from alphaloop.messages import Body, Job, Result, Status, encode_job
from alphaloop.messages.topics import dlq_topic, jobs_topic
from alphaloop.settings import Settings
from alphaloop.store.database import Database
from benchmarks.workers import read_step_sums
from engine.own import TransformersEngine
from tests.fakes import FakeEngine
from tests.fixtures.missing import missing
from tests.fixtures.models import SMOLLM2, VANILLA, decode_one
from tests.fixtures.worker import Client, by_id, running_worker, until

pytestmark = [pytest.mark.kafka, pytest.mark.postgres]

MAX_TOKENS = 8
#: A second's worth and more, however fast the machine is, and less than a minute beside other tests.
LONG_TOKENS = 80
PROMPTS = tuple(
    f"Repeat this list in reverse order, then explain step {number}: {', '.join(words)}"
    for number, words in enumerate(zip(*[iter(sorted(dir(str) + dir(list)))] * 4, strict=False))
)


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_kill_9_in_mid_batch_loses_nothing_and_records_once(
    worker_settings: Settings,
    processes: Any,
    database: Database,
    smollm2_engine: TransformersEngine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A process dies. A worker in this process takes over with the target that says what each text must be."""
    settings = worker_settings
    # What no decision can be taken without is measured, and no more: calibration has tests of its own.
    for name in ("measure_round_ms", "measure_prefill_ms"):
        monkeypatch.setattr(smollm2_engine, name, lambda *_: 1.0)
    asked = [{"messages": [{"role": "user", "content": one}], "max_tokens": MAX_TOKENS} for one in PROMPTS[:8]]
    jobs = [Job(job_id=f"job-{n}", task="code", body=Body.model_validate(body)) for n, body in enumerate(asked)]
    client = Client(settings)
    client.send("code", [encode_job(job) for job in jobs])
    killed = _ready_worker(processes, settings, ALPHALOOP_WORKER__LEASE_S="5")
    until(lambda: {"succeeded", "running"} <= _statuses(database).keys(), "the worker is in mid-batch")
    killed.process.kill()
    killed.process.wait(30)
    interrupted = _statuses(database)
    assert interrupted["running"] > 0
    assert interrupted["succeeded"] < len(jobs)
    with running_worker(settings, smollm2_engine):
        results = by_id(client.read([RESULTS], lambda records: len(by_id(records)) >= len(jobs)))
    assert {result.status for result in results.values()} == {Status.SUCCEEDED}
    assert max(result.attempt for result in results.values()) > 1, "an interrupted job was claimed again"
    for job in jobs:
        prepared = smollm2_engine.prepare(job, Sampling(max_tokens=MAX_TOKENS, temperature=0.0))
        assert results[job.job_id].text == decode_one(smollm2_engine, prepared, VANILLA).text, "decoded alone"
    assert _statuses(database) == {"succeeded": len(jobs)}
    num_runs, num_jobs = database.one(text("SELECT count(*), count(DISTINCT job_id) FROM decode_runs"))
    assert num_runs == num_jobs == len(jobs)


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_busy_worker_that_is_scaled_away_gives_its_jobs_to_another_one(
    worker_settings: Settings,
    processes: Any,
    database: Database,
    smollm2_engine: TransformersEngine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SIGTERM with less time than its jobs take. The lease is longer than the test: nobody waits for one to run out."""
    settings = worker_settings
    for name in ("measure_round_ms", "measure_prefill_ms"):
        monkeypatch.setattr(smollm2_engine, name, lambda *_: 1.0)
    names = [f"job-{number}" for number in range(4)]
    asked = [{"prompt": prompt, "max_tokens": LONG_TOKENS, "ignore_eos": True} for prompt in PROMPTS[: len(names)]]
    jobs = [
        # Vanilla, so that all end together: with drafts one ended long before the others.
        Job(job_id=name, task="code", decoding="vanilla", body=Body.model_validate(body))
        for name, body in zip(names, asked, strict=True)
    ]
    client = Client(settings)
    client.send("code", [encode_job(job) for job in jobs])
    scaled_away = _ready_worker(processes, settings, ALPHALOOP_WORKER__LEASE_S="3600", ALPHALOOP_WORKER__DRAIN_S="0.5")
    until(lambda: _statuses(database).get("running") == len(jobs), "all its jobs are claimed")
    until(lambda: _in_steps(scaled_away) > 0, "it decodes")
    assert scaled_away.stop() == 0, "it left by itself"
    scaled_away.event("worker_stopped")
    held, num_crashes = database.one(
        text("SELECT count(*) FILTER (WHERE owner IS NOT NULL), coalesce(sum(num_crashes), 0) FROM jobs")
    )
    assert (held, num_crashes) == (0, 0), "every claim was given back, and none counts"
    assert "succeeded" not in _statuses(database)
    with running_worker(settings, smollm2_engine):
        results = by_id(client.read([RESULTS], lambda records: len(by_id(records)) >= len(jobs)))
    assert set(results) == set(names)
    for result in results.values():
        assert (result.status, result.attempt) == (Status.SUCCEEDED, 2), "the first claim of the other worker"
        assert result.usage is not None
        assert result.usage.completion_tokens == LONG_TOKENS
    assert _statuses(database) == {"succeeded": len(jobs)}
    assert database.scalar(text("SELECT sum(num_crashes) FROM jobs")) == 0
    assert database.scalar(text("SELECT count(*) FROM decode_runs")) == len(jobs), "decoded to the end once"
    assert dlq_topic(jobs_topic("code")) not in list_topics(settings.kafka)


def _ready_worker(processes: Any, settings: Settings, **environment: str) -> Any:
    """A worker process with the model, once it takes jobs."""
    assert settings.postgres.url is not None
    worker = processes(
        "worker",
        {
            "KAFKA_BOOTSTRAP_SERVERS": settings.kafka.bootstrap_servers or "",
            "DATABASE_URL": settings.postgres.url.get_secret_value(),
        },
        ALPHALOOP_KAFKA__GROUP_ID=settings.kafka.group_id,
        ALPHALOOP_KAFKA__SESSION_TIMEOUT_MS=str(settings.kafka.session_timeout_ms),
        ALPHALOOP_MODELS__TARGET__SOURCE=SMOLLM2,
        ALPHALOOP_MODELS__TARGET__DTYPE="float32",
        ALPHALOOP_WORKER__CALIBRATION_BUDGET_S="0",
        **environment,
    )
    worker.event("worker_ready")
    return worker


def _in_steps(process: Any) -> int:
    """Sequences of all steps of a worker's engine so far."""
    url = next(line["metrics"] for line in process.events if "metrics" in line)
    return read_step_sums(url).num_sequence_steps


def test_kcat_types_a_job_and_reads_its_result(worker_settings: Settings) -> None:
    kcat = shutil.which("kcat")
    if kcat is None:
        missing("kcat", "apt-get install kcat")
    Client(worker_settings)
    broker = ["-b", worker_settings.kafka.bootstrap_servers or ""]
    typed = '{"task": "code", "prompt": "Write a haiku about snakes.", "max_tokens": 12}\n'
    with running_worker(worker_settings, FakeEngine()):
        subprocess.run([kcat, "-P", *broker, "-t", jobs_topic("code")], input=typed, text=True, check=True, timeout=60)
        command = [kcat, "-C", *broker, "-t", RESULTS, "-o", "beginning", "-c", "1", "-q"]
        answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    result = Result.decode(answer.stdout.encode())
    assert result.status is Status.SUCCEEDED
    assert result.text
    assert result.usage is not None
    assert result.usage.completion_tokens == 12


def _statuses(database: Database) -> dict[str, int]:
    return {s: n for s, n in database.rows(text("SELECT status, count(*) FROM jobs GROUP BY status"))}
