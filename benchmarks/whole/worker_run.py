"""One run of a worker process: started on an empty database and empty topics, timed from Kafka to Kafka, drained."""

from __future__ import annotations

import subprocess
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pydantic import BaseModel, ConfigDict

from alphaloop.cli.children import LogFollower, field_of
from alphaloop.embedded.process import ChildProcess
from alphaloop.kafka.consumer import Consumer
from alphaloop.kafka.producer import Producer
from alphaloop.kafka.records import TopicPartition
from alphaloop.kafka.topics import RESULTS, jobs_topic
from alphaloop.settings import KafkaSettings
from benchmarks.whole.checkout import check_imports
from benchmarks.whole.jobs import Jobs, PromptJob
from benchmarks.whole.metrics import StepSums, is_ready, read_step_sums
from benchmarks.whole.product import (
    ADDRESS_FIELD,
    READY_EVENT,
    environment_of,
    migrate_command,
    worker_command,
)
from benchmarks.whole.servers import Servers

#: Loading a model, compiling kernels for the first time, calibrating on an unknown device.
_START_TIMEOUT_S: Final = 600.0
_MIGRATE_TIMEOUT_S: Final = 120.0
_FLUSH_S: Final = 60.0
_GRACE_S: Final = 60.0
_POLL_S: Final = 0.2


class _Usage(BaseModel):
    model_config = ConfigDict(extra="ignore")

    completion_tokens: int = 0


class _Decoding(BaseModel):
    model_config = ConfigDict(extra="ignore")

    drafter: str | None = None
    num_draft_tokens: int = 0
    reason: str = ""


class JobResult(BaseModel):
    """What is read of a message on `results`; another commit's worker may write more."""

    model_config = ConfigDict(extra="ignore")

    job_id: str
    status: str
    text: str | None = None
    usage: _Usage | None = None
    decoding: _Decoding | None = None

    @property
    def num_tokens(self) -> int:
        """Completion tokens, as reported."""
        return self.usage.completion_tokens if self.usage else 0

    @property
    def decided(self) -> tuple[str, int] | None:
        """Drafter and k; None for vanilla."""
        if self.decoding is None or self.decoding.drafter is None or self.decoding.num_draft_tokens == 0:
            return None
        return self.decoding.drafter, self.decoding.num_draft_tokens


@dataclass(frozen=True, slots=True)
class WorkerRun:
    """A run with all results of the measured jobs."""

    seconds: float  #: from the first job sent to the last result read
    results: dict[str, JobResult]
    num_results: Counter[str]  #: messages on `results` by job_id, read when the worker had ended
    under_backlog: StepSums  #: until fewer jobs were left than there are slots
    backlog_s: float  #: how long that was

    @property
    def num_tokens(self) -> int:
        """Completion tokens of all jobs."""
        return sum(result.num_tokens for result in self.results.values())


def run_worker(
    checkout: Path,
    servers: Servers,
    jobs: Jobs,
    *,
    num_slots: int,
    seed: int,
    folder: Path,
    name: str,
    timeout_s: float,
) -> WorkerRun:
    """Start the checkout's worker, send warm-up and history, then the measured jobs; stop it and count its results.

    Raises StartFailed where the worker does not come up, RuntimeError where it ends or results are missing.
    """
    servers.renew_topics(jobs.tasks)
    with ExitStack() as stack:
        database_url = stack.enter_context(servers.fresh_database())
        environment = environment_of(
            checkout,
            broker=servers.broker,
            database_url=database_url,
            group=f"whole-{uuid.uuid4().hex}",
            num_slots=num_slots,
            data_dir=folder / "data",
        )
        check_imports(checkout, environment)
        _migrate(environment, checkout)
        worker = ChildProcess(
            f"worker ({name})",
            worker_command(checkout, seed=seed),
            log=folder / f"{name}.log",
            env=environment,
            grace_s=_GRACE_S,
        )
        log = LogFollower(worker.log)
        stack.callback(worker.stop)
        worker.start()
        worker.wait_until(lambda: log.find(READY_EVENT) is not None, _START_TIMEOUT_S)
        address = field_of(log.find(READY_EVENT) or "", ADDRESS_FIELD) or ""
        worker.wait_until(lambda: is_ready(address), _START_TIMEOUT_S)
        client = _Client(servers.kafka, lambda: _check_alive(worker), timeout_s)
        stack.callback(client.close)
        client.send_and_wait(jobs.warm_up, decoding="vanilla")
        client.send_and_wait(jobs.history)
        before = read_step_sums(address)
        timed = client.send_and_wait(
            jobs.measured, num_left=num_slots - 1, on_left=lambda: read_step_sums(address).since(before)
        )
        worker.stop()
        counted = _read_all(servers.kafka)
    wanted = {job.job_id for job in jobs.measured}
    return WorkerRun(
        timed.seconds,
        {result.job_id: result for result in counted if result.job_id in wanted},
        Counter(result.job_id for result in counted if result.job_id in wanted),
        timed.under_backlog,
        timed.backlog_s,
    )


@dataclass(frozen=True, slots=True)
class _Timed:
    seconds: float
    under_backlog: StepSums
    backlog_s: float


class _Client:
    """A producer of jobs and a reader of results. Results carry their job_id as key."""

    def __init__(self, kafka: KafkaSettings, check_alive: Callable[[], None], timeout_s: float) -> None:
        self._producer = Producer(kafka, client_id="whole-producer")
        self._consumer = Consumer(kafka, group_id=f"whole-reader-{uuid.uuid4().hex}", client_id="whole-reader")
        self._consumer.assign_from([RESULTS], at="latest")
        self._check_alive = check_alive
        self._timeout_s = timeout_s

    def send_and_wait(
        self,
        jobs: Sequence[PromptJob],
        *,
        decoding: str = "auto",
        num_left: int = 0,
        on_left: Callable[[], StepSums] = lambda: StepSums(0, 0, 0.0),
    ) -> _Timed:
        """Send all jobs at once and wait for their results. `on_left` is asked once only `num_left` are missing."""
        messages = [(jobs_topic(job.task), job.job_id.encode(), job.encoded(decoding=decoding)) for job in jobs]
        waiting = {key for _, key, _ in messages}
        began = time.monotonic()
        for topic, key, value in messages:
            self._producer.send(topic, key=key, value=value)
        self._producer.flush(_FLUSH_S)
        self._wait(waiting, num_left, began + self._timeout_s)
        backlog_s = time.monotonic() - began
        sums = on_left()
        self._wait(waiting, 0, began + self._timeout_s)
        return _Timed(time.monotonic() - began, sums, backlog_s)

    def _wait(self, waiting: set[bytes], num_left: int, deadline: float) -> None:
        while len(waiting) > num_left:
            record = self._consumer.poll(_POLL_S)
            if record is not None:
                waiting.discard(record.key or b"")
                continue
            self._check_alive()
            if time.monotonic() > deadline:
                names = ", ".join(sorted(key.decode() for key in waiting)[:5])
                raise RuntimeError(f"no result of {len(waiting)} jobs within {self._timeout_s:g} s, among them {names}")

    def close(self) -> None:
        """Let go of the broker."""
        self._consumer.close()
        self._producer.close()


def checked(run: WorkerRun, jobs: Collection[PromptJob]) -> Mapping[str, int]:
    """What is wrong with a run's results, counted: jobs without a result, with several, not succeeded."""
    ids = [job.job_id for job in jobs]
    return {
        "missing": sum(run.num_results[job_id] == 0 for job_id in ids),
        "several": sum(run.num_results[job_id] > 1 for job_id in ids),
        "not_succeeded": sum(result.status != "succeeded" for result in run.results.values()),
    }


def _migrate(environment: Mapping[str, str], checkout: Path) -> None:
    # In the checkout, because that is whose settings the command reads.
    done = subprocess.run(
        migrate_command(),
        cwd=checkout,
        env=dict(environment),
        capture_output=True,
        text=True,
        timeout=_MIGRATE_TIMEOUT_S,
    )
    if done.returncode:
        raise RuntimeError(f"the migration of the fresh database failed: {done.stderr.strip()[-1000:]}")


def _check_alive(worker: ChildProcess) -> None:
    if not worker.is_running:
        raise worker.failed("ended by itself")


def _read_all(kafka: KafkaSettings) -> list[JobResult]:
    """Every message on `results`, from the first to the last one there now."""
    consumer = Consumer(kafka, group_id=f"whole-count-{uuid.uuid4().hex}", client_id="whole-count")
    try:
        kept = [consumer.watermarks(TopicPartition(RESULTS, number)) for number in range(kafka.num_partitions)]
        num_kept = sum(end - begin for begin, end in kept)
        consumer.assign_from([RESULTS], at="earliest")
        found: list[JobResult] = []
        while len(found) < num_kept:
            record = consumer.poll(_POLL_S)
            if record is not None:
                found.append(JobResult.model_validate_json(record.value or b"{}"))
        return found
    finally:
        consumer.close()
