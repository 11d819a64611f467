"""Traces of jobs: what the recorder and the publisher tell, and opening what takes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from alphaloop.errors import ConfigError
from alphaloop.messages import Job
from alphaloop.settings import Settings
from alphaloop.store.outcomes import Outcome
from worker.engine import EngineIdentity
from worker.intake.partitions import Delivery


@dataclass(frozen=True, slots=True)
class TracedJob:
    """A job whose outcome was recorded."""

    job: Job
    delivery: Delivery
    outcome: Outcome


class JobTrace(Protocol):
    """The trace of one job, open until its result is on Kafka."""

    def published(self) -> None:
        """The broker has acknowledged the result."""


class Tracing(Protocol):
    """Takes what is known of a job at its end."""

    def recorded(self, jobs: Sequence[TracedJob]) -> Sequence[JobTrace]:
        """These outcomes were committed; returns the traces that were begun, for jobs that are sampled."""

    def close(self) -> None:
        """Send what is left; waits for a few seconds at most."""


def open_tracing(
    settings: Settings, identity: EngineIdentity, *, owner: str, now: Callable[[], datetime]
) -> Tracing | None:
    """What the settings ask for; None for no traces, the default.

    Raises ConfigError when traces are wanted and OpenTelemetry is not installed.
    """
    if settings.tracing.endpoint is None:
        return None
    try:
        from worker.job_spans import JobSpans
    except ImportError as error:
        raise ConfigError(
            f"tracing.endpoint: set, and the package {error.name} is not installed",
            hint="pip install 'alphaloop[tracing]', or unset ALPHALOOP_TRACING__ENDPOINT",
        ) from None
    return JobSpans.to_collector(settings.tracing, identity, owner=owner, group_id=settings.kafka.group_id, now=now)
