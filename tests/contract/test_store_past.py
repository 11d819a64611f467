"""What was known at an earlier moment, in a real PostgreSQL."""

from __future__ import annotations

import random
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from alphaloop.acceptance import EvidenceKey
from alphaloop.deciding.key_evidence import KeyEvidence
from alphaloop.store.acceptance_state import AcceptanceStateStore
from alphaloop.store.database import Database
from alphaloop.store.decode_runs import DecodeRun, JobCounts, ShadowRun
from alphaloop.store.housekeeping import PartitionKeeper
from alphaloop.store.outcomes import record_counts
from alphaloop.store.past import PastStore
from alphaloop.store.traffic import TrafficStore
from tests.fixtures.history import DRAFT, ENGINE, TARGET, decoded, drawn_counts, record_runs

pytestmark = pytest.mark.postgres

NOON, MINUTE, HALF_LIFE = datetime(2026, 9, 1, 12, tzinfo=UTC), timedelta(minutes=1), timedelta(days=3)


def some_runs(rng: random.Random, task: str, start: datetime, num_jobs: int = 20) -> list[DecodeRun]:
    counts = (drawn_counts(rng, 0.7, num_tokens=48, num_draft_tokens=3) for _ in range(num_jobs))
    return [decoded(its, start + i * MINUTE, task=task) for i, its in enumerate(counts)]


def write(database: Database, runs: list[DecodeRun]) -> None:
    for run in runs:
        record_runs(database, {f"{run.key.task}-{run.decoded_at}": run}, HALF_LIFE)


def state(database: Database) -> dict[EvidenceKey, KeyEvidence]:
    rows = AcceptanceStateStore(database).read(TARGET, ENGINE, {"lookup": DRAFT}).rows
    return {row.key: row.evidence for row in rows}


def test_the_past_is_made_again_exactly(database: Database, rng: random.Random) -> None:
    """Of all tasks, hours that are over among them."""
    for task in ("code", "chat"):
        write(database, some_runs(rng, task, NOON - 180 * MINUTE))
    then = state(database)
    write(database, some_runs(rng, "code", NOON + 30 * MINUTE))
    past = PastStore(database)
    assert past.evidence_by_key(TARGET, ENGINE, NOON + 25 * MINUTE, HALF_LIFE, task="code") == then
    assert past.evidence_by_key(TARGET, ENGINE, NOON + 55 * MINUTE, HALF_LIFE) == state(database)
    assert past.evidence_by_key(TARGET, ENGINE, NOON - 200 * MINUTE, HALF_LIFE, task="code") == {}
    assert past.evidence_by_key("another", ENGINE, NOON + 55 * MINUTE, HALF_LIFE, task="code") == {}


def test_before_the_ledger_the_past_is_estimated_from_hours(database: Database, rng: random.Random) -> None:
    """Of other tasks by drafter alone, whatever the keys were."""
    for task in ("code", "chat"):
        write(database, some_runs(rng, task, NOON - 180 * MINUTE))
        write(database, some_runs(rng, task, NOON))
    exact = state(database)
    until = NOON + 90 * MINUTE
    PartitionKeeper(database).drop_before((NOON + timedelta(days=1)).date())
    found = PastStore(database).evidence_by_key(TARGET, ENGINE, until, HALF_LIFE, task="code")
    (key,) = (key for key in exact if key.task == "code")
    again, before = (one.all.faded(until, HALF_LIFE) for one in (found[key], exact[key]))
    assert again.jobs == pytest.approx(before.jobs, rel=0.01)
    for name in ("trials", "accepts", "chances", "proposed"):
        assert getattr(again, name) == pytest.approx(getattr(before, name), rel=0.01)
    (other,) = (evidence for place, evidence in found.items() if place.task == "chat")
    assert other.all.faded(until, HALF_LIFE).jobs == pytest.approx(before.jobs, rel=0.1)


def test_jobs_come_in_the_order_in_which_they_were_recorded(database: Database, rng: random.Random) -> None:
    code, chat = some_runs(rng, "code", NOON), some_runs(rng, "chat", NOON + MINUTE / 2)
    everything = sorted(code + chat, key=lambda run: run.decoded_at)
    write(database, everything)
    past = PastStore(database)
    assert [run for one in past.recorded(NOON, NOON + 60 * MINUTE) for run in one.runs] == everything
    found = past.recorded(NOON + MINUTE, NOON + 5 * MINUTE, task="code")
    assert [run for one in found for run in one.runs] == code[1:5]
    assert past.first_and_last("chat") == (chat[0].decoded_at, chat[-1].decoded_at)
    assert past.first_and_last("sql") is None
    assert past.tasks() == ["chat", "code"]


def test_jobs_come_with_their_batch_and_their_chances(database: Database, rng: random.Random) -> None:
    """Drafts of three, then, as the batch drained, of five: the last two positions were not always asked for."""
    plain, changed = some_runs(rng, "code", NOON, 2)
    changed = replace(changed, chances=(40, 30, 20, 6, 5), decode_batch_id=plain.decode_batch_id)
    write(database, [plain, changed])
    found = [run for one in PastStore(database).recorded(NOON, NOON + 60 * MINUTE) for run in one.runs]
    assert found == [plain, changed]
    assert found[1].evidence.chances == changed.evidence.chances
    assert found[1].evidence.chances[3:] == (6.0, 5.0)


def test_what_was_recorded_comes_as_it_was_added(database: Database, rng: random.Random) -> None:
    """A transaction at a time: jobs, and the evidence that they gave together; controls and longer scores as such."""
    first, second, third = some_runs(rng, "code", NOON, 3)
    control = replace(first, purpose="control", key=replace(first.key, drafter="", draft_revision=""), mode="vanilla")
    whole, parts, drafted = (
        ShadowRun(replace(first.key, drafter=drafter), 3, first.counts, 20, 48, first.decoded_at, chances)
        for drafter, chances in (("other", ()), ("gated", (40, 30, 20)), (first.key.drafter, ()))
    )
    groups = [
        [JobCounts("a", 1, first, (whole, parts, drafted)), JobCounts("b", 1, second)],
        [JobCounts("c", 1, control), JobCounts("d", 1, third)],
    ]
    for minutes, group in enumerate(groups):
        with database.begin() as connection:
            record_counts(connection, group, HALF_LIFE, recorded_at=NOON + minutes * MINUTE)
    past = PastStore(database)
    found = list(past.recorded(NOON, NOON + 60 * MINUTE, task="code"))
    assert [one.runs for one in found] == [[first, second], [control, third]]
    # The run is no evidence beside a longer score under its own key, so the first row counts for the length.
    rows = (replace(whole, is_cut=False), parts, drafted)
    added = [[(s.key, s.evidence) for s in rows] + [(second.key, second.evidence)]]
    assert [one.evidence for one in found] == [*added, [(third.key, third.evidence)]]
    assert [one.scored for one in found] == [[whole.key, parts.key], []]
    assert list(past.recorded(NOON, NOON + 60 * MINUTE, task="chat")) == []
    assert [one.runs for one in past.recorded(NOON, NOON + MINUTE)] == [[first, second]]


def test_ways_of_the_last_jobs(database: Database, rng: random.Random) -> None:
    write(database, some_runs(rng, "code", NOON, 12))
    vanilla = decoded(drawn_counts(rng, 0.0, num_tokens=48, num_draft_tokens=0), NOON, drafter="", reason="control")
    write(database, [vanilla])
    where = ("code", TARGET, ENGINE, "cpu", "greedy")
    until = NOON + 60 * MINUTE
    fast, slow = TrafficStore(database).ways(*where, NOON - MINUTE, until)
    assert (fast.drafter, fast.num_draft_tokens, fast.reason, fast.num_jobs) == ("lookup", 3, "faster", 12)
    assert (slow.drafter, slow.reason, slow.num_jobs, slow.num_tokens) == ("", "control", 1, 48)
    assert slow.device_s == pytest.approx(vanilla.device_s)
    (last,) = TrafficStore(database).ways(*where, NOON - MINUTE, until, max_jobs=5)
    assert (last.num_jobs, last.num_tokens) == (5, 5 * 48)
    assert TrafficStore(database).ways("sql", *where[1:], NOON - MINUTE, until) == []
