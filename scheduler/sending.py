"""Sends the probes that are due: recorded in Postgres first, marked as sent when Kafka has acknowledged them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Protocol

from alphaloop.messages import Purpose, encode_job, payload_digest
from alphaloop.messages.topics import jobs_topic
from alphaloop.settings import SchedulerSettings
from alphaloop.store.drafts import DraftRevision, DraftStatus
from alphaloop.store.probe_sets import ProbeSetStore
from alphaloop.store.probes import ProbeRun, ProbeStore
from scheduler.facts import SentProbes
from scheduler.probes import PlannedJob, find_due, make_jobs, within_budget

DAY = timedelta(days=1)
MEASURED_DAYS = timedelta(days=30)
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
    """Finds the probes that are due within the budget, and sends them."""

    probe_sets: ProbeSetStore
    probes: ProbeStore
    sender: Sender
    settings: SchedulerSettings
    tasks: Collection[str]  #: tasks that workers know; a probe of any other would become a dead letter
    flush_timeout_s: float

    def send_due(
        self,
        drafts: Sequence[DraftRevision],
        *,
        schedule_id: str,
        scheduled_for: datetime,
        now: datetime,
    ) -> SentProbes:
        """Send one run's probes and controls. Raises DeliveryFailed with nothing marked as sent."""
        settings = self.settings
        sets = {task: found for task, found in self.probe_sets.active().items() if task in self.tasks}
        deadline = timedelta(seconds=settings.probe_deadline_s)
        history = timedelta(days=settings.history_retention_days)
        due = find_due(
            sets.values(),
            _fit_drafters(drafts),
            self.probes.last_probed(now, deadline, since=now - history),
            now,
            max_age=timedelta(seconds=settings.probe_max_age_s),
        )
        budget = max(settings.probe_min_device_s, settings.probe_device_share * self.probes.device_s(now - DAY, now))
        device_s = self.probes.mean_device_s(now - MEASURED_DAYS)
        num_prompts = {task: min(settings.probe_prompts, len(found.prompts)) for task, found in sets.items()}
        chosen = within_budget(due, device_s, num_prompts, budget)
        planned = make_jobs(
            chosen,
            sets,
            scheduled_for,
            num_prompts=settings.probe_prompts,
            deadline=now + deadline,
        )
        self._send(planned, schedule_id, scheduled_for, now)
        counted = Counter(
            (p.job.task, p.job.probe_drafter) for p in planned if p.job.purpose is Purpose.PROBE and p.job.probe_drafter
        )
        return SentProbes(
            chosen=tuple(chosen),
            num_probes={(task, str(drafter)): number for (task, drafter), number in counted.items()},
            num_jobs_by_task=Counter(p.job.task for p in planned),
            num_due=len(due),
            num_probe_sets=len(sets),
            budget_device_s=budget,
        )

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


def _fit_drafters(drafts: Sequence[DraftRevision]) -> list[str]:
    """Drafters with a revision that is measured: stale ones too, so that they can become active again."""
    measured = (DraftStatus.ACTIVE, DraftStatus.STALE)
    return sorted({draft.drafter for draft in drafts if draft.status in measured})
