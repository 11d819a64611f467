"""Which probes are due, how each is measured, what that costs, and which of them a run sends.

A drafter of a task is due because of an alarm, because of something new (a probe set, target, draft or engine that it
was never measured with), or because its newest measurement is old. Alarms come first, new things second.

Within each of these groups the expected loss decides. A task that was decoded for D device seconds since its drafter
was measured, in N jobs, is expected to have been decoded for D · P device seconds with a setting that was not checked
after the task had changed. P = 1 - exp(-N / change_jobs) is the policy's prior for a change within N jobs.

A drafter is measured on a prompt by decoding it, or by scoring the control's text. Both give the same counts. A score
costs one pass of the draft in place of a text, but it does not run what an engine may do wrong: rounds, caches,
verification. So where the engine itself is in question, every prompt is decoded. Where a measurement is merely old, a
share of its prompts is decoded, for the watch over exactness, and the rest is scored.

`ProbePlanner` reads what is stored; the other functions are pure.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from math import ceil
from typing import Final

from alphaloop.deciding.exploration import CHANGE_JOBS
from alphaloop.probes import ProbeSet, TaskTraffic
from alphaloop.settings import Bindings, Settings
from alphaloop.store.database import Database
from alphaloop.store.decision_inputs import CostStore, DraftRegistry, DraftRevision, DraftStatus
from alphaloop.store.drift import DriftEventStore, IncidentStore
from alphaloop.store.probes import MEASURED, ProbeSetStore, ProbeStore
from alphaloop.store.workers import SeenWorker, WorkerStore, drafters_of

#: A probe that has not ended by then expires.
DEADLINE: Final = timedelta(minutes=30)
#: The share of the prompts that are decoded with a drafter which is due by age alone, at least one; on the others'
#: controls it is scored.
DECODED_SHARE: Final = 0.25
#: How old a job may be that the plan, the report and the watch for drift see; a stream without one is forgotten.
WINDOW: Final = timedelta(days=14)
_NEVER: Final = datetime.min.replace(tzinfo=UTC)
_DAY: Final = timedelta(days=1)
_LATE: Final = timedelta(
    minutes=10
)  #: how late a run may be; else one that was late would let the next pass without probes
_TIMED: Final = timedelta(days=30)
_MEASURED: Final = (DraftStatus.ACTIVE, DraftStatus.STALE)
#: What scoring a text takes of what decoding it takes: a draft of 24 of the target's 30 layers (docs/guides/probes.md).
SCORE_SHARE: Final = 0.12
PRIOR_JOB_DEVICE_S: Final = 5.0  #: for a task without timings: 48 tokens at 10 a second


class Why(StrEnum):
    """Why a drafter of a task is measured; in the order in which they are sent."""

    ALARM = "alarm"  #: an alarm was raised after the newest measurement
    NEW = "new"  #: a probe set, target, draft or engine without a measurement
    AGE = "age"  #: the newest measurement is old


_ORDER: Final = tuple(Why)


@dataclass(frozen=True, slots=True)
class DueProbe:
    """A (task, drafter) to measure."""

    task: str
    drafter: str
    num_draft_tokens: int
    last_probed: datetime | None
    why: Why = Why.AGE
    at_stake_device_s: float = 0.0  #: expected device time of unchecked traffic, D · P
    is_scored: bool = False  #: on the controls' texts, but for a share of the prompts; else decoded


@dataclass(frozen=True, slots=True)
class Measurement:
    """Probes of a due (task, drafter): sent whole in this run, or not at all."""

    due: DueProbe
    num_prompts: int
    num_decoded: int  #: of them decoded with the drafter; it is scored on the others
    device_s: float  #: what it is expected to take; the first one sent of a task pays for the controls
    is_sent: bool


@dataclass(frozen=True, slots=True)
class ProbePlan:
    """The measurements that are due, the most urgent first."""

    measurements: tuple[Measurement, ...] = ()
    budget_device_s: float = 0.0
    num_probe_sets: int = 0

    @property
    def chosen(self) -> tuple[DueProbe, ...]:
        """Those that are sent."""
        return tuple(measurement.due for measurement in self.measurements if measurement.is_sent)

    @property
    def waiting(self) -> tuple[Measurement, ...]:
        """Those that the budget holds back."""
        return tuple(measurement for measurement in self.measurements if not measurement.is_sent)


class ProbePlanner:
    """Plans a run of the scheduler; `alphaloop probes plan` shows the same plan before."""

    def __init__(self, database: Database, settings: Settings) -> None:
        """A probe of a task that is not in `settings.tasks` would become a dead letter, so none is planned."""
        self._sets, self._probes = ProbeSetStore(database), ProbeStore(database)
        self._drafts, self._engines = DraftRegistry(database), CostStore(database)
        self._drift, self._incidents = DriftEventStore(database), IncidentStore(database)
        self._workers, self._bindings = WorkerStore(database), settings.bindings
        self._settings, self._tasks = settings.scheduler, settings.tasks

    def sets(self) -> dict[str, ProbeSet]:
        """The probe sets in use, of tasks that workers know."""
        return {task: probe_set for task, probe_set in self._sets.active().items() if task in self._tasks}

    def plan(self, sets: Mapping[str, ProbeSet], now: datetime) -> ProbePlan:
        """What a run at `now` would send of these sets."""
        settings = self._settings
        history, drafts = timedelta(days=settings.history_retention_days), self._drafts.all()
        due = find_due(
            sets.values(),
            _new_since(drafts, self._engines.first_measured(now), now),
            self._probes.last_probed(now, DEADLINE, since=now - history),
            now,
            max_age=self._max_age,
            alarms=self._alarms(),
            traffic=self._probes.traffic(now - WINDOW, now),
            change_jobs=CHANGE_JOBS,
            scorable=_scorable(drafts),
            incidents={(incident.found.task, incident.found.drafter) for incident in self._incidents.open_incidents()},
        )
        due = drafted(due, self._bindings, self._workers.seen())
        num_prompts = {task: min(settings.probe_prompts, len(probe_set.prompts)) for task, probe_set in sets.items()}
        job_device_s = self._probes.mean_device_s(now - _TIMED, now)
        return make_plan(due, job_device_s, num_prompts, self._budget_device_s(now))

    def _budget_device_s(self, now: datetime) -> float:
        """The share of the last day's device time, less what probes took of it already."""
        share = self._settings.probe_device_share * self._probes.device_s(now - _DAY, now)
        spent = self._probes.device_s(now - _DAY, now, purposes=MEASURED)
        return max(self._settings.probe_min_device_s, share - spent)

    def _alarms(self) -> dict[tuple[str, str], datetime]:
        """When drift was raised last, of what is open: its probes tell the cause, or confirm it."""
        raised: dict[tuple[str, str], datetime] = {}
        for event in self._drift.open_events():
            about = event.subject.task, event.subject.drafter
            raised[about] = max(raised.get(about, event.raised_at), event.raised_at)
        return raised

    def _max_age(self, task: str) -> timedelta:
        own = self._tasks[task].probe_max_age_s
        return timedelta(seconds=self._settings.probe_max_age_s if own is None else own)


def _new_since(drafts: Sequence[DraftRevision], engine_since: datetime | None, now: datetime) -> dict[str, datetime]:
    """By drafter with a revision that is measured: when the newest of its targets, revisions or engines was seen first.

    Stale drafts are measured too, so that they can become active again.
    """
    newest: dict[str, datetime] = {}
    for draft in drafts:
        if draft.status in _MEASURED:
            seen = draft.registered_at if draft.registered_at <= now else _NEVER
            newest[draft.drafter] = max(newest.get(draft.drafter, seen), seen, engine_since or seen)
    return newest


def _scorable(drafts: Sequence[DraftRevision]) -> set[str]:
    """Drafters of which every revision that is measured can be scored."""
    measured = [draft for draft in drafts if draft.status in _MEASURED]
    return {draft.drafter for draft in measured} - {draft.drafter for draft in measured if not draft.is_scorable}


def find_due(
    sets: Iterable[ProbeSet],
    drafters: Mapping[str, datetime],
    last_probed: Mapping[tuple[str, str], datetime],
    now: datetime,
    *,
    max_age: Callable[[str], timedelta],
    alarms: Mapping[tuple[str, str], datetime],
    traffic: Sequence[TaskTraffic],
    change_jobs: float,
    scorable: Collection[str] = (),
    incidents: Collection[tuple[str, str]] = (),
) -> list[DueProbe]:
    """Every (task, drafter) to measure now, the most urgent first.

    Args:
        sets: the probe sets in use.
        drafters: by name, when the newest target, draft or engine that decodes with it was seen first.
        last_probed: when a (task, drafter) was measured last with the set in use.
        max_age: of a measurement, by task.
        alarms: by (task, drafter), when the newest alarm was raised.
        traffic: of the tasks, as far back as it counts.
        change_jobs: prior for the jobs between two changes of a task.
        scorable: the drafters that can be scored. One is, if its measurement is merely old and nothing is open.
        incidents: the (task, drafter) of open incidents; an empty drafter is vanilla, and stands for all.
    """
    due = []
    for probe_set in sets:
        for drafter, new_since in drafters.items():
            pair = probe_set.task, drafter
            last = last_probed.get(pair)
            why = _why(last, now, max_age(probe_set.task), alarms.get(pair, _NEVER), new_since)
            if why is not None:
                stake = _at_stake(traffic, probe_set.task, last, change_jobs)
                is_open = pair in alarms or not {pair, (probe_set.task, "")}.isdisjoint(incidents)
                is_scored = why is Why.AGE and drafter in scorable and not is_open
                due.append(DueProbe(*pair, probe_set.num_draft_tokens, last, why, stake, is_scored))
    return sorted(
        due, key=lambda d: (_ORDER.index(d.why), -d.at_stake_device_s, d.last_probed or _NEVER, d.task, d.drafter)
    )


def drafted(due: Iterable[DueProbe], bindings: Bindings, workers: Sequence[SeenWorker]) -> list[DueProbe]:
    """Those of drafters that a live worker of the task's target asks; without several targets, any live worker."""
    is_one = len(bindings.targets) <= 1
    return [
        probe
        for probe in due
        if probe.drafter in drafters_of(workers, None if is_one else bindings.target_of(probe.task))
    ]


def _why(
    last: datetime | None, now: datetime, max_age: timedelta, alarm_at: datetime, new_since: datetime
) -> Why | None:
    if alarm_at > (last or _NEVER):
        return Why.ALARM
    if last is None or new_since > last:
        return Why.NEW
    return Why.AGE if now - last >= max_age - min(max_age / 20, _LATE) else None


def _at_stake(traffic: Sequence[TaskTraffic], task: str, last: datetime | None, change_jobs: float) -> float:
    since = [hour for hour in traffic if hour.task == task and (last is None or hour.start >= last)]
    device_s = sum(hour.device_s for hour in since)
    if last is None:
        return device_s
    return device_s * (1 - math.exp(-sum(hour.num_jobs for hour in since) / change_jobs))


def decoded_positions(due: DueProbe, positions: Collection[int], scheduled_for: datetime) -> frozenset[int]:
    """Which ones: drawn by lot for each run, so that every prompt gets its turn. The same run draws the same."""

    def lot(position: int) -> bytes:
        return hashlib.sha256(f"{due.task} {scheduled_for.timestamp()} {position}".encode()).digest()

    return frozenset(sorted(positions, key=lot)[: _num_decoded(due, len(positions))])


def _num_decoded(due: DueProbe, num_prompts: int) -> int:
    """How many of the prompts of a measurement are decoded with the drafter: at least one."""
    return ceil(DECODED_SHARE * num_prompts) if due.is_scored else num_prompts


def make_plan(
    due: Sequence[DueProbe],
    job_device_s: Mapping[str, float],
    num_prompts: Mapping[str, int],
    budget_device_s: float,
) -> ProbePlan:
    """Choose in order; what does not fit the rest of the budget is left out, and smaller ones after it may fit.

    `job_device_s` is what a probe of a task took on average, `num_prompts` how many are sent. Each task pays for its
    controls once. Where a drafter is scored, `DECODED_SHARE` of the prompts are decoded.
    """
    measurements: list[Measurement] = []
    left = budget_device_s
    with_controls: set[str] = set()
    for probe in due:
        per_job = job_device_s.get(probe.task, PRIOR_JOB_DEVICE_S)
        prompts = num_prompts[probe.task]
        decoded = _num_decoded(probe, prompts)
        controls = 0 if probe.task in with_controls else prompts
        cost = per_job * (controls + decoded + SCORE_SHARE * (prompts - decoded))
        fits = cost <= left
        if fits:
            left -= cost
            with_controls.add(probe.task)
        measurements.append(Measurement(probe, prompts, decoded, cost, fits))
    return ProbePlan(tuple(measurements), budget_device_s, len(num_prompts))
