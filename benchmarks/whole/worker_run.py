"""One run of a worker process: started on an empty database and empty topics, timed from Kafka to Kafka, drained."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pydantic import BaseModel, ConfigDict

from alphaloop.kafka.consumer import Consumer
from alphaloop.kafka.offsets import TopicPartition
from alphaloop.kafka.topics import RESULTS
from alphaloop.settings import KafkaSettings
from benchmarks.whole.jobs import Jobs, PromptJob
from benchmarks.whole.metrics import StepSums, read_step_sums
from benchmarks.whole.servers import Servers
from benchmarks.whole.started_worker import started_worker

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
    with started_worker(
        checkout,
        servers,
        jobs.tasks,
        num_slots=num_slots,
        seed=seed,
        folder=folder,
        name=name,
        timeout_s=timeout_s,
    ) as worker:
        client, address = worker.client, worker.address
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


def checked(run: WorkerRun, jobs: Collection[PromptJob]) -> Mapping[str, int]:
    """What is wrong with a run's results, counted: jobs without a result, with several, not succeeded."""
    ids = [job.job_id for job in jobs]
    return {
        "missing": sum(run.num_results[job_id] == 0 for job_id in ids),
        "several": sum(run.num_results[job_id] > 1 for job_id in ids),
        "not_succeeded": sum(result.status != "succeeded" for result in run.results.values()),
    }


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
