"""What the broker says of how long messages may be read."""

from __future__ import annotations

from datetime import timedelta

import pytest
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from alphaloop.errors import BrokerUnavailable
from alphaloop.kafka import topics
from alphaloop.kafka.topics import longest_job_retention
from alphaloop.settings import KafkaSettings
from tests.fixtures.worker import until

pytestmark = pytest.mark.kafka

HOUR_MS = 3_600_000


@pytest.fixture
def admin(kafka_broker: str) -> AdminClient:
    return AdminClient({"bootstrap.servers": kafka_broker})


@pytest.fixture
def prefix(fresh_prefix: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Topics of this test alone, because the broker holds those of others."""
    found = f"jobs.{fresh_prefix}"
    monkeypatch.setattr(topics, "_JOBS_PREFIX", found)
    return found


def make(admin: AdminClient, name: str, **config: str) -> None:
    settings = {key.replace("_", "."): value for key, value in config.items()}
    for answer in admin.create_topics([NewTopic(name, num_partitions=1, config=settings)]).values():
        answer.result(30)
    until(lambda: name in admin.list_topics(timeout=30).topics, f"the broker shows {name}")


def test_the_longest_of_all_jobs_topics_counts_with_its_segments(
    admin: AdminClient, prefix: str, kafka_broker: str
) -> None:
    kafka = KafkaSettings(bootstrap_servers=kafka_broker)
    assert longest_job_retention(kafka) == timedelta(0), "no topic, no message"
    make(admin, f"{prefix}a", retention_ms=str(24 * HOUR_MS), segment_ms=str(HOUR_MS))
    assert longest_job_retention(kafka) == timedelta(hours=25)
    make(admin, f"{prefix}a.dlq", retention_ms=str(48 * HOUR_MS))
    assert longest_job_retention(kafka) == timedelta(days=2 + 7), "Kafka's own segments take a week"


@pytest.mark.parametrize("config", [{"retention_ms": "-1"}, {"cleanup_policy": "compact"}])
def test_a_topic_that_keeps_everything_has_no_limit(
    admin: AdminClient, prefix: str, kafka_broker: str, config: dict[str, str]
) -> None:
    make(admin, f"{prefix}short", retention_ms=str(HOUR_MS))
    make(admin, f"{prefix}forever", **config)
    assert longest_job_retention(KafkaSettings(bootstrap_servers=kafka_broker)) is None


def test_no_broker_is_said_so() -> None:
    with pytest.raises(BrokerUnavailable):
        longest_job_retention(KafkaSettings(bootstrap_servers="127.0.0.1:1", request_timeout_s=0.5))
