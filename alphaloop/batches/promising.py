"""Says when the open batches end, from the database and Kafka, and keeps what was said beside what came."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import partial
from typing import Final

from alphaloop.batches.ends import (
    Kept,
    LatelyDecoded,
    Line,
    OpenBatch,
    Outlook,
    PromiseCorrection,
    Situation,
    arrivals_of,
    outlooks,
    quarter_of,
)
from alphaloop.batches.progress import Progress
from alphaloop.outcomes.reading import unended
from alphaloop.settings import Settings, settings_of_segment
from alphaloop.store.database import Database
from alphaloop.store.known_jobs import ListedBatch
from alphaloop.store.promises import BatchPlace, PromisedEnd, PromiseStore, newest_promises
from alphaloop.store.workers import WorkerStore, heard_lately

#: A promise stands for this share of what remained then, and at least this long.
_STANDS_FOR: Final = 0.02
_STANDS_AT_LEAST: Final = timedelta(seconds=10)


@dataclass(frozen=True, slots=True)
class _Known:
    """What is read once for all targets."""

    now: datetime
    waiting: Mapping[str, int]  #: messages of every task that have not ended
    seen: Counter[str]  #: workers of the last hour by target
    heard: Counter[str]  #: those of them that run


class Promising:
    """Promises the ends of batches as they are counted."""

    def __init__(self, settings: Settings, database: Database) -> None:
        self._settings, self._database = settings, database
        self._store, self._workers = PromiseStore(database), WorkerStore(database)

    def promise(
        self, batches: Mapping[str, ListedBatch], counts: Mapping[str, Progress], now: datetime
    ) -> list[PromisedEnd]:
        """Promise what is due among the open batches, and end the promises of those that have ended.

        `now`: by the database. Raises StoreError, BrokerError.
        """
        running = {batch_id for batch_id in batches if counts[batch_id].num_open}
        if over := self._store.open() - running:
            self._store.end(over)
        newest = newest_promises(self._database, running)
        if not any(_is_due(newest.get(batch_id), now) for batch_id in running):
            return []
        corrections = PromiseCorrection.by_quarter([_kept(promise) for promise in self._store.ended()])
        said = []
        for situation in self._situations({batch_id: batches[batch_id] for batch_id in running}, counts, now):
            for batch_id, outlook in outlooks(situation).items():
                if _is_due(newest.get(batch_id), now):
                    said.append(_promised(batch_id, counts[batch_id], outlook, corrections, now))
        self._store.keep(said)
        return said

    def _situations(
        self, batches: Mapping[str, ListedBatch], counts: Mapping[str, Progress], now: datetime
    ) -> Iterable[Situation]:
        """One for each target that has a batch; None: one target decodes all."""
        bindings = self._settings.bindings
        known = self._read(now)
        by_target: defaultdict[str | None, list[OpenBatch]] = defaultdict(list)
        for opened in self._opened(batches, counts):
            targets = {bindings.target_of(task) for task, _ in opened.num_open}
            by_target[targets.pop() if len(targets) == 1 else None].append(opened)
        for target, opened_here in by_target.items():
            yield self._situation(target, opened_here, known)

    def by_target(
        self, batches: Mapping[str, ListedBatch], counts: Mapping[str, Progress], now: datetime
    ) -> dict[str, Situation]:
        """What the workers of each target have before them, those of targets without a batch too.

        A batch of tasks of several targets is divided among them. Raises StoreError, BrokerError.
        """
        bindings, known = self._settings.bindings, self._read(now)
        opened = list(self._opened(batches, counts))
        # Without bindings there is one target, which is called as its workers call it.
        targets = bindings.targets or (*known.heard,) or (*known.seen,) or (self._settings.models.target.name,)
        situations = {}
        for target in targets:
            here = [replace(batch, num_open=_of_tasks(batch, partial(bindings.is_of, target))) for batch in opened]
            situations[target] = self._situation(target, [batch for batch in here if batch.num_open], known)
        return situations

    def _read(self, now: datetime) -> _Known:
        messages, workers = unended(self._settings.kafka, self._database), self._workers.seen()
        return _Known(
            now=now,
            waiting={task: of.num_messages for task, of in messages.items()},
            seen=Counter(worker.load.target for worker in workers),
            heard=Counter(worker.load.target for worker in heard_lately(workers)),
        )

    def _opened(self, batches: Mapping[str, ListedBatch], counts: Mapping[str, Progress]) -> Iterable[OpenBatch]:
        places = self._store.places(batches)
        return [_open_batch(batch, counts[batch_id], places[batch_id]) for batch_id, batch in batches.items()]

    def _situation(self, target: str | None, batches: Sequence[OpenBatch], known: _Known) -> Situation:
        """That of a target with these batches; None: of whichever runs."""
        tasks = {task for task in known.waiting if target is None or self._settings.bindings.is_of(target, task)}
        tasks |= {task for batch in batches for task, _ in batch.num_open}
        now_s = known.now.timestamp()
        hour = int(now_s // 3600)
        by_hour = self._store.jobs_by_hour(tasks, known.now)
        first = min((hour for hours in by_hour.values() for hour in hours), default=hour)
        return Situation(
            now_s=now_s,
            num_workers=known.heard.total() if target is None else known.heard[target],
            batches=batches,
            num_unfinished={task: known.waiting.get(task, 0) for task in tasks},
            lately=[LatelyDecoded(*row) for row in self._store.decoded_lately(tasks)],
            arrivals=arrivals_of(by_hour, first + 1, hour),
            task_weight=self._weight,
            segment_weight=lambda segment: settings_of_segment(self._settings.segments, segment).weight,
        )

    def _weight(self, task: str) -> float:
        known = self._settings.tasks.get(task)
        return 1.0 if known is None else known.weight


def _of_tasks(batch: OpenBatch, is_wanted: Callable[[str], bool]) -> dict[Line, float]:
    return {line: num for line, num in batch.num_open.items() if is_wanted(line[0])}


def _is_due(newest: PromisedEnd | None, now: datetime) -> bool:
    if newest is None:
        return True
    stands = _STANDS_AT_LEAST
    if newest.ends_at is not None:
        stands = max(stands, _STANDS_FOR * (newest.ends_at - newest.promised_at))
    return now - newest.promised_at >= stands


def _kept(promise: PromisedEnd) -> Kept:
    assert promise.ended_at is not None  # noqa: S101 - `ended` reads these alone
    assert promise.median_s is not None and promise.sd_s is not None  # noqa: S101, PT018 - and why is null
    came_s = (promise.ended_at - promise.promised_at).total_seconds()
    quarter = quarter_of(promise.num_open, promise.num_total)
    return Kept(promise.batch_id, promise.median_s, promise.sd_s, came_s, quarter)


def _open_batch(batch: ListedBatch, progress: Progress, place: BatchPlace) -> OpenBatch:
    total = sum(place.num_by_line.values())
    by_line = {line: progress.num_open * num / total for line, num in place.num_by_line.items()}
    expires_s = float("inf") if place.expires_at is None else place.expires_at.timestamp()
    return OpenBatch(batch.id, batch.created_at.timestamp(), by_line, expires_s)


def _promised(
    batch_id: str, progress: Progress, outlook: Outlook, corrections: Sequence[PromiseCorrection], now: datetime
) -> PromisedEnd:
    said = PromisedEnd(batch_id, now, progress.total, progress.num_open, why=outlook.why)
    if outlook.why is not None:
        return said
    correction = corrections[quarter_of(progress.num_open, progress.total)]
    ends_at, earliest_at, latest_at = (now + timedelta(seconds=each) for each in correction.interval_s(outlook))
    return replace(
        said,
        ends_at=ends_at,
        earliest_at=earliest_at,
        latest_at=latest_at,
        median_s=outlook.median_s,
        sd_s=outlook.sd_s,
    )
