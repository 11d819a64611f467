"""Probes: the sets of prompts, the probes and controls that were sent, what they measured, and the texts they gave.

Each pair of a probe and its control is handed out until it is marked as compared.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from itertools import groupby
from operator import attrgetter
from typing import Any, Final

from sqlalchemy import (
    ColumnElement,
    Connection,
    Row,
    Select,
    Table,
    and_,
    delete,
    exists,
    func,
    literal,
    or_,
    select,
    text,
    tuple_,
    union_all,
    update,
)
from sqlalchemy.dialects.postgresql import insert

from alphaloop.measurements import ProbeResult
from alphaloop.messages import Purpose
from alphaloop.probes import DecodedText, ProbePrompt, ProbeSet, ProbeSource, ProbeText, TaskTraffic, TextPair
from alphaloop.store.database import Database, Store, columns_of, of_row, values_of
from alphaloop.store.job_counts import SHADOW, CountSource, sums_between
from alphaloop.tables import (
    acceptance_hourly,
    decode_runs,
    evidence_rows,
    jobs,
    probe_prompts,
    probe_runs,
    probe_sets,
    probe_texts,
)

MEASURED: Final = (Purpose.PROBE.value, Purpose.CONTROL.value)


@dataclass(frozen=True, slots=True)
class ProbeSetVersion:
    """One version of a task's probe set."""

    task: str
    version: str
    num_prompts: int
    num_draft_tokens: int
    source: ProbeSource
    is_active: bool
    created_at: datetime


class ProbeSetStore(Store):
    """Keeps every version, because runs of an earlier one are still compared; of each task at most one is in use."""

    def register(self, probe_set: ProbeSet, now: datetime) -> None:
        """Put a set in use in place of the one before. A version that is known already comes back as it was."""
        sets = probe_sets.c
        key = {"task": probe_set.task, "version": probe_set.version}
        new = {**key, "num_draft_tokens": probe_set.num_draft_tokens, "source": probe_set.source.value}
        prompts = [
            {**key, "position": position, **values_of(prompt), "body": dict(prompt.body)}
            for position, prompt in probe_set.prompts.items()
        ]
        with self._database.begin() as connection:
            connection.execute(
                update(probe_sets)
                .where(sets.task == probe_set.task, sets.version != probe_set.version)
                .values(is_active=False)
            )
            connection.execute(
                insert(probe_sets)
                .values(**new, is_active=True, created_at=now)
                .on_conflict_do_update(index_elements=[sets.task, sets.version], set_={"is_active": True})
            )
            connection.execute(insert(probe_prompts).on_conflict_do_nothing(), prompts)

    def active(self) -> dict[str, ProbeSet]:
        """The set in use of each task that has one."""
        return {probe_set.task: probe_set for probe_set in self._read(probe_sets.c.is_active)}

    def get(self, task: str, version: str) -> ProbeSet | None:
        """One version; None where there is none of that name."""
        return next(iter(self._read(and_(probe_sets.c.task == task, probe_sets.c.version == version))), None)

    def versions(self, task: str | None = None) -> list[ProbeSetVersion]:
        """Every version, of all tasks or of one; by task, the newest first."""
        sets, prompts = probe_sets.c, probe_prompts.c
        query = (
            select(probe_sets, func.count(prompts.position).label("num_prompts"))
            .outerjoin(probe_prompts, and_(prompts.task == sets.task, prompts.version == sets.version))
            .group_by(sets.task, sets.version)
            .order_by(sets.task, sets.created_at.desc(), sets.version)
        )
        if task is not None:
            query = query.where(sets.task == task)
        return [of_row(ProbeSetVersion, row, source=ProbeSource(row.source)) for row in self._database.rows(query)]

    def prompt_ids(self) -> frozenset[str]:
        """The id of every prompt of every version, also of those that are in use no more."""
        return frozenset(self._database.scalars(select(probe_prompts.c.prompt_id)))

    def _read(self, wanted: ColumnElement[bool]) -> list[ProbeSet]:
        sets, prompts = probe_sets.c, probe_prompts.c
        query = (
            select(probe_sets, prompts.position, *columns_of(probe_prompts, ProbePrompt))
            .join(probe_prompts, and_(prompts.task == sets.task, prompts.version == sets.version))
            .where(wanted)
            .order_by(sets.task, sets.version, prompts.position)
        )
        key = attrgetter("task", "version", "num_draft_tokens", "source")
        return [
            ProbeSet(task, version, k, {row.position: of_row(ProbePrompt, row) for row in rows}, ProbeSource(source))
            for (task, version, k, source), rows in groupby(self._database.rows(query), key)
        ]


#: No probe is decoded so long after the run that sent it; nor before it, by clocks that differ.
_LONGEST_LIFE: Final = timedelta(days=2)
_TRIED_AGAIN_AFTER: Final = timedelta(days=1)


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


class ProbeStore(Store):
    """Probes and controls that were sent. What became of them is read from decode_runs and probe_texts."""

    def last_probed(self, now: datetime, deadline: timedelta, *, since: datetime) -> dict[tuple[str, str], datetime]:
        """When each (task, drafter) was last sent to be measured with the set in use, of runs due after `since`.

        A probe, and a control for what is scored on it, counts once it has counts of the drafter. One without them
        counts for a day if it was decoded, because another would end the same way, else until its deadline has passed.
        """
        runs, run, row = probe_runs.c, decode_runs.c, evidence_rows.c
        in_use = exists().where(
            probe_sets.c.task == runs.task, probe_sets.c.version == runs.probe_set, probe_sets.c.is_active
        )
        drafters = func.unnest(func.array_append(runs.scored_drafters, runs.drafter)).label("drafter")
        at = func.coalesce(runs.sent_at, runs.scheduled_for).label("at")
        sent = select(runs.task, runs.job_id, runs.sent_at, at, drafters).where(runs.scheduled_for > since, in_use)
        sent_run = sent.subquery().c
        oldest = since - _LONGEST_LIFE
        measured = union_all(
            select(run.job_id, run.drafter).where(run.purpose == Purpose.PROBE, run.decoded_at > oldest),
            select(row.job_id, row.drafter).where(row.source == CountSource.SCORED, row.decoded_at > oldest),
        )
        decoded = select(run.job_id).where(run.purpose.in_(MEASURED), run.decoded_at > oldest)
        counts = or_(
            tuple_(sent_run.job_id, sent_run.drafter).in_(measured),
            and_(sent_run.job_id.in_(decoded), sent_run.sent_at > now - _TRIED_AGAIN_AFTER),
            sent_run.sent_at > now - deadline,
        )
        query = select(sent_run.task, sent_run.drafter, func.max(sent_run.at)).where(
            sent_run.drafter.is_not(None), counts
        )
        last = self._database.rows(query.group_by(sent_run.task, sent_run.drafter))
        return {(task, drafter): at for task, drafter, at in last}

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

    def device_s(self, since: datetime, until: datetime, purposes: Collection[str] = tuple(Purpose)) -> float:
        """Device seconds of what was decoded for these purposes in the hours that began in (since, until]."""
        hours = acceptance_hourly.c
        query = select(func.coalesce(func.sum(hours.device_s), 0.0)).where(
            hours.bucket > since, hours.bucket <= until, hours.purpose.in_(purposes)
        )
        return float(self._database.scalar(query))

    def record(self, runs: Sequence[ProbeRun]) -> None:
        """Record runs that are about to be sent; recorded ones stay as they are."""
        if runs:
            self._database.change(insert(probe_runs).on_conflict_do_nothing(), [asdict(run) for run in runs])

    def is_recorded(self, job_id: str, payload_sha256: bytes) -> bool:
        """Whether this is a probe or control of the scheduler, with just this payload."""
        runs = probe_runs.c
        query = select(exists().where(runs.job_id == job_id, runs.payload_sha256 == payload_sha256))
        return bool(self._database.scalar(query))

    def mark_sent(self, job_ids: Collection[str], now: datetime) -> None:
        """Record that Kafka has acknowledged them."""
        if job_ids:
            self._database.change(update(probe_runs).where(probe_runs.c.job_id.in_(job_ids)).values(sent_at=now))

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
        scored = _results(evidence_rows, since, row.source == CountSource.SCORED)
        query = union_all(decoded, scored).order_by("scheduled_for", "task", "position", "drafter")
        return [of_row(ProbeResult, row) for row in self._database.rows(query)]

    def uncompared(self, since: datetime) -> list[TextPair]:
        """Decoded probes of runs due after `since` with their decoded controls, oldest first."""
        rows = self._database.rows(_PAIRS, {"since": since, "life": _LONGEST_LIFE})
        return [
            TextPair(_decoded_text(probe), _decoded_text(other))
            for probe, other in zip(rows[::2], rows[1::2], strict=True)
        ]

    def mark_compared(self, job_ids: Collection[str], now: datetime) -> None:
        """Record that these probes were compared with their controls."""
        if job_ids:
            self._database.change(update(probe_runs).where(probe_runs.c.job_id.in_(job_ids)).values(compared_at=now))


def record_texts(connection: Connection, texts: Sequence[tuple[str, datetime, ProbeText]]) -> None:
    """Store (job_id, when decoded, text), in the caller's transaction; what is stored already stays as it is."""
    if texts:
        rows = [{"job_id": job_id, "decoded_at": decoded_at, **asdict(text)} for job_id, decoded_at, text in texts]
        connection.execute(insert(probe_texts).on_conflict_do_nothing(), rows)


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
    num_sent, num_ended = database.one(query)
    return ProbeProgress(num_sent, num_ended)


def _results(counts: Table, since: datetime, *are_results: ColumnElement[bool]) -> Select[Any]:
    """The columns of ProbeResult from those rows of `counts` that are results of runs due after `since`.

    One bound of time finds them, so every partition is looked at once, not once a probe.
    """
    sent, result = probe_runs.c, counts.c
    counted = ("drafter", "draft_revision", "target_revision", "engine", "num_draft_tokens", "trials", "accepts")
    return (
        select(
            *(sent[name] for name in ("scheduled_for", "task", "probe_set", "position", "prompt_id")),
            *(result[name] for name in counted),
            literal(counts is evidence_rows).label("is_scored"),
        )
        .join(counts, result.job_id == sent.job_id)
        .where(sent.scheduled_for > since, result.decoded_at > since - _LONGEST_LIFE, *are_results)
    )


def _decoded() -> ColumnElement[bool]:
    """Whether a probe was decoded. The bounds leave out the partitions of other days."""
    sent, run = probe_runs.c, decode_runs.c
    return exists().where(
        run.job_id == sent.job_id,
        run.decoded_at >= sent.scheduled_for - _LONGEST_LIFE,
        run.decoded_at <= sent.scheduled_for + _LONGEST_LIFE,
    )


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


def _decoded_text(row: Row[Any]) -> DecodedText:
    ids = {name: tuple(getattr(row, name)) for name in ("token_ids", "second_ids", "gaps")}
    return of_row(DecodedText, row, text=of_row(ProbeText, row, **ids))
