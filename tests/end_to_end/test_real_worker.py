"""The worker as its users run it: a process of its own, a real model, real servers, foreign clients, kill -9."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path

import pytest
from sqlalchemy import text

from alphaloop.deciding.policy import Decision, Reason
from alphaloop.kafka.topics import RESULTS
from alphaloop.messages import Body, Job, Mode, Result, Status, encode_job
from alphaloop.messages.topics import jobs_topic
from alphaloop.settings import Settings
from alphaloop.store.database import Database
from tests.fixtures.missing import missing
from tests.fixtures.worker import Client, running_worker, until
from worker.decoding.engine import TransformersEngine
from worker.engine import Sampling

pytestmark = [pytest.mark.kafka, pytest.mark.postgres, pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(400)]

MAX_TOKENS = 16
CHECKOUT = Path(__file__).resolve().parents[2]
PROMPTS = tuple(
    f"Repeat this list in reverse order, then explain step {number}: {', '.join(words)}"
    for number, words in enumerate(zip(*[iter(sorted(dir(str) + dir(list)))] * 4, strict=False))
)


class WorkerProcess:
    """`python -m worker` with its log at hand."""

    def __init__(self, settings: Settings, log: Path) -> None:
        assert settings.postgres.url is not None
        self._log = log
        environment = {
            **os.environ,
            "KAFKA_BOOTSTRAP_SERVERS": settings.kafka.bootstrap_servers or "",
            "DATABASE_URL": settings.postgres.url.get_secret_value(),
            "ALPHALOOP_KAFKA__GROUP_ID": settings.kafka.group_id,
            "ALPHALOOP_MODELS__TARGET__DTYPE": "float32",
            "ALPHALOOP_MODELS__TARGET__CONTEXT_LENGTH": "1024",
            # What no decision can be taken without is measured, and no more: calibration has tests of its own.
            "ALPHALOOP_WORKER__CALIBRATION_SAMPLES": "1",
            "ALPHALOOP_WORKER__CALIBRATION_BUDGET_S": "0",
            "ALPHALOOP_WORKER__LEASE_S": "10",
        }
        with log.open("ab") as out:
            command = [sys.executable, "-m", "worker", "--profile", "local", "--seed", "1"]
            self.process = subprocess.Popen(command, cwd=CHECKOUT, env=environment, stdout=out, stderr=out)

    def wait_until_ready(self) -> None:
        ready = f"the worker is ready; {self._log}"
        until(lambda: self._is_dead() or "worker_ready" in self.log, ready, timeout_s=180)

    @property
    def log(self) -> str:
        return self._log.read_text(encoding="utf-8")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(30)

    def terminate(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)

    def _is_dead(self) -> bool:
        if self.process.poll() is not None:
            pytest.fail(f"the worker ended with {self.process.returncode}:\n{self.log[-4000:]}")
        return False


StartWorker = Callable[[], WorkerProcess]


@pytest.fixture
def start_worker(worker_settings: Settings, tmp_path: Path, smollm2_source: str) -> Iterator[StartWorker]:
    """Starts workers that decode SmolLM2 in float32; none outlives the test."""
    with ExitStack() as stack:
        numbers = count()

        def start() -> WorkerProcess:
            worker = WorkerProcess(worker_settings, tmp_path / f"worker-{next(numbers)}.log")
            stack.callback(worker.kill)
            return worker

        yield start


def test_kill_9_in_mid_batch_loses_nothing_and_records_once(
    worker_settings: Settings, start_worker: StartWorker, database: Database, smollm2_engine: TransformersEngine
) -> None:
    jobs = [_job(number) for number in range(12)]
    client = Client(worker_settings)
    client.send("code", [encode_job(job) for job in jobs])
    first = start_worker()
    first.wait_until_ready()
    until(lambda: {"succeeded", "running"} <= _statuses(database).keys(), "the worker is in mid-batch")
    first.kill()
    interrupted = _statuses(database)
    assert interrupted["running"] > 0
    assert interrupted["succeeded"] < len(jobs)
    second = start_worker()
    second.wait_until_ready()
    records = client.read([RESULTS], lambda r: len({Result.decode(x.value or b"").job_id for x in r}) >= len(jobs))
    assert second.terminate() == 0, second.log[-2000:]
    results = {result.job_id: result for result in (Result.decode(record.value or b"") for record in records)}
    assert {result.status for result in results.values()} == {Status.SUCCEEDED}
    assert max(result.attempt for result in results.values()) > 1, "an interrupted job was claimed again"
    expected = _texts_of(smollm2_engine, jobs)
    assert {job_id: result.text for job_id, result in results.items()} == expected
    assert _statuses(database) == {"succeeded": len(jobs)}
    num_runs, num_jobs = database.one(text("SELECT count(*), count(DISTINCT job_id) FROM decode_runs"))
    assert num_runs == num_jobs == len(jobs)


def test_kcat_types_a_job_and_reads_its_result(worker_settings: Settings, smollm2_engine: TransformersEngine) -> None:
    """Of a worker in this process: what a process of its own adds, the test above shows."""
    kcat = shutil.which("kcat")
    if kcat is None:
        missing("kcat", "apt-get install kcat")
    Client(worker_settings)
    quick = {"calibration_budget_s": 0.0}
    settings = worker_settings.model_copy(update={"worker": worker_settings.worker.model_copy(update=quick)})
    broker = ["-b", worker_settings.kafka.bootstrap_servers or ""]
    typed = '{"task": "code", "prompt": "Write a haiku about snakes.", "max_tokens": 12}\n'
    with running_worker(settings, smollm2_engine):
        subprocess.run([kcat, "-P", *broker, "-t", jobs_topic("code")], input=typed, text=True, check=True, timeout=60)
        command = [kcat, "-C", *broker, "-t", RESULTS, "-o", "beginning", "-c", "1", "-q"]
        answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    result = Result.decode(answer.stdout.encode())
    assert result.status is Status.SUCCEEDED
    assert result.text
    assert result.usage is not None
    assert result.usage.completion_tokens == 12


def _job(number: int) -> Job:
    body = Body(messages=({"role": "user", "content": PROMPTS[number % len(PROMPTS)]},), max_tokens=MAX_TOKENS)  # type: ignore[arg-type]
    return Job(job_id=f"job-{number}", task="code", body=body)


def _statuses(database: Database) -> dict[str, int]:
    return {s: n for s, n in database.rows(text("SELECT status, count(*) FROM jobs GROUP BY status"))}


def _texts_of(engine: TransformersEngine, jobs: list[Job]) -> dict[str, str]:
    """What the target alone writes, one job at a time, never interrupted."""
    vanilla = Decision(Mode.VANILLA, None, None, 0, Reason.FORCED, "the oracle")
    texts: dict[str, str] = {}
    for job in jobs:
        engine.admit(engine.prepare(job, Sampling(max_tokens=MAX_TOKENS, temperature=0.0)), vanilla)
        while job.job_id not in texts:
            texts |= {generation.job_id: generation.text for generation in engine.step().finished}
    return texts
