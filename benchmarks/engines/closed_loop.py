"""A client that keeps a number of jobs under way: the next one is sent when a result comes."""

from __future__ import annotations

import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from pydantic import BaseModel, ConfigDict

from alphaloop.kafka.consumer import Consumer
from alphaloop.kafka.producer import Producer
from alphaloop.kafka.topics import RESULTS
from alphaloop.messages.topics import jobs_topic
from alphaloop.settings import KafkaSettings
from benchmarks.whole.jobs import PromptJob

_POLL_S: Final = 0.5
_FLUSH_S: Final = 60.0


class _Part(BaseModel):
    model_config = ConfigDict(extra="ignore")


class _Usage(_Part):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Timings(_Part):
    queue_s: float
    wall_s: float


class _Decoding(_Part):
    drafter: str | None = None
    reason: str = ""
    target_revision: str = ""
    engine: str = ""


class Result(_Part):
    """What is read of a message on `results`."""

    job_id: str
    task: str = ""
    status: str
    text: str | None = None
    usage: _Usage = _Usage()
    timings: _Timings | None = None
    decoding: _Decoding | None = None

    @property
    def drafter(self) -> str | None:
        """What drafted where it was decoded."""
        return self.decoding.drafter if self.decoding else None


@dataclass(frozen=True, slots=True)
class Played:
    """Jobs that were sent together, and what came of them."""

    seconds: float  #: from the first job sent to the last result read
    results: tuple[Result, ...]
    latencies_s: tuple[float, ...]  #: of each result, from sending its job to reading it

    @property
    def num_tokens(self) -> int:
        """Completion tokens of all."""
        return sum(result.usage.completion_tokens for result in self.results)

    @property
    def beside_s(self) -> tuple[float, ...]:
        """Of each job, the time that was not spent in its request: Kafka both ways, claim, record, decision."""
        return tuple(
            latency - result.timings.wall_s
            for latency, result in zip(self.latencies_s, self.results, strict=True)
            if result.timings is not None
        )


class ClosedLoop:
    """Produces jobs and reads results, on one thread."""

    def __init__(self, kafka: KafkaSettings, check_alive: Callable[[], None], timeout_s: float) -> None:
        self._producer = Producer(kafka, client_id="engines-producer")
        self._consumer = Consumer(kafka, group_id=f"engines-{uuid.uuid4().hex}", client_id="engines-reader")
        self._consumer.assign_from([RESULTS], at="latest")
        self._check_alive, self._timeout_s = check_alive, timeout_s
        self.num_results: dict[str, int] = {}  #: messages on `results` so far, by job_id
        #: Jobs with two different results. The same one may come again: a worker that restarts publishes it anew.
        self.contradicted: set[str] = set()
        self._first: dict[str, bytes] = {}

    def play(self, jobs: Sequence[PromptJob], *, decoding: str, load: int) -> Played:
        """Send all, `load` at a time. Raises RuntimeError where a job has no result in time, or did not succeed."""
        waiting = deque(jobs)
        sent_at: dict[str, float] = {}
        results: list[Result] = []
        latencies: list[float] = []
        began = last = time.monotonic()
        while len(results) < len(jobs):
            num_new = min(len(waiting), load - (len(sent_at) - len(results)))
            for job in [waiting.popleft() for _ in range(num_new)]:
                sent_at[job.job_id] = time.monotonic()
                self._send(job, decoding)
            if num_new:
                # A client that waits for jobs does not let them linger for others.
                self._producer.serve(_POLL_S)
            result = self._next()
            now = time.monotonic()
            if result is None or result.job_id not in sent_at or self.num_results[result.job_id] > 1:
                if now - last > self._timeout_s:
                    missing = sorted(sent_at.keys() - {one.job_id for one in results})
                    raise RuntimeError(f"no result for {self._timeout_s:g} s; missing: {', '.join(missing[:5])}")
                continue
            if result.status != "succeeded":
                raise RuntimeError(f"{result.job_id}: expected a result, found that it {result.status}")
            last = now
            results.append(result)
            latencies.append(now - sent_at[result.job_id])
        return Played(last - began, tuple(results), tuple(latencies))

    def send_all(self, jobs: Sequence[PromptJob], *, decoding: str) -> None:
        """Send without waiting for results."""
        for job in jobs:
            self._send(job, decoding)
        self._producer.flush(_FLUSH_S)

    def read(self, is_enough: Callable[[], bool]) -> None:
        """Count results until it is enough, or none has come for the time-out."""
        last = time.monotonic()
        while not is_enough():
            if self._next() is not None:
                last = time.monotonic()
            elif time.monotonic() - last > self._timeout_s:
                return

    def _send(self, job: PromptJob, decoding: str) -> None:
        key, value = job.job_id.encode(), job.encoded(decoding=decoding)
        self._producer.send(jobs_topic(job.task), key=key, value=value)

    def _next(self) -> Result | None:
        record = self._consumer.poll(_POLL_S)
        if record is None:
            self._producer.poll(0)
            self._check_alive()
            return None
        result = Result.model_validate_json(record.value or b"{}")
        self.num_results[result.job_id] = self.num_results.get(result.job_id, 0) + 1
        if self._first.setdefault(result.job_id, record.value or b"") != record.value:
            self.contradicted.add(result.job_id)
        return result

    def close(self) -> None:
        """Let go of the broker."""
        self._consumer.close()
        self._producer.close()
