"""Dead letters: of messages that are no jobs, and of jobs that failed.

A failed job has a result and a dead letter. The result answers its sender, and the letter keeps its message for an
operator. A job whose outcome was recorded earlier gets its letter, too, because a worker may die after recording it. So
there is at least one letter, and perhaps two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from alphaloop.errors import MessageError
from alphaloop.messages import DeadLetter, Failure, Result, Status, dead_letter
from worker.intake.partitions import Delivery
from worker.intake.polling import Intake
from worker.intake.validation import Validation

#: In the bytes of every result that says so. Within a text the quotes are escaped.
_IS_FAILED: Final = b'"status":"failed"'


@dataclass(frozen=True, slots=True)
class DeadMessage:
    """A message that becomes a dead letter: it is no job, or its job failed, which then has a `job_id`."""

    delivery: Delivery
    reason: MessageError | Failure
    intake: Intake
    job_id: str | None = None
    attempt: int = 1

    @property
    def num_bytes(self) -> int:
        """Size of the message."""
        return self.delivery.num_bytes

    @property
    def topic(self) -> str:
        """Where it came from."""
        return self.delivery.record.topic


def failed_job(delivery: Delivery, outcome: bytes, intake: Intake) -> DeadMessage | None:
    """The message of a recorded Result's job, if it failed."""
    if _IS_FAILED not in outcome:
        return None  # most are not, and need not be read
    result = Result.decode(outcome)
    if result.status is not Status.FAILED:
        return None
    failure = result.error or Failure(code="unknown", message="no reason recorded")
    return DeadMessage(delivery, failure, intake, result.job_id, result.attempt)


class Letters:
    """Writes dead letters."""

    def __init__(self, validation: Validation, group: str) -> None:
        """`group` is the consumer group that refuses."""
        self._validation = validation
        self._group = group

    def of(self, dead: DeadMessage) -> DeadLetter:
        """The dead letter of a message."""
        record = dead.delivery.record
        return dead_letter(
            dead.reason,
            self._validation.origin(dead.delivery),
            group=self._group,
            num_deliveries=dead.attempt,
            key=record.key,
            value=record.value,
            headers=record.headers,
            job_id=dead.job_id,
        )
