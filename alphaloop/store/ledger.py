"""The ledger of evidence: acceptance_state again, from the single jobs, exactly.

Its rows are the decode_runs that are evidence and the evidence_rows, in the order of `ledger_id`. A fold repeats what
was recorded, from the first row that is kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, time, timedelta
from typing import Any, Final

from sqlalchemy import Connection, Row, Select, Table, select, text, union_all

from alphaloop.acceptance import AcceptanceCounts, EvidenceKey
from alphaloop.deciding.evidence import KeyEvidence
from alphaloop.store.acceptance_state import LedgerRow, fold, key_of
from alphaloop.store.database import Database
from alphaloop.store.decode_runs import ShadowRun
from alphaloop.store.housekeeping import partition_days
from alphaloop.tables import decode_runs, evidence_rows
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
#: No job waits so long to be recorded. Bounds the partitions that are read.
_LONGEST_WAIT: Final = timedelta(days=1)


class LedgerStore:
    """Reads the ledger."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def covers(self, moment: datetime) -> bool:
        """Whether what was recorded at `moment` is in the ledger."""
        with self._database.begin() as connection:
            days = partition_days(connection)
        return bool(days) and moment >= datetime.combine(days[0], time(), UTC)

    def evidence(
        self, target_revision: str, engine: str, until: datetime, half_life: timedelta
    ) -> dict[EvidenceKey, KeyEvidence]:
        """The evidence of a target on an engine as acceptance_state held it at `until`, by key.

        The ledger must hold all that was recorded, `until` is a moment of the database's clock, and `half_life` must be
        that of the recording.
        """
        with self._database.begin() as connection:
            folded = fold(_rows(connection, until, (target_revision, engine)), half_life)
        return {key: its.evidence for key, its in folded.items()}


def _rows(connection: Connection, until: datetime, subject: tuple[str, str]) -> Iterator[LedgerRow]:
    """Rows recorded up to `until`, in order."""
    runs = _select(decode_runs, "num_tokens", until, subject).where(decode_runs.c.is_evidence)
    others = _select(evidence_rows, "num_output_tokens", until, subject)
    query = union_all(runs, others).order_by(text("ledger_id"))
    for row in connection.execute(query.execution_options(yield_per=2000)):
        yield _ledger_row(row)


def _select(table: Table, output_tokens: str, until: datetime, subject: tuple[str, str]) -> Select[Any]:
    columns = table.c
    query = select(*(columns[name] for name in _COLUMNS), columns[output_tokens].label("num_output_tokens")).where(
        columns.recorded_at <= until, columns.decoded_at <= until + _LONGEST_WAIT
    )
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
