"""What the broker says of how long messages may be read."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from alphaloop.kafka import topics
from alphaloop.kafka.topics import longest_job_retention
from alphaloop.settings import KafkaSettings
from tests.fixtures.broker import Operator

pytestmark = pytest.mark.kafka

HOUR_MS = 3_600_000


@pytest.fixture
def prefix(fresh_prefix: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Topics of this test alone, because the broker holds those of others."""
    found = f"jobs.{fresh_prefix}"
    monkeypatch.setattr(topics, "_JOBS_PREFIX", found)
    return found


def test_the_longest_of_all_jobs_topics_counts_with_its_segments(prefix: str, kafka_broker: str) -> None:
    kafka, operator = KafkaSettings(bootstrap_servers=kafka_broker), Operator(kafka_broker)
    assert longest_job_retention(kafka) == timedelta(0), "no topic, no message"
    operator.create(f"{prefix}a", retention_ms=24 * HOUR_MS, segment_ms=HOUR_MS)
    assert longest_job_retention(kafka) == timedelta(hours=25)
    operator.create(f"{prefix}a.dlq", retention_ms=48 * HOUR_MS)
    assert longest_job_retention(kafka) == timedelta(days=2 + 7), "Kafka's own segments take a week"


@pytest.mark.parametrize("config", [{"retention_ms": -1}, {"cleanup_policy": "compact"}])
def test_a_topic_that_keeps_everything_has_no_limit(prefix: str, kafka_broker: str, config: dict[str, Any]) -> None:
    operator = Operator(kafka_broker)
    operator.create(f"{prefix}short", retention_ms=HOUR_MS)
    operator.create(f"{prefix}forever", **config)
    assert longest_job_retention(KafkaSettings(bootstrap_servers=kafka_broker)) is None
