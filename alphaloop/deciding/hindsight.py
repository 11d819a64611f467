"""Hindsight: what jobs would have cost with other settings, by the evidence at the end of their day. Pure.

A job of n tokens that shares its rounds with b sequences takes, of the device, the time to read its prompt and
n / (b · tokens a round) rounds. Tokens a round come from the posterior of α_i at the end of the day, rounds from the
cost table. History is computed in the same way, so errors that both share cancel; `measured_s` tells how large they
are.

Bounds are those of acceptance alone: settings are computed with draws from the posteriors, both with the same draw. A
drafter's draws in one task are the same on all days, because the uncertainty of one day is that of the next day too.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Final

from alphaloop.acceptance import EvidenceKey, Interval
from alphaloop.cost import CostTable
from alphaloop.deciding.decision import DraftSetting
from alphaloop.deciding.evidence_snapshot import EvidenceSnapshot
from alphaloop.deciding.evidence_source import Place
from alphaloop.deciding.goodput import DrafterState, JobSize, Shares, expected_round_ms
from alphaloop.deciding.limits import PolicyLimits
from alphaloop.deciding.posterior import Posterior
from alphaloop.deciding.posteriors import Posteriors
from alphaloop.deciding.profile import logistic
from alphaloop.deciding.replay import PAIR_LASTS

_NUM_DRAWS: Final = 200
_LEAST_TRIALS: Final = 1.0


@dataclass(frozen=True, slots=True)
class Case:
    """Jobs with the same evidence key, and how they were and would have been decoded."""

    wanted: EvidenceKey  #: without a drafter
    batch: int
    was: DraftSetting
    would: DraftSetting


@dataclass(slots=True)
class Tally:
    """Sums over the jobs of a case."""

    num_jobs: int = 0
    num_tokens: int = 0
    num_prompt_tokens: int = 0
    device_s: float = 0.0

    def add(self, num_tokens: int, num_prompt_tokens: int, device_s: float) -> None:
        """One job."""
        self.num_jobs += 1
        self.num_tokens += num_tokens
        self.num_prompt_tokens += num_prompt_tokens
        self.device_s += device_s


@dataclass(slots=True)
class Compared:
    """A task, or all of them: device time as it was and as it would have been."""

    num_jobs: int = 0
    num_tokens: int = 0
    num_same_jobs: int = 0
    measured_s: float = 0.0
    was_s: float = 0.0  #: computed, of history's settings
    would_s: float = 0.0
    num_untested_tokens: int = 0  #: drafted at a position that no draft of the task has reached
    was_draws: list[float] = field(default_factory=lambda: [0.0] * _NUM_DRAWS)
    would_draws: list[float] = field(default_factory=lambda: [0.0] * _NUM_DRAWS)
    settings: Counter[tuple[DraftSetting, DraftSetting]] = field(default_factory=Counter)  #: tokens by (was, would)

    @property
    def ratio(self) -> Interval | None:
        """Device time as it would have been over what it was, with 95 % bounds; None without jobs."""
        if self.was_s <= 0:
            return None
        drawn = sorted(would / was for would, was in zip(self.would_draws, self.was_draws, strict=True))
        cut = round(0.025 * len(drawn))
        mean = self.would_s / self.was_s
        # The mean of a convex function is not the function of the mean: keep the middle inside.
        return Interval(mean, min(mean, drawn[cut]), max(mean, drawn[-1 - cut]))

    def __add__(self, other: Compared) -> Compared:
        return Compared(
            self.num_jobs + other.num_jobs,
            self.num_tokens + other.num_tokens,
            self.num_same_jobs + other.num_same_jobs,
            self.measured_s + other.measured_s,
            self.was_s + other.was_s,
            self.would_s + other.would_s,
            self.num_untested_tokens + other.num_untested_tokens,
            [a + b for a, b in zip(self.was_draws, other.was_draws, strict=True)],
            [a + b for a, b in zip(self.would_draws, other.would_draws, strict=True)],
            self.settings + other.settings,
        )


class Hindsight:
    """Compares day by day. All random numbers come from `seed`."""

    def __init__(self, snapshot: EvidenceSnapshot, limits: PolicyLimits, seed: int) -> None:
        self.snapshot: Final = snapshot
        self.posteriors: Final = Posteriors(snapshot, limits, pair_lasts=PAIR_LASTS)
        self._seed = seed
        self._drawn: dict[tuple[str, str], list[list[float]]] = {}

    def compare(
        self,
        cases: Mapping[Case, Tally],
        drafters: Sequence[DrafterState],
        costs: CostTable,
        at: datetime,
        into: dict[str, Compared],
    ) -> int:
        """Add the cases by task, with the evidence up to `at`; returns the jobs whose cost was never measured."""
        left_out = 0
        day = _Day(self, cases, drafters, costs, at)
        for case, tally in cases.items():
            was, would = day.price(case, tally, case.was), day.price(case, tally, case.would)
            if was is None or would is None:
                left_out += tally.num_jobs
                continue
            task = into.setdefault(case.wanted.task, Compared())
            task.num_jobs += tally.num_jobs
            task.num_tokens += tally.num_tokens
            task.num_same_jobs += tally.num_jobs * (case.was == case.would)
            task.measured_s += tally.device_s
            task.was_s += was[0]
            task.would_s += would[0]
            for i in range(_NUM_DRAWS):
                task.was_draws[i] += was[1][i]
                task.would_draws[i] += would[1][i]
            task.settings[case.was, case.would] += tally.num_tokens
            if case.would != case.was and not day.is_tested(case):
                task.num_untested_tokens += tally.num_tokens
        return left_out

    def numbers(self, task: str, drafter: str, size: int) -> list[list[float]]:
        """Standard normal numbers, at least `size` a draw."""
        rows = self._drawn.get((task, drafter))
        if rows is None or len(rows[0]) < size:
            # The seed is made of names alone, so the same numbers come first however many are asked for.
            rows = []
            for i in range(_NUM_DRAWS):
                rng = random.Random(f"{self._seed} {i} {task} {drafter}")
                rows.append([rng.gauss(0.0, 1.0) for _ in range(size)])
            self._drawn[task, drafter] = rows
        return rows


class _Day:
    """The posteriors at the end of one day, each inferred once."""

    def __init__(
        self,
        hindsight: Hindsight,
        cases: Iterable[Case],
        drafters: Sequence[DrafterState],
        costs: CostTable,
        at: datetime,
    ) -> None:
        self._hindsight, self._costs, self._at = hindsight, costs, at
        longest = Counter[str]()
        for case in cases:
            for setting in (case.was, case.would):
                name = setting.drafter or ""
                longest[name] = max(longest[name], setting.num_draft_tokens)
        # As long as any draft of history: a shorter limit may have been set since.
        self._drafters = {
            d.name: replace(d, max_draft_tokens=max(d.max_draft_tokens, longest[d.name])) for d in drafters
        }
        self._posteriors: dict[tuple[EvidenceKey, str], Posterior] = {}
        self._drawn: dict[tuple[EvidenceKey, DraftSetting], list[float]] = {}

    def price(self, case: Case, tally: Tally, setting: DraftSetting) -> tuple[float, list[float]] | None:
        """Seconds of the device for the jobs of the case, and the same for every draw; None without a cost."""
        prompt, output = tally.num_prompt_tokens / tally.num_jobs, tally.num_tokens / tally.num_jobs
        drafter = self._drafters.get(setting.drafter or "")
        shares = Shares(case.batch, list(self._drafters.values()))
        load = shares.of(drafter) if drafter else shares.vanilla
        here = self._costs.rounds(load, JobSize(prompt, output).context)
        reading_s = tally.num_jobs * self._costs.prefill_ms(None, prompt) / 1000
        if setting.drafter is None:
            ms = here.part_ms(None, 1)
            if ms is None:
                return None
            seconds = reading_s + tally.num_tokens * ms / 1000 / load
            return seconds, [seconds] * _NUM_DRAWS
        name, k = setting.drafter, setting.num_draft_tokens
        if drafter is None:
            return None
        posterior = self._posterior(case.wanted, name)
        ms = expected_round_ms(here, name, posterior, k, posterior.longest_proposed(case.batch)[k])
        if ms is None:
            return None
        reading_s = tally.num_jobs * drafter.first_token_ms(self._costs, prompt) / 1000
        rounds_s = tally.num_tokens * ms / 1000 / load
        drawn = self._tokens(case.wanted, setting, posterior)
        return reading_s + rounds_s / posterior.corrected_tokens[k], [
            reading_s + rounds_s / (posterior.error.factor * tokens) for tokens in drawn
        ]

    def is_tested(self, case: Case) -> bool:
        """Whether a draft of the task has ever reached the last position that would be drafted."""
        if case.would.drafter is None:
            return True
        drafter, k = self._drafters[case.would.drafter], case.would.num_draft_tokens
        place = Place(case.wanted.task, drafter.name, drafter.revision)
        leaves = self._hindsight.snapshot.leaves(place, self._at)
        return sum(m.all.trials[k - 1] for m in leaves.values() if len(m.all.trials) >= k) >= _LEAST_TRIALS

    def _posterior(self, wanted: EvidenceKey, name: str) -> Posterior:
        if (wanted, name) not in self._posteriors:
            self._posteriors[wanted, name] = self._hindsight.posteriors.of(wanted, self._drafters[name], self._at)
        return self._posteriors[wanted, name]

    def _tokens(self, wanted: EvidenceKey, setting: DraftSetting, posterior: Posterior) -> list[float]:
        """Tokens a round, drawn from the posterior."""
        if (wanted, setting) not in self._drawn:
            profile, found = posterior.profile, []
            common = math.sqrt(profile.common_var)
            own = [math.sqrt(v) for v in profile.own_var[: setting.num_draft_tokens]]
            for row in self._hindsight.numbers(wanted.task, setting.drafter or "", 1 + len(profile.mean)):
                tokens = through = 1.0
                for m, b, sd, z in zip(profile.mean, profile.loading, own, row[1:], strict=False):
                    through *= logistic(m + b * common * row[0] + sd * z)
                    tokens += through
                found.append(tokens)
            self._drawn[wanted, setting] = found
        return self._drawn[wanted, setting]


def total(tasks: Iterable[Compared]) -> Compared:
    """All of them together."""
    return sum(tasks, start=Compared())
