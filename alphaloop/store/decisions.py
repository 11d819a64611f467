"""What is kept of decisions: the log of choices, budgets of exploration, and snapshots.

The log says when a task's way of decoding, or the reason for it, changed; from what to what, and why. The figures
for a change are kept with it, because costs and evidence are overwritten. There is one budget a task for all
workers, kept over restarts. Snapshots are written in batches by workers; `explain` and `replay` read them, with the
jobs they decided.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final, NamedTuple, Self
from uuid import UUID

from sqlalchemy import (
    BigInteger,
    Column,
    ColumnElement,
    Connection,
    Row,
    Select,
    Text,
    cast,
    func,
    select,
    tuple_,
)
from sqlalchemy.dialects.postgresql import insert

from alphaloop.deciding.decision import NOT_A_CHOICE, Decision, DraftSetting, reason_said
from alphaloop.deciding.evidence import HALF_LIFE, EvidenceSums, together
from alphaloop.deciding.exploration import ExplorationBudget
from alphaloop.deciding.snapshot import JobsAlike, SessionFacts, Snapshot, decode
from alphaloop.messages import Purpose
from alphaloop.store.database import Database, RowSet, Store, of_row, values_of
from alphaloop.store.decision_inputs import unpack
from alphaloop.store.housekeeping import ensure_days, utc_day
from alphaloop.tables import KEY, acceptance_state, decision_snapshots, decisions, decode_runs, exploration_budgets

log = logging.getLogger(__name__)

#: No job is decoded for so long. Bounds the partitions that are read.
_LONGEST_DECODING: Final = timedelta(days=1)
# The document travels as text: as part of the parameter's own JSON it would be written twice.
_ROWS: Final = RowSet([Column(c.name, Text) if c.name == "snapshot" else c for c in decision_snapshots.c])
_INSERT: Final = (
    f"INSERT INTO decision_snapshots ({_ROWS.columns}) "  # noqa: S608
    f"SELECT {', '.join(f'CAST(given.{n} AS json)' if n == 'snapshot' else f'given.{n}' for n in _ROWS.names)} "
    f"FROM {_ROWS.source} ON CONFLICT DO NOTHING"
)


@dataclass(frozen=True, slots=True)
class LoggedSetting:
    """Mode, drafter and draft length."""

    mode: str
    drafter: str | None
    num_draft_tokens: int


@dataclass(frozen=True, slots=True)
class ExpectedSpeedup:
    """What was expected of one alternative."""

    drafter: str | None
    num_draft_tokens: int
    speedup: float
    speedup_low: float
    speedup_high: float


@dataclass(frozen=True, slots=True)
class ChoiceFigures:
    """What was expected of a choice and of its best rival, and the evidence of the drafter that it is about."""

    tokens_per_round: float
    round_ms: float
    chosen: ExpectedSpeedup
    rival: ExpectedSpeedup | None
    jobs: float  #: weighted jobs; of the rival's drafter if vanilla was chosen
    trials: tuple[float, ...]
    accepts: tuple[float, ...]

    @classmethod
    def of_row(cls, row: Any) -> Self | None:
        """From a row of decisions; None where it has none."""
        if row.speedup is None:
            return None
        names = ("drafter", "num_draft_tokens", "speedup", "speedup_low", "speedup_high")
        rival = ExpectedSpeedup(*(getattr(row, f"rival_{name}") for name in names))
        chosen = ExpectedSpeedup(row.to_drafter, row.to_num_draft_tokens, *(getattr(row, name) for name in names[2:]))
        return of_row(cls, row, chosen=chosen, rival=None if row.rival_num_draft_tokens is None else rival)


@dataclass(frozen=True, slots=True)
class DecisionChange:
    """One row of the log; `before` is None for a task's first choice."""

    decided_at: datetime
    task: str
    target_revision: str
    device: str
    sampling_bucket: str
    batch: int
    before: LoggedSetting | None
    after: LoggedSetting
    reason: str
    explanation: str
    owner: str
    figures: ChoiceFigures | None = None  #: None where nothing was weighed


_SETTING: Final = tuple(LoggedSetting.__slots__)


class DecisionLog:
    """The table of choices that changed. The evidence kept with a change is faded by `half_life`."""

    def __init__(self, database: Database, *, half_life: timedelta = HALF_LIFE) -> None:
        self._database = database
        self._half_life = half_life

    def record_change(self, subject: BudgetSubject, batch: int, decision: Decision, owner: str) -> bool:
        """Log the decision if it, or its reason, differs from the last choice logged; returns whether it was logged.

        The reason counts, because vanilla without history is not vanilla without gain. Choices of all workers for the
        same subject are compared.
        """
        if decision.reason in NOT_A_CHOICE:
            return False
        choice = LoggedSetting(decision.mode, decision.drafter, decision.num_draft_tokens)
        with self._database.begin() as connection:
            if _last_choice(connection, subject) == (choice, decision.reason):
                return False
            # Two workers with the same change log it once. Only a change takes the lock.
            connection.execute(select(func.pg_advisory_xact_lock(func.hashtextextended("\n".join(subject), 0))))
            last = _last_choice(connection, subject)
            if last == (choice, decision.reason):
                return False
            sides = {"from": last[0] if last else None, "to": choice}
            connection.execute(
                insert(decisions).values(
                    **subject._asdict(),
                    batch=batch,
                    **{
                        f"{side}_{n}": setting and getattr(setting, n)
                        for side, setting in sides.items()
                        for n in _SETTING
                    },
                    reason=decision.reason,
                    explanation=decision.explanation,
                    owner=owner,
                    **_figures(connection, subject, decision, self._half_life),
                )
            )
        return True

    def last_choice(
        self, subject: BudgetSubject, *, until: datetime | None = None, running: int | None = None
    ) -> DraftSetting | None:
        """What was chosen last for a subject, up to a moment; None if nothing ever was.

        With `running`, what was chosen last beside about this number of sequences, where anything was.
        """
        with self._database.begin() as connection:
            last = _last_choice(connection, subject, until, running)
        return DraftSetting(last[0].drafter, last[0].num_draft_tokens) if last else None

    def latest(self, task: str, limit: int = 20, *, until: datetime | None = None) -> list[DecisionChange]:
        """The last changes of a task's choice, up to a moment, newest first."""
        query = select(decisions).where(decisions.c.task == task).order_by(decisions.c.id.desc()).limit(limit)
        if until is not None:
            query = query.where(decisions.c.decided_at <= until)
        return [change_of(row) for row in self._database.rows(query)]


def change_of(row: Any) -> DecisionChange:
    """From a row of the log."""
    before = LoggedSetting(row.from_mode, row.from_drafter, row.from_num_draft_tokens) if row.from_mode else None
    after = LoggedSetting(row.to_mode, row.to_drafter, row.to_num_draft_tokens)
    reason = reason_said(row.reason, row.speedup_low)
    return of_row(DecisionChange, row, before=before, after=after, reason=reason, figures=ChoiceFigures.of_row(row))


def _is_about(column: ColumnElement[int], running: int) -> ColumnElement[bool]:
    """Whether the number of sequences is of the same load as `running`, by the loads of alphaloop.deciding.decision."""
    load = 1 << (max(running, 1) - 1).bit_length()
    return column.between(load // 2 + 1, load)


def _last_choice(
    connection: Connection, subject: BudgetSubject, until: datetime | None = None, running: int | None = None
) -> tuple[LoggedSetting, str] | None:
    columns = decisions.c
    query = (
        select(columns.to_mode, columns.to_drafter, columns.to_num_draft_tokens, columns.reason)
        .where(tuple_(columns.task, columns.target_revision, columns.device, columns.sampling_bucket) == subject)
        .limit(1)
    )
    if running is not None:
        query = query.order_by(_is_about(columns.batch, running).desc())
    query = query.order_by(decisions.c.id.desc())
    if until is not None:
        query = query.where(decisions.c.decided_at <= until)
    row = connection.execute(query).first()
    return (LoggedSetting(row.to_mode, row.to_drafter, row.to_num_draft_tokens), row.reason) if row else None


def _figures(
    connection: Connection, subject: BudgetSubject, decision: Decision, half_life: timedelta
) -> dict[str, Any]:
    """The columns of decisions that hold the figures; none if no alternatives were compared."""
    chosen = decision.chosen
    if chosen is None:
        return {}
    rival = max((a for a in decision.alternatives if a is not chosen), key=lambda a: a.speedup, default=None)
    drafter = chosen.drafter or (rival.drafter if rival else None)
    seen = _evidence(
        connection, subject.task, subject.target_revision, drafter or "", decision.draft_revision, half_life
    )
    expected = ("speedup", "speedup_low", "speedup_high")
    return {
        **{name: getattr(chosen, name) for name in ("tokens_per_round", "round_ms", *expected)},
        **{f"rival_{n}": rival and getattr(rival, n) for n in ("drafter", "num_draft_tokens", *expected)},
        "jobs": seen.jobs if seen else 0.0,
        "trials": seen.trials if seen else (),
        "accepts": seen.accepts if seen else (),
    }


def _evidence(
    connection: Connection,
    task: str,
    target_revision: str,
    drafter: str,
    draft_revision: str | None,
    half_life: timedelta,
) -> EvidenceSums | None:
    """The evidence of all keys of the task; without a revision, of the engine and revision that were used last."""
    state = acceptance_state.c
    query = select(*(state[name] for name in KEY), state.as_of, state.evidence).where(
        state.target_revision == target_revision, state.drafter == drafter, state.task == task
    )
    if draft_revision is not None:
        query = query.where(state.draft_revision == draft_revision)
    rows = connection.execute(query).all()
    if not rows:
        return None
    newest = max(rows, key=lambda row: row.as_of)
    mine = [row for row in rows if (row.engine, row.draft_revision) == (newest.engine, newest.draft_revision)]
    return together([unpack(row.evidence, row.as_of).all for row in mine], half_life)


class BudgetSums(NamedTuple):
    """What the database holds of a budget, or a change of it."""

    balance: float = 0.0
    accrued: float = 0.0
    spent: float = 0.0

    @classmethod
    def of(cls, budget: ExplorationBudget) -> BudgetSums:
        """Those of a budget."""
        return cls(budget.balance, budget.accrued, budget.spent)

    def plus(self, other: BudgetSums) -> BudgetSums:
        """Both together."""
        return BudgetSums(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))

    def minus(self, other: BudgetSums) -> BudgetSums:
        """What is more than in `other`."""
        return BudgetSums(*(mine - theirs for mine, theirs in zip(self, other, strict=True)))


class BudgetSubject(NamedTuple):
    """Whose choice is logged, and whose exploration has a budget."""

    task: str
    target_revision: str
    device: str
    sampling_bucket: str


class BudgetStore(Store):
    """The table of budgets. It does not hold how long a drafter was not used: history shows that."""

    def read(self, subject: BudgetSubject) -> BudgetSums | None:
        """What is left; None where there was no credit so far."""
        columns = exploration_budgets.c
        query = select(*(columns[name] for name in BudgetSums._fields)).where(
            *(columns[name] == value for name, value in subject._asdict().items())
        )
        row = self._database.row(query)
        return None if row is None else BudgetSums(*row)

    def add(self, subject: BudgetSubject, change: BudgetSums) -> BudgetSums:
        """Add a change; returns what there is with the changes of other workers.

        Workers add differences, so that none of them overwrites what another spent.
        """
        statement = insert(exploration_budgets).values(**subject._asdict(), **change._asdict())
        columns = exploration_budgets.c
        added = {name: columns[name] + statement.excluded[name] for name in BudgetSums._fields}
        statement = statement.on_conflict_do_update(
            index_elements=list(BudgetSubject._fields), set_={**added, "changed_at": func.now()}
        )
        return BudgetSums(*self._database.one(statement.returning(*(columns[name] for name in BudgetSums._fields))))


@dataclass(frozen=True, slots=True)
class SnapshotRow:
    """A row of decision_snapshots; `snapshot` is JSON."""

    decided_at: datetime
    decision_id: UUID
    task: str
    sampling_bucket: str
    num_running: int
    snapshot: str


@dataclass(frozen=True, slots=True)
class StoredSnapshot:
    """A snapshot that was read, and the session that decided."""

    snapshot: Snapshot
    facts: SessionFacts


class SnapshotStore(Store):
    """The table of snapshots."""

    def add(self, rows: Sequence[SnapshotRow]) -> None:
        """Write rows in one transaction; the same rows again change nothing. A missing partition is made first."""
        given = map(values_of, rows)
        with self._database.begin() as connection:
            ensure_days(connection, {utc_day(row.decided_at) for row in rows})
            connection.exec_driver_sql(_INSERT, {"rows": RowSet.parameter(given)})

    def last(
        self, task: str, sampling_bucket: str, until: datetime, *, running: int | None = None
    ) -> StoredSnapshot | None:
        """The last decision for such jobs up to a moment; with `running`, beside about this number of sequences."""
        columns = decision_snapshots.c
        query = select(decision_snapshots).where(
            columns.task == task, columns.sampling_bucket == sampling_bucket, columns.decided_at <= until
        )
        if running is not None:
            query = query.where(_is_about(columns.num_running, running))
        return self._first(query.order_by(columns.decided_at.desc()))

    def of_job(self, job_id: str) -> StoredSnapshot | None:
        """The decision that a job was decoded with; None where it is not stored."""
        runs, columns = decode_runs.c, decision_snapshots.c
        query = (
            select(decision_snapshots)
            .join_from(decode_runs, decision_snapshots, runs.decode_batch_id == columns.decision_id)
            .where(runs.job_id == job_id, columns.decided_at <= runs.decoded_at)
        )
        return self._first(query.order_by(columns.decided_at.desc()))

    def kind_of_job(self, job_id: str) -> tuple[str, str, str] | None:
        """The segment, the prompt bucket and the form of a decoded job; None where its run is not stored."""
        runs = decode_runs.c
        query = select(runs.segment, runs.prompt_bucket, runs.form_bucket).where(runs.job_id == job_id).limit(1)
        row = self._database.row(query)
        return None if row is None else (row.segment, row.prompt_bucket, row.form_bucket)

    def first_and_last(self, task: str | None = None) -> tuple[datetime, datetime] | None:
        """When the first and the last decision that is kept was taken; None if there is none."""
        columns = decision_snapshots.c
        query = select(func.min(columns.decided_at), func.max(columns.decided_at))
        if task is not None:
            query = query.where(columns.task == task)
        first, last = self._database.one(query)
        return None if first is None else (first, last)

    def between(
        self, since: datetime, until: datetime, *, task: str | None = None
    ) -> Iterator[tuple[StoredSnapshot, Sequence[JobsAlike]]]:
        """The decisions in [since, until), in order, each with its recorded jobs; read as they are asked for."""
        columns = decision_snapshots.c
        where = [columns.decided_at >= since, columns.decided_at < until]
        if task is not None:
            where.append(columns.task == task)
        query = select(decision_snapshots).where(*where).order_by(columns.decided_at, columns.decision_id)
        with self._database.begin() as connection:
            jobs = _jobs(connection, where, since, until)
            for row in connection.execute(query.execution_options(yield_per=500)):
                if (stored := _read(row)) is not None:
                    yield stored, jobs.get(row.decision_id, [])

    def num_without(self, since: datetime, until: datetime, *, task: str | None = None) -> int:
        """Jobs of traffic decoded in [since, until) whose decision has no snapshot."""
        runs, columns = decode_runs.c, decision_snapshots.c
        has_one = select(columns.decision_id).where(
            columns.decision_id == runs.decode_batch_id,
            columns.decided_at >= since - _LONGEST_DECODING,
            columns.decided_at < until,
        )
        query = select(func.count()).where(
            runs.decoded_at >= since, runs.decoded_at < until, runs.purpose == Purpose.TRAFFIC, ~has_one.exists()
        )
        if task is not None:
            query = query.where(runs.task == task)
        return int(self._database.scalar(query))

    def _first(self, query: Select[Any]) -> StoredSnapshot | None:
        row = self._database.row(query.limit(1))
        return None if row is None else _read(row)


def _jobs(
    connection: Connection, where: Sequence[ColumnElement[bool]], since: datetime, until: datetime
) -> dict[UUID, list[JobsAlike]]:
    """The jobs of these decisions, by decision."""
    runs, columns = decode_runs.c, decision_snapshots.c
    alike = (
        *(runs.segment, runs.prompt_bucket, runs.form_bucket, runs.purpose),
        *(runs.drafter, runs.num_draft_tokens, runs.draft_revision),
    )
    query = (
        select(
            columns.decision_id,
            *alike,
            func.count().label("num_jobs"),
            cast(func.sum(runs.num_tokens), BigInteger).label("num_tokens"),
            cast(func.sum(runs.num_prompt_tokens), BigInteger).label("num_prompt_tokens"),
            func.sum(runs.device_s).label("device_s"),
        )
        .join_from(decision_snapshots, decode_runs, runs.decode_batch_id == columns.decision_id)
        .where(*where, runs.decoded_at >= since, runs.decoded_at < until + _LONGEST_DECODING)
        .group_by(columns.decision_id, *alike)
    )
    by_decision: dict[UUID, list[JobsAlike]] = {}
    for row in connection.execute(query):
        setting = DraftSetting(row.drafter or None, row.num_draft_tokens)
        by_decision.setdefault(row.decision_id, []).append(of_row(JobsAlike, row, setting=setting))
    return by_decision


def _read(row: Row[Any]) -> StoredSnapshot | None:
    """From a row; None of a release whose snapshots have another form."""
    try:
        decoded = decode(row.snapshot, row.decision_id, row.decided_at, row.task, row.sampling_bucket, row.num_running)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        log.info("the snapshot of a decision of another release is not read: %s", type(error).__name__)
        return None
    return StoredSnapshot(*decoded)
