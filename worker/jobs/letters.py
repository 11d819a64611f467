"""Dead letters: of messages that are no jobs, and of jobs that failed.

A failed job has a result and a dead letter. The result answers its sender, and the letter keeps its message for an
operator. Both are published together, also for an outcome that was recorded earlier, because a worker may die after
recording it. So there is at least one letter, and perhaps two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from alphaloop.errors import MessageError
from alphaloop.messages import DeadLetter, Failure, Result, Status, dead_letter
from worker.intake.polling import Delivery
from worker.intake.validation import Validation

#: In the bytes of every result that says so. Within a text the quotes are escaped.
_IS_FAILED: Final = b'"status":"failed"'


@dataclass(frozen=True, slots=True)
class FailedJob:
    """A job whose recorded outcome is that it failed."""

    delivery: Delivery
    job_id: str
    failure: Failure
    attempt: int


def failed_job(delivery: Delivery, outcome: bytes) -> FailedJob | None:
    """The job of a recorded Result, if it failed."""
    if _IS_FAILED not in outcome:
        return None  # most are not, and need not be read
    result = Result.decode(outcome)
    if result.status is not Status.FAILED:
        return None
    return FailedJob(
        delivery, result.job_id, result.error or Failure(code="unknown", message="no reason recorded"), result.attempt
    )


class Letters:
    """Writes dead letters."""

    def __init__(self, validation: Validation, group: str) -> None:
        """`group` is the consumer group that refuses."""
        self._validation = validation
        self._group = group

    def of_message(self, delivery: Delivery, error: MessageError) -> DeadLetter:
        """The dead letter of a message that is no job."""
        return self._write(delivery, error, None, 1)

    def of_job(self, failed: FailedJob) -> DeadLetter:
        """The dead letter of a job that failed."""
        return self._write(failed.delivery, failed.failure, failed.job_id, failed.attempt)

    def _write(self, delivery: Delivery, reason: MessageError | Failure, job_id: str | None, num: int) -> DeadLetter:
        record = delivery.record
        return dead_letter(
            reason,
            self._validation.origin(delivery),
            group=self._group,
            num_deliveries=num,
            key=record.key,
            value=record.value,
            headers=record.headers,
            job_id=job_id,
        )
