"""The memory of tasks: the results that look-up searches, written with the outcomes and read by every worker.

A result is forgotten by taking its tokens out of its row. The row stays for FORGOTTEN_KEPT_FOR, so that workers read
that it is forgotten as they read what is new.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Connection, text

from alphaloop.store.database import OLDEST_RUNNING, Store, driver_of

#: A worker that has read no change for so long reads everything anew.
FORGOTTEN_KEPT_FOR: Final = timedelta(days=1)
#: Rows of one answer, some 200 tokens each.
_PORTION: Final = 2000
#: Forgotten in one transaction.
_CHUNK: Final = 1000


@dataclass(frozen=True, slots=True)
class ResultToRemember:
    """The text of a job whose task remembers results."""

    task: str
    segment: str
    batch_id: str | None
    target_revision: str
    token_ids: Sequence[int]


class RememberedResult(NamedTuple):
    """A row with its text."""

    id: int
    task: str
    segment: str
    batch_id: str
    tokens: NDArray[np.uint32]


class MemoryChange(NamedTuple):
    """A row that was written or forgotten."""

    id: int
    is_forgotten: bool


class ResultMemoryStore(Store):
    """Reads what was remembered, and forgets."""

    def oldest_running(self) -> int:
        """For `changes`: what transactions below it wrote can be read now."""
        return int(self._database.scalar(OLDEST_RUNNING))

    def read(self, target_revision: str, tasks: Collection[str], most_tokens: int) -> Iterator[RememberedResult]:
        """The results of each of `tasks`, the newest first, as many as have `most_tokens` tokens together."""
        for task in tasks:
            last, left = _LAST, most_tokens
            while left > 0:
                given = {"target_revision": target_revision, "task": task, "last": last, "portion": _PORTION}
                rows = self._database.rows(_NEWEST, given)
                for row in rows:
                    left -= row.num_tokens + 1
                    if left < 0:
                        break
                    yield _remembered(row)
                if len(rows) < _PORTION:
                    break
                last = rows[-1].id

    def changes(self, target_revision: str, tasks: Collection[str], since: int) -> list[MemoryChange]:
        """What was written or forgotten by transactions from `since` on, oldest first; some of it may be known."""
        given = {"target_revision": target_revision, "tasks": list(tasks), "since": since}
        return [MemoryChange(*row) for row in self._database.rows(_CHANGES, given)]

    def texts(self, ids: Sequence[int]) -> list[RememberedResult]:
        """The results of these ids that are not forgotten, the oldest first."""
        results: list[RememberedResult] = []
        for begin in range(0, len(ids), _PORTION):
            results += map(_remembered, self._database.rows(_TEXTS, {"ids": list(ids[begin : begin + _PORTION])}))
        return results

    def make_room(self, target_revision: str, task: str, most_tokens: int) -> int:
        """Forget the oldest results of a task beyond `most_tokens`; returns how many were forgotten."""
        return self.forget(_BEYOND, {"target_revision": target_revision, "task": task, "most_tokens": most_tokens})

    def forget_before(self, moment: datetime) -> int:
        """Forget what was recorded before a moment; returns how many results."""
        return self.forget("recorded_at < :before", {"before": moment})

    def delete_forgotten(self, before: datetime) -> int:
        """Delete rows that were forgotten before a moment; returns how many."""
        return self._database.change(_DELETE, {"before": before})

    def forget(self, which: str, given: Mapping[str, Any]) -> int:
        """Forget all results for which a condition in SQL holds, in short transactions; returns how many."""
        statement, num = text(_FORGET.format(which=which)), 0
        while True:
            num_forgotten = self._database.change(statement, {**given, "chunk": _CHUNK})
            num += num_forgotten
            if num_forgotten < _CHUNK:
                return num


def remember(connection: Connection, results: Sequence[tuple[str, ResultToRemember]]) -> None:
    """Write (job_id, result) of outcomes, in their transaction."""
    if results:
        columns: dict[str, list[Any]] = {
            name: [getattr(result, name) for _, result in results]
            for name in ("task", "segment", "batch_id", "target_revision")
        }
        columns["job_id"] = [job_id for job_id, _ in results]
        columns["num_tokens"] = [len(result.token_ids) for _, result in results]
        columns["token_ids"] = [_packed(result.token_ids) for _, result in results]
        driver_of(connection).execute(_REMEMBER, columns)


def _packed(token_ids: Sequence[int]) -> bytes:
    return zlib.compress(np.asarray(token_ids, "<u4").tobytes(), 1)


def _remembered(row: Any) -> RememberedResult:
    tokens = np.frombuffer(zlib.decompress(row.token_ids), "<u4").astype(np.uint32)
    return RememberedResult(row.id, row.task, row.segment, row.batch_id or "", tokens)


_LAST: Final = 2**63 - 1
_REMEMBER: Final = """
    INSERT INTO remembered_results (task, segment, batch_id, target_revision, job_id, num_tokens, token_ids)
    SELECT * FROM unnest(%(task)b::text[], %(segment)b::text[], %(batch_id)b::text[], %(target_revision)b::text[],
        %(job_id)b::text[], %(num_tokens)b::int[], %(token_ids)b::bytea[])
"""
_NEWEST: Final = text("""
    SELECT id, task, segment, batch_id, num_tokens, token_ids FROM remembered_results
    WHERE target_revision = :target_revision AND task = :task AND id < :last AND forgotten_at IS NULL
    ORDER BY id DESC LIMIT :portion
""")
_CHANGES: Final = text("""
    SELECT id, forgotten_at IS NOT NULL FROM remembered_results
    WHERE changed_in >= :since AND target_revision = :target_revision AND task = ANY(:tasks) ORDER BY id
""")
_TEXTS: Final = text("""
    SELECT id, task, segment, batch_id, token_ids FROM remembered_results
    WHERE id = ANY(:ids) AND forgotten_at IS NULL ORDER BY id
""")
#: A statement for each condition; none holds a value.
_FORGET: Final = """
    UPDATE remembered_results SET token_ids = NULL, forgotten_at = now(),
        changed_in = pg_current_xact_id()::text::bigint
    WHERE id = ANY(ARRAY(
        SELECT id FROM remembered_results WHERE forgotten_at IS NULL AND {which} ORDER BY id LIMIT :chunk FOR UPDATE
    ))
"""
_BEYOND: Final = """target_revision = :target_revision AND task = :task AND id < (
    SELECT min(id) FROM (
        SELECT id, sum(num_tokens + 1) OVER (ORDER BY id DESC) AS num_behind FROM remembered_results
        WHERE target_revision = :target_revision AND task = :task AND forgotten_at IS NULL
    ) AS newest WHERE num_behind <= :most_tokens
)"""
_DELETE: Final = text("DELETE FROM remembered_results WHERE forgotten_at < :before")
