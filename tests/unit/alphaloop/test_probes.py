"""Probe sets, and which measurements a run does."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alphaloop.messages import Body, Job, Purpose
from alphaloop.probe_plan import PRIOR_JOB_DEVICE_S, SCORE_SHARE, DueProbe, Why, find_due, make_plan
from alphaloop.probes import TaskTraffic, draw_prompts, new_probe_set
from tests.fixtures.drift import probe_set

BODIES = [{"prompt": "one", "temperature": 0.7}, {"prompt": "two", "stream": True, "seed": 4}]


def test_prompts_are_asked_greedily_and_whole() -> None:
    found = probe_set("code", BODIES)
    asked = sorted((dict(prompt.body) for prompt in found.prompts.values()), key=lambda body: str(body["prompt"]))
    assert asked == [
        {"prompt": "one", "temperature": 0.0, "max_tokens": 48},
        {"prompt": "two", "temperature": 0.0, "max_tokens": 48},
    ]


def test_versions_share_the_prompts_that_both_have() -> None:
    first, second = probe_set("code", BODIES), probe_set("code", [{"prompt": "two"}, {"prompt": "three"}])
    assert first.version != second.version
    (shared,) = {p.prompt_id: p for p in first.prompts.values()}.keys() & {p.prompt_id for p in second.prompts.values()}
    assert {p.prompt_id: p.body["prompt"] for p in first.prompts.values()}[shared] == "two"


def test_another_k_is_another_version_of_the_same_prompts() -> None:
    first, second = probe_set("code", BODIES, 3), probe_set("code", BODIES, 5)
    assert first.version != second.version
    assert first.prompts == second.prompts


def test_another_output_limit_makes_other_prompts() -> None:
    longer = new_probe_set("code", BODIES, num_draft_tokens=3, max_tokens=64)
    ids = {prompt.prompt_id for prompt in longer.prompts.values()}
    assert ids.isdisjoint(prompt.prompt_id for prompt in probe_set("code", BODIES).prompts.values())


def test_a_prompt_that_occurs_twice_is_measured_once() -> None:
    assert probe_set("code", [*BODIES, BODIES[0]]) == probe_set("code", BODIES)


def test_any_beginning_has_prompts_of_every_length() -> None:
    bodies = [{"prompt": "x" * length} for length in range(1, 41)]
    lengths = [len(str(prompt.body["prompt"])) for prompt in probe_set("code", bodies).prompts.values()]
    assert lengths[:4] == [1, 11, 21, 31]
    assert sorted(lengths) == list(range(1, 41))
    assert probe_set("code", bodies[::-1]) == probe_set("code", bodies), "the order of the file does not matter"


def test_a_set_has_a_prompt() -> None:
    with pytest.raises(ValueError, match="without a prompt"):
        probe_set("code", [])


def job(number: int, length: int, purpose: Purpose = Purpose.TRAFFIC) -> Job:
    return Job(job_id=f"job-{number}", task="code", body=Body(prompt=f"{number:03d}" + "x" * length), purpose=purpose)


JOBS = [job(i, 10) for i in range(80)] + [job(100 + i, 5000) for i in range(20)]


def test_long_prompts_are_drawn_as_often_as_they_occur() -> None:
    found = draw_prompts(JOBS, 20, seed=1)
    assert len(found) == len({one.body.prompt for one in found}) == 20
    num_long = sum(len(one.body.prompt or "") > 1000 for one in found)
    assert 3 <= num_long <= 5, "20 of 100 prompts are long, in one of the four quarters"


def test_the_same_seed_draws_the_same() -> None:
    assert draw_prompts(JOBS, 20, seed=1) == draw_prompts(JOBS[::-1], 20, seed=1) != draw_prompts(JOBS, 20, seed=2)


def test_probes_and_repeated_prompts_are_left_out() -> None:
    jobs = [job(1, 10), job(1, 10), job(2, 10, Purpose.PROBE), job(3, 10, Purpose.CONTROL)]
    assert [(one.body.prompt or "")[:3] for one in draw_prompts(jobs, 5, seed=0)] == ["001"]


NOW = datetime(2026, 1, 5, 12, tzinfo=UTC)
HOUR, DAY = timedelta(hours=1), timedelta(days=1)
CODE, SQL = probe_set("code", [{"prompt": "one"}], 5), probe_set("sql", [{"prompt": "one"}])
LONG_AGO = NOW - 30 * DAY
CHANGE_JOBS = 500.0


def due(
    last: Mapping[tuple[str, str], datetime],
    *,
    drafters: Mapping[str, datetime] | None = None,
    alarms: Mapping[tuple[str, str], datetime] | None = None,
    traffic: Sequence[TaskTraffic] = (),
    scorable: Collection[str] = (),
    incidents: Collection[tuple[str, str]] = (),
) -> list[DueProbe]:
    return find_due(
        [CODE, SQL],
        drafters or {"lookup": LONG_AGO, "tiny": LONG_AGO},
        last,
        NOW,
        max_age=lambda task: DAY if task == "code" else 3 * DAY,
        alarms=alarms or {},
        traffic=traffic,
        change_jobs=CHANGE_JOBS,
        scorable=scorable,
        incidents=incidents,
    )


def measured(hours: float) -> dict[tuple[str, str], datetime]:
    """Everything was measured so long ago."""
    return {(task, drafter): NOW - hours * HOUR for task in ("code", "sql") for drafter in ("lookup", "tiny")}


def pairs(found: Sequence[DueProbe]) -> list[tuple[str, str, Why]]:
    return [(one.task, one.drafter, one.why) for one in found]


def test_everything_is_new_once() -> None:
    assert {(one.why, one.last_probed) for one in due({})} == {(Why.NEW, None)}
    assert {(one.task, one.num_draft_tokens) for one in due({})} == {("code", 5), ("sql", 3)}
    assert due(measured(1)) == []


def test_a_task_may_have_an_age_of_its_own() -> None:
    assert pairs(due(measured(25))) == [("code", "lookup", Why.AGE), ("code", "tiny", Why.AGE)]
    assert len(due(measured(73))) == 4


def test_something_new_is_measured_at_once_and_once() -> None:
    drafters = {"lookup": LONG_AGO, "tiny": NOW - 2 * HOUR}
    assert pairs(due(measured(3), drafters=drafters)) == [("code", "tiny", Why.NEW), ("sql", "tiny", Why.NEW)]
    assert due(measured(1), drafters=drafters) == []


def test_an_alarm_is_measured_at_once_and_once() -> None:
    alarms = {("sql", "lookup"): NOW - 2 * HOUR}
    assert pairs(due(measured(3), alarms=alarms)) == [("sql", "lookup", Why.ALARM)]
    assert due(measured(1), alarms=alarms) == []


def test_alarms_come_first_and_new_things_before_old_ones() -> None:
    last = measured(80) | {("code", "tiny"): NOW - 3 * HOUR, ("sql", "lookup"): NOW - HOUR}
    found = due(last, drafters={"lookup": LONG_AGO, "tiny": NOW - 2 * HOUR}, alarms={("sql", "lookup"): NOW})
    assert pairs(found) == [
        ("sql", "lookup", Why.ALARM),
        ("sql", "tiny", Why.NEW),
        ("code", "tiny", Why.NEW),
        ("code", "lookup", Why.AGE),
    ]


def test_what_is_at_stake_is_unchecked_traffic() -> None:
    """D · (1 - exp(-N / change_jobs)) over the hours since the last measurement."""
    traffic = [TaskTraffic("sql", NOW - h * HOUR, 10, 20.0) for h in range(1, 101)]
    traffic += [TaskTraffic("code", NOW - HOUR, 5, 1.0)]
    last = measured(80) | {("sql", "tiny"): NOW - 90 * HOUR}
    found = due(last, traffic=traffic)
    assert [(one.task, one.drafter) for one in found] == [
        ("sql", "tiny"),
        ("sql", "lookup"),
        ("code", "lookup"),
        ("code", "tiny"),
    ]
    assert found[0].at_stake_device_s == pytest.approx(90 * 20.0 * (1 - math.exp(-900 / CHANGE_JOBS)))
    assert found[1].at_stake_device_s == pytest.approx(80 * 20.0 * (1 - math.exp(-800 / CHANGE_JOBS)))


def test_only_what_is_merely_old_is_scored() -> None:
    def scored(found: Sequence[DueProbe]) -> set[tuple[str, str]]:
        return {(one.task, one.drafter) for one in found if one.is_scored}

    both = ("lookup", "tiny")
    assert scored(due({}, scorable=both)) == set(), "new"
    assert scored(due(measured(80))) == set(), "cannot be"
    assert scored(due(measured(80), scorable=["tiny"])) == {("code", "tiny"), ("sql", "tiny")}
    drift = {("code", "tiny"): NOW - 90 * HOUR}
    assert scored(due(measured(80), scorable=["tiny"], alarms=drift)) == {("sql", "tiny")}, "drift is still open"
    wrong = [("code", "tiny"), ("sql", "")]
    assert scored(due(measured(80), scorable=both, incidents=wrong)) == {("code", "lookup")}


def test_a_scored_measurement_costs_its_controls_a_share_of_probes_and_the_scores() -> None:
    old = due(measured(25), scorable=["lookup", "tiny"])
    assert [one.task for one in old] == ["code", "code"]
    first, second = make_plan(old, {"code": 2.0}, {"code": 8, "sql": 1}, 100.0).measurements
    assert (first.num_prompts, first.num_decoded) == (8, 2)
    assert first.device_s == pytest.approx(2.0 * (8 + 2 + 6 * SCORE_SHARE))
    assert second.device_s == pytest.approx(2.0 * (2 + 6 * SCORE_SHARE)), "the controls are paid for"
    (alone,) = make_plan(old[:1], {"code": 2.0}, {"code": 1}, 100.0).measurements
    assert alone.num_decoded == 1, "the watch over exactness has a pair in every run"


@given(st.floats(0, 500), st.dictionaries(st.sampled_from(["code", "sql"]), st.floats(0.1, 20)))
def test_the_budget_is_kept_and_a_measurement_is_whole(budget: float, seconds: dict[str, float]) -> None:
    num_prompts = {"code": 4, "sql": 1}
    plan = make_plan(due({}), seconds, num_prompts, budget)
    assert [one.due for one in plan.measurements] == due({})
    per_prompt = {task: seconds.get(task, PRIOR_JOB_DEVICE_S) for task in num_prompts}
    cost = sum(per_prompt[d.task] * num_prompts[d.task] for d in plan.chosen)
    cost += sum(per_prompt[task] * num_prompts[task] for task in {d.task for d in plan.chosen})
    assert cost == pytest.approx(sum(one.device_s for one in plan.measurements if one.is_sent))
    assert cost <= budget * (1 + 1e-9)
    left = budget - cost
    assert all(
        one.device_s > left * (1 - 1e-9) for one in plan.waiting if one.due.task in {d.task for d in plan.chosen}
    )


def test_what_does_not_fit_does_not_hold_back_what_does() -> None:
    plan = make_plan(due({}), {"code": 100.0, "sql": 1.0}, {"code": 1, "sql": 1}, 10.0)
    assert [d.task for d in plan.chosen] == ["sql", "sql"]
    assert [one.due.task for one in plan.waiting] == ["code", "code"]
