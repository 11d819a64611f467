"""Which drafters are due, in which order, and what fits the budget."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alphaloop.probing.due import Due, TaskHour, Why, find_due
from alphaloop.probing.plan import PRIOR_JOB_DEVICE_S, make_plan
from tests.fixtures.probes import probe_set

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
    traffic: Sequence[TaskHour] = (),
) -> list[Due]:
    return find_due(
        [CODE, SQL],
        drafters or {"lookup": LONG_AGO, "tiny": LONG_AGO},
        last,
        NOW,
        max_age=lambda task: DAY if task == "code" else 3 * DAY,
        alarms=alarms or {},
        traffic=traffic,
        change_jobs=CHANGE_JOBS,
    )


def measured(hours: float) -> dict[tuple[str, str], datetime]:
    """Everything was measured so long ago."""
    return {(task, drafter): NOW - hours * HOUR for task in ("code", "sql") for drafter in ("lookup", "tiny")}


def pairs(found: Sequence[Due]) -> list[tuple[str, str, Why]]:
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
    traffic = [TaskHour("sql", NOW - h * HOUR, 10, 20.0) for h in range(1, 101)]
    traffic += [TaskHour("code", NOW - HOUR, 5, 1.0)]
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
