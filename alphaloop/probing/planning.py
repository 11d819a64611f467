"""The plan of the next probes, from what is stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final

from alphaloop.probe_sets import ProbeSet
from alphaloop.probing.due import find_due
from alphaloop.probing.plan import ProbePlan, make_plan
from alphaloop.settings import SchedulerSettings, TaskSettings
from alphaloop.store.costs import CostStore
from alphaloop.store.database import Database
from alphaloop.store.drafts import DraftRegistry, DraftRevision, DraftStatus
from alphaloop.store.drift import DriftEventStore
from alphaloop.store.incidents import IncidentStore
from alphaloop.store.probes import MEASURED, ProbeSetStore, ProbeStore

DAY: Final = timedelta(days=1)
_TIMED: Final = timedelta(days=30)
_MEASURED: Final = (DraftStatus.ACTIVE, DraftStatus.STALE)


class ProbePlanner:
    """Plans a run of the scheduler; `alphaloop probes plan` shows the same plan before."""

    def __init__(
        self, database: Database, settings: SchedulerSettings, tasks: Mapping[str, TaskSettings], change_jobs: float
    ) -> None:
        """`tasks` are those that workers know: a probe of any other would become a dead letter."""
        self._sets, self._probes = ProbeSetStore(database), ProbeStore(database)
        self._drafts, self._engines = DraftRegistry(database), CostStore(database)
        self._drift, self._incidents = DriftEventStore(database), IncidentStore(database)
        self._settings, self._tasks, self._change_jobs = settings, tasks, change_jobs

    def sets(self) -> dict[str, ProbeSet]:
        """The probe sets in use, of tasks that workers know."""
        return {task: found for task, found in self._sets.active().items() if task in self._tasks}

    def plan(self, sets: Mapping[str, ProbeSet], now: datetime) -> ProbePlan:
        """What a run at `now` would send of these sets."""
        settings = self._settings
        history, drafts = timedelta(days=settings.history_retention_days), self._drafts.all()
        due = find_due(
            sets.values(),
            _new_since(drafts, self._engines.first_measured(now), now),
            self._probes.last_probed(now, timedelta(seconds=settings.probe_deadline_s), since=now - history),
            now,
            max_age=self._max_age,
            alarms=self._alarms(),
            traffic=self._probes.traffic(now - timedelta(days=settings.drift_window_days), now),
            change_jobs=self._change_jobs,
            scorable=_scorable(drafts),
            incidents={(one.found.task, one.found.drafter) for one in self._incidents.open_incidents()},
        )
        num_prompts = {task: min(settings.probe_prompts, len(found.prompts)) for task, found in sets.items()}
        job_device_s = self._probes.mean_device_s(now - _TIMED, now)
        return make_plan(due, job_device_s, num_prompts, self._budget_device_s(now), settings.probe_decoded_share)

    def _budget_device_s(self, now: datetime) -> float:
        """The share of the last day's device time, less what probes took of it already."""
        share = self._settings.probe_device_share * self._probes.device_s(now - DAY, now)
        spent = self._probes.device_s(now - DAY, now, purposes=MEASURED)
        return max(self._settings.probe_min_device_s, share - spent)

    def _alarms(self) -> dict[tuple[str, str], datetime]:
        """When drift was raised last, of what is open: its probes tell the cause, or confirm it."""
        found: dict[tuple[str, str], datetime] = {}
        for event in self._drift.open_events():
            about = event.subject.task, event.subject.drafter
            found[about] = max(found.get(about, event.raised_at), event.raised_at)
        return found

    def _max_age(self, task: str) -> timedelta:
        own = self._tasks[task].probe_max_age_s
        return timedelta(seconds=self._settings.probe_max_age_s if own is None else own)


def _new_since(drafts: Sequence[DraftRevision], engine_since: datetime | None, now: datetime) -> dict[str, datetime]:
    """By drafter with a revision that is measured: when the newest of its targets, revisions or engines was seen first.

    Stale drafts are measured too, so that they can become active again.
    """
    found: dict[str, datetime] = {}
    for draft in drafts:
        if draft.status in _MEASURED:
            seen = draft.registered_at if draft.registered_at <= now else datetime.min.replace(tzinfo=UTC)
            found[draft.drafter] = max(found.get(draft.drafter, seen), seen, engine_since or seen)
    return found


def _scorable(drafts: Sequence[DraftRevision]) -> set[str]:
    """Drafters of which every revision that is measured can be scored."""
    measured = [draft for draft in drafts if draft.status in _MEASURED]
    return {draft.drafter for draft in measured} - {draft.drafter for draft in measured if not draft.is_scorable}
