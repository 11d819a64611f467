"""Messages that are no jobs: answered with a dead letter, and only then done with."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from alphaloop.errors import MessageError
from alphaloop.messages import dead_letter
from worker.intake import Delivery
from worker.parts import Parts
from worker.patience import Patience

log = logging.getLogger(__name__)


def refuse(refused: Sequence[tuple[Delivery, MessageError]], parts: Parts, patience: Patience) -> None:
    """Dead letters first, acknowledged; then the messages are finished."""
    if not refused:
        return
    letters = [
        dead_letter(
            error,
            parts.validation.origin(delivery),
            group=parts.group,
            num_deliveries=1,
            key=delivery.record.key,
            value=delivery.record.value,
            headers=delivery.record.headers,
        )
        for delivery, error in refused
    ]
    patience.until_done("refuse", lambda: parts.publisher.refuse(letters))
    for delivery, error in refused:
        parts.metrics.refused(error.code)
        log.warning(
            "refused: %s",
            error.code,
            extra={
                "action": "dead_letter",
                "topic": delivery.record.topic,
                "partition": delivery.record.partition,
                "offset": delivery.record.offset,
            },
        )
    parts.intake.finish(delivery for delivery, _ in refused)
