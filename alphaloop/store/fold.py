"""The fold that makes evidence from the ledger. Pure: recording and rebuilding use the same arithmetic.

Jobs of one key that were recorded in one transaction are added up first and then added to the row. A fold repeats
these groups, because sums of floating-point numbers depend on the grouping.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple

from alphaloop.acceptance import EvidenceKey
from alphaloop.deciding.evidence import EvidenceSums, KeyEvidence, together
from alphaloop.store.packed_evidence import pack, unpack


@dataclass(frozen=True, slots=True)
class FoldedKey:
    """The content of a row of acceptance_state."""

    as_of: datetime
    packed: bytes  #: as in the table, so that folded and stored evidence are equal bit by bit
    num_jobs: int
    last_ledger_id: int

    @property
    def evidence(self) -> KeyEvidence:
        """The sums, as of `as_of`."""
        return unpack(self.packed, self.as_of)


class LedgerRow(NamedTuple):
    """One job's counts under one key."""

    ledger_id: int
    recorded_in: int  #: the same for rows of one transaction
    key: EvidenceKey
    evidence: EvidenceSums


def fold(
    rows: Iterable[LedgerRow], half_life: timedelta, start: Mapping[EvidenceKey, FoldedKey] | None = None
) -> dict[EvidenceKey, FoldedKey]:
    """What acceptance_state holds after these rows, which come in the order of `ledger_id`.

    With `start`, rows that it includes are left out.
    """
    folded = dict(start or {})
    for key, its in _states(rows, half_life, folded):
        folded[key] = its
    return folded


def _states(
    rows: Iterable[LedgerRow], half_life: timedelta, start: Mapping[EvidenceKey, FoldedKey]
) -> Iterator[tuple[EvidenceKey, FoldedKey]]:
    """Each key after each transaction; keys one after the other."""
    by_key: dict[EvidenceKey, list[LedgerRow]] = {}
    for row in rows:
        if row.key not in start or row.ledger_id > start[row.key].last_ledger_id:
            by_key.setdefault(row.key, []).append(row)
    for key, its in by_key.items():
        standing = start.get(key)
        for _, group in groupby(its, attrgetter("recorded_in")):
            standing = add_group(standing, [(row.ledger_id, row.evidence) for row in group], half_life)
            yield key, standing


def add_group(standing: FoldedKey | None, group: Sequence[tuple[int, EvidenceSums]], half_life: timedelta) -> FoldedKey:
    """A key's row after jobs (ledger_id, sums) that were recorded together; `standing` is None for a new key."""
    jobs = [job for _, job in group]
    before = standing or FoldedKey(jobs[0].as_of, b"", 0, 0)
    evidence = before.evidence.with_job(together(jobs, half_life), half_life)
    return FoldedKey(evidence.all.as_of, pack(evidence), before.num_jobs + len(jobs), group[-1][0])


def key_of(row: Any) -> EvidenceKey:
    """From a row with the columns of the key."""
    return EvidenceKey(**{name: getattr(row, name) for name in EvidenceKey.__slots__})


def folded_of(row: Any) -> FoldedKey:
    """From a row of acceptance_state."""
    return FoldedKey(row.as_of, row.evidence, row.num_jobs, row.last_ledger_id)
