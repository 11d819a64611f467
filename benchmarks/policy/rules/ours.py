"""alphaloop's own decision over its own evidence, as a worker takes it: no formula of the policy stands here."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Final, Protocol, TypeAlias

from alphaloop.acceptance import EvidenceKey
from alphaloop.cost import CostPoint, CostTable
from alphaloop.deciding.evidence import EvidenceSums
from alphaloop.deciding.exploration import ExplorationBudget
from alphaloop.deciding.goodput import DrafterState
from alphaloop.deciding.inference import PairPosterior, infer_all
from alphaloop.deciding.key_evidence import KeyEvidence
from alphaloop.deciding.limits import PolicyLimits
from alphaloop.deciding.policy import Decision, DecisionContext, Reason, decide
from alphaloop.deciding.policy import DraftSetting as Kept
from alphaloop.deciding.posterior import Posterior
from benchmarks.policy.play import Batch, Choice, Decoded, Why
from benchmarks.policy.scenario import Scenario
from benchmarks.policy.stream import Cell
from worker.costs.live import LiveCosts
from worker.engine import Step

#: worker.history_half_life_days
HALF_LIFE: Final = timedelta(days=7)
#: worker.correction_half_life_rounds
CORRECTION_HALF_LIFE: Final = 32
#: Rounds of a batch that correct the costs; a worker takes every one.
CORRECTING_ROUNDS: Final = 3
#: What a job may put out at most, while nothing is known of its task.
MOST_TOKENS: Final = 128.0
#: How old a belief may be, though nothing new was seen.
REFRESH: Final = timedelta(hours=6)
#: New jobs of a drafter after which its beliefs are made anew: a share of those known, at most so many. A worker does
#: it after every batch.
WAITING_SHARE: Final = 0.05
MOST_WAITING: Final = 8.0
#: Batches between two looks at what all tasks say of a drafter.
PAIR_REFRESH: Final = 25
_BUDGET: Final = {Reason.CONTROL: Why.CONTROL, Reason.EXPLORING: Why.EXPLORING}


class Costs(Protocol):
    """The costs as they are now believed, and what rounds teach of them."""

    @property
    def table(self) -> CostTable:
        """For decisions."""

    def observe(self, step: Step) -> None:
        """A round."""


class CalibratedCosts:
    """Costs that are believed as they were measured, for streams in which they were measured well."""

    def __init__(self, points: Iterable[CostPoint]) -> None:
        self.table: CostTable = CostTable(points)

    def observe(self, step: Step) -> None:
        """They stay."""


def costs_of(scenario: Scenario, points: Iterable[CostPoint]) -> Costs:
    """The worker's own live costs where the scenario's are wrong; left out elsewhere, to save time."""
    if not scenario.inferred:
        return CalibratedCosts(points)
    return LiveCosts(
        tuple(points), half_life=CORRECTION_HALF_LIFE, save=lambda _: None, save_every_s=1e9, clock=lambda: 0.0
    )


class Evidence:
    """What is remembered and believed, by task: a worker's cache over `acceptance_state`. It outlives a restart."""

    def __init__(self, scenario: Scenario, limits: PolicyLimits) -> None:
        self.drafters = [
            DrafterState(name, "r1", most, is_scored=name in scenario.scored_free)
            for name, most in scenario.draft_tokens.items()
        ]
        self.scored = [drafter for drafter in self.drafters if drafter.is_scored]
        self._limits = limits
        self._memories: dict[str, dict[EvidenceKey, KeyEvidence]] = {}
        self._lengths: dict[str, EvidenceSums] = {}
        self._posteriors: dict[tuple[Cell, str], tuple[datetime, Posterior]] = {}
        self._waiting: dict[tuple[str, str], list[tuple[EvidenceKey, EvidenceSums]]] = {}
        self._pairs: dict[str, PairPosterior] = {}
        self._pairs_due = 0

    def posteriors(self, cell: Cell, now: datetime) -> dict[str, Posterior]:
        """Of every drafter; made anew when it was used or scored in this task, or when the old one has aged."""
        if self._pairs_due <= 0:
            self._pairs, self._pairs_due = self._of_all_tasks(now), PAIR_REFRESH
        self._pairs_due -= 1
        found = {}
        for drafter in self.drafters:
            at, posterior = self._posteriors.get((cell, drafter.name), (None, None))
            if at is None or posterior is None or now - at > REFRESH:
                evidence_by_key = {
                    key: evidence.faded(now, HALF_LIFE)
                    for key, evidence in self._memories.get(cell.task, {}).items()
                    if key.drafter == drafter.name
                }
                posterior = infer_all(evidence_by_key, _key(cell), [drafter], self._limits, self._pairs)[drafter.name]
                self._posteriors[cell, drafter.name] = (now, posterior)
            found[drafter.name] = posterior
        return found

    def expected_tokens(self, task: str) -> tuple[float, float]:
        """Mean output of the task's jobs, and how many jobs say so."""
        sums = self._lengths.get(task)
        return (MOST_TOKENS, 0.0) if sums is None else (sums.mean_output_tokens or MOST_TOKENS, sums.jobs)

    def vanilla_jobs(self, task: str) -> float:
        """Jobs of this task that were decoded without a drafter."""
        return sum(evidence.all.jobs for key, evidence in self._memories.get(task, {}).items() if not key.drafter)

    def add(self, batch: Batch, choice: Choice, decoded: Decoded) -> None:
        """The batch's counts, and those of drafters that its texts are replayed to."""
        seen = decoded.evidence(choice.drafter, choice.num_draft_tokens, batch.now)
        lengths = EvidenceSums(batch.now, jobs=seen.jobs, output_tokens=seen.output_tokens)
        known = self._lengths.get(batch.cell.task)
        self._lengths[batch.cell.task] = lengths if known is None else known.faded(batch.now, HALF_LIFE) + lengths
        scored = {d.name: decoded.evidence(d.name, d.max_draft_tokens, batch.now) for d in self.scored}
        # At its longest it says all that the shorter run says; a worker counts such a job once as well.
        for drafter, sums in ({choice.drafter or "": seen} | scored).items():
            self._add(batch, drafter, sums)

    def _add(self, batch: Batch, drafter: str, seen: EvidenceSums) -> None:
        """Jobs wait until they are worth a new belief: adding and believing are most of what this rule costs."""
        task = batch.cell.task
        key = replace(_key(batch.cell), drafter=drafter, draft_revision="r1" if drafter else "")
        waiting = self._waiting.setdefault((task, drafter), [])
        waiting.append((key, seen))
        evidence_by_key = self._memories.setdefault(task, {})
        known = sum(evidence.all.jobs for key, evidence in evidence_by_key.items() if key.drafter == drafter)
        if sum(jobs.jobs for _, jobs in waiting) < min(MOST_WAITING, WAITING_SHARE * known):
            return
        added: dict[EvidenceKey, EvidenceSums] = {}
        for key, jobs in waiting:
            # Minutes apart, against a half-life of days.
            jobs = replace(jobs, as_of=batch.now)
            added[key] = added[key] + jobs if key in added else jobs
        for key, jobs in added.items():
            evidence_by_key[key] = evidence_by_key.get(key, KeyEvidence.empty(batch.now)).with_job(jobs, HALF_LIFE)
        del self._waiting[task, drafter]
        for stale in [known for known in self._posteriors if known[0].task == task and known[1] == drafter]:
            del self._posteriors[stale]

    def _of_all_tasks(self, now: datetime) -> dict[str, PairPosterior]:
        found = {}
        for drafter in self.drafters:
            tasks = []
            for evidence_by_key in self._memories.values():
                mine = [
                    m.all.faded(now, HALF_LIFE) for key, m in evidence_by_key.items() if key.drafter == drafter.name
                ]
                if mine:
                    tasks.append(sum(mine[1:], mine[0]))
            found[drafter.name] = PairPosterior.of_drafter(drafter, self._limits, tasks)
        return found


#: Batches that are decided alike: task, sampling and prompt bucket, batch size.
_Kind: TypeAlias = tuple[str, str, str, int]


class Ours:
    """The policy with its default limits, asked as `worker.deciding.decider` asks it."""

    def __init__(self, scenario: Scenario, points: Iterable[CostPoint], seed: int) -> None:
        self._limits = PolicyLimits()
        self._evidence = Evidence(scenario, self._limits)
        self._costs = costs_of(scenario, points)
        self._rng = random.Random(seed)
        self._kept: dict[_Kind, Kept | None] = {}
        self._logged: dict[tuple[str, str], Kept | None] = {}
        self._budgets: dict[tuple[str, str], ExplorationBudget] = {}

    def choose(self, batch: Batch) -> Choice:
        """What the policy says."""
        decision = self.decide(batch, explores=True)
        return Choice(decision.drafter, decision.num_draft_tokens, _BUDGET.get(decision.reason, Why.CHOSEN))

    def decide(self, batch: Batch, *, explores: bool) -> Decision:
        """The policy's whole answer; what it says to remember is remembered."""
        cell = batch.cell
        kind, subject = (cell.task, cell.sampling, cell.prompt, batch.num_jobs), (cell.task, cell.sampling)
        expected, known = self._evidence.expected_tokens(cell.task)
        context = DecisionContext(
            task=cell.task,
            batch=batch.num_jobs,
            expected_tokens=expected,
            draw=self._rng.random(),
            prompt_tokens=cell.prompt_tokens,
            known_output_jobs=known,
            control_jobs=self._evidence.vanilla_jobs(cell.task),
        )
        decision = decide(
            self._evidence.posteriors(cell, batch.now),
            self._evidence.drafters,
            self._costs.table,
            context,
            self._limits,
            incumbent=self._kept.get(kind, self._logged.get(subject)),
            budget=self._budgets.get(subject, ExplorationBudget()) if explores else None,
        )
        if decision.kept is not None:
            self._kept[kind] = self._logged[subject] = decision.kept
        if decision.budget is not None:
            self._budgets[subject] = decision.budget
        return decision

    def observe(self, batch: Batch, choice: Choice, decoded: Decoded) -> None:
        """Store the batch's counts; its rounds correct the costs."""
        self._evidence.add(batch, choice, decoded)
        subject = (batch.cell.task, batch.cell.sampling)
        if subject in self._budgets:
            for drafter in self._evidence.scored:
                self._budgets[subject] = self._budgets[subject].used(drafter.name)
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
        """Evidence, costs, budgets and the log of choices are stored, by task: what each kind of batch had is lost."""
        self._kept = {}


class EpsilonOverBeliefs(Ours):
    """The same beliefs and the same choice, but exploring by chance: any alternative, in a fixed share of batches."""

    EPSILON: Final = 0.02

    def choose(self, batch: Batch) -> Choice:
        """The best believed, or any."""
        decision = self.decide(batch, explores=False)
        if self._rng.random() < self.EPSILON and decision.alternatives:
            tried = self._rng.choice(decision.alternatives)
            return Choice(tried.drafter, tried.num_draft_tokens, Why.EXPLORING)
        return Choice(decision.drafter, decision.num_draft_tokens)


def _key(cell: Cell) -> EvidenceKey:
    return EvidenceKey(
        task=cell.task,
        target_revision="t1",
        engine="simulated",
        sampling_bucket=cell.sampling,
        prompt_bucket=cell.prompt,
        segment=cell.segment,
    )
