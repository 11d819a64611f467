"""The servers, a worker and a scheduler of the night as processes, a sender that keeps time, and a worker's death."""

from __future__ import annotations

import json
import math
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

from alphaloop.cli.children import START_TIMEOUT_S, LogFollower
from alphaloop.embedded.process import ChildProcess
from alphaloop.kafka.producer import Producer
from alphaloop.kafka.topics import ensure_topics
from alphaloop.messages.topics import high_topic, jobs_topic
from benchmarks.reporting import REPOSITORY
from benchmarks.servers import CONFIGS, PROFILE, running_servers
from benchmarks.week.night.ledger import Ledger
from benchmarks.week.night.schedule import HIGH_TASKS, TASKS, Planned
from benchmarks.week.world import NUM_SLOTS, SEGMENT_WEIGHTS
from benchmarks.workers import check_imports, environment_of

_FLUSH_S: Final = 60.0
_LOOK_EVERY_S: Final = 0.5
_STALLED_S: Final = 180.0  #: no job has ended for so long
#: The only run of the scheduler's measurements comes before the first job: probes would take part in the night.
_INTERVAL_S: Final = 86_400


@dataclass(slots=True)
class Night:
    """What runs. All times are seconds since 1970."""

    ledger: Ledger
    worker: ChildProcess
    scheduler: ChildProcess
    _log: LogFollower
    _producer: Producer
    sent_at: dict[str, float] = field(default_factory=dict)  #: by job_id

    def send(self, jobs: Sequence[Planned], prompts: Mapping[str, str], begin: float) -> None:
        """Send each job at its time after `begin`."""
        for job in jobs:
            if begin + job.at_s > time.time():
                self._producer.flush(_FLUSH_S)
                time.sleep(max(0.0, begin + job.at_s - time.time()))
            now = time.time()
            topic = (high_topic if job.stream.is_high else jobs_topic)(job.stream.task)
            value = json.dumps(message_of(job, prompts[job.job_id], now)).encode()
            self._producer.send(topic, key=job.job_id.encode(), value=value)
            self.sent_at[job.job_id] = now
        self._producer.flush(_FLUSH_S)

    def kill_and_start(self) -> tuple[float, float]:
        """End the worker as a power cut would and start it anew; the moments of its death and of its return."""
        self.worker.kill()
        died_at = time.time()
        self._start()
        return died_at, time.time()

    def wait_ended(self, num_jobs: int) -> None:
        """Until so many jobs have ended. Raises RuntimeError where none ends for some minutes."""
        num_before, changed_at = -1, time.monotonic()
        while (num_ended := self.ledger.num_ended()) < num_jobs:
            for process in (self.worker, self.scheduler):
                if not process.is_running:
                    raise process.failed("ended by itself")
            if num_ended != num_before:
                num_before, changed_at = num_ended, time.monotonic()
            if time.monotonic() - changed_at > _STALLED_S:
                raise RuntimeError(f"expected {num_jobs} ended jobs, found {num_ended}, and none for {_STALLED_S:g} s")
            time.sleep(_LOOK_EVERY_S)

    def _start(self) -> None:
        self._log.events.clear()
        self.worker.start()
        self.worker.wait_until(lambda: self._log.find("worker_ready") is not None, START_TIMEOUT_S)


def message_of(job: Planned, prompt: str, now: float) -> dict[str, Any]:
    """The message of a job that is sent at `now`."""
    fields: dict[str, Any] = {"job_id": job.job_id, "task": job.stream.task, "prompt": prompt, "temperature": 0.0}
    fields |= {"max_tokens": job.max_tokens, "priority": job.stream.priority}
    if job.stream.segment:
        fields["segment"] = job.stream.segment
    if job.batch_id is not None:
        fields["batch_id"] = job.batch_id
    if job.within_s < math.inf:
        fields["deadline"] = (datetime.fromtimestamp(now, UTC) + timedelta(seconds=job.within_s)).isoformat()
    return fields


@contextmanager
def deployed(folder: Path, seed: int) -> Iterator[Night]:
    """Start everything on an empty database and empty topics; it ends with the block. Raises StartFailed."""
    with ExitStack() as stack:
        servers = stack.enter_context(running_servers(folder))
        ensure_topics(servers.kafka, TASKS, high=HIGH_TASKS)
        url = stack.enter_context(servers.fresh_database(is_migrated=True))
        environment = environment_of(
            REPOSITORY, servers, database_url=url, num_slots=NUM_SLOTS, data_dir=folder / "data"
        ) | {
            "ALPHALOOP_SEGMENTS": json.dumps({name or "*": {"weight": of} for name, of in SEGMENT_WEIGHTS.items()}),
            "ALPHALOOP_SCHEDULER__HTTP_PORT": "0",
            "ALPHALOOP_SCHEDULER__INTERVAL_S": str(_INTERVAL_S),
            "ALPHALOOP_CONSOLE__HTTP_PORT": "0",
        }
        check_imports(REPOSITORY, environment)
        scheduler = _process("scheduler", ["run"], folder, environment)
        worker = _process("worker", ["--seed", str(seed)], folder, environment)
        for process in (scheduler, worker):
            stack.callback(process.stop)
        producer = Producer(servers.kafka, client_id="benchmark-producer")
        stack.callback(producer.close)
        ledger = stack.enter_context(Ledger.of(url))
        night = Night(ledger, worker, scheduler, LogFollower(worker.log), producer)
        measuring = LogFollower(scheduler.log)
        scheduler.start()
        scheduler.wait_until(lambda: measuring.find("scheduler_ready") is not None, START_TIMEOUT_S)
        night._start()
        yield night


def _process(module: str, arguments: Sequence[str], folder: Path, environment: Mapping[str, str]) -> ChildProcess:
    command = [sys.executable, "-P", "-m", module, *arguments, "--configs", str(CONFIGS), "--profile", PROFILE]
    return ChildProcess(module, command, log=folder / "logs" / f"{module}.log", env=environment, grace_s=60.0)


class Sending(threading.Thread):
    """The night's sender, beside whoever kills workers. `join` raises what ended it."""

    def __init__(self, night: Night, jobs: Sequence[Planned], prompts: Mapping[str, str], begin: float) -> None:
        super().__init__(name="sender", daemon=True)
        self._night, self._jobs, self._prompts, self._begin = night, jobs, prompts, begin
        self._failure: Exception | None = None

    def run(self) -> None:
        """Send all jobs."""
        try:
            self._night.send(self._jobs, self._prompts, self._begin)
        except Exception as error:
            self._failure = error

    def join(self, timeout: float | None = None) -> None:
        """Wait until all are sent."""
        super().join(timeout)
        if self._failure is not None:
            raise self._failure
