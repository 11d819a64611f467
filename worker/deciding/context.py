"""The decision context of prepared jobs: subject, facts and the engine's conditions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from alphaloop.deciding.job_facts import EngineConditions, JobFacts, Subject
from alphaloop.messages import Decoding, Purpose
from worker.engine import Engine, PreparedJob


class DecisionKey(Protocol):
    """What jobs have in common that are decided together."""

    @property
    def task(self) -> str: ...
    @property
    def sampling_bucket(self) -> str: ...
    @property
    def decoding(self) -> str: ...
    @property
    def purpose(self) -> str: ...
    @property
    def probe_drafter(self) -> str: ...
    @property
    def probe_num_draft_tokens(self) -> int: ...
    @property
    def switched_off(self) -> str: ...


def subject_of(key: DecisionKey) -> Subject:
    """The key as a session takes it; empty fields are None."""
    return Subject(
        key.task,
        key.sampling_bucket,
        Decoding(key.decoding),
        Purpose(key.purpose),
        key.probe_drafter or None,
        key.probe_num_draft_tokens or None,
        key.switched_off or None,
    )


def num_slots(engine: Engine) -> int:
    """Sequences for which a decision has settings by what runs; 0 where a job is decoded as it was admitted."""
    return engine.load().num_slots if engine.can_redraft else 0


def facts_of(job: PreparedJob) -> JobFacts:
    """What a decision may know of the job."""
    return JobFacts(job.num_prompt_tokens, job.sampling.max_tokens, job.segment, job.job.deadline)


def conditions_of(engine: Engine, jobs: Sequence[PreparedJob], num_running: int) -> EngineConditions:
    """What `engine` allows for `jobs`, at least one, while `num_running` sequences share a round."""
    longest = max(job.num_prompt_tokens + job.sampling.max_tokens for job in jobs)
    widest = 1 + max((drafter.max_draft_tokens for drafter in engine.drafters), default=0)
    needs_memory = any(drafter.cache_bytes_per_token for drafter in engine.drafters)
    memory = engine.memory() if needs_memory else None
    if memory is None:
        return EngineConditions(None, engine.unserved(jobs))
    free = memory.left_for_drafts(num_running, longest, widest)
    return EngineConditions(free, engine.unserved(jobs), memory.left_elsewhere(num_running, longest, widest))
