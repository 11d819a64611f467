"""The log of choices: when a task's way of decoding, or the reason for it, changed; from what to what, and why."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal

from sqlalchemy import Connection, func, insert, select

from alphaloop.deciding import decision as deciding
from alphaloop.deciding.decision import NOT_A_CHOICE, Decision
from alphaloop.store.choice_figures import ChoiceFigures, figures_of
from alphaloop.store.database import Database, of_row
from alphaloop.tables import decisions


@dataclass(frozen=True, slots=True)
class LoggedSetting:
    """Mode, drafter and draft length."""

    mode: str
    drafter: str | None
    num_draft_tokens: int


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


class DecisionLog:
    """The table of choices that changed. The evidence kept with a change is faded by `half_life`."""

    def __init__(self, database: Database, *, half_life: timedelta = timedelta(days=3)) -> None:
        self._database = database
        self._half_life = half_life

    def record_change(
        self,
        task: str,
        target_revision: str,
        device: str,
        sampling_bucket: str,
        batch: int,
        decision: Decision,
        owner: str,
    ) -> bool:
        """Log the decision if it, or its reason, differs from the last choice logged; returns whether it was logged.

        The reason counts, because vanilla without history is not vanilla without gain. Choices of all workers are
        compared within (task, target revision, device, sampling bucket).
        """
        if decision.reason in NOT_A_CHOICE:
            return False
        subject = (task, target_revision, device, sampling_bucket)
        choice = LoggedSetting(decision.mode, decision.drafter, decision.num_draft_tokens)
        with self._database.begin() as connection:
            if _last_choice(connection, *subject) == (choice, decision.reason):
                return False
            # Two workers with the same change log it once. Only a change takes the lock.
            connection.execute(select(func.pg_advisory_xact_lock(func.hashtextextended("\n".join(subject), 0))))
            last = _last_choice(connection, *subject)
            if last == (choice, decision.reason):
                return False
            before = last[0] if last else None
            connection.execute(
                insert(decisions).values(
                    task=task,
                    target_revision=target_revision,
                    device=device,
                    sampling_bucket=sampling_bucket,
                    batch=batch,
                    from_mode=before.mode if before else None,
                    from_drafter=before.drafter if before else None,
                    from_num_draft_tokens=before.num_draft_tokens if before else None,
                    to_mode=choice.mode,
                    to_drafter=choice.drafter,
                    to_num_draft_tokens=choice.num_draft_tokens,
                    reason=decision.reason,
                    explanation=decision.explanation,
                    owner=owner,
                    **figures_of(connection, task, target_revision, decision, self._half_life),
                )
            )
        return True

    def last_choice(
        self,
        task: str,
        target_revision: str,
        device: str,
        sampling_bucket: str,
        *,
        until: datetime | None = None,
        running: int | None = None,
    ) -> deciding.DraftSetting | None:
        """What was chosen last for these, up to a moment; None if nothing ever was.

        With `running`, what was chosen last beside about so many sequences, where anything was.
        """
        with self._database.begin() as connection:
            last = _last_choice(connection, task, target_revision, device, sampling_bucket, until, running)
        return deciding.DraftSetting(last[0].drafter, last[0].num_draft_tokens) if last else None

    def latest(self, task: str, limit: int = 20, *, until: datetime | None = None) -> list[DecisionChange]:
        """The last changes of a task's choice, up to a moment, newest first."""
        query = select(decisions).where(decisions.c.task == task).order_by(decisions.c.id.desc()).limit(limit)
        if until is not None:
            query = query.where(decisions.c.decided_at <= until)
        return [_change(row) for row in self._database.rows(query)]


def setting_of(row: Any, side: Literal["from", "to"]) -> LoggedSetting | None:
    """What a change was made from or to; None for the first choice of a task."""
    mode, drafter, k = (getattr(row, f"{side}_{name}") for name in ("mode", "drafter", "num_draft_tokens"))
    return LoggedSetting(mode, drafter, k) if mode else None


def _change(row: Any) -> DecisionChange:
    figures = ChoiceFigures.of_row(row)
    return of_row(DecisionChange, row, before=setting_of(row, "from"), after=setting_of(row, "to"), figures=figures)


def _last_choice(
    connection: Connection,
    task: str,
    target_revision: str,
    device: str,
    sampling_bucket: str,
    until: datetime | None = None,
    running: int | None = None,
) -> tuple[LoggedSetting, str] | None:
    query = (
        select(decisions.c.to_mode, decisions.c.to_drafter, decisions.c.to_num_draft_tokens, decisions.c.reason)
        .where(
            decisions.c.task == task,
            decisions.c.target_revision == target_revision,
            decisions.c.device == device,
            decisions.c.sampling_bucket == sampling_bucket,
        )
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
