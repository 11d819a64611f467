"""Sends the probes that are due: recorded in Postgres first, marked as sent when Kafka has acknowledged them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Protocol

from alphaloop.messages import encode_job, payload_digest
from alphaloop.messages.topics import jobs_topic
from alphaloop.probing.planning import ProbePlanner
from alphaloop.settings import SchedulerSettings
from alphaloop.store.probes import ProbeRun, ProbeStore
from scheduler.facts import SentProbes
from scheduler.probing.jobs import PlannedJob, make_jobs

HEADERS = (("content-type", b"application/json"),)


class Sender(Protocol):
    """The part of alphaloop.kafka.Producer that is used."""

    def send(
        self, topic: str, *, key: bytes | None, value: bytes | None, headers: Sequence[tuple[str, bytes]] = ...
    ) -> None:
        """Hand one message over."""

    def flush(self, timeout_s: float) -> None:
        """Wait until all are acknowledged; raises DeliveryFailed."""


@dataclass(frozen=True, slots=True)
class ProbeSender:
    """Sends what is planned."""

    planner: ProbePlanner
    probes: ProbeStore
    sender: Sender
    settings: SchedulerSettings
    flush_timeout_s: float

    def send_due(self, *, schedule_id: str, scheduled_for: datetime, now: datetime) -> SentProbes:
        """Send one run's probes and controls. Raises DeliveryFailed with nothing marked as sent."""
        settings = self.settings
        sets = self.planner.sets()
        plan = self.planner.plan(sets, now)
        planned = make_jobs(
            plan.chosen,
            sets,
            scheduled_for,
            num_prompts=settings.probe_prompts,
            decoded_share=settings.probe_decoded_share,
            deadline=now + timedelta(seconds=settings.probe_deadline_s),
        )
        self._send(planned, schedule_id, scheduled_for, now)
        return SentProbes(plan, Counter(p.job.task for p in planned))

    def _send(self, planned: Sequence[PlannedJob], schedule_id: str, scheduled_for: datetime, now: datetime) -> None:
        if not planned:
            return
        self.probes.record(
            [
                ProbeRun(
                    job_id=p.job.job_id,
                    schedule_id=schedule_id,
                    scheduled_for=scheduled_for,
                    task=p.job.task,
                    probe_set=p.probe_set,
                    position=p.position,
                    prompt_id=p.prompt_id,
                    purpose=p.job.purpose.value,
                    drafter=p.job.probe_drafter,
                    num_draft_tokens=p.job.probe_num_draft_tokens,
                    scored_drafters=p.job.scored_drafters,
                    payload_sha256=payload_digest(p.job),
                )
                for p in planned
            ]
        )
        for p in planned:
            self.sender.send(
                jobs_topic(p.job.task), key=p.job.job_id.encode(), value=encode_job(p.job), headers=HEADERS
            )
        self.sender.flush(self.flush_timeout_s)
        self.probes.mark_sent([p.job.job_id for p in planned], now)
