"""Messages that are no jobs: answered with a dead letter, and only then done with."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from alphaloop.errors import MessageError
from alphaloop.messages import dead_letter
from worker.components import Components
from worker.intake.polling import Delivery
from worker.retry import Retry

log = logging.getLogger(__name__)


def refuse(refused: Sequence[tuple[Delivery, MessageError]], components: Components, retry: Retry) -> None:
    """Dead letters first, acknowledged; then the messages are finished."""
    if not refused:
        return
    letters = [
        dead_letter(
            error,
            components.validation.origin(delivery),
            group=components.group,
            num_deliveries=1,
            key=delivery.record.key,
            value=delivery.record.value,
            headers=delivery.record.headers,
        )
        for delivery, error in refused
    ]
    retry.until_done("refuse", lambda: components.publisher.refuse(letters))
    for delivery, error in refused:
        components.metrics.refused(error.code)
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
    components.intake.finish(delivery for delivery, _ in refused)
