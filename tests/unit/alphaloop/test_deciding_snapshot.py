"""Snapshots: what a decision was taken from comes back, and no document is longer than it may be."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alphaloop.deciding.decision import DraftSetting
from alphaloop.deciding.exploration import ExplorationBudget
from alphaloop.deciding.goodput import DrafterState
from alphaloop.deciding.job_facts import Aim, Objective, Subject
from alphaloop.deciding.policy import Group
from alphaloop.deciding.snapshot import MOST_BYTES, SessionFacts, Snapshot, SnapshotEncoder, decode
from alphaloop.messages import Decoding, Purpose
from tests.fixtures.deciding import NOON, inferred, some_snapshot

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
