"""Stores the slices of the switchback experiment, and keeps the measured speed-ups of their tasks up to date."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from typing import Final, Protocol

from alphaloop.store.switchback import SliceRow
from alphaloop.switchback.task_speedup import Subject
from worker.engine import EngineIdentity
from worker.jobs.steering import TaskSlice

#: A speed-up is computed anew at most so often: it reads a day of slices.
REFRESH_EVERY_S: Final = 10.0


class Slices(Protocol):
    """What is needed of alphaloop.store.switchback.SwitchbackStore."""

    def add(self, rows: Sequence[SliceRow]) -> None: ...
    def refresh(self, now: datetime, tasks: Collection[str] | None = None) -> int: ...


class SliceRecorder:
    """Called with slices, from the thread that writes in the background. Raises StoreError."""

    def __init__(
        self,
        store: Slices,
        identity: EngineIdentity,
        revisions: Mapping[str, str],
        *,
        owner: str,
        now: Callable[[], datetime],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`revisions` are those of the drafters, by name."""
        self._store, self._identity, self._revisions, self._owner = store, identity, revisions, owner
        self._now, self._clock = now, clock
        self._tasks: set[str] = set()  # with slices since their speed-up was computed
        self._due = clock()

    def store(self, slices: Sequence[TaskSlice]) -> None:
        """Store these, and refresh the speed-ups where that is due."""
        self._store.add([self._row(one) for one in slices])
        self._tasks |= {one.slice.task for one in slices}
        if self._tasks and self._clock() >= self._due:
            self._store.refresh(self._now(), self._tasks)
            self._tasks = set()
            self._due = self._clock() + REFRESH_EVERY_S

    def _row(self, one: TaskSlice) -> SliceRow:
        drafter, identity = one.slice.treatment.drafter, self._identity
        subject = Subject(
            task=one.slice.task,
            sampling_bucket=one.sampling_bucket,
            target_revision=identity.target_revision,
            engine=identity.engine,
            host=identity.host,
            device=identity.device,
            drafter=drafter,
            draft_revision=self._revisions[drafter],
        )
        return SliceRow(subject, one.slice, self._owner)
