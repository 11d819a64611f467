"""How long the broker may keep a message, as its topics are set."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final

from confluent_kafka.admin._config import ConfigResource
from confluent_kafka.admin._resource import ResourceType

from alphaloop.errors import BrokerUnavailable
from alphaloop.kafka.errors import mapped
from alphaloop.kafka.topics import admin_client, list_topics
from alphaloop.settings import KafkaSettings

_JOBS_PREFIX: Final = "jobs."


def longest_job_retention(kafka: KafkaSettings) -> timedelta | None:
    """How long a message of any `jobs.` topic may still be read; None: without limit, or the broker does not say.

    Retries and dead letters are among these topics. Kafka deletes whole segments, and a segment may take messages for
    `segment.ms`, so that time counts too. Raises BrokerError, BrokerUnavailable.
    """
    names = [name for name in list_topics(kafka) if name.startswith(_JOBS_PREFIX)]
    if not names:
        return timedelta(0)
    resources = [ConfigResource(ResourceType.TOPIC, name) for name in names]
    with mapped("asking for the retention of topics"):
        # The name keeps the client alive until every answer is in.
        admin = admin_client(kafka)
        answers = admin.describe_configs(resources, request_timeout=kafka.request_timeout_s)
        found = [_retention(answer.result(kafka.request_timeout_s)) for answer in answers.values()]
    if len(found) < len(names):
        raise BrokerUnavailable("the broker did not describe every topic")
    limited = [one for one in found if one is not None]
    return max(limited) if len(limited) == len(found) else None


def _retention(config: dict[str, Any]) -> timedelta | None:
    values = {name: config[name].value for name in ("cleanup.policy", "retention.ms", "segment.ms") if name in config}
    if len(values) < 3 or "delete" not in str(values["cleanup.policy"]) or int(values["retention.ms"]) < 0:
        return None
    return timedelta(milliseconds=int(values["retention.ms"]) + int(values["segment.ms"]))
