"""What a worker consumes from: topics, consumers with their limits, and the file of tasks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path

from alphaloop.errors import BrokerError, BrokerUnavailable, ConfigError
from alphaloop.kafka.consumer import Consumer
from alphaloop.kafka.topics import ensure_topics
from alphaloop.settings import Settings, TaskSettings, read_tasks
from worker.intake.handing_over import SHARE_OF_POLL_INTERVAL
from worker.intake.polling import Intake

log = logging.getLogger(__name__)


def make_topics(settings: Settings) -> None:
    """Create missing topics. One that this user may not create does not end the worker; its users say so again."""
    try:
        ensure_topics(settings.kafka, settings.tasks)
    except BrokerUnavailable:
        raise
    except BrokerError as error:
        log.error("topics are missing: %s", error.message, extra={"action": "topics_missing", "hint": error.hint or ""})


def open_intake(
    settings: Settings, group_id: str, patterns: Sequence[str], name: str, now: Callable[[], datetime]
) -> Intake:
    """A consumer of that group, with the limits of the settings. `name` is for logs, `now` the time of day."""
    limits = settings.worker
    consumer = Consumer(settings.kafka, group_id=group_id)
    return Intake(
        consumer,
        patterns,
        max_buffered=limits.max_buffered,
        max_buffered_bytes=limits.max_buffered_bytes,
        most_message_bytes=settings.kafka.max_message_bytes,
        max_distance=limits.max_watermark_distance,
        commit_interval_s=limits.commit_interval_s,
        hand_over_s=SHARE_OF_POLL_INTERVAL * consumer.max_poll_interval_s,
        name=name,
        now=now,
    )


def tasks_reader(configs: Path | None) -> Callable[[], Mapping[str, TaskSettings]]:
    """Reads the tasks of the folder again at each call; none while the file cannot be read."""

    def reread() -> Mapping[str, TaskSettings]:
        try:
            return read_tasks(configs)
        except ConfigError as error:
            # Somebody is editing the file: the tasks known so far stay.
            log.warning("tasks not read again: %s", error.message, extra={"action": "tasks_unreadable"})
            return {}

    return reread
