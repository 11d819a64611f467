"""A refresh in words and figures, the same on every screen: before, stale and after it, and why it is in its state.

The three are tokens a round on held-out texts. Before: the parent where it was trained, on texts of that target. Stale
and after: parent and candidate on the texts of the new target, which the trainer judged both on.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from operator import attrgetter
from typing import Any

from alphaloop.acceptance import Interval
from alphaloop.draft_card import DraftJudgement
from alphaloop.errors import ConfigError
from alphaloop.experiment.figures import TaskSpeedup
from alphaloop.settings.models import ModelSettings
from alphaloop.store.database import Database, DatabaseClock
from alphaloop.store.decision_inputs import UNFIT, DraftRegistry, DraftRevision
from alphaloop.store.refreshes import Refresh, RefreshReason, RefreshState, RefreshStore, is_trainer_missing
from alphaloop.store.switchback import SwitchbackStore
from alphaloop.store.workers import SeenWorker, heard_lately
from alphaloop.wording import how_many, span


@dataclass(frozen=True, slots=True)
class RefreshLine:
    """One refresh as it is shown."""

    id: int
    drafter: str  #: the parent
    target_revision: str
    parent_draft_revision: str
    reason: RefreshReason
    state: RefreshState
    sentence: str
    before: float | None  #: tokens a round of the parent under the target that it was trained for; None: never judged
    stale: float | None  #: of the parent under this target; None: not judged yet
    after: float | None  #: of the candidate
    ratio: float | None  #: after over stale, on the same texts
    low: float | None  #: of the 95 % interval of `ratio`
    high: float | None
    trial: Mapping[str, Interval]  #: by task, how many times faster the candidate decodes than `over`, measured
    over: str  #: the parent; `vanilla` where the parent is stale, so that nothing drafts with it
    candidate_name: str | None
    candidate_revision: str | None
    num_attempts: int
    device_s: float
    opened_at: datetime
    changed_at: datetime

    @property
    def gain(self) -> str:
        """The ratio with its interval; empty before it is known."""
        if self.ratio is None:
            return ""
        if self.low is None or self.high is None:
            return f"{self.ratio:.2f}×"
        return gain_in_words(Interval(self.ratio, self.low, self.high))

    @property
    def rates(self) -> str:
        """Tokens a round before, stale and after, as far as they are known; else empty."""
        named = {"before": self.before, "stale": self.stale, "after": self.after}
        rates = ", ".join(f"{name} {rate:.2f}" for name, rate in named.items() if rate is not None)
        return f"tokens a round: {rates}{f', {self.gain}' if self.gain else ''}" if rates else ""

    @property
    def in_words(self) -> str:
        """Why it is in its state, what its trial has measured, and what it took so far."""
        trial = ", ".join(f"{task} {gain_in_words(gain)}" for task, gain in self.trial.items())
        took = f"{span(self.device_s)} of a trainer's time" if self.device_s >= 1 else ""
        parts = self.sentence, f"measured over {self.over}: {trial}" if trial else "", took
        return "; ".join(part for part in parts if part)


def refresh_lines(
    database: Database, models: ModelSettings, *, drafter: str | None = None, within: timedelta | None = None
) -> list[RefreshLine]:
    """The refreshes of a drafter or of all, the newest first; with `within` those that are open or changed lately.

    `models` say which drafters ask a candidate.
    """
    store, now = RefreshStore(database), DatabaseClock(database).now()
    switchback = SwitchbackStore(database)
    speedups = [*switchback.rivals(now), *switchback.over_vanilla(now)]
    known = store.all(None if within is None else now - within)
    drafts = DraftRegistry(database).all()
    judged = {(draft.drafter, draft.draft_revision): draft for draft in drafts if draft.figures is not None}
    unfit = {(draft.drafter, draft.draft_revision, draft.target_revision) for draft in drafts if draft.status in UNFIT}
    return [
        _line(
            refresh,
            judged.get((refresh.drafter, refresh.parent_draft_revision)),
            known,
            now,
            measured_gains(models, refresh, speedups, is_parent_unfit=refresh.parent in unfit),
        )
        for refresh in known
        if drafter in (None, refresh.drafter)
    ]


def _line(
    refresh: Refresh,
    parent: DraftRevision | None,
    known: Sequence[Refresh],
    now: datetime,
    measured: MeasuredGains,
) -> RefreshLine:
    total: dict[str, Any] = (refresh.figures or {}).get("total", {})
    return RefreshLine(
        id=refresh.id,
        drafter=refresh.drafter,
        target_revision=refresh.target_revision,
        parent_draft_revision=refresh.parent_draft_revision,
        reason=refresh.reason,
        state=refresh.state,
        sentence=_sentence(refresh, known, now),
        before=_tokens_a_round(parent),
        stale=total.get("parent"),
        after=total.get("candidate"),
        ratio=total.get("ratio"),
        low=total.get("low"),
        high=total.get("high"),
        trial={task: gain.speedup for task, gain in measured.by_task.items()},
        over=measured.over,
        candidate_name=refresh.candidate_name,
        candidate_revision=refresh.candidate_revision,
        num_attempts=refresh.attempt,
        device_s=round(refresh.device_s, 1),
        opened_at=refresh.opened_at,
        changed_at=refresh.changed_at,
    )


def _sentence(refresh: Refresh, known: Sequence[Refresh], now: datetime) -> str:
    said = [refresh.sentence] if refresh.sentence else []
    if is_trainer_missing(refresh, known, now):
        said.append("no trainer is alive: start `alphaloop trainer`")
    if refresh.num_erased:
        said.append(f"trained with {how_many(refresh.num_erased, 'job')} whose texts were erased since")
    return "; ".join(said)


def _tokens_a_round(draft: DraftRevision | None) -> float | None:
    if draft is None or draft.figures is None:
        return None
    total = DraftJudgement.model_validate(draft.figures).total
    return total.num_tokens / total.rounds if total.rounds else None


@dataclass(frozen=True, slots=True)
class TaskGain:
    """How many times faster a task is with a candidate than with its parent."""

    speedup: Interval
    sequence_s: float  #: seconds times sequences that it rests on


@dataclass(frozen=True, slots=True)
class MeasuredGains:
    """What a trial has measured."""

    over: str  #: what the candidate is compared with
    by_task: Mapping[str, TaskGain]


def measured_gains(
    models: ModelSettings, refresh: Refresh, speedups: Sequence[TaskSpeedup], *, is_parent_unfit: bool
) -> MeasuredGains:
    """The gains of a candidate over its parent; over vanilla where the parent drafts nothing and was never compared."""
    gains = trial_gains(models, refresh, speedups)
    if gains or not is_parent_unfit:
        return MeasuredGains(refresh.drafter, gains)
    return MeasuredGains("vanilla", trial_gains(models, refresh, speedups, over_vanilla=True))


def names_of(models: ModelSettings, refresh: Refresh) -> tuple[str, ...]:
    """The names of a refresh's candidate and of the hybrids that ask it, the candidate first."""
    return tuple(_parents(models, refresh)) or (refresh.candidate_name or "",)


def _parents(models: ModelSettings, refresh: Refresh) -> dict[str, str]:
    """By drafter of a trial, the one that it may replace; none where no worker loads it with these settings."""
    try:
        succeeding = models.successors(refresh.drafter, refresh.candidate_name or "")
    except ConfigError:
        return {}
    return {name: successor.parent for name, successor in succeeding.items()}


def trial_gains(
    models: ModelSettings, refresh: Refresh, speedups: Iterable[TaskSpeedup], *, over_vanilla: bool = False
) -> dict[str, TaskGain]:
    """By task, how many times faster the candidate of a refresh is than its parent, as far as that is measured.

    With `over_vanilla`, than vanilla.
    """
    parents = _parents(models, refresh)
    gains: dict[str, list[TaskGain]] = {}
    for one in speedups:
        subject = one.subject
        if (
            one.speedup is None
            or not 0 < one.speedup.low < one.speedup.high < math.inf
            or subject.target_revision != refresh.target_revision
        ):
            continue
        gain = one.speedup
        if parents.get(one.against) == subject.drafter:  # the parent decodes, and the candidate is its control
            gain = Interval(1 / gain.mean, 1 / gain.high, 1 / gain.low)
        elif one.against != ("" if over_vanilla else parents.get(subject.drafter)) or subject.drafter not in parents:
            continue
        gains.setdefault(subject.task, []).append(TaskGain(gain, one.sequence_s))
    means = {task: (mean_gain(own), sum(gain.sequence_s for gain in own)) for task, own in gains.items()}
    return {task: TaskGain(gain, seconds) for task, (gain, seconds) in sorted(means.items()) if gain is not None}


def mean_gain(gains: Iterable[TaskGain]) -> Interval | None:
    """The geometric mean of gains, weighted by the time that each rests on, with its 95 % interval; None of none.

    ln(gain) of each is taken to be normal, and independent of the others: they are of other rounds.
    """
    gains = [gain for gain in gains if gain.sequence_s > 0]
    if not gains:
        return None
    whole_s = sum(gain.sequence_s for gain in gains)
    mean = sum(gain.sequence_s * math.log(gain.speedup.mean) for gain in gains) / whole_s
    low, high = (
        math.sqrt(sum((gain.sequence_s * math.log(bound(gain.speedup) / gain.speedup.mean)) ** 2 for gain in gains))
        / whole_s
        for bound in (attrgetter("low"), attrgetter("high"))
    )
    return Interval(math.exp(mean), math.exp(mean - low), math.exp(mean + high))


def gain_in_words(gain: Interval) -> str:
    """`1.12× [1.05 1.20]`."""
    return f"{gain.mean:.2f}× [{gain.low:.2f} {gain.high:.2f}]"


@dataclass(frozen=True, slots=True)
class ServedHeads:
    """A drafter under a target, as a worker runs them."""

    target_revision: str
    draft_revision: str
    trained_for: str  #: the target that it was trained for; empty: its files do not say


def served(workers: Sequence[SeenWorker], drafter: str) -> list[ServedHeads]:
    """Every target and revision of a drafter that workers serve which were heard of lately."""
    setups = [worker.load.setup for worker in heard_lately(workers)]
    return sorted(
        {
            ServedHeads(setup.facts.target_revision, state.revision, state.trained_for)
            for setup in setups
            if setup
            for state in setup.drafters
            if state.name == drafter
        },
        key=lambda pair: (pair.target_revision, pair.draft_revision),
    )
