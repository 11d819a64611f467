"""The probes and controls that were sent, and their results."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from sqlalchemy import (
    ColumnElement,
    Select,
    Table,
    and_,
    delete,
    exists,
    func,
    literal,
    or_,
    select,
    union_all,
    update,
)
from sqlalchemy.dialects.postgresql import insert

from alphaloop.measurements import ProbeResult
from alphaloop.messages import Purpose
from alphaloop.probes import TaskTraffic
from alphaloop.store.database import Database
from alphaloop.store.decode_runs import Source
from alphaloop.store.hourly_sums import SHADOW
from alphaloop.store.settled_sums import sums_between
from alphaloop.tables import acceptance_hourly, decode_runs, evidence_rows, probe_runs, probe_sets

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
    scored_drafters: tuple[str, ...] = ()  #: on a control's text


class ProbeStore:
    """Probes; their outcomes come from decode_runs."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def last_probed(self, now: datetime, deadline: timedelta, *, since: datetime) -> dict[tuple[str, str], datetime]:
        """When each (task, drafter) was last measured with the set in use, or is being measured.

        Of runs due after `since`. A probe, and a control for what is scored on it, counts once it was decoded, and
        before that until its deadline has passed.
        """
        runs = probe_runs.c
        in_use = exists().where(
            probe_sets.c.task == runs.task, probe_sets.c.version == runs.probe_set, probe_sets.c.is_active
        )
        decoded = select(decode_runs.c.job_id).where(_is_measured(since))
        drafters = func.unnest(func.array_append(runs.scored_drafters, runs.drafter))
        measured = (
            select(runs.task, drafters.label("drafter"), runs.scheduled_for)
            .where(runs.scheduled_for > since, in_use)
            .where(or_(runs.job_id.in_(decoded), runs.sent_at > now - deadline))
            .subquery()
            .c
        )
        query = (
            select(measured.task, measured.drafter, func.max(measured.scheduled_for))
            .where(measured.drafter.is_not(None))
            .group_by(measured.task, measured.drafter)
        )
        with self._database.begin() as connection:
            return {(task, drafter): last for task, drafter, last in connection.execute(query)}

    def mean_device_s(self, since: datetime, until: datetime) -> dict[str, float]:
        """Mean device seconds of a probe or control by task, over the hours that began in (since, until]."""
        with self._database.begin() as connection:
            sums = sums_between(connection, since, until).c
            query = (
                select(sums.task, func.sum(sums.device_s) / func.sum(sums.num_jobs))
                .where(sums.purpose.in_(MEASURED), sums.mode != SHADOW)
                .group_by(sums.task)
            )
            return {task: seconds for task, seconds in connection.execute(query)}

    def traffic(self, since: datetime, until: datetime) -> list[TaskTraffic]:
        """Traffic by task of the hours that began in (since, until]: by hour, or by settled day."""
        with self._database.begin() as connection:
            sums = sums_between(connection, since, until).c
            query = (
                select(sums.task, sums.bucket, func.sum(sums.num_jobs), func.sum(sums.device_s))
                .where(sums.purpose == Purpose.TRAFFIC, sums.mode != SHADOW)
                .group_by(sums.task, sums.bucket)
            )
            return [
                TaskTraffic(task, start, int(number), seconds)
                for task, start, number, seconds in connection.execute(query)
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
                rows = [{**asdict(run), "scored_drafters": list(run.scored_drafters)} for run in runs]
                connection.execute(insert(probe_runs).on_conflict_do_nothing(), rows)

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
        with self._database.begin() as connection:
            connection.execute(update(probe_runs).where(unsent, _decoded()).values(sent_at=probe_runs.c.scheduled_for))
            return connection.execute(delete(probe_runs).where(unsent)).rowcount

    def results(self, since: datetime) -> list[ProbeResult]:
        """What probes of runs due after `since` measured, decoded ones and scored ones; oldest first.

        A probe that its worker could not decode with the drafter asked for is left out, and so is a score that it could
        not give.
        """
        run, row = decode_runs.c, evidence_rows.c
        decoded = _results(decode_runs, since, run.purpose == Purpose.PROBE, run.drafter == probe_runs.c.drafter)
        scored = _results(evidence_rows, since, row.source == Source.SCORED)
        query = union_all(decoded, scored).order_by("scheduled_for", "task", "position", "drafter")
        with self._database.begin() as connection:
            return [
                ProbeResult(**{**row, "trials": tuple(row["trials"]), "accepts": tuple(row["accepts"])})
                for row in connection.execute(query).mappings()
            ]


def _results(counts: Table, since: datetime, *are_results: ColumnElement[bool]) -> Select[Any]:
    """The columns of ProbeResult from those rows of `counts` that are results of runs due after `since`.

    One bound of time finds them, so every partition is looked at once, not once a probe.
    """
    sent, found = probe_runs.c, counts.c
    counted = ("drafter", "draft_revision", "target_revision", "engine", "num_draft_tokens", "trials", "accepts")
    return (
        select(
            *(sent[name] for name in ("scheduled_for", "task", "probe_set", "position", "prompt_id")),
            *(found[name] for name in counted),
            literal(counts is evidence_rows).label("is_scored"),
        )
        .join(counts, found.job_id == sent.job_id)
        .where(sent.scheduled_for > since, found.decoded_at > since - LONGEST_LIFE, *are_results)
    )


def _is_measured(since: datetime) -> ColumnElement[bool]:
    return and_(decode_runs.c.purpose.in_(MEASURED), decode_runs.c.decoded_at > since - LONGEST_LIFE)


def _decoded() -> ColumnElement[bool]:
    """Whether a probe was decoded. The bounds leave out the partitions of other days."""
    sent, run = probe_runs.c, decode_runs.c
    return exists().where(
        run.job_id == sent.job_id,
        run.decoded_at >= sent.scheduled_for - LONGEST_LIFE,
        run.decoded_at <= sent.scheduled_for + LONGEST_LIFE,
    )
