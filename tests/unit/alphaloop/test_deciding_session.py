"""The decision session: what it keeps between decisions, and when it looks at evidence and costs again."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from uuid import uuid4

import pytest

from alphaloop.acceptance import AcceptanceCounts, EvidenceKey
from alphaloop.costs import CostPoint, CostTable
from alphaloop.deciding.decision import Decision, DraftSetting, IncumbentKey, Reason
from alphaloop.deciding.evidence import EvidenceSnapshot, EvidenceSums
from alphaloop.deciding.exploration import FIRST_JOBS
from alphaloop.deciding.goodput import DrafterState
from alphaloop.deciding.inference import Posteriors
from alphaloop.deciding.job_facts import Aim, EngineConditions, JobFacts, Objective, Subject, TaskRules
from alphaloop.deciding.replay import group_of
from alphaloop.deciding.session import DecisionSession
from alphaloop.deciding.snapshot import Snapshot
from alphaloop.messages import Decoding
from benchmarks.policy.ours import BudgetsInMemory, ChoicesInMemory

NOW, HALF_LIFE = datetime(2026, 9, 1, tzinfo=UTC), timedelta(days=3)
LOOKUP = DrafterState("lookup", "r1", 6)
CODE = Subject("code", "greedy")
SECOND = timedelta(seconds=1)


def costs(per_position_ms: float = 3.0) -> CostTable:
    """A pass takes 20 ms, and so much for each position of each sequence; a draft almost nothing."""
    points = [CostPoint(None, b, w, 20 + per_position_ms * b * w, 5) for b in (1, 2, 4, 8) for w in (1, 7)]
    return CostTable([*points, *(CostPoint("lookup", b, w, 0.1, 5) for b in (1, 8) for w in (2, 7))])


def seen(alpha: float, num_jobs: int) -> list[tuple[EvidenceKey, EvidenceSums]]:
    """Jobs of 100 rounds at k = 3, every position accepted with α."""
    accepts = tuple(round(100 * alpha**i) for i in (1, 2, 3))
    counts = AcceptanceCounts(101, 1, 0, (100,) * 3, (100, *accepts[:2]), accepts)
    key = EvidenceKey("code", "t", "e", "greedy", "<=256", "", LOOKUP.name, LOOKUP.revision)
    return [(key, EvidenceSums.of_job(counts, 3, NOW, 100, 20))] * num_jobs


@dataclass
class Made:
    """A session, and what it stands on."""

    explores: bool = False
    evidence: EvidenceSnapshot = field(default_factory=lambda: EvidenceSnapshot(HALF_LIFE))
    choices: ChoicesInMemory = field(default_factory=ChoicesInMemory)
    table: CostTable = field(default_factory=costs)

    def __post_init__(self) -> None:
        self.session = DecisionSession(
            "t",
            "e",
            Posteriors(self.evidence),
            choices=self.choices,
            budgets=BudgetsInMemory(self.evidence, lambda: (LOOKUP,)) if self.explores else None,
            costs=lambda: self.table,
            drafters=lambda: (LOOKUP,),
            num_slots=8,
        )

    def decide(self, num_running: int = 1, *, now: datetime = NOW) -> Decision:
        (decision,) = self.session.decide(CODE, [JobFacts(20, 200)], TaskRules(), num_running=num_running, now=now)
        return decision


def test_an_incumbent_stays_in_its_load_and_outlives_its_session_in_the_log() -> None:
    made = Made()
    made.evidence.add(seen(0.6, 3))
    alone = made.decide(1)
    crowded = made.decide(8)
    assert alone.num_draft_tokens > crowded.num_draft_tokens
    assert made.choices.last_choice("code", "greedy") == crowded.setting
    # A rival that is a little better, but not beyond its noise, does not replace what runs.
    near = next(a for a in alone.alternatives if a.drafter and a.num_draft_tokens != alone.num_draft_tokens)
    assert alone.alternatives[0].speedup / near.speedup < 1.02
    began = ChoicesInMemory()
    began.record(IncumbentKey.of("code", "greedy", "<=256", 1), replace(alone, num_draft_tokens=near.num_draft_tokens))
    again = Made(evidence=made.evidence, choices=began).decide(1)
    assert again.setting == DraftSetting("lookup", near.num_draft_tokens)
    assert "stays" in again.explanation


def test_a_little_new_evidence_waits_a_second_and_much_does_not() -> None:
    made = Made()
    made.evidence.add(seen(0.9, 200))

    def expected(now: datetime) -> float:
        return max(a.tokens_per_round for a in made.decide(now=now).alternatives)

    before = expected(NOW)
    made.evidence.add(seen(0.0, 2))
    assert expected(NOW + SECOND / 2) == before
    later = expected(NOW + SECOND)
    assert later < before
    made.evidence.add(seen(0.0, 40))
    assert expected(NOW + SECOND) < later


def test_settings_by_running_follow_evidence_at_once_and_costs_within_a_second() -> None:
    made = Made()
    made.evidence.add(seen(0.8, 20))
    first = made.decide(8)
    assert first.setting_while(1).num_draft_tokens > first.setting_while(8).num_draft_tokens
    made.table = costs(0.0)
    kept = replace(made.decide(8, now=NOW), settings_by_running=())
    assert made.decide(1).settings_by_running == (), "passes cost the same however many run"
    made.table = costs(3.0)
    assert made.decide(8, now=NOW + 2 * SECOND).settings_by_running == first.settings_by_running
    assert kept.drafter == "lookup"


def test_four_jobs_capped_at_six_tokens_do_not_make_a_long_job_vanilla() -> None:
    made, jobs = Made(), [JobFacts(40, 120)]
    capped = EvidenceSums.of_job(AcceptanceCounts(rounds=6, num_empty_rounds=6), 0, NOW, 6, 40, is_cut=True)
    made.evidence.add([(EvidenceKey("code", "t", "e", "greedy", "<=256"), capped)] * 4)
    context = made.session.context(CODE, jobs, TaskRules(), num_running=1, now=NOW)
    assert (context.expected_tokens, context.known_output_jobs) == (120, 0)
    (decision,) = made.session.decide(CODE, jobs, TaskRules(), num_running=1, now=NOW)
    assert decision.reason is not Reason.SHORT_OUTPUT, decision.explanation


def test_a_job_whose_limit_is_short_is_no_choice_of_its_task() -> None:
    made = Made()
    made.evidence.add(seen(0.6, 30))
    long = made.decide(1)
    (short,) = made.session.decide(CODE, [JobFacts(20, 6)], TaskRules(), num_running=1, now=NOW)
    assert short.reason is Reason.SHORT_OUTPUT
    assert short.explanation == "about 6 tokens expected, the jobs' limit, fewer than 20"
    assert made.choices.last_choice("code", "greedy") == long.setting


def test_a_budget_counts_the_jobs_of_the_decision_and_not_those_that_run() -> None:
    made = Made(explores=True)
    made.decide(8)
    budget = made.session.budget(CODE)
    assert budget.accrued == pytest.approx((0.02 + FIRST_JOBS) * 200)


def test_rules_conditions_and_deadlines_reach_the_context() -> None:
    made = Made()
    jobs = [JobFacts(30, 100, deadline=NOW + 9 * SECOND), JobFacts(50, 200, deadline=NOW + 4 * SECOND)]
    conditions = EngineConditions(1 << 20, {"lookup": "logit_bias"})

    def context(rules: TaskRules) -> object:
        return made.session.context(CODE, jobs, rules, num_running=5, now=NOW, conditions=conditions)

    found = made.session.context(CODE, jobs, TaskRules(), num_running=5, now=NOW, conditions=conditions)
    assert (found.num_running, found.num_jobs, found.expected_tokens, found.prompt_tokens) == (5, 2, 150.0, 40.0)
    assert (found.max_sequence_tokens, found.max_output_tokens, found.free_cache_bytes) == (250.0, 200.0, 1 << 20)
    assert found.objective == Objective(Aim.DEADLINE, 4000.0)
    target = Objective(Aim.TIME_PER_TOKEN, 50.0)
    assert context(TaskRules(objective=target)) == replace(found, objective=target)
    assert context(TaskRules(decoding=Decoding.VANILLA)) == replace(found, decoding=Decoding.VANILLA)
    asked = Subject("code", "greedy", Decoding.SPECULATIVE)
    forced = made.session.context(asked, jobs, TaskRules(decoding=Decoding.VANILLA), num_running=5, now=NOW)
    assert forced.decoding is Decoding.SPECULATIVE, "a job's own wish goes first"


def test_without_a_known_prompt_the_time_to_read_it_is_left_out() -> None:
    made = Made()
    context = made.session.context(CODE, [JobFacts(None, 100)], TaskRules(), num_running=1, now=NOW)
    assert (context.prompt_tokens, context.size, context.max_sequence_tokens) == (None, None, None)


def test_a_form_has_a_decision_an_incumbent_and_evidence_of_its_own() -> None:
    """JSON is accepted well, plain text badly: jobs of one lane that are decided together get a setting each."""
    made, snapshots = Made(), list[Snapshot]()
    made.session.note = snapshots.append
    made.evidence.add(seen(0.1, 40))
    made.evidence.add((replace(key, form_bucket="json"), sums) for key, sums in seen(0.95, 40))
    jobs = [JobFacts(20, 200), JobFacts(20, 200, form_bucket="json"), JobFacts(20, 200)]
    plain, json, again = made.session.decide(CODE, jobs, TaskRules(), num_running=3, now=NOW, decision_id=uuid4())
    assert plain is again
    assert (plain.drafter, json.drafter) == (None, "lookup")
    (snapshot,) = snapshots
    assert [(group.num_jobs, group.form_bucket) for group in snapshot.groups] == [(2, ""), (1, "json")]
    assert group_of(snapshot, "", "<=256", "json") == 1
    assert group_of(snapshot, "", "<=256") == 0
    assert group_of(snapshot, "", "<=256", "regex") is None
    keys = [IncumbentKey.of("code", "greedy", "<=256", 3, form) for form in ("", "json")]
    assert len(set(keys)) == 2


def test_forced_tokens_are_no_yield_of_rounds() -> None:
    """Vanilla jobs get them as well: expectations are those of the same rounds without them."""
    plain, constrained = Made(), Made()
    for made, forced in ((plain, 0), (constrained, 400)):
        for key, sums in seen(0.6, 20):
            counts = AcceptanceCounts(101, 1, 0, (100,) * 3, (100, 60, 36), (60, 36, 22), num_forced=forced)
            made.evidence.add([(key, EvidenceSums.of_job(counts, 3, NOW, counts.num_tokens, 20))])
            assert sums.rounds == 100
    ways = [made.decide().alternatives for made in (plain, constrained)]
    assert ways[0] == ways[1]
    contexts = [
        made.session.context(CODE, [JobFacts(20, 1000)], TaskRules(), num_running=1, now=NOW).expected_tokens
        for made in (plain, constrained)
    ]
    assert contexts == [219, 219], "what rounds have to yield"
