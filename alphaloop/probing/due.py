"""The drafters to measure now, in the order of what it may cost not to. Pure.

A drafter of a task is due because of an alarm, because of something new (a probe set, target, draft or engine that it
was never measured with), or because its newest measurement is old. Alarms come first, new things second.

Within each of these groups the expected loss decides. A task that was decoded for D device seconds since its drafter
was measured, in N jobs, is expected to have been decoded for D · P device seconds with a setting that nobody checked
after the task had changed. P = 1 - exp(-N / change_jobs) is the policy's prior for a change within N jobs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Final

from alphaloop.probe_sets import ProbeSet

_NEVER: Final = datetime.min.replace(tzinfo=UTC)


class Why(StrEnum):
    """Why a drafter of a task is measured; in the order in which they are sent."""

    ALARM = "alarm"  #: an alarm was raised after the newest measurement
    NEW = "new"  #: a probe set, target, draft or engine without a measurement
    AGE = "age"  #: the newest measurement is old


_ORDER: Final = tuple(Why)


@dataclass(frozen=True, slots=True)
class TaskTraffic:
    """Traffic of a task in one hour, or in one day that is long over: jobs, and device time in seconds."""

    task: str
    start: datetime
    num_jobs: int
    device_s: float


@dataclass(frozen=True, slots=True)
class Due:
    """A (task, drafter) to measure."""

    task: str
    drafter: str
    num_draft_tokens: int
    last_probed: datetime | None
    why: Why = Why.AGE
    at_stake_device_s: float = 0.0  #: expected device time of unchecked traffic, D · P
    is_scored: bool = False  #: on the controls' texts, but for a share of the prompts; else decoded


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
) -> list[Due]:
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
                due.append(Due(*pair, probe_set.num_draft_tokens, last, why, stake, is_scored))
    return sorted(
        due, key=lambda d: (_ORDER.index(d.why), -d.at_stake_device_s, d.last_probed or _NEVER, d.task, d.drafter)
    )


def _why(
    last: datetime | None, now: datetime, max_age: timedelta, alarm_at: datetime, new_since: datetime
) -> Why | None:
    if alarm_at > (last or _NEVER):
        return Why.ALARM
    if last is None or new_since > last:
        return Why.NEW
    return Why.AGE if now - last >= max_age else None


def _at_stake(traffic: Sequence[TaskTraffic], task: str, last: datetime | None, change_jobs: float) -> float:
    since = [one for one in traffic if one.task == task and (last is None or one.start >= last)]
    device_s = sum(one.device_s for one in since)
    if last is None:
        return device_s
    return device_s * -math.expm1(-sum(one.num_jobs for one in since) / change_jobs)
