"""The tokens of probes and controls, and the pairs of them that are still to be compared."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Any, Final

from sqlalchemy import Connection, Row, text, update
from sqlalchemy.dialects.postgresql import insert

from alphaloop.probes import DecodedText, ProbeText, TextPair
from alphaloop.store.database import Database
from alphaloop.store.probes import LONGEST_LIFE
from alphaloop.tables import probe_runs, probe_texts

_DECODED: Final = """
    SELECT sent.job_id, sent.schedule_id, sent.scheduled_for, sent.task, sent.probe_set, sent.position,
           run.drafter, run.draft_revision, run.target_revision, run.engine, run.num_tokens,
           texts.token_ids, texts.finish_reason, texts.max_tokens, texts.near_tie, texts.second_ids, texts.gaps
    FROM probe_runs AS sent
    JOIN decode_runs AS run ON run.job_id = sent.job_id
        AND run.decoded_at BETWEEN sent.scheduled_for - :life AND sent.scheduled_for + :life
    JOIN probe_texts AS texts ON texts.job_id = sent.job_id
    WHERE sent.scheduled_for > :since
"""
_PAIRS: Final = text(f"""
    WITH control AS ({_DECODED} AND sent.purpose = 'control'),
         probe AS ({_DECODED} AND sent.purpose = 'probe' AND sent.compared_at IS NULL)
    SELECT 'control' AS side, probe.job_id AS pair, control.*
    FROM probe JOIN control USING (schedule_id, scheduled_for, task, probe_set, position)
    UNION ALL
    SELECT 'probe', probe.job_id, probe.*
    FROM probe JOIN control USING (schedule_id, scheduled_for, task, probe_set, position)
    ORDER BY scheduled_for, pair, side
""")  # noqa: S608 - no values


def record_texts(connection: Connection, texts: Sequence[tuple[str, datetime, ProbeText]]) -> None:
    """Store (job_id, when decoded, text), in the caller's transaction; what is stored already stays as it is."""
    if texts:
        rows = [
            {
                "job_id": job_id,
                "decoded_at": decoded_at,
                "token_ids": list(text.token_ids),
                "finish_reason": text.finish_reason,
                "max_tokens": text.max_tokens,
                "near_tie": text.near_tie,
                "second_ids": list(text.second_ids),
                "gaps": list(text.gaps),
            }
            for job_id, decoded_at, text in texts
        ]
        connection.execute(insert(probe_texts).on_conflict_do_nothing(), rows)


class ProbeTextStore:
    """Reads pairs; each is handed out until it is marked as compared."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def uncompared(self, since: datetime) -> list[TextPair]:
        """Decoded probes of runs due after `since` with their decoded controls, oldest first."""
        with self._database.begin() as connection:
            rows = connection.execute(_PAIRS, {"since": since, "life": LONGEST_LIFE}).all()
        return [TextPair(_decoded(one), _decoded(other)) for one, other in zip(rows[::2], rows[1::2], strict=True)]

    def mark_compared(self, job_ids: Collection[str], now: datetime) -> None:
        """Record that these probes were compared with their controls."""
        if job_ids:
            with self._database.begin() as connection:
                connection.execute(update(probe_runs).where(probe_runs.c.job_id.in_(job_ids)).values(compared_at=now))


def _decoded(row: Row[Any]) -> DecodedText:
    return DecodedText(
        job_id=row.job_id,
        task=row.task,
        drafter=row.drafter,
        draft_revision=row.draft_revision,
        target_revision=row.target_revision,
        engine=row.engine,
        num_tokens=row.num_tokens,
        text=ProbeText(
            token_ids=tuple(row.token_ids),
            finish_reason=row.finish_reason,
            max_tokens=row.max_tokens,
            near_tie=row.near_tie,
            second_ids=tuple(row.second_ids),
            gaps=tuple(row.gaps),
        ),
    )
