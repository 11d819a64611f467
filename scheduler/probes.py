"""The drafters to measure now, and the jobs that measure them.

A probe is an ordinary job on the task's topic, greedy, with the drafter that it names and the k of its probe set,
whatever k is in force, because α_i moves a little with k. Its control is the same prompt decoded vanilla. Drafters that
are not in use get probes too, so that they can come back.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from alphaloop.messages import Body, Decoding, Job, Purpose
from alphaloop.probe_sets import ProbeSet

PRIOR_JOB_DEVICE_S: Final = 5.0  #: for a task without timings: 48 tokens at 10 a second
MAX_JOB_ID_CHARS: Final = 200


@dataclass(frozen=True, slots=True)
class Due:
    """A (task, drafter) whose evidence is older than allowed."""

    task: str
    drafter: str
    num_draft_tokens: int
    last_probed: datetime | None


@dataclass(frozen=True, slots=True)
class PlannedJob:
    """A probe or control and its row of probe_runs."""

    job: Job
    probe_set: str
    position: int
    prompt_id: str


def find_due(
    sets: Iterable[ProbeSet],
    drafters: Sequence[str],
    last_probed: Mapping[tuple[str, str], datetime],
    now: datetime,
    *,
    max_age: timedelta,
) -> list[Due]:
    """Every (task, drafter) without a probe younger than `max_age`: never probed first, then oldest first."""
    due = [
        Due(probe_set.task, drafter, probe_set.num_draft_tokens, last_probed.get((probe_set.task, drafter)))
        for probe_set in sets
        for drafter in drafters
    ]
    old = [d for d in due if d.last_probed is None or now - d.last_probed >= max_age]
    never = datetime.min.replace(tzinfo=UTC)
    return sorted(old, key=lambda d: (d.last_probed or never, d.task, d.drafter))


def within_budget(
    due: Sequence[Due], job_device_s: Mapping[str, float], num_prompts: Mapping[str, int], budget_device_s: float
) -> list[Due]:
    """The longest prefix of `due` whose jobs fit the budget; a measurement is sent whole or not at all.

    `job_device_s` is what a probe of a task took on average, `num_prompts` how many are sent. Each task pays for its
    controls once.
    """
    chosen: list[Due] = []
    left = budget_device_s
    for candidate in due:
        per_job = job_device_s.get(candidate.task, PRIOR_JOB_DEVICE_S)
        needs_controls = all(c.task != candidate.task for c in chosen)
        cost = per_job * num_prompts[candidate.task] * (2 if needs_controls else 1)
        if cost > left:
            break
        left -= cost
        chosen.append(candidate)
    return chosen


def make_jobs(
    chosen: Sequence[Due],
    sets: Mapping[str, ProbeSet],
    scheduled_for: datetime,
    *,
    num_prompts: int,
    deadline: datetime,
) -> list[PlannedJob]:
    """The jobs of this run: for each prompt a control, then a probe a drafter.

    The ids follow from the run's time, so a run that is repeated sends the same jobs, and none is decoded twice.
    """
    planned = []
    for task in dict.fromkeys(due.task for due in chosen):
        probe_set = sets[task]
        for position, prompt in sorted(probe_set.prompts.items())[:num_prompts]:
            common: dict[str, Any] = {
                "task": task,
                "body": Body.model_validate(prompt.body),
                "deadline": deadline,
            }
            control = Job(
                job_id=_job_id("control", task, scheduled_for, position, None),
                purpose=Purpose.CONTROL,
                decoding=Decoding.VANILLA,
                **common,
            )
            planned.append(PlannedJob(control, probe_set.version, position, prompt.prompt_id))
            for due in chosen:
                if due.task == task:
                    probe = Job(
                        job_id=_job_id("probe", task, scheduled_for, position, due.drafter),
                        purpose=Purpose.PROBE,
                        probe_drafter=due.drafter,
                        probe_num_draft_tokens=due.num_draft_tokens,
                        **common,
                    )
                    planned.append(PlannedJob(probe, probe_set.version, position, prompt.prompt_id))
    return planned


def _job_id(purpose: str, task: str, scheduled_for: datetime, position: int, drafter: str | None) -> str:
    when = scheduled_for.astimezone(UTC).strftime("%Y%m%dT%H%M%S.%fZ").replace(".000000Z", "Z")
    name = "-".join([purpose, task, when, str(position), *([drafter] if drafter else [])])
    if len(name) <= MAX_JOB_ID_CHARS:
        return name
    return f"{purpose}-{when}-{hashlib.sha256(name.encode()).hexdigest()}"
