"""alphaloop's own decision session over its own evidence: no formula of the policy stands here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Final

from alphaloop.acceptance import EvidenceKey
from alphaloop.costs import CostPoint, CostTable
from alphaloop.deciding.decision import Decision, DraftSetting, IncumbentKey, Reason
from alphaloop.deciding.evidence import EvidenceSnapshot, EvidenceSums, Place
from alphaloop.deciding.exploration import ExplorationBudget
from alphaloop.deciding.goodput import DrafterState
from alphaloop.deciding.inference import Posteriors
from alphaloop.deciding.job_facts import JobFacts, Subject, TaskRules
from alphaloop.deciding.session import DecisionSession
from alphaloop.engine import Step
from benchmarks.policy.play import Batch, Choice, Decoded
from benchmarks.policy.scenario import Scenario
from benchmarks.policy.stream import Cell
from worker.costs.learning import LiveCosts

#: After so long, evidence counts half.
HALF_LIFE: Final = timedelta(days=7)
#: as in worker.costs.learning
CORRECTION_HALF_LIFE: Final = 32
#: Rounds of a batch that correct the costs; a worker takes every one.
CORRECTING_ROUNDS: Final = 3
TARGET: Final = "t1"
ENGINE: Final = "simulated"
#: New jobs of a drafter after which its evidence is added: a share of the jobs known, at most MAX_WAITING. A worker
#: adds after every job.
WAITING_SHARE: Final = 0.05
MAX_WAITING: Final = 8.0


class LastingPosteriors(Posteriors):
    """Posteriors of a simulator, where a worker's minute would take most of the time."""

    LASTS = timedelta(hours=3)


class ChoicesInMemory:
    """A log of choices, for a simulator."""

    def __init__(self) -> None:
        self._last: dict[tuple[str, str], DraftSetting] = {}

    def last_choice(self, task: str, sampling_bucket: str) -> DraftSetting | None:
        """The choice that was recorded last."""
        return self._last.get((task, sampling_bucket))

    def record(self, key: IncumbentKey, decision: Decision) -> bool:
        """Keep the choice."""
        self._last[key.task, key.sampling_bucket] = decision.setting
        return True


class BudgetsInMemory:
    """Budgets for a simulator. A drafter that the task's evidence knows counts as used just now."""

    def __init__(self, evidence: EvidenceSnapshot, drafters: Callable[[], Sequence[DrafterState]]) -> None:
        self._evidence, self._drafters = evidence, drafters
        self._budgets: dict[tuple[str, str], ExplorationBudget] = {}

    def open(self, task: str, sampling_bucket: str) -> ExplorationBudget:
        """The budget that was kept last, or a new one."""
        used = [d.name for d in self._drafters() if self._evidence.held(Place(task, d.name, d.revision))]
        return self._budgets.get((task, sampling_bucket)) or ExplorationBudget(unseen=dict.fromkeys(used, 0.0) or None)

    def keep(self, task: str, sampling_bucket: str, budget: ExplorationBudget) -> ExplorationBudget:
        """Store the budget; no other session spends from it."""
        self._budgets[task, sampling_bucket] = budget
        return budget

    save = keep


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
    """The policy as it is configured by default."""

    def __init__(self, scenario: Scenario, points: Iterable[CostPoint], seed: int) -> None:
        self._evidence = Evidence(scenario)
        calibrated = tuple(points)
        self._table = CostTable(calibrated)
        self._live: LiveCosts | None = None
        if scenario.inferred:  # left out where the calibration is right, to save time
            self._live = LiveCosts(calibrated, half_life=CORRECTION_HALF_LIFE, save=lambda _: None, clock=lambda: 0.0)
        self._choices = ChoicesInMemory()
        self._budgets = BudgetsInMemory(self._evidence.snapshot, lambda: self._evidence.drafters)
        self._max_tokens = {name: task.longest * task.tokens for name, task in scenario.tasks.items()}
        self._session = self._open()

    def choose(self, batch: Batch) -> Choice:
        """The session's decision."""
        decision = self.decide(batch)
        return Choice(decision.drafter, decision.num_draft_tokens, decision.reason is Reason.EXPLORING)

    def decide(self, batch: Batch) -> Decision:
        """The session's decision for a whole batch, whose jobs are all of one cell."""
        cell = batch.cell
        job = JobFacts(cell.prompt_tokens, self._max_tokens[cell.task], cell.segment, form_bucket=cell.form)
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
        if self._live is None:
            return
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
            self._live.observe(step)

    def restart(self) -> None:
        """Evidence, costs, budgets and the log of choices are stored. The session's incumbents are lost."""
        self._session = self._open()

    def _open(self) -> DecisionSession:
        snapshot = self._evidence.snapshot
        return DecisionSession(
            TARGET,
            ENGINE,
            LastingPosteriors(snapshot),
            choices=self._choices,
            budgets=self._budgets,
            costs=lambda: self._live.table if self._live else self._table,
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
        form_bucket=cell.form,
    )
