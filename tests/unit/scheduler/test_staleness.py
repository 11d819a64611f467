"""The stale flag: two thresholds, and comparisons by prompt."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alphaloop.acceptance import Interval
from alphaloop.measurements import ProbeResult
from scheduler.staleness import compare_probes, is_stale, pooled_change

AT = datetime(2026, 1, 1, tzinfo=UTC)
DAY = timedelta(days=1)


def probe(position: int, accepts: int, *, day: int = 0, trials: int = 20) -> ProbeResult:
    return ProbeResult(
        AT + day * DAY,
        "code",
        "set-1",
        position,
        f"prompt-{position}",
        "lookup",
        "draft-1",
        "target-1",
        "engine-1",
        3,
        (trials, accepts),
        (accepts, 0),
        48,
        1.0,
    )


changes = st.floats(-1, 1).flatmap(
    lambda mean: st.tuples(st.just(mean), st.floats(-1, mean), st.floats(mean, 1)).map(lambda t: Interval(*t))
)


@given(changes, st.booleans())
def test_between_the_thresholds_nothing_changes(change: Interval, was: bool) -> None:
    now = is_stale(was, change, drop=0.1, recover=0.04)
    if now and not was:
        assert change.mean < -0.1
        assert change.high < 0
    if was and not now:
        assert change.mean > -0.04
    if -0.1 <= change.mean <= -0.04:
        assert now == was


@given(st.lists(changes, max_size=20))
def test_seeing_the_same_again_changes_nothing(history: list[Interval]) -> None:
    state = False
    for change in history:
        state = is_stale(state, change, drop=0.1, recover=0.04)
        assert is_stale(state, change, drop=0.1, recover=0.04) == state


def test_an_uncertain_fall_does_not_open() -> None:
    assert not is_stale(False, Interval(-0.3, -0.7, 0.1), drop=0.1, recover=0.04)
    assert is_stale(False, Interval(-0.3, -0.5, -0.1), drop=0.1, recover=0.04)


def test_the_latest_run_is_compared_with_the_first() -> None:
    runs = [probe(p, 16) for p in range(4)] + [probe(p, 3, day=1) for p in range(4)]
    runs += [probe(p, 12, day=2) for p in range(4)]
    (comparison,) = compare_probes(reversed(runs))
    assert comparison.change.mean == pytest.approx(-0.2)
    assert (comparison.alpha_before, comparison.alpha_after) == (pytest.approx(0.8), pytest.approx(0.6))
    assert not comparison.target_changed


def test_a_new_target_is_compared_with_the_old_one() -> None:
    runs = [probe(p, 16) for p in range(4)]
    runs += [replace(probe(p, 8, day=1), target_revision="target-2") for p in range(4)]
    (comparison,) = compare_probes(runs)
    assert comparison.target_changed
    assert comparison.subject.target_revision == "target-2"
    assert comparison.change.mean == pytest.approx(-0.4)


def test_a_new_draft_or_a_new_set_starts_anew() -> None:
    first = [probe(p, 16) for p in range(4)]
    another_draft = [replace(probe(p, 4, day=1), draft_revision="draft-2") for p in range(4)]
    assert compare_probes(first + another_draft) == []
    another_set = [replace(probe(p, 4, day=1), probe_set="set-2") for p in range(4)]
    assert compare_probes(first + another_set) == []


def test_prompts_without_a_twin_are_left_out() -> None:
    (comparison,) = compare_probes([probe(0, 16), probe(1, 2), probe(0, 16, day=1)])
    assert len(comparison.pairs) == 1
    assert comparison.change.mean == 0


def test_nothing_proposed_is_nothing_known() -> None:
    silent = [replace(probe(p, 0, day=1), trials=(), accepts=()) for p in range(4)]
    assert compare_probes([probe(p, 16) for p in range(4)] + silent) == []


def test_tasks_are_pooled_for_a_draft() -> None:
    code = [probe(p, 16) for p in range(4)] + [probe(p, 8, day=1) for p in range(4)]
    sql = [replace(r, task="sql") for r in [probe(p, 16) for p in range(4)] + [probe(p, 16, day=1) for p in range(4)]]
    change = pooled_change(compare_probes(code + sql))
    assert change is not None
    assert change.mean == pytest.approx(-0.2)
    assert change.low < -0.2 < change.high
