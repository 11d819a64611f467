"""Properties of librdkafka that `kafka.extra` may not set, because alphaloop's promises rest on the values it gives."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

_OFFSETS: Final = "the worker commits an offset only after the job's outcome is recorded and published"
_REPORTS: Final = "a result counts as published only after the broker's own report of it"
_STORED: Final = "a result counts as published only after all replicas in sync have stored it"
_GROUP: Final = "the worker hands partitions over in small steps, as the cooperative assignor of classic groups does"
_ALIASES: Final = "the setting of its own has to hold for all clients and topics"

#: Property → reason. Aliases of one property all stand here.
RESERVED: Final = {
    "enable.auto.commit": _OFFSETS,
    "auto.commit.enable": _OFFSETS,
    "auto.commit.interval.ms": _OFFSETS,
    "enable.auto.offset.store": _OFFSETS,
    "offset.store.method": _OFFSETS,
    "offset.store.path": _OFFSETS,
    "offset.store.sync.interval.ms": _OFFSETS,
    "auto.offset.reset": "a group without offsets has to begin with the oldest job, or jobs are passed over",
    "isolation.level": "a job of an aborted transaction was never sent",
    "group.id": f"{_ALIASES}: kafka.group_id",
    "group.instance.id": "two workers with one instance id put each other out of the group",
    "group.protocol": _GROUP,
    "group.remote.assignor": _GROUP,
    "partition.assignment.strategy": _GROUP,
    "acks": _STORED,
    "request.required.acks": _STORED,
    "enable.idempotence": "a retry of a send may not store a message twice or in another order",
    "enable.gapless.guarantee": "one message that the broker refuses would end the producer",
    "transactional.id": "results are published outside Kafka's transactions (docs/decisions/0003)",
    "retries": "a message is sent again until its time is up",
    "message.send.max.retries": "a message is sent again until its time is up",
    "delivery.report.only.error": _REPORTS,
    "dr_cb": _REPORTS,
    "dr_msg_cb": _REPORTS,
    "message.max.bytes": f"{_ALIASES}: kafka.max_message_bytes",
    "test.mock.num.brokers": "the client would talk to a broker in its own memory, which loses messages",
}


def _not_reserved(name: str) -> str:
    if name in RESERVED:
        raise PydanticCustomError("reserved", "Expected another property: {reason}", {"reason": RESERVED[name]})
    return name


#: A property that `kafka.extra` may set.
ExtraProperty = Annotated[str, AfterValidator(_not_reserved)]
