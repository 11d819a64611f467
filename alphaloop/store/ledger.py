"""The ledger of evidence: acceptance_state as it was at any moment that the ledger still covers, exactly.

Its rows are the decode_runs that are evidence and the evidence_rows, in the order of `ledger_id`. A fold begins with
checkpoints, daily copies of acceptance_state, and repeats what was recorded after them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from datetime import UTC, datetime, time, timedelta
from typing import Any, Final

from sqlalchemy import Connection, Row, Select, Table, func, select, text, union_all

from alphaloop.acceptance import AcceptanceCounts, EvidenceKey
from alphaloop.deciding.key_evidence import KeyEvidence
from alphaloop.store.acceptance_state import LedgerRow, fold, fold_at, key_of
from alphaloop.store.checkpoints import newest_checkpoints
from alphaloop.store.database import Database
from alphaloop.store.decode_runs import ShadowRun
from alphaloop.store.housekeeping import partition_days
from alphaloop.tables import acceptance_checkpoints, decode_runs, evidence_rows
from alphaloop.tables.evidence import KEY

_COUNTS: Final = AcceptanceCounts.__slots__
_COLUMNS: Final = (
    "ledger_id",
    "recorded_in",
    *KEY,
    "decoded_at",
    "num_draft_tokens",
    *_COUNTS,
    "chances",
    "num_prompt_tokens",
    "is_cut",
)
#: No transaction takes so long, so rows recorded this long before a checkpoint are in it.
_LONGEST_TRANSACTION: Final = timedelta(hours=1)
#: No evidence cache lags so long behind the database while its worker decides.
_LONGEST_LAG: Final = timedelta(hours=1)
#: No job waits so long to be recorded. Bounds the partitions that are read.
LONGEST_WAIT: Final = timedelta(days=1)


class LedgerStore:
    """Reads the ledger."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def covers(self, moment: datetime) -> bool:
        """Whether everything recorded up to `moment` is in the ledger or in a stored checkpoint."""
        with self._database.begin() as connection:
            days = partition_days(connection)
        return bool(days) and moment >= datetime.combine(days[0], time(), UTC)

    def evidence(
        self, target_revision: str, engine: str, until: datetime, half_life: timedelta
    ) -> dict[EvidenceKey, KeyEvidence]:
        """The evidence of a target on an engine as acceptance_state held it at `until`, by key.

        `until` is a moment of the database's clock for which `covers` is true. `half_life` must be that of the
        recording.
        """
        with self._database.begin() as connection:
            subject = target_revision, engine
            start = newest_checkpoints(connection, until, subject)
            folded = fold(_rows(connection, _fold_begins(connection, until), until, subject), half_life, start)
        return {key: its.evidence for key, its in folded.items()}

    def at_positions(
        self,
        subject: tuple[str, str],
        positions: Collection[int],
        since: datetime,
        until: datetime,
        half_life: timedelta,
    ) -> dict[int, tuple[EvidenceKey, KeyEvidence]]:
        """The evidence of a key when one of `positions` was the last row that it included, by position.

        `subject` is a target revision and an engine. The positions were those of a worker's evidence cache between
        `since` and `until`. A position that the ledger does not cover is left out.
        """
        if not positions:
            return {}
        with self._database.begin() as connection:
            # The cache may lag behind the database, so the fold begins well before.
            start = newest_checkpoints(connection, since - _LONGEST_LAG, subject)
            begin = _fold_begins(connection, since - _LONGEST_LAG)
            last = max(positions)
            rows = (row for row in _rows(connection, begin, until + _LONGEST_LAG, subject) if row.ledger_id <= last)
            found = fold_at(rows, half_life, frozenset(positions), start)
        return {position: (key, its.evidence) for position, (key, its) in found.items()}


def _fold_begins(connection: Connection, until: datetime) -> datetime | None:
    """From when on rows are read after the checkpoints that were taken by `until`; None: from the first."""
    taken = acceptance_checkpoints.c.taken_at
    last: datetime | None = connection.execute(select(func.max(taken)).where(taken <= until)).scalar_one()
    return None if last is None else last - _LONGEST_TRANSACTION


def _rows(
    connection: Connection, since: datetime | None, until: datetime, subject: tuple[str, str]
) -> Iterator[LedgerRow]:
    """Rows recorded in [since, until], in order."""
    runs = _select(decode_runs, "num_tokens", since, until, subject).where(decode_runs.c.is_evidence)
    others = _select(evidence_rows, "num_output_tokens", since, until, subject)
    query = union_all(runs, others).order_by(text("ledger_id"))
    for row in connection.execute(query.execution_options(yield_per=2000)):
        yield _ledger_row(row)


def _select(
    table: Table, output_tokens: str, since: datetime | None, until: datetime, subject: tuple[str, str]
) -> Select[Any]:
    columns = table.c
    query = select(*(columns[name] for name in _COLUMNS), columns[output_tokens].label("num_output_tokens")).where(
        columns.recorded_at <= until, columns.decoded_at <= until + LONGEST_WAIT
    )
    if since is not None:
        query = query.where(columns.recorded_at >= since, columns.decoded_at >= since - LONGEST_WAIT)
    return query.where(columns.target_revision == subject[0], columns.engine == subject[1])


def _ledger_row(row: Row[Any]) -> LedgerRow:
    # A run's own counts are read like a shadow's: the same sums follow from them.
    counted = shadow_of(row)
    return LedgerRow(row.ledger_id, row.recorded_in, counted.key, counted.evidence)


def shadow_of(row: Row[Any]) -> ShadowRun:
    """From a row of evidence_rows."""
    return ShadowRun(
        key_of(row),
        row.num_draft_tokens,
        counts_of(row),
        row.num_prompt_tokens,
        row.num_output_tokens,
        row.decoded_at,
        tuple(row.chances),
        is_cut=row.is_cut,
    )


def counts_of(row: Row[Any]) -> AcceptanceCounts:
    """From a row of either table."""
    return AcceptanceCounts(
        row.rounds, row.num_empty_rounds, row.num_cropped, tuple(row.proposed), tuple(row.trials), tuple(row.accepts)
    )
