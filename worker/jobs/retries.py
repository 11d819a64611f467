"""Jobs that failed and are tried again: counted in Postgres, then sent to a retry topic.

1. count     the failure, and give the claim back, in one statement
2. publish   the message on the retry topic of its delay; the broker acknowledges it (worker/jobs/forwarding.py)
3. finish    the delivery that failed

A worker that dies after 1 or 2 leaves the delivery unfinished. So it is delivered again, and perhaps decoded before its
delay is over, but each failure is counted once, and the job ends once.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from alphaloop.errors import BrokerError, BrokerUnavailable
from alphaloop.messages import Failure, Purpose, Status
from alphaloop.messages.retry import RetryHeaders as RetryHeaders
from alphaloop.messages.topics import retry_topic
from alphaloop.store.jobs import JobStore
from worker.intake.delays import JITTER
from worker.intake.polling import Intake
from worker.jobs.bounded_queue import BoundedQueue
from worker.jobs.claiming import ClaimedJob
from worker.jobs.forwarding import Forwarder, TryAgain
from worker.jobs.leases import LeaseKeeper
from worker.jobs.outcomes import ended
from worker.jobs.recording import EndedJob, Recorder
from worker.retry import Retry

log = logging.getLogger(__name__)

_MOST_AT_ONCE: Final = 256
_IDLE_WAIT_S: Final = 0.2


@dataclass(frozen=True, slots=True)
class FailedTry:
    """A job that failed, and what it waits for."""

    claimed: ClaimedJob
    failure: Failure
    failed_at: datetime
    delay_s: int
    not_before: datetime


class JobRetries:
    """Decides in the loop which failed jobs are tried again, and sends them from a thread of its own."""

    def __init__(
        self,
        delays_s: Sequence[int],
        store: JobStore,
        leases: LeaseKeeper,
        forwarder: Forwarder,
        recorder: Recorder,
        intake: Intake,
        *,
        ensure_topics: Callable[[str], object],
        owner: str,
        retry: Retry,
        rng: random.Random,
        max_bytes: int,
        is_hurried: Callable[[], bool],
    ) -> None:
        """`delays_s`: the delay before each try after the first; without any, no job is tried again.

        `ensure_topics` makes a task's retry topics where they are missing. Raises BrokerError where it may not.
        """
        self._delays_s = tuple(delays_s)
        self._store = store
        self._leases = leases
        self._forwarder = forwarder
        self._recorder = recorder
        self._ensure_topics = ensure_topics
        self._has_topics: dict[str, bool] = {}
        self._intake = intake
        self._owner = owner
        self._retry = retry
        self._rng = rng
        self._is_hurried = is_hurried
        self._waiting: BoundedQueue[FailedTry] = BoundedQueue(
            max_items=_MOST_AT_ONCE, max_bytes=max_bytes, num_bytes_of=lambda one: one.claimed.ready.num_bytes
        )

    def __len__(self) -> int:
        """Failed jobs that were not handed to the forwarder yet."""
        return self._waiting.num_unsettled

    def put(self, claimed: ClaimedJob, failure: Failure, now: datetime) -> bool:
        """Have the job tried again; False if it has no try left, and then it has failed for good.

        Probes and controls are measured now or never. A job whose deadline comes first would only expire.
        """
        job = claimed.ready.job
        if job.purpose is not Purpose.TRAFFIC or claimed.num_failures >= len(self._delays_s):
            return False
        delay_s = self._delays_s[claimed.num_failures]
        not_before = now + timedelta(seconds=delay_s * (1 + JITTER * self._rng.random()))
        if job.is_expired(not_before):
            return False
        self._waiting.put([FailedTry(claimed, failure, now, delay_s, not_before)], give_up=self._is_hurried)
        return True

    def turn(self, timeout_s: float = _IDLE_WAIT_S) -> int:
        """Count what waits as failed and hand it to the forwarder; returns how many jobs.

        A job whose claim was lost is sent too: whoever took it over records its outcome, and its retry is answered from
        the record. Whether it was lost is not certain, because the answer to a first statement may have been.
        """
        taken = self._waiting.take(_MOST_AT_ONCE, timeout_s)
        tries = [one for one in taken if self._can_wait(one)]
        if not tries:
            return 0
        attempts = {one.claimed.job_id: one.claimed.attempt for one in tries}
        self._retry.until_done("count failures", lambda: self._store.fail(attempts, owner=self._owner))
        self._leases.let_go(attempts)
        self._forwarder.put(*(self._message(one) for one in tries))
        return len(tries)

    def _can_wait(self, one: FailedTry) -> bool:
        """Whether the job's retry topics are there; if they cannot be, it has failed for good."""
        task = one.claimed.ready.job.task
        if task not in self._has_topics:
            try:
                self._retry.until_done("retry topics", lambda: self._ensure_topics(task))
                self._has_topics[task] = True
            except BrokerUnavailable:
                raise
            except BrokerError as error:
                log.error("no retries of task %s: %s", task, error.message, extra={"action": "no_retry_topics"})
                self._has_topics[task] = False
        if not self._has_topics[task]:
            outcome = ended(one.claimed, Status.FAILED, one.failure, now=one.failed_at)
            self._recorder.put([EndedJob(one.claimed, outcome)])
        return self._has_topics[task]

    def _message(self, one: FailedTry) -> TryAgain:
        delivery = one.claimed.ready.delivery
        record, job = delivery.record, one.claimed.ready.job
        num_failures = one.claimed.num_failures + 1
        headers = RetryHeaders(
            topic=record.topic,
            partition=record.partition,
            offset=record.offset,
            timestamp_ms=record.timestamp_ms,
            not_before_ms=int(one.not_before.timestamp() * 1000),
            num_failures=num_failures,
            reason=one.failure.code,
        ).headers(record.headers)
        where = {"job_id": job.job_id, "code": one.failure.code, "delay_s": one.delay_s}
        log.warning(
            "a job failed for the %d. time, tried again", num_failures, extra={"action": "job_retried", **where}
        )
        return TryAgain(delivery, retry_topic(job.task, one.delay_s), tuple(headers), one.failure.code, self._intake)
