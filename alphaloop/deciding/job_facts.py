"""What a decision may know of its jobs, of their task's settings and of the engine that will decode them.

The objective of a decision: most tokens a second, or a time target.

Alternatives that meet the target with a probability of 90 % or more come first, ranked by goodput. The others follow,
ranked by their probability. So a task with a target drafts only if the lower end of the posterior meets the target
too; a task without a target drafts on the mean alone.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from statistics import fmean
from typing import Final

from alphaloop.acceptance import prompt_bucket
from alphaloop.messages import Decoding, Purpose

#: A target counts as met from this probability on.
SURE_ENOUGH: Final = 0.9


class Aim(StrEnum):
    """What is optimised."""

    THROUGHPUT = "throughput"
    TIME_PER_TOKEN = "time_per_token"  # noqa: S105  #: after the first token
    TIME_TO_FIRST_TOKEN = "time_to_first_token"  # noqa: S105
    DEADLINE = "deadline"  #: the whole job, its prompt included


@dataclass(frozen=True, slots=True)
class Objective:
    """An aim and, except for throughput, its target in milliseconds."""

    aim: Aim = Aim.THROUGHPUT
    target_ms: float = math.inf

    def chance(
        self, *, reading_ms: float, round_ms: float, num_tokens: float, tokens_per_round: float, tokens_sd: float
    ) -> float:
        """Probability that a usual job meets the target, 1 where it is at least `SURE_ENOUGH`.

        `reading_ms` pass before the first round; then `num_tokens` come in rounds of `round_ms`.
        """
        if self.aim is Aim.THROUGHPUT:
            return 1.0
        if self.aim is Aim.TIME_TO_FIRST_TOKEN:
            return 1.0 if reading_ms <= self.target_ms else 0.0
        left_ms = self.target_ms if self.aim is Aim.TIME_PER_TOKEN else self.target_ms - reading_ms
        num_tokens = 1.0 if self.aim is Aim.TIME_PER_TOKEN else num_tokens
        if left_ms <= 0:
            return 0.0
        needed = round_ms * num_tokens / left_ms
        if tokens_sd <= 0:
            return 1.0 if tokens_per_round >= needed else 0.0
        met = 0.5 * math.erfc((needed - tokens_per_round) / tokens_sd / math.sqrt(2))
        return 1.0 if met >= SURE_ENOUGH else met


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
    form_bucket: str = ""  #: what the text has to match, tools, images; empty for plain text

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
    """Indices of the jobs that share their posteriors: by prompt bucket and form, and by segment where segments differ.

    Forms are always kept apart: what a text has to match moves acceptance more than the length of its prompt.
    """
    groups: dict[tuple[str, str, str], list[int]] = {}
    for index, job in enumerate(jobs):
        groups.setdefault((job.prompt_bucket, job.form_bucket, job.segment if by_segment else ""), []).append(index)
    return list(groups.values())
