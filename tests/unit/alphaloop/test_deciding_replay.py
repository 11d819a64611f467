"""Snapshots decided again under other rules, and what that would have cost: where the answer is known."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Final

import pytest

from alphaloop.deciding.decision import Decision, DraftSetting, Reason
from alphaloop.deciding.exploration import ExplorationBudget
from alphaloop.deciding.job_facts import Aim, Objective, Subject, TaskRules
from alphaloop.deciding.policy import Group
from alphaloop.deciding.posterior import Posterior, tokens_per_round
from alphaloop.deciding.replay import Compared, Pricing, Replay, Rules, group_of, is_given
from alphaloop.deciding.snapshot import JobsAlike, SessionFacts, Snapshot
from alphaloop.messages import Decoding, Purpose
from tests.fixtures.deciding import inferred, some_snapshot, under

FACTS: Final = SessionFacts("w", "h", "d", "e", "t", 8, timedelta(days=3), 0.0)


def decided(snapshot: Snapshot, rules: Rules, replay: Replay | None = None) -> Decision:
    return (replay or Replay(rules)).decide(snapshot, FACTS)[0]


def test_under_the_rules_of_that_time_a_decision_is_the_one_that_was_taken() -> None:
    snapshot = some_snapshot(explore_share=0.0)
    same = decided(snapshot, Rules(0.0, {}))
    assert snapshot.is_reproduced([same])
    assert same.reason is Reason.FASTER
    assert not replace(snapshot, is_whole=False).is_reproduced([same])
    assert not snapshot.is_reproduced([replace(same, num_draft_tokens=1)])


def test_other_rules_decide_the_same_jobs_otherwise() -> None:
    snapshot = some_snapshot(explore_share=0.0)
    forced = Rules(0.0, {"code": TaskRules(decoding=Decoding.VANILLA)})
    assert decided(snapshot, forced).reason is Reason.FORCED
    shorter = decided(snapshot, Rules(0.0, {}, {"lookup": 1}))
    assert shorter.setting == DraftSetting("lookup", 1)
    assert decided(snapshot, Rules(0.0, {}, {"lookup": 99})).setting == snapshot.decisions[0].setting
    assert decided(snapshot, Rules(0.0, {}, removed=frozenset({"lookup"}))).reason is Reason.NO_DRAFTER
    target = TaskRules(objective=Objective(Aim.TIME_PER_TOKEN, 25.0))
    assert decided(snapshot, Rules(0.0, {"code": target})).reason is Reason.ON_TARGET


def test_a_job_keeps_the_mode_that_it_asked_for_and_its_deadline() -> None:
    asked = some_snapshot(decoding=Decoding.VANILLA)
    asked = replace(under(asked, Subject("code", "greedy", Decoding.VANILLA)), deadline_ms=3000.0)
    again = asked.under(TaskRules(decoding=Decoding.SPECULATIVE), asked.drafters)
    assert again.context.decoding is Decoding.VANILLA
    assert again.context.objective == Objective(Aim.DEADLINE, 3000.0)


def test_only_what_rules_had_a_say_in_is_compared() -> None:
    snapshot = some_snapshot(explore_share=0.0)
    (decision,) = snapshot.decisions
    assert not is_given(snapshot, decision)
    for subject in (
        Subject("code", "greedy", Decoding.SPECULATIVE),
        Subject("code", "greedy", purpose=Purpose.PROBE),
        Subject("code", "greedy", purpose=Purpose.CONTROL),
    ):
        assert is_given(under(snapshot, subject), decision)
    assert is_given(snapshot, replace(decision, reason=Reason.CANNOT_SERVE))
    assert not is_given(snapshot, replace(decision, reason=Reason.FORCED)), "forced by the task's configuration"


def test_incumbents_and_budgets_under_other_rules_are_carried_from_decision_to_decision() -> None:
    vague = inferred(0.02, k=4, jobs=8.0, sd=1.5)
    past = some_snapshot(groups=[Group(2, {"lookup": vague}, "", "<=256")], explore_share=0.0)
    past = replace(past, budget=ExplorationBudget(unseen={"lookup": 0.0}))
    generous = Rules(0.005, {})

    def reasons(rules: Rules) -> list[Reason]:
        replay = Replay(rules)
        return [decided(past, rules, replay).reason for _ in range(60)]

    trials = reasons(generous)
    assert trials == reasons(generous)
    assert trials[0] is not Reason.EXPLORING, "the budget of that time had nothing to spend"
    assert Reason.EXPLORING in trials
    assert Reason.EXPLORING not in reasons(Rules(0.0, {}))


def test_jobs_find_their_group() -> None:
    posterior = {"lookup": inferred(0.8, k=4)}
    groups = [
        Group(1, posterior, "gold", "<=256"),
        Group(1, posterior, "free", "<=256"),
        Group(1, posterior, "gold", "<=1024"),
    ]
    snapshot = some_snapshot(groups=groups)
    split = replace(snapshot, is_split=True)
    kinds = (("free", "<=256"), ("gold", "<=1024"), ("free", "<=1024"))
    assert [group_of(split, *kind) for kind in kinds] == [1, 2, None]
    assert group_of(snapshot, "another", "<=256") == 0


def compared(posterior: Posterior, was: DraftSetting, would: DraftSetting, seed: int = 0) -> Compared:
    """Ten jobs of 60 tokens, alone."""
    snapshot = some_snapshot(groups=[Group(1, {"lookup": posterior}, "", "<=256")], prompt_tokens=None)
    snapshot = replace(snapshot, context=replace(snapshot.context, num_running=1))
    jobs = JobsAlike("", "<=256", Purpose.TRAFFIC, was, "", 10, 600, 200, 10.0)
    return Pricing(seed).compare(snapshot, snapshot.groups[0], jobs, would)


def test_the_cost_of_another_setting_follows_from_acceptance(seed: int) -> None:
    """A vanilla token takes 30 ms; a round of three drafted 33 ms, for what α = .8 brings."""
    found = compared(inferred(0.8, k=4, sd=0.05), DraftSetting(), DraftSetting("lookup", 3), seed)
    tokens = tokens_per_round((0.8, 0.8, 0.8))[3]
    assert found.was_s == pytest.approx(600 * 0.030)
    assert found.would_s == pytest.approx(600 * 0.033 / tokens, rel=0.01)
    assert found.ratio.low <= found.ratio.mean <= found.ratio.high
    assert found.ratio.mean == pytest.approx(1.1 / tokens, rel=0.01)
    assert (found.num_jobs, found.num_same_jobs, found.measured_s) == (10, 0, 10.0)
    vague = compared(inferred(0.8, k=4, sd=0.5), DraftSetting(), DraftSetting("lookup", 3), seed).ratio
    assert vague.high - vague.low > 2 * (found.ratio.high - found.ratio.low)
