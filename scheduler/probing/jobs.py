"""The jobs of a measurement.

A probe is an ordinary job on the task's topic, greedy, with the drafter that it names and the k of its probe set,
whatever k is in force, because α_i moves a little with k. Its control is the same prompt decoded vanilla. In place of a
probe, a drafter may be scored on the control's text (alphaloop.probing.method). Drafters that are not in use are
measured too, so that they can come back.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from alphaloop.messages import Body, Decoding, Job, Purpose
from alphaloop.probe_sets import ProbeSet
from alphaloop.probing.due import Due
from alphaloop.probing.method import decoded_positions

MAX_JOB_ID_CHARS: Final = 200


@dataclass(frozen=True, slots=True)
class PlannedJob:
    """A probe or control and its row of probe_runs."""

    job: Job
    probe_set: str
    position: int
    prompt_id: str


def make_jobs(
    chosen: Sequence[Due],
    sets: Mapping[str, ProbeSet],
    scheduled_for: datetime,
    *,
    num_prompts: int,
    decoded_share: float,
    deadline: datetime,
) -> list[PlannedJob]:
    """The jobs of this run: for each prompt a control, then a probe for each drafter that is decoded there.

    The ids follow from the run's time, so a run that is repeated sends the same jobs, and none is decoded twice.
    """
    planned = []
    for task in dict.fromkeys(due.task for due in chosen):
        probe_set = sets[task]
        its = [due for due in chosen if due.task == task]
        prompts = dict(sorted(probe_set.prompts.items())[:num_prompts])
        decoded = {due.drafter: decoded_positions(due, prompts, scheduled_for, decoded_share) for due in its}
        for position, prompt in prompts.items():
            scored = tuple(due.drafter for due in its if position not in decoded[due.drafter])
            common: dict[str, Any] = {
                "task": task,
                "body": Body.model_validate(prompt.body),
                "deadline": deadline,
            }
            control = Job(
                job_id=_job_id("control", task, scheduled_for, position, None),
                purpose=Purpose.CONTROL,
                decoding=Decoding.VANILLA,
                scored_drafters=scored,
                probe_num_draft_tokens=probe_set.num_draft_tokens if scored else None,
                **common,
            )
            planned.append(PlannedJob(control, probe_set.version, position, prompt.prompt_id))
            for due in its:
                if due.drafter not in scored:
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
