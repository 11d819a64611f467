"""Switchback slices on their way to Postgres, and the speed-ups that follow from them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Final

from alphaloop.store.switchback import SliceRow, SwitchbackStore
from alphaloop.switchback.task_speedup import Subject
from worker.engine import EngineIdentity
from worker.jobs.steering import TaskSlice

#: Speed-ups are computed again so often at most: a task's slices of a day are read for it.
_REFRESH_EVERY_S: Final = 10.0


class SliceWriter:
    """Called from the thread of background writes. Raises StoreError; the same call may then be repeated."""

    def __init__(
        self,
        store: SwitchbackStore,
        identity: EngineIdentity,
        revisions: Mapping[str, str],
        owner: str,
        *,
        now: Callable[[], datetime],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._identity = identity
        self._revisions = revisions
        self._owner = owner
        self._now = now
        self._clock = clock
        self._refresh_due = clock()
        self._stale_tasks: set[str] = set()

    def write(self, slices: Sequence[TaskSlice]) -> None:
        """Store slices; what is shown of their tasks follows within seconds."""
        self._store.add([SliceRow(self._subject(one), one.slice, self._owner) for one in slices])
        self._stale_tasks.update(one.slice.task for one in slices)
        if self._clock() >= self._refresh_due:
            self._store.refresh(self._now(), self._stale_tasks)
            self._stale_tasks.clear()
            self._refresh_due = self._clock() + _REFRESH_EVERY_S

    def _subject(self, one: TaskSlice) -> Subject:
        drafter = one.slice.treatment.drafter
        return Subject(
            task=one.slice.task,
            sampling_bucket=one.sampling_bucket,
            target_revision=self._identity.target_revision,
            engine=self._identity.engine,
            host=self._identity.host,
            device=self._identity.device,
            drafter=drafter,
            draft_revision=self._revisions[drafter],
        )
