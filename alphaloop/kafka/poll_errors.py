"""What a consumer does about the errors that it polls: most pass by themselves."""

from __future__ import annotations

import logging

from confluent_kafka import KafkaError

from alphaloop.kafka.config import BrokerWatch
from alphaloop.kafka.errors import MISSING, UNREACHABLE, broker_error

log = logging.getLogger(__name__)


def judge(error: KafkaError, watch: BrokerWatch) -> None:
    """Log an error that passes by itself. Raises BrokerError, or FatalBrokerError, for every other one."""
    code = error.code()
    if error.fatal():
        raise broker_error(error, "polling")
    if code == KafkaError._PARTITION_EOF:
        return
    if code in UNREACHABLE:
        watch.on_error(error)
    elif code == KafkaError._MAX_POLL_EXCEEDED:
        # No error: the member left the group and joins again with the next poll.
        log.warning("this member was put out of the group: not polled for max.poll.interval.ms; joining again")
    elif code in MISSING:
        # A pattern, or a topic that does not exist yet: the subscription includes it once it exists.
        log.debug("%s", error.str())
    else:
        raise broker_error(error, "polling")
