"""The log of choices: when a task's way of decoding, or the reason for it, changed; from what to what, and why.

The figures behind a change are kept with it, because costs and evidence are overwritten.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final, Self

from sqlalchemy import Connection, func, insert, select, tuple_

from alphaloop.deciding.decision import NOT_A_CHOICE, Decision, DraftSetting
from alphaloop.deciding.evidence import EvidenceSums, together
from alphaloop.store.acceptance_state import unpack
from alphaloop.store.budgets import BudgetSubject
from alphaloop.store.database import Database, of_row
from alphaloop.tables import KEY, acceptance_state, decisions


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

    def __init__(self, database: Database, *, half_life: timedelta = timedelta(days=3)) -> None:
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
                    **{f"{side}_{n}": one and getattr(one, n) for side, one in sides.items() for n in _SETTING},
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

        With `running`, what was chosen last beside about so many sequences, where anything was.
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
    return of_row(DecisionChange, row, before=before, after=after, figures=ChoiceFigures.of_row(row))


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
        load = 1 << (max(running, 1) - 1).bit_length()  # as alphaloop.deciding.decision has it
        query = query.order_by(decisions.c.batch.between(load // 2 + 1, load).desc())
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
    """Of all keys of the task; without a revision, of the engine and revision that were used last."""
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
