"""A snapshot holds everything that a decision was taken from; a replay decides it again, under other rules too."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alphaloop.deciding.decision import Decision, DraftSetting, Reason
from alphaloop.deciding.exploration import ExplorationBudget
from alphaloop.deciding.goodput import DrafterState
from alphaloop.deciding.job_facts import Aim, Objective, Subject, TaskRules
from alphaloop.deciding.policy import Group
from alphaloop.deciding.posterior import Posterior, tokens_per_round
from alphaloop.deciding.replay import Compared, Pricing, Replay, Rules, group_of, is_given
from alphaloop.deciding.snapshot import MOST_BYTES, JobsAlike, SessionFacts, Snapshot, SnapshotEncoder, decode
from alphaloop.messages import Decoding, Purpose
from tests.fixtures.deciding import NOON, inferred, some_snapshot, under

FACTS: Final = SessionFacts("w", "h", "d", "e", "t", 4, timedelta(days=3), 0.02)
names: Final = st.text(max_size=8)


def stored(snapshot: Snapshot) -> dict[str, Any]:
    """As it comes back from the database."""
    text = SnapshotEncoder(FACTS).encode(snapshot)
    assert len(text.encode()) <= MOST_BYTES
    return json.loads(text)  # type: ignore[no-any-return]


def again(snapshot: Snapshot) -> Snapshot:
    subject = snapshot.subject
    found, facts = decode(
        stored(snapshot),
        snapshot.decision_id,
        snapshot.decided_at,
        subject.task,
        subject.sampling_bucket,
        snapshot.context.num_running,
    )
    assert facts == FACTS
    return found


def test_everything_that_a_decision_is_taken_from_comes_back() -> None:
    context = replace(
        some_snapshot().context,
        subject=Subject("code", "greedy", Decoding.VANILLA, Purpose.PROBE, "lookup", 3, "a pattern"),
        decoding=Decoding.VANILLA,
        objective=Objective(Aim.TIME_PER_TOKEN, 30.0),
        known_output_jobs=7.5,
        free_cache_bytes=1000,
        free_elsewhere={"lookup": 5},
        max_sequence_tokens=150.0,
        max_output_tokens=100.0,
        cannot_serve={"lookup": "min_p"},
    )
    snapshot = replace(
        some_snapshot(),
        context=context,
        incumbent=DraftSetting("lookup", 2),
        budget=ExplorationBudget(5.0, 9.0, 4.0, {"lookup": 3.0}, {"lookup": 60.0}, NOON),
        deadline_ms=1500.0,
        is_split=True,
    )
    found = again(snapshot)
    for name in ("subject", "context", "deadline_ms", "drafters", "is_split", "incumbent", "budget", "is_whole"):
        assert getattr(found, name) == getattr(snapshot, name), name
    assert [(one.setting, one.reason, one.explanation) for one in found.decisions] == [
        (one.setting, one.reason, one.explanation) for one in snapshot.decisions
    ]
    assert found.seen["lookup"].trials == snapshot.seen["lookup"].trials
    posterior, before = (its.groups[0].posteriors["lookup"] for its in (found, snapshot))
    assert posterior.tokens == pytest.approx(before.tokens, rel=1e-4)
    assert posterior.tokens_sd == pytest.approx(before.tokens_sd, rel=1e-4)


def many(number: int, k: int = 8) -> list[DrafterState]:
    return [DrafterState(f"drafter-{n}", f"revision-{n}", k) for n in range(number)]


@pytest.mark.parametrize("num_drafters", [12, 60])
@pytest.mark.parametrize("num_groups", [1, 20])
def test_of_many_drafters_the_least_likely_are_dropped(num_drafters: int, num_groups: int) -> None:
    drafters = many(num_drafters)
    groups = [
        Group(
            1 + number % 3,
            {one.name: inferred(0.2 + 0.6 * rank / num_drafters, k=8) for rank, one in enumerate(drafters)},
            f"segment {number}",
            "<=256",
        )
        for number in range(num_groups)
    ]
    snapshot = some_snapshot(drafters, groups)
    content = stored(snapshot)
    dropped = content["dropped"]
    assert len(content["drafters"]) == num_drafters - dropped["drafters"]
    assert len(content["groups"]) == num_groups - dropped["groups"]
    largest = max(snapshot.groups, key=lambda group: group.num_jobs)
    assert largest.segment in {group["segment"] for group in content["groups"]}
    found = again(snapshot)
    assert found.is_whole == (dropped["drafters"] == dropped["groups"] == 0)
    best = {drafter.name for drafter in found.drafters}
    assert {one.drafter for one in snapshot.decisions[:1]} - {None} <= best
    if dropped["drafters"] and num_groups == 1:
        assert f"drafter-{num_drafters - 1}" in best, "what was expected to be fastest stays"
        assert "drafter-0" not in best
        assert found.decide()[0].setting == snapshot.decisions[0].setting


def test_of_a_document_that_would_be_too_long_the_outcome_stays() -> None:
    (drafter,) = many(1, k=400)
    posterior = inferred(0.9, k=400, reach=(0.9,) * 400)
    own_var = tuple(1e-4 + n / 1e6 for n in range(400))
    posterior = replace(posterior, profile=replace(posterior.profile, own_var=own_var))
    snapshot = some_snapshot([drafter], [Group(1, {drafter.name: posterior})])
    found = again(snapshot)
    assert not found.is_whole
    assert found.drafters == ()
    assert [(one.setting, one.reason) for one in found.decisions] == [
        (one.setting, one.reason) for one in snapshot.decisions
    ]


@settings(max_examples=25)
@given(
    st.lists(names, min_size=1, max_size=6, unique=True), names, st.text(max_size=2000), st.dictionaries(names, names)
)
def test_a_document_is_never_too_long_whatever_the_names_are(
    drafters: Sequence[str], segment: str, pattern: str, cannot_serve: dict[str, str]
) -> None:
    states = [DrafterState(name, "r", 6) for name in drafters]
    groups = [Group(1, {name: inferred(0.7, k=6) for name in drafters}, segment, "<=256")]
    again(some_snapshot(states, groups, switched_off=pattern, cannot_serve=cannot_serve))


def test_a_document_of_another_form_is_refused() -> None:
    content = stored(some_snapshot())
    for name in ("explore_share", "groups", "context", "drafters", "costs"):
        broken = {part: value for part, value in content.items() if part != name}
        with pytest.raises((KeyError, TypeError, ValueError)):
            decode(broken, some_snapshot().decision_id, NOON, "code", "greedy", 4)


SESSION: Final = SessionFacts("w", "h", "d", "e", "t", 8, timedelta(days=3), 0.0)


def decided(snapshot: Snapshot, rules: Rules, replay: Replay | None = None) -> Decision:
    return (replay or Replay(rules)).decide(snapshot, SESSION)[0]


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
