"""Rules on a device with slots: rules that decide by job, and moving-average tiers by round."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import numpy as np

from alphaloop.deciding.decision import DraftSetting
from alphaloop.deciding.evidence import EvidenceSums
from benchmarks.policy.load import Slower
from benchmarks.policy.play import BEGINNING, Batch, Choice, Decoded, Rule, Why
from benchmarks.policy.rounds import Counts, Outcomes
from benchmarks.policy.rules.ema_tiers import EmaTiers
from benchmarks.policy.slot_round import Running, SlotRound


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
        k, _ = self._rule.lengths(range(len(running)), ())
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
