"""configs/tasks.toml: `[tasks.NAME]`, one task and what decisions know of it, and `[segments.NAME]`, what jobs of one
customer or product may take from others.

`Bindings` says which target decodes which task, and which topics its workers therefore read. The workers of all targets
form one consumer group, so that the offsets of a task stay when it is bound to another target. Each topic of jobs has
exactly one target: its task's, and the default one where the task names none or is not known.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Final, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from alphaloop.deciding.job_facts import Aim, Objective, TaskRules
from alphaloop.messages.job import Decoding
from alphaloop.messages.topics import task_read_from
from alphaloop.settings.section import Section

PromptPattern = Annotated[str, Field(min_length=1, max_length=500)]


#: The table of every segment that has none of its own, and of the jobs without a segment.
OTHERS: Final = "*"


class SharingSettings(Section):
    """What shares the device with others of its kind."""

    weight: float = Field(
        1.0, ge=0.01, le=100.0
    )  #: tasks with waiting jobs share a worker's device time in proportion to their weights, and segments a task's


class SegmentSettings(SharingSettings):
    """One segment. `"*"` is the table of each one without its own, and of jobs without one."""

    max_waiting_jobs: int | None = Field(
        None, ge=1
    )  #: requests of its API batches that may wait; a new batch meanwhile gets 429. Unset: any number


def settings_of_segment(segments: Mapping[str, SegmentSettings], segment: str) -> SegmentSettings:
    """The settings of a segment; the empty one is that of jobs without a segment."""
    return segments.get(segment) or segments.get(OTHERS) or _DEFAULTS


_DEFAULTS: Final = SegmentSettings()


class TaskSettings(SharingSettings):
    """One task: the defaults of its jobs."""

    description: str = ""
    model: str | None = Field(
        None, min_length=1, max_length=200
    )  #: the target that decodes its jobs, by its models.target.name; unset: default_model
    high_topic: bool = False  #: whether a worker creates `jobs.<task>.high` when it starts, for jobs that go first
    max_tokens: int = Field(256, ge=1)
    temperature: float = Field(0.0, ge=0.0, le=2.0)
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    top_k: int = Field(0, ge=0)  #: 0 is the whole vocabulary
    min_p: float = Field(0.0, ge=0.0, le=1.0)
    repetition_penalty: float = Field(1.0, ge=0.01, le=100.0)
    decoding: Decoding = Decoding.AUTO
    vanilla_patterns: tuple[PromptPattern, ...] = Field(
        (), max_length=100
    )  #: a job whose prompt, or one of whose messages, is covered by one of them is decoded vanilla; * is any text
    probe_max_age_s: float | None = Field(
        None, gt=0
    )  #: a drafter whose newest probe of this task is older is measured again; unset: the scheduler's
    probes_from_traffic: bool = False  #: whether `alphaloop probes draw` may store prompts of jobs as probes
    train_from_traffic: bool = False  #: whether a trainer may train drafts with prompts of jobs (`[refresh]`)
    num_vanilla_tokens: int = Field(
        0, ge=0
    )  #: first tokens of a streamed answer that are decoded without drafts: no draft model reads the prompt before them
    memory: Literal["off", "segment", "shared"] = (
        "off"  #: what look-up with `memory` searches beside the text: results of jobs of its segment, or also what jobs
        #: of several batches or segments wrote alike
    )
    max_memory_bytes: int = Field(
        64 << 20, ge=1 << 16
    )  #: of these results in each worker, at 8 bytes a token; beyond it the oldest are forgotten everywhere
    reuse: bool = False  #: whether a greedy job is answered with the recorded text of an equal one of its segment
    reuse_days: int = Field(7, ge=1, le=365)  #: such a text is no older
    round_counts_in_results: bool = (
        True  #: whether results tell rounds, proposed and accepted tokens: with memory on they say what others wrote
    )
    target_time_per_token_ms: float | None = Field(
        None, gt=0
    )  #: after the first token; the target has precedence over throughput
    target_time_to_first_token_ms: float | None = Field(
        None, gt=0
    )  #: from the start of decoding; only one of the two targets can be given

    def rules(self) -> TaskRules:
        """What decisions know of the task's settings."""
        objective = Objective()
        if self.target_time_per_token_ms is not None:
            objective = Objective(Aim.TIME_PER_TOKEN, self.target_time_per_token_ms)
        elif self.target_time_to_first_token_ms is not None:
            objective = Objective(Aim.TIME_TO_FIRST_TOKEN, self.target_time_to_first_token_ms)
        return TaskRules(float(self.max_tokens), self.decoding, objective)

    @model_validator(mode="after")
    def _one_target(self) -> Self:
        if self.target_time_per_token_ms is not None and self.target_time_to_first_token_ms is not None:
            raise PydanticCustomError(
                "targets",
                "Expected one target, target_time_per_token_ms or target_time_to_first_token_ms; leave out one",
            )
        return self


@dataclass(frozen=True, slots=True)
class Bindings:
    """What configs/tasks.toml says of tasks and targets."""

    tasks: Mapping[str, TaskSettings]
    default_model: str | None = None  #: the target of every other task; None: one target decodes all

    @property
    def targets(self) -> tuple[str, ...]:
        """Every target that is named, the default one first; none where one target decodes all."""
        named = (task.model for task in self.tasks.values())
        return tuple(dict.fromkeys(target for target in (self.default_model, *named) if target is not None))

    def target_of(self, task: str) -> str | None:
        """The target that decodes the task's jobs; None: whichever runs."""
        settings = self.tasks.get(task)
        return self.default_model if settings is None or settings.model is None else settings.model

    def is_of(self, target: str, task: str) -> bool:
        """Whether the workers of this target decode the task's jobs."""
        return self.target_of(task) in (None, target)

    def topics_of(self, target: str, topics: Iterable[str]) -> frozenset[str]:
        """Those of these topics that the workers of this target read: with a task go its high lane and its retries."""
        return frozenset(
            topic for topic in topics if (task := task_read_from(topic)) is not None and self.is_of(target, task)
        )
