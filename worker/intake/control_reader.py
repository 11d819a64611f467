"""The reader of the `control` topic, with a consumer of its own: a full buffer of jobs delays no cancellation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

from alphaloop.errors import MessageError
from worker.intake.cancellation import parse_cancellation
from worker.intake.polling import Delivery, Intake
from worker.retry import Retry

_MOST_AT_ONCE: Final = 100
_IDLE_WAIT_S: Final = 0.2


class Cancellations(Protocol):
    """What is needed of alphaloop.store.jobs.JobStore."""

    def request_cancel(self, job_id: str) -> None: ...


class ControlReader:
    """Stores each cancellation, which notifies all workers, and applies it in this worker at once."""

    def __init__(
        self,
        intake: Intake,
        store: Cancellations,
        *,
        cancel_here: Callable[[str], None],
        refuse: Callable[[Delivery, MessageError], None],
        retry: Retry,
    ) -> None:
        self._intake = intake
        self._store = store
        self._cancel_here = cancel_here
        self._refuse = refuse
        self._retry = retry

    def turn(self) -> None:
        """Read what has come. A message that is no cancellation becomes a dead letter."""
        for delivery in self._intake.take(_MOST_AT_ONCE, _IDLE_WAIT_S):
            try:
                job_id = parse_cancellation(delivery.record.value).job_id
            except MessageError as error:
                self._refuse(delivery, error)
                continue
            self._cancel(job_id)
            self._intake.finish([delivery])

    def _cancel(self, job_id: str) -> None:
        self._retry.until_done("cancel", lambda: self._store.request_cancel(job_id))
        self._cancel_here(job_id)
