"""Draft revisions and whether they are fit to serve."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any

from sqlalchemy import func, select, update
from sqlalchemy.dialects.postgresql import insert

from alphaloop.store.database import Store, of_row
from alphaloop.tables import draft_revisions


class DraftStatus(StrEnum):
    """What a draft revision may be used for."""

    CANDIDATE = "candidate"  #: measured, not serving
    ACTIVE = "active"
    STALE = "stale"  #: its acceptance fell: only probes use it
    RETIRED = "retired"


@dataclass(frozen=True, slots=True)
class DraftRevision:
    """One draft under one target."""

    drafter: str
    draft_revision: str
    target_revision: str
    status: DraftStatus
    status_reason: str
    registered_at: datetime
    status_changed_at: datetime
    parent_revision: str | None = None  #: what it was trained from
    trained_on: str | None = None
    figures: Mapping[str, Any] | None = None  #: measured on held-out text; None if never measured
    is_scorable: bool = False  #: one pass over a greedy text gives its counts


class DraftRegistry(Store):
    """The table of draft revisions."""

    def register(self, drafter: str, draft_revision: str, target_revision: str, *, is_scorable: bool = False) -> None:
        """Register a draft that is served; a new one and a candidate become active, others keep their status."""
        statement = insert(draft_revisions).values(
            drafter=drafter,
            draft_revision=draft_revision,
            target_revision=target_revision,
            status=DraftStatus.ACTIVE,
            status_reason="registered by a worker",
            is_scorable=is_scorable,
        )
        promote = statement.on_conflict_do_update(
            constraint=draft_revisions.primary_key,
            set_={
                "status": DraftStatus.ACTIVE,
                "status_reason": "served by a worker",
                "status_changed_at": func.now(),
                "is_scorable": is_scorable,
            },
            where=draft_revisions.c.status == DraftStatus.CANDIDATE,
        )
        self._database.change(promote)

    def register_trained(
        self,
        drafter: str,
        draft_revision: str,
        target_revision: str,
        *,
        parent_revision: str,
        trained_on: str,
        figures: Mapping[str, Any],
    ) -> DraftStatus:
        """Register a trained draft as a candidate; a known draft keeps its status. Returns the status."""
        facts = {"parent_revision": parent_revision, "trained_on": trained_on, "figures": dict(figures)}
        statement = insert(draft_revisions).values(
            drafter=drafter,
            draft_revision=draft_revision,
            target_revision=target_revision,
            status=DraftStatus.CANDIDATE,
            status_reason="trained, not served yet",
            **facts,
        )
        statement = statement.on_conflict_do_update(constraint=draft_revisions.primary_key, set_=facts)
        return DraftStatus(self._database.scalar(statement.returning(draft_revisions.c.status)))

    def stale(self, target_revision: str) -> set[tuple[str, str]]:
        """The (drafter, draft revision) that may not serve this target: stale ones and retired ones."""
        drafts = draft_revisions.c
        query = select(drafts.drafter, drafts.draft_revision).where(
            drafts.target_revision == target_revision, drafts.status.in_([DraftStatus.STALE, DraftStatus.RETIRED])
        )
        return {(drafter, revision) for drafter, revision in self._database.rows(query)}

    def set_status(
        self, drafter: str, draft_revision: str, target_revision: str, status: DraftStatus, reason: str
    ) -> bool:
        """Change a draft's status; returns whether the draft exists and had another status."""
        drafts = draft_revisions.c
        statement = (
            update(draft_revisions)
            .where(
                drafts.drafter == drafter,
                drafts.draft_revision == draft_revision,
                drafts.target_revision == target_revision,
                drafts.status != status,
            )
            .values(status=status, status_reason=reason, status_changed_at=func.now())
        )
        return self._database.change(statement) == 1

    def retired(self) -> set[str]:
        """The drafters that an operator retired, by name: no worker opens them."""
        query = select(draft_revisions.c.drafter).where(draft_revisions.c.status == DraftStatus.RETIRED)
        return {drafter for (drafter,) in self._database.rows(query)}

    def set_retired(self, drafter: str, is_retired: bool) -> None:
        """Retire every revision of a drafter, or make the retired ones active again."""
        drafts, was_retired = draft_revisions.c, draft_revisions.c.status == DraftStatus.RETIRED
        status, done = (DraftStatus.RETIRED, "retired") if is_retired else (DraftStatus.ACTIVE, "restored")
        statement = update(draft_revisions).where(
            drafts.drafter == drafter, ~was_retired if is_retired else was_retired
        )
        reason = f"{done} by an operator"
        self._database.change(statement.values(status=status, status_reason=reason, status_changed_at=func.now()))

    def all(self) -> list[DraftRevision]:
        """Every draft known, by name, then by age."""
        drafts = draft_revisions.c
        query = select(draft_revisions).order_by(
            drafts.drafter, drafts.registered_at, drafts.draft_revision, drafts.target_revision
        )
        return [of_row(DraftRevision, row, status=DraftStatus(row.status)) for row in self._database.rows(query)]
