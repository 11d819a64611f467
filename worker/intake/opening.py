"""What a worker consumes from: topics, consumers with their limits, and what a message is validated against."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path

from alphaloop.claim_check.store import ContentStore
from alphaloop.errors import BrokerError, BrokerUnavailable, ConfigError
from alphaloop.kafka.consumer import Consumer
from alphaloop.kafka.topics import cluster_id, ensure_topics
from alphaloop.settings import Settings, TaskSettings, read_tasks
from alphaloop.store.probes import ProbeStore
from worker.engine import Engine
from worker.intake.handing_over import SHARE_OF_POLL_INTERVAL
from worker.intake.polling import Intake
from worker.intake.validation import Validation, no_references
from worker.retry import Retry

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


def open_validation(
    settings: Settings,
    configs: Path | None,
    engine: Engine,
    contents: ContentStore | None,
    probes: ProbeStore,
    *,
    keeps_apart: Callable[[str, str], bool],
    retry: Retry,
) -> Validation:
    """Validation against the engine and the tasks of the folder `configs`; it asks the database whether a probe is one.

    `keeps_apart` says whether a segment of a task has evidence of its own.
    """
    return Validation(
        engine,
        settings.tasks,
        reread_tasks=_tasks_reader(configs),
        limits=settings.worker,
        cluster=cluster_id(settings.kafka),
        keeps_apart=keeps_apart,
        check_reference=contents.check if contents else no_references,
        is_probe=lambda job_id, digest: retry.until_done("probe", partial(probes.is_recorded, job_id, digest)),
    )


def _tasks_reader(configs: Path | None) -> Callable[[], Mapping[str, TaskSettings]]:
    """Reads the tasks of the folder again at each call; none while the file cannot be read."""

    def reread() -> Mapping[str, TaskSettings]:
        try:
            return read_tasks(configs)
        except ConfigError as error:
            # Somebody is editing the file: the tasks known so far stay.
            log.warning("tasks not read again: %s", error.message, extra={"action": "tasks_unreadable"})
            return {}

    return reread
