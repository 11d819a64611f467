"""What a decision may know of its jobs, of their task's settings and of the engine that will decode them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from statistics import fmean

from alphaloop.acceptance import prompt_bucket
from alphaloop.deciding.objective import Objective
from alphaloop.messages import Decoding, Purpose


@dataclass(frozen=True, slots=True)
class Subject:
    """What jobs that are decided together have in common."""

    task: str
    sampling_bucket: str
    decoding: Decoding = Decoding.AUTO
    purpose: Purpose = Purpose.TRAFFIC
    probe_drafter: str | None = None
    probe_num_draft_tokens: int | None = None
    switched_off: str | None = None  #: the operator's pattern that the prompts match


@dataclass(frozen=True, slots=True)
class JobFacts:
    """One job."""

    num_prompt_tokens: float | None  #: None: not known, so the time to read prompts is left out
    max_tokens: float  #: of the output
    segment: str = ""  #: empty: the job has none
    deadline: datetime | None = None

    @property
    def prompt_bucket(self) -> str:
        """The evidence key's bucket of the prompt's length."""
        return prompt_bucket(round(self.num_prompt_tokens or 0))


@dataclass(frozen=True, slots=True)
class TaskRules:
    """The settings of a task."""

    max_tokens: float = 256.0
    decoding: Decoding = Decoding.AUTO
    objective: Objective = field(default_factory=Objective)  #: the task's own; deadlines belong to jobs


@dataclass(frozen=True, slots=True)
class EngineConditions:
    """What the engine allows for these jobs. The default allows everything."""

    free_cache_bytes: int | None = None  #: left for drafts' keys and values beside the target; None: never short
    cannot_serve: Mapping[str, str] = field(default_factory=dict)  #: drafter → which sampling setting it cannot serve
    free_elsewhere: Mapping[str, int] = field(default_factory=dict)  #: drafter → the same on a device of its own


def mean_prompt_tokens(jobs: Sequence[JobFacts]) -> float | None:
    """Mean over the jobs; None where a prompt's length is not known."""
    known = [job.num_prompt_tokens for job in jobs if job.num_prompt_tokens is not None]
    return fmean(known) if len(known) == len(jobs) else None


def main_segment(jobs: Sequence[JobFacts]) -> str:
    """The segment of most of the jobs."""
    segments = Counter(job.segment for job in jobs)
    return max(segments, key=lambda name: (segments[name], name))


def alike(jobs: Sequence[JobFacts], *, by_segment: bool) -> list[list[int]]:
    """Indices of the jobs that share their posteriors: by prompt bucket, and by segment where segments differ."""
    found: dict[tuple[str, str], list[int]] = {}
    for index, job in enumerate(jobs):
        found.setdefault((job.prompt_bucket, job.segment if by_segment else ""), []).append(index)
    return list(found.values())
