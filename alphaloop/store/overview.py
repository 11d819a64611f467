"""The state of the tasks now: the rows of the status table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime, timedelta
from typing import Any, Self

from alphaloop.as_decoded import NextJob
from alphaloop.store.database import Database
from alphaloop.store.switchback import SwitchbackStore
from alphaloop.store.task_figures import WINDOW, TaskFigures, task_figures
from alphaloop.switchback.task_speedup import TaskSpeedup


@dataclass(slots=True)
class TaskNow(TaskFigures):
    """One task: its figures, what its next job would do, and the measured speed-up.

    `next_job` is None where nobody can say: before the first calibration. `measured` is None where no slice of the task
    was recorded in the last day.
    """

    next_job: NextJob | None = None
    measured: TaskSpeedup | None = None

    @classmethod
    def of(cls, figures: TaskFigures) -> Self:
        """The figures, before the next job and the speed-up are known."""
        return cls(**{its.name: getattr(figures, its.name) for its in fields(figures)})

    def as_json(self, waiting: Mapping[str, int] | None) -> dict[str, Any]:
        """Counts, and the rates that screens show. `waiting`: by task, jobs that no worker has claimed, if known."""
        return {
            **asdict(self),
            "decoded": None if self.decoded is None else self.decoded.as_json(),
            "num_jobs": self.num_jobs,
            "num_probes": self.num_probes,
            "num_controls": self.num_controls,
            "waiting": None if waiting is None else waiting.get(self.task, 0),
            "tokens_per_s": self.measured.tokens_per_s if self.measured else None,
            "vanilla_tokens_per_s": self.measured.vanilla_tokens_per_s if self.measured else None,
        }


def with_waiting(found: Sequence[TaskNow], waiting: Mapping[str, int] | None) -> list[TaskNow]:
    """Also the tasks whose jobs only wait, by name."""
    known = {now.task for now in found}
    fresh = [TaskNow(task) for task, number in (waiting or {}).items() if number and task not in known]
    return sorted([*found, *fresh], key=lambda now: now.task)


def waits(tasks: Iterable[TaskNow], unfinished: Mapping[str, int]) -> dict[str, int]:
    """By task, the jobs that no worker has claimed: of the unfinished messages those that are held are left out."""
    held = {now.task: now.num_held for now in tasks}
    return {task: max(0, number - held.get(task, 0)) for task, number in unfinished.items()}


class Overview:
    """Reads the figures of the status table."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def tasks_now(self, window: timedelta = WINDOW) -> list[TaskNow]:
        """Every task with a job in the window before now, by name, without what its next job would do.

        The window begins at a full hour.
        """
        found = task_figures(self._database, window=window)
        by_task = {task: TaskNow.of(figures) for task, figures in found.items()}
        for task, measured in SwitchbackStore(self._database).shown(datetime.now(UTC)).items():
            by_task.setdefault(task, TaskNow(task)).measured = measured
        return [by_task[task] for task in sorted(by_task)]
