"""Progress of the probes of a scheduled run."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import func, select

from alphaloop.store.database import Database
from alphaloop.tables import jobs, probe_runs


@dataclass(frozen=True, slots=True)
class ProbeProgress:
    """Probes and controls of one run: how many were sent, and how many have their outcome."""

    num_sent: int
    num_ended: int


def probe_progress(database: Database, scheduled_for: datetime) -> ProbeProgress:
    """Progress of the run that was due at `scheduled_for`."""
    runs = probe_runs.c
    query = (
        select(func.count(), func.count(jobs.c.finished_at))
        .select_from(probe_runs.outerjoin(jobs, jobs.c.job_id == runs.job_id))
        .where(runs.scheduled_for == scheduled_for, runs.sent_at.is_not(None))
    )
    with database.begin() as connection:
        num_sent, num_ended = connection.execute(query).one()
    return ProbeProgress(num_sent, num_ended)
