"""A worker, a scheduler and their servers as processes, and a client that waits for results."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from alphaloop.cli.children import LogFollower, await_event, child_environment, field_of, scheduler_process
from alphaloop.cli.children import worker_process as started_worker
from alphaloop.cli.options import GlobalOptions
from alphaloop.embedded.process import ChildProcess
from alphaloop.kafka.producer import Producer
from alphaloop.messages import Job, Result, encode_job
from alphaloop.messages.topics import jobs_topic
from alphaloop.outcomes.reading import OutcomeReader
from alphaloop.settings import Settings

_FLUSH_S: Final = 60.0
_STALLED_S: Final = 300.0


@dataclass(frozen=True, slots=True)
class Deployed:
    """What runs; `settings` name the servers."""

    options: GlobalOptions
    settings: Settings
    seed: int

    @property
    def environment(self) -> dict[str, str]:
        """For commands on the same servers."""
        return child_environment(self.options, self.settings)

    @contextmanager
    def worker(self) -> Iterator[ChildProcess]:
        """A worker that is ready; it drains at the end."""
        child = started_worker(self.options, self.settings, arguments=["--seed", str(self.seed)])
        follower = LogFollower(child.log)
        child.start()
        try:
            await_event(child, follower, "worker_ready")
            yield child
        finally:
            child.stop()

    @contextmanager
    def scheduler(self) -> Iterator[str]:
        """A scheduler that has made a report since; the address of its metrics."""
        child = scheduler_process(self.options, self.settings, "run")
        follower = LogFollower(child.log)
        child.start()
        try:
            ready = await_event(child, follower, "scheduler_ready")
            await_event(child, follower, "run_finished")
            yield field_of(ready or "", "metrics") or ""
        finally:
            child.stop()

    def decode(self, jobs: Sequence[Job], worker: ChildProcess) -> dict[str, Result]:
        """The results by job_id. Raises RuntimeError where a job has no text."""
        names, results = {job.job_id for job in jobs}, dict[str, Result]()
        since = time.monotonic()

        def alive() -> None:
            if not worker.is_running:
                raise worker.failed("ended by itself")
            if time.monotonic() - since > _STALLED_S:
                raise RuntimeError(f"nothing ended in {_STALLED_S:.0f} s; {len(results)} of {len(names)} results")

        producer = Producer(self.settings.kafka, client_id="agreement")
        try:
            with OutcomeReader(self.settings.kafka, {job.task for job in jobs}) as reader:
                for job in jobs:
                    producer.send(jobs_topic(job.task), key=job.job_id.encode(), value=encode_job(job))
                producer.flush(_FLUSH_S)
                for outcome in reader.outcomes(names, timeout_s=86_400.0, alive=alive):
                    if not isinstance(outcome, Result) or outcome.usage is None or outcome.timings is None:
                        raise RuntimeError(f"job {outcome.job_id} ended without a text")
                    results[outcome.job_id], since = outcome, time.monotonic()
        finally:
            producer.close()
        return results
