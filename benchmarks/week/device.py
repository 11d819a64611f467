"""A worker's device between two events: what runs, how it drafts by production's decisions, and how fast it gets on.

Rounds are not played: as long as the same sequences run, a round takes the table's time for their number and their mean
k, and each sequence puts out what its α yields. Reading prompts is left out.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Final, Protocol

import numpy as np

from alphaloop.acceptance import AcceptanceCounts, EvidenceKey
from alphaloop.deciding.decision import Decision
from alphaloop.deciding.evidence import EvidenceSnapshot, EvidenceSums
from alphaloop.deciding.goodput import DrafterState
from alphaloop.deciding.job_facts import JobFacts, Subject, TaskRules
from alphaloop.deciding.session import DecisionSession
from benchmarks.policy.ours import (
    ENGINE,
    HALF_LIFE,
    TARGET,
    BudgetsInMemory,
    ChoicesInMemory,
    LastingPosteriors,
)
from benchmarks.policy.play import BEGINNING
from benchmarks.policy.slots import SlotTable
from benchmarks.week.world import DAY_S, DRAFTER, LIMIT_TOKENS, MOST_DRAFT_TOKENS, NUM_SLOTS, WeekJob, yield_at
from worker.admission import Line

_EVIDENCE_AT_ONCE: Final = 20  #: ended jobs whose counts are added together, because each addition infers anew
_DRAFTERS: Final = (DrafterState(DRAFTER, "r1", MOST_DRAFT_TOKENS),)


class WeekDecisions(Protocol):
    """How jobs draft."""

    def decide(self, jobs: Sequence[WeekJob], num_running: int, now_s: float) -> Sequence[Decision]:
        """For jobs of one lane."""

    def ended(self, job: WeekJob, k: int, now_s: float) -> None:
        """Count what a job showed that was decoded at k to its end."""


class Decisions:
    """Production's session over evidence that all workers share, as a database."""

    def __init__(self, table: SlotTable, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._evidence = EvidenceSnapshot(HALF_LIFE)
        self._waiting: list[tuple[WeekJob, int, float]] = []
        self._session = DecisionSession(
            TARGET,
            ENGINE,
            LastingPosteriors(self._evidence),
            choices=ChoicesInMemory(),
            budgets=BudgetsInMemory(self._evidence, lambda: _DRAFTERS),
            costs=lambda: table.table,
            drafters=lambda: _DRAFTERS,
            num_slots=NUM_SLOTS,
        )

    def decide(self, jobs: Sequence[WeekJob], num_running: int, now_s: float) -> Sequence[Decision]:
        """For jobs of one lane."""
        facts = [JobFacts(None, LIMIT_TOKENS, job.stream.segment) for job in jobs]
        subject = Subject(jobs[0].lane.task, jobs[0].lane.sampling_bucket)
        return self._session.decide(subject, facts, TaskRules(), num_running=num_running, now=_moment(now_s))

    def ended(self, job: WeekJob, k: int, now_s: float) -> None:
        """Count what a job showed that was decoded at k to its end."""
        self._waiting.append((job, k, now_s))
        if len(self._waiting) >= _EVIDENCE_AT_ONCE:
            self._evidence.add([self._counted(*each) for each in self._waiting])
            self._waiting.clear()

    def _counted(self, job: WeekJob, k: int, now_s: float) -> tuple[EvidenceKey, EvidenceSums]:
        facts = [JobFacts(None, LIMIT_TOKENS, job.stream.segment)]
        key = self._session.evidence_key(Subject(job.lane.task, job.lane.sampling_bucket), facts)
        rounds = max(1, round((job.num_tokens - 1) / yield_at(job.alpha, k)))
        accepts, through = [], rounds
        for _ in range(k):
            through = int(self._rng.binomial(through, job.alpha))
            accepts.append(through)
        trials = [rounds, *accepts[:-1]][:k]
        counts = AcceptanceCounts(rounds + 1, 1 if k else rounds + 1, 0, (rounds,) * k, tuple(trials), tuple(accepts))
        sums = EvidenceSums.of_job(counts, k, _moment(now_s), job.num_tokens)
        return (replace(key, drafter=DRAFTER, draft_revision="r1") if k else key), sums


def _moment(now_s: float) -> datetime:
    return BEGINNING + timedelta(seconds=now_s)


@dataclass(slots=True, eq=False)
class Decoding:
    """A job in a slot."""

    job: WeekJob
    decision: Decision
    line: Line
    started_s: float
    left: float  #: tokens
    tokens_per_ms: float = 0.0
    device_s: float = 0.0  #: its share of the device's time so far
    most_running: int = 1  #: jobs that ran at the same time


class WeekDevice:
    """The slots of one worker."""

    def __init__(
        self, table: SlotTable, decisions: WeekDecisions, slowness: Callable[[float], float] = lambda now_s: 1.0
    ) -> None:
        """`slowness`: what a round takes at a time, over what the table says."""
        self._table, self._decisions, self._slowness = table, decisions, slowness
        self.running: list[Decoding] = []
        self.ended: list[Decoding] = []  #: with their last token, in this order
        self.now_s = 0.0
        self.busy_s: defaultdict[int, float] = defaultdict(float)  #: by day, from 0

    @property
    def num_free(self) -> int:
        """Slots."""
        return NUM_SLOTS - len(self.running)

    @property
    def by_line(self) -> Counter[Line]:
        """Jobs that run."""
        return Counter(each.line for each in self.running)

    @property
    def next_s(self) -> float:
        """When the next job ends or has to be ended."""
        ends = [self.now_s + each.left / each.tokens_per_ms / 1000 for each in self.running]
        return min([*ends, *(each.job.deadline_s for each in self.running)], default=float("inf"))

    def advance(self, to_s: float) -> Mapping[Line, float]:
        """Decode until then; returns the device seconds by line."""
        day, passed_s, self.now_s = int(self.now_s // DAY_S), max(0.0, to_s - self.now_s), to_s
        if not self.running or not passed_s:
            return {}
        share_s = passed_s / len(self.running)
        for each in self.running:
            each.left -= each.tokens_per_ms * 1000 * passed_s
            each.device_s += share_s
        self.busy_s[day] += passed_s
        return {line: share_s * number for line, number in self.by_line.items()}

    def start(self, jobs: Sequence[WeekJob]) -> None:
        """Jobs that start together, decided lane by lane."""
        by_lane: defaultdict[str, list[WeekJob]] = defaultdict(list)
        for job in jobs:
            by_lane[job.lane.task].append(job)
        for lane in by_lane.values():
            decisions = self._decisions.decide(lane, len(self.running) + len(lane), self.now_s)
            for job, decision in zip(lane, decisions, strict=True):
                job.num_starts += 1
                line = Line(job.lane, job.stream.segment)
                self.running.append(Decoding(job, decision, line, self.now_s, float(job.num_tokens)))
        self._steer()

    def take_ended(self) -> list[Decoding]:
        """Jobs that have their last token, and those whose deadline is here, which are `is_expired`."""
        ended = [e for e in self.running if e.left <= 1e-6 or e.job.deadline_s <= self.now_s]
        if ended:
            self.running = [each for each in self.running if each not in ended]
            for each in ended:
                each.job.is_expired = each.left > 1e-6
                if not each.job.is_expired:
                    each.job.ended_s = self.now_s
                    self.ended.append(each)
                    self._decisions.ended(each.job, each.decision.num_draft_tokens, self.now_s)
            self._steer()
        return ended

    def lose_all(self) -> list[Decoding]:
        """The worker dies."""
        lost, self.running = self.running, []
        return lost

    def _steer(self) -> None:
        num_running = len(self.running)
        if not num_running:
            return
        lengths = [each.decision.setting_while(num_running).num_draft_tokens for each in self.running]
        drafting = [k for k in lengths if k]
        round_ms = self._table.pass_ms(num_running, sum(lengths) / num_running)
        if drafting:
            round_ms += self._table.draft_ms(DRAFTER, len(drafting), max(drafting))
        round_ms *= self._slowness(self.now_s)
        for each, k in zip(self.running, lengths, strict=True):
            each.most_running = max(each.most_running, num_running)
            each.tokens_per_ms = yield_at(each.job.alpha, k) / round_ms
