"""Texts that answer equal jobs: which job has the text of a key, and which jobs were answered so.

A key is a digest of all that decides a greedy text (worker/intake/reuse_key.py). The text itself stays where it was
recorded, in `jobs.outcome`, so what deletes, replaces or erases it there ends its reuse, too.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, NamedTuple

from sqlalchemy import Connection, text

from alphaloop.store.database import Store, driver_of


@dataclass(frozen=True, slots=True)
class Reused:
    """Whose text answers a job."""

    source_job_id: str
    task: str
    segment: str
    decoded_at: datetime


class ReusableText(NamedTuple):
    """The decoded job of a key, and its Result, byte for byte."""

    job_id: str
    decoded_at: datetime
    outcome: bytes


class SourcesGone(Exception):
    """The texts that were to answer `job_ids` were erased or deleted meanwhile: nothing was recorded."""

    def __init__(self, job_ids: Collection[str]) -> None:
        super().__init__(f"the texts for {len(job_ids)} jobs are gone")
        self.job_ids = frozenset(job_ids)


class ReuseStore(Store):
    """Looks texts up."""

    def find(self, keys: Collection[bytes]) -> dict[bytes, ReusableText]:
        """By key, the job that was decoded last, if its text is still recorded."""
        if not keys:
            return {}
        return {
            bytes(row.reuse_key): ReusableText(row.job_id, row.decoded_at, row.outcome.encode())
            for row in self._database.rows(_FIND, {"keys": list(keys)})
        }


def record_reuse(
    connection: Connection, decoded: Sequence[tuple[str, bytes, datetime]], reused: Sequence[tuple[str, Reused]]
) -> None:
    """Write of outcomes, in their transaction, (job_id, key, decoded_at) of decoded and (job_id, source) of others."""
    driver = driver_of(connection)
    if decoded:
        newest = {key: (job_id, at) for job_id, key, at in decoded}  # a statement may write a row once
        columns: dict[str, list[Any]] = {
            "key": list(newest),
            "job_id": [job_id for job_id, _ in newest.values()],
            "decoded_at": [at for _, at in newest.values()],
        }
        driver.execute(_REUSABLE, columns)
    if reused:
        columns = {
            name: [getattr(source, name) for _, source in reused]
            for name in ("source_job_id", "task", "segment", "decoded_at")
        }
        columns["job_id"] = [job_id for job_id, _ in reused]
        driver.execute(_REUSED, columns)


def check_sources(connection: Connection, reused: Sequence[tuple[str, Reused]]) -> None:
    """Keep the texts of these sources as they are until the end of the transaction. Raises SourcesGone.

    An erasure either waits for this transaction, and then finds its copies, or has been before. A row that is locked
    counts as gone: nothing here waits for another transaction while it holds a lock.
    """
    if not reused:
        return
    sources = {source.source_job_id for _, source in reused}
    kept = {job_id for (job_id,) in driver_of(connection).execute(_KEPT, {"job_ids": sorted(sources)})}
    if gone := [job_id for job_id, source in reused if source.source_job_id not in kept]:
        raise SourcesGone(gone)


#: Whether a job has a text. `alphaloop erase` writes the field; inside a text its quotes would be escaped.
_HAS_TEXT: Final = """jobs.status = 'succeeded' AND strpos(jobs.outcome::text, '"erased_at":') = 0"""
_FIND: Final = text(f"""
    SELECT reuse_key, job_id, decoded_at, outcome::text AS outcome
    FROM reusable_results JOIN jobs USING (job_id)
    WHERE reuse_key = ANY(:keys) AND {_HAS_TEXT}
""")  # noqa: S608 - no values
_KEPT: Final = f"SELECT job_id FROM jobs WHERE job_id = ANY(%(job_ids)s) AND {_HAS_TEXT} FOR SHARE SKIP LOCKED"  # noqa: S608
#: In the order of the keys, so that two workers cannot wait for each other.
_REUSABLE: Final = """
    INSERT INTO reusable_results AS known (reuse_key, job_id, decoded_at)
    SELECT * FROM unnest(%(key)b::bytea[], %(job_id)b::text[], %(decoded_at)b::timestamptz[])
        AS given(reuse_key, job_id, decoded_at)
    ORDER BY reuse_key
    ON CONFLICT (reuse_key) DO UPDATE SET job_id = excluded.job_id, decoded_at = excluded.decoded_at
"""
_REUSED: Final = """
    INSERT INTO reused_results (job_id, source_job_id, task, segment, decoded_at, reused_at)
    SELECT given.*, now() FROM unnest(%(job_id)b::text[], %(source_job_id)b::text[], %(task)b::text[],
        %(segment)b::text[], %(decoded_at)b::timestamptz[]) AS given(job_id, source_job_id, task, segment, decoded_at)
    ON CONFLICT (job_id) DO NOTHING
"""
