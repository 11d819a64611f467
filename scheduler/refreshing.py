"""Which drafters a run has trained anew, and how trials end. Pure.

Trained anew are heads whose target is new, and heads that are stale.

Each has a day between two refreshes. Heads are trained once for a new target: where they were nowhere better, or an
operator ended it, the same heads would give the same result. What became stale may be tried again every day.

A trial is decided when the candidate is faster or slower than its parent over all tasks together, or after MOST_JOBS.
Where the parent is stale it drafts nothing, and the candidate is compared with vanilla.
Then whichever no task uses is retired: a candidate at once, a parent after a day, in which decisions can go back to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from alphaloop.experiment.figures import TaskSpeedup
from alphaloop.explaining.refreshing import ServedHeads, gain_in_words, mean_gain, measured_gains, names_of, served
from alphaloop.settings.models import ModelSettings
from alphaloop.store.decision_inputs import UNFIT, DraftStatus
from alphaloop.store.refreshes import Refresh, RefreshReason, RefreshState
from alphaloop.store.workers import SeenWorker
from alphaloop.wording import how_many
from scheduler.events import Draft

#: Between the end of a refresh and the next one of the same drafter and target.
COOL_DOWN: Final = timedelta(days=1)


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
    for name in models.trainable:
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
        if refresh.state is RefreshState.KEPT and statuses.get(candidate) not in UNFIT:
            return True
        if reason is RefreshReason.NEW_TARGET and refresh.state in (RefreshState.REJECTED, RefreshState.CANCELLED):
            return True
    return False


#: Jobs of a target after which a trial is decided, whatever was measured.
MOST_JOBS: Final = 2_000


@dataclass(frozen=True, slots=True)
class EndedTrial:
    """A trial that is decided."""

    refresh: Refresh
    state: RefreshState  #: kept or rejected
    sentence: str


def ended_trials(
    models: ModelSettings,
    known: Sequence[Refresh],
    statuses: Mapping[Draft, DraftStatus],
    speedups: Sequence[TaskSpeedup],
    choices: Mapping[str, str | None],
    num_jobs: Callable[[Refresh], int],
) -> Iterator[EndedTrial]:
    """The trials to end now.

    Args:
        models: what the settings say of drafters.
        known: every refresh so far.
        statuses: of every draft.
        speedups: drafters over vanilla; those on trial also over the other of the pair.
        choices: by task, the drafter that its next job would have; None: vanilla.
        num_jobs: of a refresh's target since its trial began.
    """
    for refresh in known:
        if refresh.state is not RefreshState.TRIAL:
            continue
        gains = measured_gains(models, refresh, speedups, is_parent_unfit=statuses.get(refresh.parent) in UNFIT)
        overall = mean_gain(gains.by_task.values())
        is_measured = overall is not None and not overall.low <= 1 <= overall.high
        num = num_jobs(refresh)
        if not is_measured and num < MOST_JOBS:
            continue
        names = names_of(models, refresh)
        using = sorted(task for task, drafter in choices.items() if drafter in names)
        measured = f"; {gain_in_words(overall)} over {gains.over}" if overall is not None else ""
        after = f"after {how_many(num, 'job')}{measured}"
        unloaded = f"; {refresh.sentence}" if refresh.sentence.startswith("not loaded") else ""
        if using:
            yield EndedTrial(
                refresh, RefreshState.KEPT, f"{', '.join(using)} {'uses' if len(using) == 1 else 'use'} it {after}"
            )
        else:
            yield EndedTrial(refresh, RefreshState.REJECTED, f"no task uses it {after}{unloaded}")


def replaced_parents(
    models: ModelSettings,
    known: Sequence[Refresh],
    statuses: Mapping[Draft, DraftStatus],
    choices: Mapping[str, str | None],
    now: datetime,
) -> Iterator[tuple[Draft, str]]:
    """Parents that no task has used a day after their candidate was kept, each with the reason to retire it."""
    for refresh in known:
        candidate = (refresh.candidate_name or "", refresh.candidate_revision or "", refresh.target_revision)
        if refresh.state is not RefreshState.KEPT or now - refresh.changed_at < COOL_DOWN:
            continue
        if statuses.get(refresh.parent) in (None, DraftStatus.RETIRED):
            continue
        if statuses.get(candidate) is not DraftStatus.ACTIVE:  # a server's stays a candidate: no worker loads it
            continue
        asking = {name for name in models.drafters if refresh.drafter in models.with_sources([name])}
        if not {refresh.drafter, *asking} & set(choices.values()):
            yield refresh.parent, f"no task uses it since {refresh.candidate_name} was kept"
