"""Our rule on slots: decided and steered as the worker does, and measured by switchback beside the simulated truth."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Final, NamedTuple

from alphaloop.acceptance import AcceptanceCounts, EvidenceKey
from alphaloop.costs import CostPoint
from alphaloop.deciding import job_facts
from alphaloop.deciding.decision import Decision, DraftSetting, Reason
from alphaloop.deciding.draft_lengths import RunningSequence
from alphaloop.deciding.evidence import EvidenceSnapshot, EvidenceSums
from alphaloop.deciding.expectation_error import ExpectationErrors
from alphaloop.deciding.goodput import DrafterState
from alphaloop.deciding.inference import Posteriors
from alphaloop.deciding.job_facts import JobFacts, PolicyLimits, TaskRules
from alphaloop.deciding.session import DecisionSession
from alphaloop.engine import Step
from alphaloop.experiment.assign import Arm, RoundDesign, RoundSchedule
from alphaloop.experiment.figures import ExpectationPair, SpeedupSubject, expectation_pair
from alphaloop.experiment.observe import Expected, RoundFacts, Slice, TaskRound, Treatment, mean_expected
from benchmarks.policy.ours import (
    CORRECTION_HALF_LIFE,
    ENGINE,
    HALF_LIFE,
    TARGET,
    BudgetsInMemory,
    ChoicesInMemory,
    evidence_key,
)
from benchmarks.policy.play import BEGINNING
from benchmarks.policy.scenario import Scenario, Slower
from benchmarks.policy.slots import Counter, Running, SlotRound
from worker.costs.learning import LiveCosts


@dataclass(slots=True)
class Truth:
    """Sequence-milliseconds of a subject's treatment rounds, and of vanilla rounds for the same tokens there."""

    vanilla_ms: float = 0.0
    treatment_ms: float = 0.0

    @property
    def speedup(self) -> float:
        """What the experiment is to find."""
        return self.vanilla_ms / self.treatment_ms


def step_of(done: SlotRound) -> Step:
    """The round as an engine reports it. Prompts are reported, so the costs leave the round out as a worker's do."""
    num_running, draft_ms = len(done.running), done.draft_ms + done.draft_read_ms
    widest = max(one.setting.num_draft_tokens for one in done.running)
    return Step(
        finished=(),
        deltas=(),
        batch=num_running,
        width=widest + 1,
        wall_s=done.ms / 1000,
        draft_s=draft_ms / 1000,
        verify_s=(done.ms - draft_ms) / 1000,
        num_positions=num_running + sum(done.num_offered),
        context=round(mean_context(done)),
        num_prefill_tokens=done.num_read,
        num_draft_prefill_tokens=done.num_draft_read,
        tokens_by_job={str(one.job.number): n for one, n in zip(done.running, done.num_tokens, strict=True)},
        proposed_by_job={str(one.job.number): n for one, n in zip(done.running, done.num_offered, strict=True) if n},
        drafter=next(iter(done.drafters)) if len(done.drafters) == 1 else None,
    )


def mean_context(done: SlotRound) -> float:
    """Tokens of context a sequence."""
    tokens = [one.job.cell.prompt_tokens + one.job.needed - one.left for one in done.running]
    return sum(tokens) / len(tokens)


FIRST_DRAFT: Final = "r1"


class _Drafted(NamedTuple):
    """A subject of the experiment with one drafter."""

    subject: str
    drafter: str

    @property
    def as_stored(self) -> SpeedupSubject:
        """As the database names it."""
        task, _, sampling = self.subject.partition(" ")
        return SpeedupSubject(task, sampling, TARGET, ENGINE, "host", "device", self.drafter, FIRST_DRAFT)


class MeasuredBesideTruth:
    """Slices and true speed-ups by subject. Pairs are closed as alphaloop/store/switchback.py closes them."""

    def __init__(self) -> None:
        self.slices: list[Slice] = []
        self.truth: dict[str, Truth] = {}
        self._unpaired: dict[_Drafted, list[Slice]] = {}

    def note_round(self, done: SlotRound, on_trial: Mapping[int, str]) -> None:
        """A round outside control: its time, and what that would be with all that is on trial in vanilla.

        `on_trial` has the subject by job.
        """
        if not on_trial:
            return
        vanilla_ms = done.vanilla_ms([i for i, one in enumerate(done.running) if one.job.number in on_trial])
        for subject in set(on_trial.values()):
            places = [i for i, one in enumerate(done.running) if on_trial.get(one.job.number) == subject]
            read_ms = len(places) * (done.read_ms + done.draft_read_ms)
            truth = self.truth.setdefault(subject, Truth())
            truth.vanilla_ms += sum(done.num_tokens[i] for i in places) * vanilla_ms + read_ms
            truth.treatment_ms += len(places) * done.ms

    def note_slices(self, ended: Sequence[Slice], now: datetime) -> list[ExpectationPair]:
        """Slices that ended with a round; returns the pairs that they closed."""
        self.slices += ended
        for part in ended:
            self._unpaired.setdefault(_Drafted(part.task, part.treatment.drafter), []).append(part)
        closed: list[ExpectationPair] = []
        for drafted in sorted({_Drafted(part.task, part.treatment.drafter) for part in ended}):
            if pair := expectation_pair(drafted.as_stored, self._unpaired[drafted], now):
                self._unpaired[drafted] = []
                closed.append(pair)
        return closed


#: Reasons of decisions that were free to speculate, as in worker/steering.py.
ON_TRIAL: Final = frozenset({Reason.FASTER, Reason.ON_TARGET, Reason.NO_HISTORY, Reason.UNCERTAIN, Reason.NOT_FASTER})


@dataclass(slots=True)
class _Decided:
    decision: Decision
    wanted: DraftSetting
    subject: str  #: of the switchback experiment
    drafted: dict[str, Counter] = field(default_factory=dict)
    longest: dict[str, int] = field(default_factory=dict)


class OursOnSlots:
    """A worker's decisions with default limits; measured speed-ups correct later expectations."""

    def __init__(self, scenario: Scenario, points: Sequence[CostPoint], seed: int) -> None:
        assert scenario.slots is not None
        self._now_ms = 0.0
        self._draft_tokens = scenario.draft_tokens
        self._drafters = [
            DrafterState(name, FIRST_DRAFT, most, is_scored=name in scenario.scored_free)
            for name, most in scenario.draft_tokens.items()
        ]
        self._costs = LiveCosts(
            tuple(points),
            half_life=CORRECTION_HALF_LIFE,
            save=lambda _: None,
            clock=lambda: self._now_ms / 1000,
        )
        self._errors = ExpectationErrors(HALF_LIFE)
        limits, self._evidence = PolicyLimits(), EvidenceSnapshot(HALF_LIFE, errors=self._errors)
        self._session = DecisionSession(
            TARGET,
            ENGINE,
            Posteriors(self._evidence, limits),
            choices=ChoicesInMemory(),
            budgets=BudgetsInMemory(self._evidence, lambda: self._drafters),
            costs=lambda: self._costs.table,
            drafters=lambda: self._drafters,
            num_slots=scenario.slots.num_slots,
        )
        self._lengths = self._session.lengths
        self._schedule = RoundSchedule(RoundDesign(), random.Random(seed))
        self._decided: dict[int, _Decided] = {}
        self._running: list[Running] = []
        self._arms: Mapping[str, Arm] = {}
        self._treatments: dict[str, Treatment] = {}
        self._on_trial: dict[int, str] = {}  # subject by job
        self._control: frozenset[int] = frozenset()
        self.measured = MeasuredBesideTruth()
        self._expected: dict[str, Expected | None] = {}  # by subject
        #: By job in order of its start: the setting at the number running then, and why.
        self.choices: list[tuple[int, DraftSetting, Reason]] = []

    def start(self, jobs: Sequence[Running], num_running: int, now_ms: float) -> None:
        """The session's decisions for jobs of one task and sampling bucket."""
        self._now_ms = now_ms
        cell = jobs[0].job.cell
        cells = [one.job.cell for one in jobs]
        facts = [
            JobFacts(cell.prompt_tokens, one.job.max_tokens, cell.segment, form_bucket=cell.form)
            for one, cell in zip(jobs, cells, strict=True)
        ]
        decisions = self._session.decide(
            job_facts.Subject(cell.task, cell.sampling),
            facts,
            TaskRules(),
            num_running=num_running,
            now=BEGINNING + timedelta(milliseconds=now_ms),
        )
        for one, decision in zip(jobs, decisions, strict=True):
            self._decided[one.job.number] = _Decided(decision, decision.setting, f"{cell.task} {cell.sampling}")
            one.is_budget = decision.reason is Reason.EXPLORING
            self.choices.append((one.job.number, decision.setting, decision.reason))

    def steer(self, running: Sequence[Running], slower: Slower, now_ms: float) -> None:
        """Settings by what runs, then by the arm of the experiment."""
        self._now_ms = now_ms
        if running != self._running:
            self._running = list(running)
            self._consider(running)
        self._arms = self._schedule.next_round(self._treatments)
        for one in running:
            one.setting = self._setting_of(one)
        charged = self._schedule.is_charged
        self._control = frozenset(n for n, s in self._on_trial.items() if charged and self._arms.get(s) is None)

    def _consider(self, running: Sequence[Running]) -> None:
        """As a worker, only when a job has started or ended."""
        its_decisions = [self._decided[one.job.number] for one in running]
        settings = self._lengths.settings(
            [RunningSequence(its.subject, its.decision) for its in its_decisions],
            BEGINNING + timedelta(milliseconds=self._now_ms),
        )
        for its, setting in zip(its_decisions, settings, strict=True):
            its.wanted = setting
        votes: dict[str, dict[Treatment, int]] = {}
        for its in its_decisions:
            if its.decision.reason in ON_TRIAL and its.wanted.drafter and its.wanted.num_draft_tokens:
                treatment = Treatment(its.wanted.drafter, its.wanted.num_draft_tokens)
                counts = votes.setdefault(its.subject, {})
                counts[treatment] = counts.get(treatment, 0) + 1
        self._treatments = {subject: max(counts, key=counts.__getitem__) for subject, counts in votes.items()}
        self._on_trial = {}
        for one in running:
            its = self._decided[one.job.number]
            if self._may_be_on_trial(its):
                self._on_trial[one.job.number] = its.subject
        found: dict[str, list[Expected]] = {subject: [] for subject in votes}
        for its in its_decisions:
            treatment_of = self._treatments.get(its.subject)
            if treatment_of and self._may_be_on_trial(its) and its.decision.drafter == treatment_of.drafter:
                found[its.subject] += filter(None, [its.decision.expected])
        self._expected = {subject: mean_expected(each) for subject, each in found.items()}

    def decision_of(self, one: Running) -> Decision:
        """The decision of a running job."""
        return self._decided[one.job.number].decision

    def is_control(self) -> frozenset[int]:
        """Jobs that the experiment has in vanilla in this round."""
        return self._control

    def observe(self, done: SlotRound) -> None:
        """Costs, the experiment and the counts of each job learn from the round."""
        self._now_ms = done.began_ms + done.ms
        self._costs.observe(step_of(done))
        ended = self._schedule.observe(self._facts(done))
        if not self._schedule.is_charged:
            self.measured.note_round(done, self._on_trial)
        self._errors.add(self.measured.note_slices(ended, BEGINNING + timedelta(milliseconds=self._now_ms)))
        for place, one in enumerate(done.running):
            its, drafter, k = self._decided[one.job.number], one.setting.drafter, one.setting.num_draft_tokens
            if drafter is None or not k:
                continue
            if drafter not in its.drafted:
                its.drafted[drafter] = Counter(self._draft_tokens[drafter])
            its.drafted[drafter].add(done.num_offered[place], done.num_accepted[place], one.left, k=k)
            its.longest[drafter] = max(k, its.longest.get(drafter, 0))

    def end(self, ended: Running, now_ms: float) -> None:
        """Evidence: what the job's own drafters did in their rounds, and what look-up would have done."""
        job, its = ended.job, self._decided.pop(ended.job.number)
        now, key = BEGINNING + timedelta(milliseconds=now_ms), evidence_key(job.cell)
        scored = [drafter.name for drafter in self._drafters if drafter.is_scored]
        found: list[tuple[EvidenceKey, EvidenceSums]] = []

        def add(drafter: str, counts: AcceptanceCounts, k: int, chances: tuple[int, ...] | None) -> None:
            sums = EvidenceSums.of_job(counts, k, now, job.needed, job.cell.prompt_tokens, chances)
            found.append((replace(key, drafter=drafter, draft_revision=FIRST_DRAFT if drafter else ""), sums))

        for drafter, counter in its.drafted.items():
            if drafter not in scored:
                k = its.longest[drafter]
                add(drafter, _cut(counter.counts, k), k, counter.chances[:k])
        if not its.drafted:
            add("", AcceptanceCounts(job.needed, job.needed, 0), 0, None)
        for drafter in scored:
            most = self._draft_tokens[drafter]
            add(drafter, job.counts_at(drafter, most), most, None)
        self._evidence.add(found)
        self._session.count_scored([replace(key, drafter=drafter) for drafter in scored])

    def close(self) -> None:
        """The stream is over."""
        self.measured.slices += self._schedule.close()

    def _may_be_on_trial(self, its: _Decided) -> bool:
        treatment = self._treatments.get(its.subject)
        return treatment is not None and its.decision.reason in ON_TRIAL and its.wanted.drafter == treatment.drafter

    def _setting_of(self, one: Running) -> DraftSetting:
        wanted, subject = self._decided[one.job.number].wanted, self._on_trial.get(one.job.number)
        if subject is None or subject not in self._arms:
            return wanted
        arm = self._arms[subject]
        if arm is None:
            return DraftSetting(wanted.drafter, 0)
        return wanted if arm == self._treatments[subject] else DraftSetting(arm.drafter, arm.num_draft_tokens)

    def _facts(self, done: SlotRound) -> RoundFacts:
        tasks: dict[str, TaskRound] = {}
        for place, one in enumerate(done.running):
            if (subject := self._on_trial.get(one.job.number)) is not None:
                before = tasks.get(subject) or TaskRound(0, 0)
                tasks[subject] = TaskRound(
                    before.num_sequences + 1,
                    before.num_tokens + done.num_tokens[place],
                    before.num_proposed + done.num_offered[place],
                    self._expected.get(subject),
                )
        return RoundFacts(
            started_at=BEGINNING + timedelta(milliseconds=done.began_ms),
            wall_s=done.ms / 1000,
            num_running=len(done.running),
            mean_context_tokens=mean_context(done),
            has_prompt=done.num_read > 0 or done.num_draft_read > 0,
            tasks=tasks,
        )


def _cut(counts: AcceptanceCounts, k: int) -> AcceptanceCounts:
    """Without the positions that no round allowed."""
    return replace(counts, proposed=counts.proposed[:k], trials=counts.trials[:k], accepts=counts.accepts[:k])
