"""Replay: past decisions are taken again from their snapshots under other rules, and priced. Pure; writes nothing.

Each decision has the posteriors, costs and jobs of its own moment. Under the rules of that time it is the decision that
was taken. Under other rules the incumbents and the exploration budgets are those that the other rules lead to, so they
are carried from decision to decision. The evidence stays what history decoded, not what the other rules would have.

A job of n tokens that shares its rounds with b sequences takes, of the device, the time to read its prompt and
n / (b · tokens a round) rounds, by the posterior and the costs of its snapshot. What was decoded is priced in the same
way, so errors that both share cancel in the ratio by which `measured_s` is multiplied. Bounds are those of acceptance
alone: settings are priced with draws from the posterior, both with the same draw. A drafter's draws in one task are the
same for all decisions, because successive decisions share their uncertainty.
"""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from alphaloop.acceptance import Interval
from alphaloop.deciding.decision import Decision, DraftSetting, IncumbentKey, Reason
from alphaloop.deciding.exploration import ExplorationBudget
from alphaloop.deciding.goodput import DrafterState, JobSize, Shares
from alphaloop.deciding.job_facts import TaskRules
from alphaloop.deciding.policy import Group
from alphaloop.deciding.posterior import Posterior
from alphaloop.deciding.snapshot import JobsAlike, SessionFacts, Snapshot
from alphaloop.messages import Decoding, Purpose

_NUM_DRAWS: Final = 200
_LEAST_TRIALS: Final = 1.0
#: Reasons that follow from the job or from the engine's state, whatever the rules are.
_GIVEN: Final = frozenset(
    {
        Reason.PROBE,
        Reason.CONTROL,
        Reason.SWITCHED_OFF,
        Reason.NO_MEMORY,
        Reason.FIRST_TOKENS,
        Reason.CANNOT_SERVE,
        Reason.UNDECIDED,
    }
)

Draws = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Rules:
    """A configuration as far as snapshots can be decided under it, and how its drafters differ from today's."""

    explore_share: float
    tasks: Mapping[str, TaskRules]  #: those without rules have the defaults
    longest_drafts: Mapping[str, int] = field(default_factory=dict)  #: of drafters whose setting changed
    removed: frozenset[str] = frozenset()  #: drafters that it does not have

    def drafters(self, snapshot: Snapshot) -> tuple[DrafterState, ...]:
        """The snapshot's drafters under this configuration."""
        return tuple(
            replace(d, max_draft_tokens=min(d.max_draft_tokens, self.longest_drafts.get(d.name, d.max_draft_tokens)))
            for d in snapshot.drafters
            if d.name not in self.removed
        )


class Replay:
    """The decisions of one session, in their order, under `rules`."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._incumbents: dict[IncumbentKey, DraftSetting] = {}
        self._budgets: dict[tuple[str, str], ExplorationBudget] = {}

    def decide(self, past: Snapshot, facts: SessionFacts) -> tuple[Decision, ...]:
        """The decision of each group of its jobs."""
        share = self._rules.explore_share
        rules = self._rules.tasks.get(past.subject.task) or TaskRules()
        now = past.under(rules, self._rules.drafters(past))
        if (now.context, now.drafters, share) == (past.context, past.drafters, facts.explore_share):
            return past.decide()
        subject = past.subject.task, past.subject.sampling_bucket
        largest = max(range(len(past.groups)), key=lambda index: past.groups[index].num_jobs)
        group = past.groups[largest]
        key = IncumbentKey.of(*subject, group.prompt_bucket, past.context.num_running, group.form_bucket)
        budget = self._budgets.get(subject, past.budget)
        now = replace(
            now,
            incumbent=self._incumbents.get(key, past.incumbent),
            budget=budget and replace(budget, explore_share=share),
        )
        decisions = now.decide()
        whole = decisions[largest]
        if whole.kept is not None:
            self._incumbents[key] = whole.kept
        if whole.budget is not None:
            self._budgets[subject] = whole.budget
        return decisions


def is_given(past: Snapshot, decision: Decision) -> bool:
    """Whether rules had no say in how the jobs were decoded."""
    subject = past.subject
    return subject.purpose is not Purpose.TRAFFIC or subject.decoding is not Decoding.AUTO or decision.reason in _GIVEN


@dataclass(slots=True)
class Compared:
    """A task, or all of them: device time as it was and as it would have been."""

    num_jobs: int = 0
    num_tokens: int = 0
    num_same_jobs: int = 0
    measured_s: float = 0.0
    was_s: float = 0.0  #: computed, of history's settings
    would_s: float = 0.0
    num_untested_tokens: int = 0  #: drafted at a position that no earlier draft of the task reached
    was_draws: Draws = field(default_factory=lambda: np.zeros(_NUM_DRAWS))
    would_draws: Draws = field(default_factory=lambda: np.zeros(_NUM_DRAWS))
    settings: Counter[tuple[DraftSetting, DraftSetting]] = field(default_factory=Counter)  #: tokens by (was, would)

    @property
    def ratio(self) -> Interval | None:
        """Device time as it would have been over what it was, with 95 % bounds; None without jobs."""
        if self.was_s <= 0:
            return None
        low, high = np.quantile(self.would_draws / self.was_draws, (0.025, 0.975))
        mean = self.would_s / self.was_s
        # The mean of a convex function is not the function of the mean: keep the middle inside.
        return Interval(mean, min(mean, float(low)), max(mean, float(high)))

    @property
    def replayed_s(self) -> float:
        """Seconds that the jobs would have taken, because they took `measured_s`."""
        return self.measured_s * (self.would_s / self.was_s if self.was_s > 0 else 1.0)

    def __add__(self, other: Compared) -> Compared:
        return Compared(*(getattr(self, name) + getattr(other, name) for name in Compared.__slots__))


def total(tasks: Iterable[Compared]) -> Compared:
    """All of them together."""
    return sum(tasks, start=Compared())


class Pricing:
    """Prices settings from snapshots. All random numbers come from `seed`."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._drawn: dict[tuple[str, str], Draws] = {}

    def compare(self, past: Snapshot, group: Group, jobs: JobsAlike, would: DraftSetting) -> Compared | None:
        """Jobs that were decoded in one way and would have been in another; None where a cost is not known."""
        was_s, would_s = (self._seconds(past, group, jobs, setting) for setting in (jobs.setting, would))
        if was_s is None or would_s is None:
            return None
        is_untested = would != jobs.setting and not _is_tested(past, would)
        return Compared(
            num_jobs=jobs.num_jobs,
            num_tokens=jobs.num_tokens,
            num_same_jobs=jobs.num_jobs * (jobs.setting == would),
            measured_s=jobs.device_s,
            was_s=was_s[0],
            would_s=would_s[0],
            num_untested_tokens=jobs.num_tokens * is_untested,
            was_draws=was_s[1],
            would_draws=would_s[1],
            settings=Counter({(jobs.setting, would): jobs.num_tokens}),
        )

    def _seconds(
        self, past: Snapshot, group: Group, jobs: JobsAlike, setting: DraftSetting
    ) -> tuple[float, Draws] | None:
        """Seconds of the device, and the same for every draw; None without a cost."""
        costs, prompt = past.costs, jobs.num_prompt_tokens / jobs.num_jobs
        drafter = next((d for d in past.drafters if d.name == setting.drafter), None)
        shares = Shares(past.context.num_running, past.drafters)
        load = shares.of(drafter) if drafter else shares.vanilla
        rounds = costs.rounds(load, JobSize(prompt, jobs.num_tokens / jobs.num_jobs).context)
        if setting.drafter is None:
            ms = rounds.part_ms(None, 1)
            if ms is None:
                return None
            seconds = (jobs.num_jobs * costs.prefill_ms(None, prompt) + jobs.num_tokens * ms / load) / 1000
            return seconds, np.full(_NUM_DRAWS, seconds)
        posterior = group.posteriors.get(setting.drafter)
        k = setting.num_draft_tokens
        if drafter is None or posterior is None or k > posterior.max_draft_tokens:
            return None
        longest = posterior.longest_proposed(past.context.num_running)[k]
        ms = rounds.round_ms(drafter.name, k, posterior.proposed, longest)
        if ms is None:
            return None
        reading_s = jobs.num_jobs * drafter.first_token_ms(costs, prompt) / 1000
        rounds_s = jobs.num_tokens * ms / 1000 / load
        drawn = posterior.error.factor * self._tokens(past.subject.task, drafter.name, posterior, k)
        return reading_s + rounds_s / posterior.corrected_tokens[k], reading_s + rounds_s / drawn

    def _tokens(self, task: str, drafter: str, posterior: Posterior, k: int) -> Draws:
        """Tokens a round, drawn from the posterior."""
        profile = posterior.profile
        normal = self._normal(task, drafter, 1 + k)
        common, own = np.array(profile.loading[:k]) * math.sqrt(profile.common_var), np.sqrt(profile.own_var[:k])
        logits = np.array(profile.mean[:k]) + normal[:, :1] * common + normal[:, 1 : 1 + k] * own
        tokens: Draws = 1.0 + np.cumprod(1 / (1 + np.exp(-logits)), axis=1).sum(axis=1)
        return tokens

    def _normal(self, task: str, drafter: str, size: int) -> Draws:
        """Standard normal numbers, at least `size` a draw; the same come first however many are asked for."""
        known = self._drawn.get((task, drafter))
        if known is None or known.shape[1] < size:
            rng = np.random.default_rng([self._seed, zlib.crc32(f"{task} {drafter}".encode())])
            known = self._drawn[task, drafter] = rng.standard_normal((size, _NUM_DRAWS)).T
        return known


def _is_tested(past: Snapshot, would: DraftSetting) -> bool:
    """Whether a draft of the task had ever reached the last position that would be drafted."""
    if would.drafter is None:
        return True
    seen, k = past.seen.get(would.drafter), would.num_draft_tokens
    return seen is not None and len(seen.trials) >= k and seen.trials[k - 1] >= _LEAST_TRIALS


def group_of(past: Snapshot, segment: str, prompt_bucket: str, form_bucket: str = "") -> int | None:
    """The number of the group that jobs of a segment, prompt length and form belong to; None where it is not in it."""
    buckets = prompt_bucket, form_bucket
    of_bucket = [n for n, group in enumerate(past.groups) if (group.prompt_bucket, group.form_bucket) == buckets]
    same = [n for n in of_bucket if not past.is_split or past.groups[n].segment == segment]
    return same[0] if same else None
