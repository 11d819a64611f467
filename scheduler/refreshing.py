"""Which drafters a run has trained anew: heads whose target is new, and heads that are stale. Pure.

Each has a day between two refreshes. Heads are trained once for a new target: where they were nowhere better, or an
operator ended it, the same heads would give the same result. What became stale may be tried again every day.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from alphaloop.explaining.refreshing import ServedHeads, served
from alphaloop.settings.models import HeadsDrafterSettings, ModelSettings
from alphaloop.store.decision_inputs import DraftStatus
from alphaloop.store.refreshes import Refresh, RefreshReason, RefreshState
from alphaloop.store.workers import SeenWorker
from scheduler.events import Draft

#: Between the end of a refresh and the next one of the same drafter and target.
COOL_DOWN: Final = timedelta(days=1)
_UNFIT: Final = (DraftStatus.STALE, DraftStatus.RETIRED)


@dataclass(frozen=True, slots=True)
class DueRefresh:
    """A drafter that is to be trained anew."""

    drafter: str
    target_revision: str
    parent: str  #: its revision
    reason: RefreshReason


def due_refreshes(
    models: ModelSettings,
    workers: Sequence[SeenWorker],
    statuses: Mapping[Draft, DraftStatus],
    known: Sequence[Refresh],
    now: datetime,
) -> Iterator[DueRefresh]:
    """The refreshes to open now: of the heads in the settings, under the targets that workers serve.

    Args:
        models: which drafters there are.
        workers: what serves.
        statuses: of every draft.
        known: every refresh so far.
        now: by the database's clock.
    """
    for name, settings in models.drafters.items():
        if not isinstance(settings, HeadsDrafterSettings):
            continue
        for pair in served(workers, name):
            reason = _reason(pair, statuses.get((name, pair.draft_revision, pair.target_revision)))
            own = [r for r in known if (r.drafter, r.target_revision) == (name, pair.target_revision)]
            if reason is not None and not _is_settled(reason, pair, own, statuses, now):
                yield DueRefresh(name, pair.target_revision, pair.draft_revision, reason)


def _reason(pair: ServedHeads, status: DraftStatus | None) -> RefreshReason | None:
    if status is DraftStatus.STALE:
        return RefreshReason.DRAFT_STALE
    is_new = pair.trained_for not in ("", pair.target_revision)
    return RefreshReason.NEW_TARGET if is_new and status is not DraftStatus.RETIRED else None


def _is_settled(
    reason: RefreshReason,
    pair: ServedHeads,
    own: Iterable[Refresh],
    statuses: Mapping[Draft, DraftStatus],
    now: datetime,
) -> bool:
    """Whether one is open, ended lately, gave a draft that serves, or would give the same result again."""
    for refresh in own:
        if refresh.is_open or now - refresh.changed_at < COOL_DOWN:
            return True
        if refresh.parent_draft_revision != pair.draft_revision:
            continue
        candidate = (refresh.candidate_name or "", refresh.candidate_revision or "", refresh.target_revision)
        if refresh.state is RefreshState.KEPT and statuses.get(candidate) not in _UNFIT:
            return True
        if reason is RefreshReason.NEW_TARGET and refresh.state in (RefreshState.REJECTED, RefreshState.CANCELLED):
            return True
    return False
