"""Decisions between servers: one draft length each or many, rounds that are timed whole, and loads that they share."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alphaloop.costs import CostKind, CostPoint, CostTable
from alphaloop.deciding.decision import DraftSetting, Reason
from alphaloop.deciding.draft_lengths import LengthsTogether, RunningSequence, settings_by_running
from alphaloop.deciding.exploration import ExplorationBudget
from alphaloop.deciding.goodput import MIN_SPEEDUP, DrafterState, JobSize, weigh
from alphaloop.deciding.job_facts import Aim, Objective
from alphaloop.deciding.policy import Group, decide, decide_groups
from alphaloop.messages import Purpose
from tests.fixtures.deciding import context_of, find, inferred

NGRAM = DrafterState("ngram", "r1", 4, least_draft_tokens=4)
EAGLE = DrafterState("eagle", "r1", 3, least_draft_tokens=3)
CONTEXT = context_of(1, 1, 200.0)
POSTERIORS = {"ngram": inferred(0.7, k=4)}


def served(
    vanilla: tuple[float, float] = (20.0, 1.0),
    *,
    prompts: bool = False,
    variance: float = 0.0,
    **drafters: tuple[float, float],
) -> CostTable:
    """Rounds of a + b · load milliseconds, by drafter; a token of a prompt takes a hundredth of a."""
    ways: list[tuple[DrafterState | None, tuple[float, float]]] = [(None, vanilla)]
    ways += [(state, drafters[state.name]) for state in (NGRAM, EAGLE) if state.name in drafters]
    points = []
    for drafter, (fixed, each) in ways:
        name, width = (drafter.name, drafter.max_draft_tokens + 1) if drafter else (None, 1)
        kind = CostKind.SERVED if drafter else CostKind.ROUND
        points += [
            CostPoint(name, load, width, fixed + each * load, 9, kind=kind, correction_variance=variance)
            for load in (1, 2, 4, 8, 16, 32)
        ]
        if prompts:
            points += [CostPoint(name, 1, 100, fixed, 3, 0, CostKind.PREFILL)]
    return CostTable(points)


def test_a_servers_round_is_draft_and_pass_together() -> None:
    table = served(ngram=(30.0, 2.0), variance=0.01)
    here = table.rounds(4)
    assert (table.is_served("ngram"), table.is_served("lookup"), table.is_of_servers) == (True, False, True)
    assert here.components_ms("ngram", 4) == (38.0, 0.0)
    assert here.components_ms("ngram", 4, [0.0, 0.1, 0.2, 0.2, 0.2], 0.2) == (38.0, 0.0), "a mean over proposals"
    assert here.round_ms(None, 0) == 24.0
    assert here.components_ms("eagle", 3) is None
    assert here.variance("ngram") == pytest.approx(0.01)
    assert table.rounds(2.5).round_ms("ngram", 4) == pytest.approx(35.0)
    assert not CostTable([CostPoint(None, 1, 1, 10.0, 3)]).is_of_servers


def test_a_server_is_weighed_at_its_one_length() -> None:
    table = served(ngram=(30.0, 2.0), eagle=(26.0, 1.0))
    posteriors = {"ngram": inferred(0.7, k=4), "eagle": inferred(0.7, k=3)}
    found = weigh(posteriors, [NGRAM, EAGLE], table, 4)
    assert {(a.drafter, a.num_draft_tokens) for a in found} == {(None, 0), ("ngram", 4), ("eagle", 3)}
    four = find(found, 4, "ngram")
    assert four.round_ms == 38.0
    assert four.speedup == pytest.approx(posteriors["ngram"].tokens[4] * 24.0 / 38.0)


def test_servers_share_what_runs() -> None:
    table = served((20.0, 1.0), ngram=(30.0, 2.0))
    shared = replace(NGRAM, num_endpoints=2, num_vanilla_endpoints=4)
    found = weigh(POSTERIORS, [shared], table, 8)
    assert find(found, 4, "ngram").round_ms == pytest.approx(30.0 + 2.0 * 4)
    assert next(a for a in found if a.drafter is None).round_ms == pytest.approx(20.0 + 2.0)
    assert find(weigh(POSTERIORS, [shared], table, 1), 4, "ngram").round_ms == 32.0, "one request is at one server"
    assert find(weigh(POSTERIORS, [NGRAM], table, 8), 4, "ngram").round_ms == pytest.approx(46.0)


def test_servers_have_no_more_requests_than_they_take() -> None:
    """A backlog fills both routes: their rounds are those of full servers, not of all that runs."""
    table = served((20.0, 1.0), ngram=(2.0, 8.0))
    full = replace(NGRAM, num_places=8, num_vanilla_places=16, num_vanilla_endpoints=2)
    found = weigh(POSTERIORS, [full], table, 40)
    assert find(found, 4, "ngram").round_ms == pytest.approx(2.0 + 8.0 * 8)
    assert next(a for a in found if a.drafter is None).round_ms == pytest.approx(20.0 + 1.0 * 16 / 2)
    assert find(weigh(POSTERIORS, [full], table, 3), 4, "ngram").round_ms == pytest.approx(2.0 + 8.0 * 3)
    context = replace(CONTEXT, num_running=40)
    assert decide(POSTERIORS, [full], table, context).drafter == "ngram"
    assert decide(POSTERIORS, [NGRAM], table, context).drafter is None, "as if one server had them all"


def test_a_prompt_is_read_once_by_the_server_that_gets_it() -> None:
    table = served((20.0, 1.0), ngram=(30.0, 2.0), prompts=True)
    size = JobSize(100.0, 50.0)
    four = find(weigh(POSTERIORS, [NGRAM], table, 4, size), 4, "ngram")
    tokens = POSTERIORS["ngram"].tokens[4]
    assert four.speedup == pytest.approx((20.0 + 50 * 24.0) / (30.0 + 50 * 38.0 / tokens))
    # 25 ms are enough for the vanilla server's 20 ms; the other one reads for 30, not for 50.
    for allowed_ms, chance in ((25.0, 0.0), (30.0, 1.0)):
        target = Objective(Aim.TIME_TO_FIRST_TOKEN, allowed_ms)
        found = weigh(POSTERIORS, [NGRAM], table, 1, size, target, 1)
        assert find(found, 4, "ngram").chance == chance
    context = replace(CONTEXT, prompt_tokens=100.0, objective=Objective(Aim.TIME_TO_FIRST_TOKEN, 40.0))
    assert decide(POSTERIORS, [NGRAM], table, context).drafter == "ngram"


@pytest.mark.parametrize("asked", [None, 1, 2, 4, 9])
def test_a_probe_of_another_length_has_the_servers(asked: int | None) -> None:
    context = context_of(1, 1, 200.0, purpose=Purpose.PROBE, probe_drafter="ngram", probe_num_draft_tokens=asked)
    decision = decide({}, [NGRAM], served(ngram=(30.0, 2.0)), context)
    assert (decision.reason, decision.setting) == (Reason.PROBE, DraftSetting("ngram", 4))
    assert ("not at k=" in decision.explanation) == (asked in (1, 2))


def test_groups_are_decided_apart_because_their_rounds_are() -> None:
    table = served((20.0, 1.0), ngram=(28.0, 1.5), prompts=True)
    groups = [Group(6, {"ngram": inferred(0.9, k=4)}), Group(2, {"ngram": inferred(0.1, k=4)})]
    context = replace(CONTEXT, num_jobs=8, num_running=8, prompt_tokens=100.0)
    good, poor = decide_groups(groups, [NGRAM], table, context)
    assert (good.setting, poor.setting) == (DraftSetting("ngram", 4), DraftSetting())
    assert (good.reason, poor.reason) == (Reason.FASTER, Reason.NOT_FASTER)


def test_what_runs_on_a_server_stays_as_it_is() -> None:
    table = served((20.0, 1.0), ngram=(28.0, 1.5))
    posteriors = {"ngram": inferred(0.9, k=4)}
    decision = decide(posteriors, [NGRAM], table, CONTEXT)
    assert decision.setting == DraftSetting("ngram", 4)
    for drafter in (NGRAM, FREE):
        assert settings_by_running(decision, posteriors, [drafter], table, CONTEXT, 32) == ()
    assert decide(posteriors, [FREE], table, CONTEXT).posteriors == {}
    poor = decide({"ngram": inferred(0.6, k=4)}, [NGRAM], table, CONTEXT)
    running = [RunningSequence("a", decision)] * 3 + [RunningSequence("b", poor)] * 3
    together = LengthsTogether(lambda: table).settings(running, datetime(2026, 11, 1, tzinfo=UTC))
    assert together == [one.decision.setting for one in running]


@given(
    vanilla=st.tuples(st.floats(5, 60), st.floats(0, 4)),
    ngram=st.tuples(st.floats(5, 60), st.floats(0, 12)),
    eagle=st.tuples(st.floats(5, 60), st.floats(0, 12)),
    alphas=st.tuples(st.floats(0.02, 0.98), st.floats(0.02, 0.98)),
    endpoints=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    num_running=st.integers(1, 32),
)
def test_the_better_server_is_chosen_at_every_load(
    vanilla: tuple[float, float],
    ngram: tuple[float, float],
    eagle: tuple[float, float],
    alphas: tuple[float, float],
    endpoints: tuple[int, int],
    num_running: int,
) -> None:
    """Tokens a second written out from the law; costs are linear, so interpolation is exact."""
    table = served(vanilla, ngram=ngram, eagle=eagle)
    states = [replace(NGRAM, num_endpoints=endpoints[0]), replace(EAGLE, num_endpoints=endpoints[1])]
    posteriors = {"ngram": inferred(alphas[0], k=4, sd=1e-3), "eagle": inferred(alphas[1], k=3, sd=1e-3)}
    decision = decide(posteriors, states, table, replace(CONTEXT, num_running=num_running))

    def rate(drafter: str | None) -> float:
        if drafter is None:
            return 1 / (vanilla[0] + vanilla[1] * num_running)
        state, law = (states[0], ngram) if drafter == "ngram" else (states[1], eagle)
        load = max(1.0, num_running / state.num_endpoints)
        return posteriors[drafter].tokens[state.max_draft_tokens] / (law[0] + law[1] * load)

    best = max(rate(name) for name in (None, "ngram", "eagle"))
    least_gain = MIN_SPEEDUP if decision.drafter is None else 1.0
    assert rate(decision.drafter) * least_gain >= best * (1 - 1e-9)


FREE = replace(NGRAM, least_draft_tokens=1)  # its servers follow each request in how long they draft


def followed(
    longest_ms: float = 30.0, shortest_ms: float = 24.0, *, variance: float = 0.01, of_shortest: float = 0.01
) -> CostTable:
    """Vanilla rounds of 20 ms, at any load; the variances are those of ln(ms)."""
    return CostTable(
        [
            CostPoint(None, 1, 1, 20.0, 9, correction_variance=variance),
            CostPoint("ngram", 1, 2, shortest_ms, 9, kind=CostKind.SERVED, correction_variance=of_shortest),
            CostPoint("ngram", 1, 5, longest_ms, 9, kind=CostKind.SERVED, correction_variance=variance),
        ]
    )


def test_every_length_is_weighed_with_its_own_time_and_doubt() -> None:
    table, posteriors = followed(of_shortest=0.09), {"ngram": inferred(0.7, k=4)}
    found = weigh(posteriors, [FREE], table, 1)
    assert {a.num_draft_tokens for a in found} == {0, 1, 2, 3, 4}
    assert [find(found, k, "ngram").round_ms for k in (1, 2, 3, 4)] == pytest.approx([24.0, 26.0, 28.0, 30.0])
    assert find(found, 1, "ngram").cost_sd == pytest.approx(math.hypot(0.3, 0.1))
    assert find(found, 4, "ngram").cost_sd == pytest.approx(math.hypot(0.1, 0.1))


@pytest.mark.parametrize(("alpha", "k"), [(0.95, 4), (0.3, 1), (0.05, 0)])
def test_the_length_follows_the_acceptance(alpha: float, k: int) -> None:
    decision = decide({"ngram": inferred(alpha, k=4)}, [FREE], followed(shortest_ms=22.0), CONTEXT)
    assert decision.setting == (DraftSetting("ngram", k) if k else DraftSetting())


@pytest.mark.parametrize(("of_shortest", "is_tried"), [(1e-4, False), (0.09, True)])
def test_a_length_whose_time_is_doubted_is_tried_though_it_is_shorter(of_shortest: float, is_tried: bool) -> None:
    """Rounds of four tokens do not time rounds of one, and their acceptance is known: only a trial tells the time."""
    table = followed(25.0, 22.0, variance=1e-4, of_shortest=of_shortest)
    posteriors = {"ngram": inferred(0.5, k=4, sd=1e-3, jobs=1e4)}
    context, budget = replace(CONTEXT, num_jobs=4, num_running=4), ExplorationBudget(5000.0, unseen={"ngram": 0.0})
    tried = set()
    for _ in range(20):
        decision = decide(posteriors, [FREE], table, context, budget=budget)
        assert decision.budget is not None
        budget = decision.budget
        if decision.reason is Reason.EXPLORING:
            tried.add(decision.setting)
    assert bool(tried) is is_tried
    assert tried <= {DraftSetting("ngram", k) for k in (1, 2, 3)}
