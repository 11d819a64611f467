"""The `control` topic: `{"action": "cancel", "job_id": "…"}`. The worker that reads it stores it for all workers.

It is read with a consumer of its own, so that a full buffer of jobs delays no cancellation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, ValidationError

from alphaloop.errors import InvalidField, MalformedMessage, MessageError
from alphaloop.messages.job import Identifier
from alphaloop.store.jobs import JobStore
from worker.background import Retry
from worker.dead_letters import DeadMessage
from worker.intake.partitions import Delivery
from worker.intake.polling import Intake

if TYPE_CHECKING:
    from worker.claims import LeaseKeeper
    from worker.dead_letters import Forwarder
    from worker.foundation import Foundation

_MOST_AT_ONCE: Final = 100
_IDLE_WAIT_S: Final = 0.2


@dataclass(eq=False)
class ControlReader:
    """Stores each cancellation, which notifies all workers, and applies them in this worker at once."""

    intake: Intake
    store: JobStore
    _: KW_ONLY
    check_here: Callable[[], None]
    refuse: Callable[[Delivery, MessageError], None]
    retry: Retry

    def turn(self) -> None:
        """Read what has come. A message that is no cancellation becomes a dead letter."""
        for delivery in (taken := self.intake.take(_MOST_AT_ONCE, _IDLE_WAIT_S)):
            try:
                asked = parse_cancellation(delivery.record.value)
            except MessageError as error:
                self.refuse(delivery, error)
                continue
            self.retry.until_done("cancel", partial(self.store.request_cancel, asked.job_id, until=asked.until))
            self.intake.finish([delivery])
        if taken:
            self.retry.until_done("cancel", self.check_here)


class Cancellation(BaseModel):
    """A request to cancel one job, before or while it is decoded. A job that has ended is not changed."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    action: Literal["cancel"]
    job_id: Identifier
    until: AwareDatetime | None = None  #: what is sent later is decoded; None: 24 hours from now


def parse_cancellation(value: bytes | None) -> Cancellation:
    """Raises MalformedMessage or InvalidField."""
    try:
        return Cancellation.model_validate_json(value or b"")
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        if first["type"] == "json_invalid":
            raise MalformedMessage('expected {"action": "cancel", "job_id": "…"}, found no JSON') from None
        raise InvalidField(first["msg"], field=".".join(map(str, first["loc"])) or None) from None


def open_control_reader(base: Foundation, intake: Intake, leases: LeaseKeeper, forwarder: Forwarder) -> ControlReader:
    """What reads `control` for this worker; what is no cancellation becomes a dead letter."""
    return ControlReader(
        intake,
        JobStore(base.database),
        check_here=leases.check_cancelled,
        refuse=lambda delivery, error: forwarder.put(DeadMessage(delivery, error, intake)),
        retry=base.retry,
    )
