"""The rules that ours has to beat: ε-greedy, thresholds and tiers of α; and these on slots."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final

import numpy as np

from alphaloop.deciding.decision import DraftSetting
from alphaloop.deciding.evidence import EvidenceSums
from benchmarks.policy.play import BEGINNING, Batch, Choice, Decoded, Rule, Why
from benchmarks.policy.scenario import Slower
from benchmarks.policy.slots import Running, SlotRound
from benchmarks.policy.stream import Counts, Outcomes

#: Share of batches decoded at random: the best of five. Mean gross goodput over the oracle's, twelve scenarios, seeds
#: 501 to 508: 1 % .844, 2 % .882, 5 % .921, 10 % .927, 20 % .917.
EPSILON: Final = 0.1
#: Weight of the newest batch, so that a change is followed: about the last 20 of an arm count.
RECENCY: Final = 0.1


class EpsilonGreedy:
    """Arms by task and batch size, each tried for the first time by chance. Its means live in the process."""

    def __init__(self, actions: tuple[tuple[str | None, int], ...], seed: int) -> None:
        self._actions = actions
        self._rng = random.Random(seed)
        self._means: dict[tuple[str, int], dict[tuple[str | None, int], float]] = {}

    def choose(self, batch: Batch) -> Choice:
        """The fastest arm so far, or any."""
        if self._rng.random() < EPSILON:
            return Choice(*self._rng.choice(self._actions), Why.EXPLORING)
        means = self._means.get((batch.cell.task, batch.num_running))
        return Choice(*min(means, key=means.__getitem__)) if means else Choice()

    def observe(self, batch: Batch, choice: Choice, decoded: Decoded) -> None:
        """Milliseconds a token."""
        means = self._means.setdefault((batch.cell.task, batch.num_running), {})
        arm = (choice.drafter, choice.num_draft_tokens)
        took = decoded.ms / sum(decoded.num_tokens)
        means[arm] = means[arm] + RECENCY * (took - means[arm]) if arm in means else took

    def restart(self) -> None:
        """All is forgotten."""
        self._means = {}


OFF_BELOW: Final = 0.5
ON_ABOVE: Final = 0.6
#: Above so many sequences the articles switch off; they name 8 to 32.
MOST_SEQUENCES: Final = 8
FEWEST_TOKENS: Final = 20
#: Jobs that a measurement rests on, and jobs after which one that came out as off is repeated.
MEASURED_JOBS: Final = 10
AGAIN_AFTER_JOBS: Final = 100


@dataclass(slots=True)
class _Task:
    is_on: bool = True
    jobs_left: int = MEASURED_JOBS  #: until the next verdict
    recent: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=2 * MEASURED_JOBS))
    lengths: deque[int] = field(default_factory=lambda: deque(maxlen=50))


class AlphaThresholds:
    """One drafter, one k, a switch for each task. It stands in the process."""

    def __init__(self, drafter: str, num_draft_tokens: int) -> None:
        self._on = Choice(drafter, num_draft_tokens)
        self._tasks: dict[str, _Task] = {}

    def choose(self, batch: Batch) -> Choice:
        """On while α was found high, or is being found."""
        task = self._tasks.setdefault(batch.cell.task, _Task())
        is_short = bool(task.lengths) and sum(task.lengths) < FEWEST_TOKENS * len(task.lengths)
        return self._on if task.is_on and batch.num_running <= MOST_SEQUENCES and not is_short else Choice()

    def observe(self, batch: Batch, choice: Choice, decoded: Decoded) -> None:
        """Accepted over tested tokens, pooled over positions; a verdict after every measurement."""
        task = self._tasks[batch.cell.task]
        task.lengths.extend(decoded.num_tokens)
        if choice.drafter is not None:
            i, out = decoded.index, decoded.outcomes.counts
            task.recent.extend(zip(out.accepts[i].sum(1).tolist(), out.trials[i].sum(1).tolist(), strict=True))
        task.jobs_left -= batch.num_jobs
        if task.jobs_left > 0:
            return
        if not task.is_on:
            task.is_on, task.jobs_left = True, MEASURED_JOBS
            task.recent.clear()
            return
        trials = sum(n for _, n in task.recent)
        alpha = sum(a for a, _ in task.recent) / trials if trials else 0.0
        task.is_on = alpha >= OFF_BELOW
        task.jobs_left = MEASURED_JOBS if task.is_on else AGAIN_AFTER_JOBS
        if OFF_BELOW <= alpha <= ON_ABOVE:
            task.recent.clear()

    def restart(self) -> None:
        """All is forgotten."""
        self._tasks = {}


SLOTS: Final = {1: (1, 3, 5, 7), 8: (0, 1, 3), 32: (0, 1), 64: (0,)}
DOWN_HYSTERESIS: Final = {1: -0.25, 8: 0.0, 32: 0.0, 64: 0.0}
NEWEST: Final = 0.2
WARM_UP_STEPS: Final = 10
STEPS_A_VERDICT: Final = 5
FIRST_TIER: Final = 3


class EmaTiers:
    """One drafter, one length for the whole step, whatever the tasks; all in the process."""

    def __init__(self, drafter: str, most: int) -> None:
        self.drafter = drafter
        self._most = most
        self.restart()

    def restart(self) -> None:
        """All is forgotten."""
        self._slots = {
            size: _Slot(tuple(t for t in tiers if t <= self._most), DOWN_HYSTERESIS[size])
            for size, tiers in SLOTS.items()
        }
        self.at_load(1)

    def at_load(self, num_running: int) -> None:
        """So many sequences share the next step; the slot nearest to the load is used."""
        self._slot = self._slots[min(SLOTS, key=lambda size: abs(size - num_running))]

    @property
    def steps(self) -> int:
        """Tokens that every sequence drafts: the tier of the slot."""
        return self._slot.steps

    def accepted(self, mean: float) -> None:
        """The step's mean of accepted tokens a sequence."""
        self._slot.update(mean)


class _Slot:
    def __init__(self, tiers: tuple[int, ...], down_hysteresis: float) -> None:
        self._tiers, self._down = tiers, down_hysteresis
        self._at = tiers.index(FIRST_TIER) if FIRST_TIER in tiers else len(tiers) // 2
        self._mean = self.steps - 1.0
        self._num_steps = 0

    @property
    def steps(self) -> int:
        return self._tiers[self._at]

    def update(self, accepted: float) -> None:
        if self.steps:
            self._mean += NEWEST * (accepted - self._mean)
        self._num_steps += 1
        if self._num_steps > WARM_UP_STEPS and (self._num_steps - WARM_UP_STEPS) % STEPS_A_VERDICT == 0:
            self._judge()

    def _judge(self) -> None:
        last = len(self._tiers) - 1
        if self.steps == 0:
            self._at = min(1, last)
            if self._mean < 0:
                self._mean = self.steps - 1.0
            return
        before = self._at
        while self._at > 0 and self._mean <= max(self._tiers[self._at - 1] - 0.5, 0.5) + self._down:
            self._at -= 1
        if self._at == before:
            while self._at < last and self._mean > self.steps - 0.5:
                self._at += 1


class ByJob:
    """A rule of batches, asked for every job alone at the load of the moment; the job keeps what it began with."""

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        self._asked: dict[int, tuple[Batch, Choice]] = {}

    def start(self, jobs: Sequence[Running], num_running: int, now_ms: float) -> None:
        """The rule's choices."""
        for one in jobs:
            batch = Batch(one.job.cell, 1, BEGINNING + timedelta(milliseconds=now_ms), num_running)
            choice = self._rule.choose(batch)
            self._asked[one.job.number] = batch, choice
            one.setting = DraftSetting(choice.drafter, choice.num_draft_tokens)
            one.is_budget = choice.why is not Why.CHOSEN

    def steer(self, running: Sequence[Running], slower: Slower, now_ms: float) -> None:
        """Jobs keep their settings."""

    def observe(self, done: SlotRound) -> None:
        """Each running job bears its share of the round."""
        for one in done.running:
            one.device_ms += done.ms / len(done.running)

    def end(self, ended: Running, now_ms: float) -> None:
        """The rule learns from the job."""
        batch, choice = self._asked.pop(ended.job.number)
        self._rule.observe(batch, choice, _decoded(ended, choice))


class Tiers:
    """Moving-average tiers: one length for all that run, changed between rounds."""

    def __init__(self, rule: EmaTiers) -> None:
        self._rule = rule

    def start(self, jobs: Sequence[Running], num_running: int, now_ms: float) -> None:
        """Lengths are set before every round."""

    def steer(self, running: Sequence[Running], slower: Slower, now_ms: float) -> None:
        """The tier of the load."""
        self._rule.at_load(len(running))
        k = self._rule.steps
        for one in running:
            one.setting = DraftSetting(self._rule.drafter, k) if k else DraftSetting(self._rule.drafter, 0)

    def observe(self, done: SlotRound) -> None:
        """Accepted tokens a sequence."""
        self._rule.accepted(sum(done.num_accepted) / len(done.running))

    def end(self, ended: Running, now_ms: float) -> None:
        """Nothing is learned from jobs."""


def _decoded(ended: Running, choice: Choice) -> Decoded:
    k, job = choice.num_draft_tokens, ended.job
    found = job.counts_at(choice.drafter, k) if choice.drafter is not None else None
    rounds = (found.rounds if found else job.needed) - 1
    by_job = [np.array([[n]]) for n in (rounds, found.num_empty_rounds - 1 if found else rounds, 0)]
    rows = (found.proposed, found.trials, found.accepts) if found else ((), (), ())
    by_position = [np.array(row, dtype=np.int64).reshape(1, 1, k) for row in rows]
    counts = Counts(by_job[0], by_job[1], by_job[2], by_position[0], by_position[1], by_position[2])
    nothing = np.zeros(1)
    outcomes = Outcomes(np.array([ended.device_ms]), nothing, nothing, lambda: counts)
    return Decoded(outcomes, 0, (job.needed,), _no_evidence)


def _no_evidence(*_: object) -> EvidenceSums:
    raise AssertionError("only our own rule asks for evidence, and it takes its own on slots")
