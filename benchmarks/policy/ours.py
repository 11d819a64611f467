"""alphaloop's own decision session over its own evidence: no formula of the policy stands here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from datetime import timedelta
from typing import Final, Protocol

from alphaloop.acceptance import EvidenceKey
from alphaloop.costs import CostPoint, CostTable
from alphaloop.deciding.decision import ChoicesInMemory, Decision, Reason
from alphaloop.deciding.evidence import EvidenceSnapshot, EvidenceSums
from alphaloop.deciding.exploration import BudgetsInMemory
from alphaloop.deciding.goodput import DrafterState
from alphaloop.deciding.inference import Posteriors
from alphaloop.deciding.job_facts import JobFacts, PolicyLimits, Subject, TaskRules
from alphaloop.deciding.session import DecisionSession
from benchmarks.policy.play import Batch, Choice, Decoded, Why
from benchmarks.policy.scenario import Scenario
from benchmarks.policy.stream import Cell
from worker.costs.learning import LiveCosts
from worker.engine import Step

#: worker.history_half_life_days
HALF_LIFE: Final = timedelta(days=7)
#: as in worker.costs.learning
CORRECTION_HALF_LIFE: Final = 32
#: Rounds of a batch that correct the costs; a worker takes every one.
CORRECTING_ROUNDS: Final = 3
TARGET: Final = "t1"
ENGINE: Final = "simulated"
#: How long posteriors stay without new evidence: a worker's minute would take most of the simulator's time.
POSTERIOR_LASTS: Final = timedelta(hours=6)
PAIR_LASTS: Final = timedelta(hours=3)
#: New jobs of a drafter after which its evidence is added: a share of the jobs known, at most so many. A worker adds
#: after every job.
WAITING_SHARE: Final = 0.05
MAX_WAITING: Final = 8.0


class Costs(Protocol):
    """The costs as they are now, corrected by rounds."""

    @property
    def table(self) -> CostTable:
        """For decisions."""

    def observe(self, step: Step) -> None:
        """A round."""


class CalibratedCosts:
    """Costs as they were measured, for streams in which they were measured well."""

    def __init__(self, points: Iterable[CostPoint]) -> None:
        self.table: CostTable = CostTable(points)

    def observe(self, step: Step) -> None:
        """They stay."""


def costs_of(scenario: Scenario, points: Iterable[CostPoint]) -> Costs:
    """The worker's own live costs where the scenario's calibration is wrong; left out elsewhere, to save time."""
    if not scenario.inferred:
        return CalibratedCosts(points)
    return LiveCosts(tuple(points), half_life=CORRECTION_HALF_LIFE, save=lambda _: None, clock=lambda: 0.0)


class Evidence:
    """What a scenario's drafters showed. Like a worker's database, it outlives a restart.

    Jobs wait until they are worth a new posterior: adding and inferring are most of this rule's time.
    """

    def __init__(self, scenario: Scenario) -> None:
        self.drafters = [
            DrafterState(name, "r1", most, is_scored=name in scenario.scored_free)
            for name, most in scenario.draft_tokens.items()
        ]
        self.scored = [drafter for drafter in self.drafters if drafter.is_scored]
        self.snapshot = EvidenceSnapshot(HALF_LIFE)
        self._num_added: dict[tuple[str, str], float] = {}
        self._waiting: dict[tuple[str, str], list[tuple[EvidenceKey, EvidenceSums]]] = {}

    def add(self, batch: Batch, choice: Choice, decoded: Decoded) -> None:
        """The batch's counts, and those of drafters that are scored on its texts."""
        seen = decoded.evidence(choice.drafter, choice.num_draft_tokens, batch.now)
        scored = {d.name: decoded.evidence(d.name, d.max_draft_tokens, batch.now) for d in self.scored}
        # A scored text at its longest draft says all that the shorter one says; a worker counts such a job once too.
        for drafter, sums in ({choice.drafter or "": seen} | scored).items():
            self._add(batch, drafter, sums)

    def _add(self, batch: Batch, drafter: str, seen: EvidenceSums) -> None:
        name = batch.cell.task, drafter
        key = replace(evidence_key(batch.cell), drafter=drafter, draft_revision="r1" if drafter else "")
        waiting = self._waiting.setdefault(name, [])
        waiting.append((key, seen))
        num_waiting = sum(jobs.jobs for _, jobs in waiting)
        if num_waiting >= min(MAX_WAITING, WAITING_SHARE * self._num_added.get(name, 0.0)):
            # Minutes apart, against a half-life of days.
            self.snapshot.add((key, replace(jobs, as_of=batch.now)) for key, jobs in waiting)
            self._num_added[name] = self._num_added.get(name, 0.0) + num_waiting
            del self._waiting[name]


class Ours:
    """The policy with its default limits."""

    def __init__(self, scenario: Scenario, points: Iterable[CostPoint], seed: int) -> None:
        self._limits = PolicyLimits()
        self._evidence = Evidence(scenario)
        self._costs = costs_of(scenario, points)
        self._choices = ChoicesInMemory()
        self._budgets = BudgetsInMemory(self._evidence.snapshot, lambda: self._evidence.drafters)
        self._max_tokens = {name: task.longest * task.tokens for name, task in scenario.tasks.items()}
        self._session = self._open()

    def choose(self, batch: Batch) -> Choice:
        """The session's decision."""
        decision = self.decide(batch)
        why = Why.EXPLORING if decision.reason is Reason.EXPLORING else Why.CHOSEN
        return Choice(decision.drafter, decision.num_draft_tokens, why)

    def decide(self, batch: Batch) -> Decision:
        """The session's decision for a whole batch, whose jobs are all of one cell."""
        cell = batch.cell
        job = JobFacts(cell.prompt_tokens, self._max_tokens[cell.task], cell.segment)
        decision, *_ = self._session.decide(
            Subject(cell.task, cell.sampling),
            [job] * batch.num_jobs,
            TaskRules(),
            num_running=batch.num_jobs,
            now=batch.now,
        )
        return decision

    def observe(self, batch: Batch, choice: Choice, decoded: Decoded) -> None:
        """Store the batch's counts; its rounds correct the costs."""
        self._evidence.add(batch, choice, decoded)
        key = evidence_key(batch.cell)
        self._session.count_scored([replace(key, drafter=d.name) for d in self._evidence.scored])
        verify_ms, draft_ms = decoded.round_ms
        step = Step(
            finished=(),
            deltas=(),
            batch=batch.num_jobs,
            width=choice.num_draft_tokens + 1,
            wall_s=(verify_ms + draft_ms) / 1000,
            draft_s=draft_ms / 1000,
            verify_s=verify_ms / 1000,
            num_positions=round(batch.num_jobs * decoded.mean_width),
            context=256,
            drafter=choice.drafter,
        )
        for _ in range(CORRECTING_ROUNDS):
            self._costs.observe(step)

    def restart(self) -> None:
        """Evidence, costs, budgets and the log of choices are stored. The session's incumbents are lost."""
        self._session = self._open()

    def _open(self) -> DecisionSession:
        snapshot = self._evidence.snapshot
        return DecisionSession(
            TARGET,
            ENGINE,
            Posteriors(snapshot, self._limits, lasts=POSTERIOR_LASTS, pair_lasts=PAIR_LASTS),
            choices=self._choices,
            budgets=self._budgets,
            costs=lambda: self._costs.table,
            drafters=lambda: self._evidence.drafters,
            num_slots=0,
        )


def evidence_key(cell: Cell) -> EvidenceKey:
    """The cell's key, without a drafter."""
    return EvidenceKey(
        task=cell.task,
        target_revision=TARGET,
        engine=ENGINE,
        sampling_bucket=cell.sampling,
        prompt_bucket=cell.prompt,
        segment=cell.segment,
    )
