"""How the tokens of a job are drawn, and what is taken where a job does not say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from alphaloop.acceptance import sampling_bucket
from alphaloop.settings import TaskSettings


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling settings with every default filled in. What they mean: docs/reference/messages.md."""

    max_tokens: int
    temperature: float
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()  #: (token id, what is added to its score), each id once
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    bucket: str = field(init=False, compare=False, repr=False)  #: which settings share evidence

    def __post_init__(self) -> None:
        bucket = sampling_bucket(
            self.temperature,
            is_cut=self.is_cut,
            is_reproducible=self.is_reproducible,
            is_adjusted=self.is_adjusted,
        )
        object.__setattr__(self, "bucket", bucket)

    @property
    def is_adjusted(self) -> bool:
        """Whether scores change before a token is chosen."""
        return bool(
            self.logit_bias or self.repetition_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0
        )

    @property
    def is_cut(self) -> bool:
        """Whether improbable tokens are left out."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @property
    def is_reproducible(self) -> bool:
        """Whether tokens are drawn so that the seed alone decides the text, however the job is decoded."""
        return self.seed is not None and self.temperature > 0


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What a model's generation_config.json says of sampling. Jobs take it only where the settings want that."""

    suggested: Mapping[str, float] = field(default_factory=dict)  #: by the names of TaskSettings
    unsupported: tuple[str, ...] = ()  #: fields that would change texts, and that are not followed here
    are_used: bool = False  #: models.target.use_generation_config

    def applied_to(self, task: TaskSettings) -> TaskSettings:
        """The task, with what the model suggests where the task's section says nothing."""
        if not self.are_used:
            return task
        return task.model_copy(
            update={name: value for name, value in self.suggested.items() if name not in task.model_fields_set}
        )

    def sentence(self) -> str:
        """For people; empty where the model says nothing of sampling."""
        parts = []
        if self.suggested:
            shown = ", ".join(f"{name} {value:g}" for name, value in self.suggested.items())
            rule = "defaults of jobs whose task sets none" if self.are_used else "not used, jobs are greedy by default"
            parts.append(f"{shown} ({rule})")
        if self.unsupported:
            parts.append(f"not supported: {', '.join(self.unsupported)}")
        return "; ".join(parts)
