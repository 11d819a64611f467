"""Which target decodes which task, and which topics its workers therefore read. Pure.

The workers of all targets form one consumer group, so that the offsets of a task stay when it is bound to another
target. Each topic of jobs has exactly one target: its task's, and the default one where the task names none or is not
known.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from alphaloop.messages.topics import task_read_from
from alphaloop.settings.task import TaskSettings


@dataclass(frozen=True, slots=True)
class Bindings:
    """What configs/tasks.toml says of tasks and targets."""

    tasks: Mapping[str, TaskSettings]
    default_model: str | None = None  #: the target of every other task; None: one target decodes all

    @property
    def targets(self) -> tuple[str, ...]:
        """Every target that is named, the default one first; none where one target decodes all."""
        named = (one.model for one in self.tasks.values())
        return tuple(dict.fromkeys(one for one in (self.default_model, *named) if one is not None))

    def target_of(self, task: str) -> str | None:
        """The target that decodes the task's jobs; None: whichever runs."""
        its = self.tasks.get(task)
        return self.default_model if its is None or its.model is None else its.model

    def is_of(self, target: str, task: str) -> bool:
        """Whether the workers of this target decode the task's jobs."""
        return self.target_of(task) in (None, target)

    def topics_of(self, target: str, topics: Iterable[str]) -> frozenset[str]:
        """Of these topics those that the workers of this target read: with a task go its high lane and its retries."""
        return frozenset(
            topic for topic in topics if (task := task_read_from(topic)) is not None and self.is_of(target, task)
        )
