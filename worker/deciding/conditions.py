"""What a decision is told of its batch beside the evidence: memory, what drafters cannot serve, patterns, targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from alphaloop.deciding.decision import DecisionContext
from alphaloop.deciding.objective import Aim, Objective
from alphaloop.settings import TaskSettings
from worker.engine import Engine, PreparedJob
from worker.jobs.lanes import LaneKey

_MILLISECOND = timedelta(milliseconds=1)


def with_conditions(
    context: DecisionContext,
    engine: Engine,
    key: LaneKey,
    jobs: Sequence[PreparedJob],
    task: TaskSettings,
    now: datetime,
) -> DecisionContext:
    """The context with what `engine`, the batch's key and its task's settings say. `jobs`: at least one."""
    longest = max(len(job.token_ids) + job.sampling.max_tokens for job in jobs)
    widest = 1 + max((drafter.max_draft_tokens for drafter in engine.drafters), default=0)
    needs_memory = any(drafter.cache_bytes_per_token for drafter in engine.drafters)
    return replace(
        context,
        free_cache_bytes=engine.memory().left_for_drafts(len(jobs), longest, widest) if needs_memory else None,
        max_sequence_tokens=float(longest),
        max_output_tokens=float(max(job.sampling.max_tokens for job in jobs)),
        cannot_serve=engine.unserved(jobs),
        switched_off=key.switched_off or None,
        objective=objective_of(jobs, task, now),
    )


def objective_of(jobs: Sequence[PreparedJob], task: TaskSettings, now: datetime) -> Objective:
    """The task's target; without one the earliest deadline of the batch; without one the most tokens a second.

    The task's goes first because a deadline that is hours away would turn it off.
    """
    if task.target_time_per_token_ms is not None:
        return Objective(Aim.TIME_PER_TOKEN, task.target_time_per_token_ms)
    if task.target_time_to_first_token_ms is not None:
        return Objective(Aim.TIME_TO_FIRST_TOKEN, task.target_time_to_first_token_ms)
    deadlines = [job.job.deadline for job in jobs if job.job.deadline is not None]
    return Objective(Aim.DEADLINE, (min(deadlines) - now) / _MILLISECOND) if deadlines else Objective()
