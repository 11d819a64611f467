"""Carries out what a run found: drift events, and the statuses of drafts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from alphaloop.settings import SchedulerSettings
from alphaloop.store.database import Database
from alphaloop.store.drafts import DraftRegistry
from alphaloop.store.drift import DriftEventStore, EventState
from alphaloop.store.switchback import SwitchbackStore
from alphaloop.store.traffic import TrafficStore
from scheduler.causes.cause import Finding
from scheduler.draft_status import status_changes
from scheduler.event_life import changes
from scheduler.facts import SettingInForce
from scheduler.inaction import TaskPace, lost_tokens_per_s
from scheduler.judging import About, Judged

_DAY: Final = timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Flagged:
    """What a run changed."""

    num_opened: int  #: reopened ones too
    num_closed: int
    num_status_changes: int


class Flagger:
    """Opens, confirms and closes drift events; makes drafts stale or active."""

    def __init__(self, database: Database, settings: SchedulerSettings) -> None:
        self._settings = settings
        self._events, self._drafts = DriftEventStore(database), DraftRegistry(database)
        self._drift, self._switchback = TrafficStore(database), SwitchbackStore(database)

    def flag(self, judged: Mapping[About, Judged], choices: Mapping[str, SettingInForce], now: datetime) -> Flagged:
        """Carry out the findings of a run at `now`. `choices` are in force, by task."""
        settings = self._settings
        made = changes(
            judged,
            self._events.since(now - timedelta(days=settings.drift_reopen_days)),
            lambda finding: self._cost(finding, choices, now),
            now,
            forget_after=timedelta(days=settings.history_retention_days),
        )
        self._events.write(made, now)
        statuses = {(d.drafter, d.draft_revision, d.target_revision): d.status for d in self._drafts.all()}
        found = status_changes(judged.values(), statuses, settings.stale_drop)
        for one in found:
            self._drafts.set_status(one.drafter, one.draft_revision, one.target_revision, one.status, one.reason)
        states = Counter(change.state for change in made)
        return Flagged(states[EventState.OPENED] + states[EventState.REOPENED], states[EventState.CLOSED], len(found))

    def _cost(self, finding: Finding, choices: Mapping[str, SettingInForce], now: datetime) -> float | None:
        task, began = finding.subject.task, finding.began_after
        pace = TaskPace(
            tokens_per_s=self._drift.num_tokens(task, now - _DAY, now) / _DAY.total_seconds(),
            setting=choices.get(task),
            measured_before=None if began is None else self._switchback.at(task, began),
            measured_now=self._switchback.shown(now).get(task),
        )
        return lost_tokens_per_s(finding, pace)
