"""The probes and controls that were sent, and their results."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from typing import Final

from sqlalchemy import ColumnElement, FromClause, and_, delete, exists, func, or_, select, update
from sqlalchemy.dialects.postgresql import insert

from alphaloop.measurements import ProbeResult
from alphaloop.messages import Purpose
from alphaloop.probing.due import TaskHour
from alphaloop.store.database import Database
from alphaloop.store.hourly_sums import SHADOW
from alphaloop.tables import acceptance_hourly, decode_runs, probe_runs, probe_sets

MEASURED: Final = (Purpose.PROBE.value, Purpose.CONTROL.value)
EVERY_PURPOSE: Final = tuple(purpose.value for purpose in Purpose)
#: No probe is decoded so long after the run that sent it; nor before it, by clocks that differ.
LONGEST_LIFE: Final = timedelta(days=2)


@dataclass(frozen=True, slots=True)
class ProbeRun:
    """A probe or control about to be sent."""

    job_id: str
    schedule_id: str
    scheduled_for: datetime
    task: str
    probe_set: str
    position: int
    prompt_id: str
    purpose: str
    drafter: str | None
    num_draft_tokens: int | None
    payload_sha256: bytes


class ProbeStore:
    """Probes; their outcomes come from decode_runs."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def last_probed(self, now: datetime, deadline: timedelta, *, since: datetime) -> dict[tuple[str, str], datetime]:
        """When each (task, drafter) was last measured with the set in use, or is being measured.

        Of runs due after `since`. A probe counts once it was decoded, and before that until its deadline has passed.
        """
        runs = probe_runs.c
        in_use = exists().where(
            probe_sets.c.task == runs.task, probe_sets.c.version == runs.probe_set, probe_sets.c.is_active
        )
        query = (
            select(runs.task, runs.drafter, func.max(runs.scheduled_for))
            .where(runs.purpose == "probe", runs.scheduled_for > since, in_use)
            .where(or_(exists().where(_decoded_as(decode_runs, probe_runs)), runs.sent_at > now - deadline))
            .group_by(runs.task, runs.drafter)
        )
        with self._database.begin() as connection:
            return {(task, drafter): last for task, drafter, last in connection.execute(query)}

    def mean_device_s(self, since: datetime) -> dict[str, float]:
        """Mean device seconds of a probe or control by task, over the hours that began after `since`."""
        hours = acceptance_hourly.c
        query = (
            select(hours.task, func.sum(hours.device_s) / func.sum(hours.num_jobs))
            .where(hours.bucket > since, hours.purpose.in_(MEASURED), hours.mode != SHADOW)
            .group_by(hours.task)
        )
        with self._database.begin() as connection:
            return {task: seconds for task, seconds in connection.execute(query)}

    def traffic(self, since: datetime) -> list[TaskHour]:
        """Traffic by task and hour, of the hours that began after `since`."""
        hours = acceptance_hourly.c
        query = (
            select(hours.task, hours.bucket, func.sum(hours.num_jobs), func.sum(hours.device_s))
            .where(hours.bucket > since, hours.purpose == "traffic", hours.mode != SHADOW)
            .group_by(hours.task, hours.bucket)
        )
        with self._database.begin() as connection:
            return [
                TaskHour(task, hour, int(number), seconds) for task, hour, number, seconds in connection.execute(query)
            ]

    def device_s(self, since: datetime, until: datetime, purposes: Collection[str] = EVERY_PURPOSE) -> float:
        """Device seconds of what was decoded for these purposes in the hours that began in (since, until]."""
        hours = acceptance_hourly.c
        query = select(func.coalesce(func.sum(hours.device_s), 0.0)).where(
            hours.bucket > since, hours.bucket <= until, hours.purpose.in_(purposes)
        )
        with self._database.begin() as connection:
            return float(connection.execute(query).scalar_one())

    def record(self, runs: Sequence[ProbeRun]) -> None:
        """Record runs that are about to be sent; recorded ones stay as they are."""
        if runs:
            with self._database.begin() as connection:
                connection.execute(insert(probe_runs).on_conflict_do_nothing(), [asdict(run) for run in runs])

    def is_recorded(self, job_id: str, payload_sha256: bytes) -> bool:
        """Whether this is a probe or control of the scheduler, with just this payload."""
        runs = probe_runs.c
        query = select(exists().where(runs.job_id == job_id, runs.payload_sha256 == payload_sha256))
        with self._database.begin() as connection:
            return bool(connection.execute(query).scalar_one())

    def mark_sent(self, job_ids: Collection[str], now: datetime) -> None:
        """Record that Kafka has acknowledged them."""
        if job_ids:
            with self._database.begin() as connection:
                connection.execute(update(probe_runs).where(probe_runs.c.job_id.in_(job_ids)).values(sent_at=now))

    def settle_unsent(self, before: datetime) -> int:
        """Clean up after runs, due before `before`, that died while sending: returns how many probes were deleted.

        A probe that was decoded is marked as sent; the others are deleted.
        """
        unsent = and_(probe_runs.c.sent_at.is_(None), probe_runs.c.scheduled_for < before)
        decoded = exists().where(_decoded_as(decode_runs, probe_runs))
        with self._database.begin() as connection:
            connection.execute(update(probe_runs).where(unsent, decoded).values(sent_at=probe_runs.c.scheduled_for))
            return connection.execute(delete(probe_runs).where(unsent)).rowcount

    def results(self, since: datetime) -> list[ProbeResult]:
        """Decoded probes of runs due after `since`, each with its control of the same run and prompt; oldest first.

        A probe that its worker could not decode with the drafter asked for is left out.
        """
        probe, run = probe_runs.alias("probe"), decode_runs.alias("run")
        twin, twin_run = probe_runs.alias("twin"), decode_runs.alias("twin_run")
        same = ("schedule_id", "scheduled_for", "task", "probe_set", "position")
        query = (
            select(
                probe.c.scheduled_for,
                probe.c.task,
                probe.c.probe_set,
                probe.c.position,
                probe.c.prompt_id,
                run.c.drafter,
                run.c.draft_revision,
                run.c.target_revision,
                run.c.engine,
                run.c.num_draft_tokens,
                run.c.trials,
                run.c.accepts,
                run.c.num_tokens,
                run.c.device_s,
                twin_run.c.num_tokens.label("control_tokens"),
                twin_run.c.device_s.label("control_device_s"),
            )
            .join(run, and_(_decoded_as(run, probe), run.c.drafter == probe.c.drafter))
            .outerjoin(twin, and_(*(twin.c[name] == probe.c[name] for name in same), twin.c.purpose == "control"))
            .outerjoin(twin_run, and_(_decoded_as(twin_run, twin), twin_run.c.target_revision == run.c.target_revision))
            .where(probe.c.purpose == "probe", probe.c.scheduled_for > since)
            .order_by(probe.c.scheduled_for, probe.c.task, probe.c.position, probe.c.drafter)
        )
        with self._database.begin() as connection:
            return [
                ProbeResult(**{**row, "trials": tuple(row["trials"]), "accepts": tuple(row["accepts"])})
                for row in connection.execute(query).mappings()
            ]


def _decoded_as(run: FromClause, probe: FromClause) -> ColumnElement[bool]:
    """Whether a row of decode_runs is that of a probe. The bounds leave out the partitions of other days."""
    at = run.c.decoded_at
    return and_(
        run.c.job_id == probe.c.job_id,
        at >= probe.c.scheduled_for - LONGEST_LIFE,
        at <= probe.c.scheduled_for + LONGEST_LIFE,
    )
