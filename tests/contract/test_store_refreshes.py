"""Refreshes on a real Postgres: one is open at a time, one trainer has it, and an erasure is never missed."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import text

from alphaloop.errors import ConfigError
from alphaloop.messages import Mode, Purpose
from alphaloop.store.api import Deed
from alphaloop.store.database import Database
from alphaloop.store.decision_inputs import DraftRegistry
from alphaloop.store.housekeeping import EraseStore, Erasure, Texts
from alphaloop.store.outcomes import OutcomeStore
from alphaloop.store.refreshes import (
    MAX_ATTEMPTS,
    TRAINER_MISSED_AFTER,
    Refresh,
    RefreshReason,
    RefreshState,
    RefreshStore,
    is_trainer_missing,
)
from tests.fixtures.runs import claim, decode_run, outcome, record, vanilla_counts
from tests.fixtures.worker import until

pytestmark = [pytest.mark.postgres, pytest.mark.roles("alphaloop_worker")]

NOW = datetime.now(UTC).replace(microsecond=0)
SECOND, MINUTE = timedelta(seconds=1), timedelta(minutes=1)
LEASE_S = 30.0
FOUND = {"name": "heads-2", "revision": "h2", "location": "file:///drafts/h2", "figures": {"tokens": 2}}


@pytest.fixture
def store(database: Database) -> RefreshStore:
    return RefreshStore(database)


def opened(store: RefreshStore, drafter: str = "heads", target: str = "t1") -> Refresh:
    return store.open(drafter, target, "h1", RefreshReason.BY_HAND, NOW)


def leased(store: RefreshStore, at: datetime = NOW, owner: str = "trainer") -> Refresh:
    refresh = store.lease(owner, at, LEASE_S)
    assert refresh is not None
    return refresh


def on_trial(store: RefreshStore) -> Refresh:
    refresh = leased(store)
    assert store.trial(refresh.id, refresh.attempt, **FOUND, sentence="better in code")  # type: ignore[arg-type]
    return store.of(refresh.drafter)[0]


def ended(database: Database, *job_ids: str) -> None:
    claim(database, *job_ids, segment="acme")
    OutcomeStore(database).record([outcome(job_id) for job_id in job_ids], owner="w")


def erase(database: Database, **whose: Any) -> Texts:
    erasure = Erasure(**whose)
    return EraseStore(database).erase(erasure, Deed("command", "ada", "texts_erased", erasure.subject), None, NOW)


def taught(store: RefreshStore, database: Database) -> Refresh:
    """In training with the jobs a and b; c is held out."""
    opened(store)
    refresh = leased(store)
    ended(database, "a", "b", "c")
    store.prompts(refresh.id, 1, [("a", "p1", False), ("b", "p2", False), ("c", "p3", True)])
    return refresh


def test_a_drafter_has_one_open_refresh_a_target(store: RefreshStore) -> None:
    first = opened(store)
    assert (first.state, first.attempt, first.figures, first.is_open) == (RefreshState.WAITING, 0, None, True)
    with pytest.raises(ConfigError, match="no open refresh of heads for the target t1, found one") as refusal:
        opened(store)
    assert "--cancel" in (refusal.value.hint or "")
    second, other = opened(store, target="t2"), opened(store, "eagle")
    assert [refresh.state for refresh in store.cancel("heads", NOW)] == [RefreshState.CANCELLED] * 2
    again = opened(store)
    assert [refresh.id for refresh in store.of("heads")] == [again.id, second.id, first.id]
    assert store.of("eagle") == [other]


def test_one_trainer_has_it_and_the_next_follows_after_its_lease(store: RefreshStore) -> None:
    opened(store)
    first = leased(store)
    assert (first.state, first.attempt, first.lease_owner) == (RefreshState.TRAINING, 1, "trainer")
    assert store.lease("other", NOW + 29 * SECOND, LEASE_S) is None
    assert store.renew(first.id, 1, "trainer", NOW + 20 * SECOND, LEASE_S)
    assert store.lease("other", NOW + 49 * SECOND, LEASE_S) is None
    second = leased(store, NOW + 50 * SECOND, "other")
    assert (second.id, second.attempt, second.device_s) == (first.id, 2, 20.0)


@pytest.mark.parametrize(
    "write",
    [
        lambda store, r: store.renew(r.id, r.attempt, "trainer", NOW, LEASE_S),
        lambda store, r: store.release(r.id, r.attempt, sentence="again", not_before=NOW),
        lambda store, r: store.trial(r.id, r.attempt, **FOUND, sentence=""),
        lambda store, r: store.end(r.id, r.attempt, RefreshState.REJECTED, sentence="nowhere better"),
        lambda store, r: store.prompts(r.id, r.attempt, []) is not None,
    ],
    ids=["renew", "release", "trial", "end", "prompts"],
)
@pytest.mark.parametrize("lost", ["taken", "cancelled"])
def test_an_attempt_that_does_not_hold_writes_nothing(
    store: RefreshStore, write: Callable[[RefreshStore, Refresh], bool], lost: str
) -> None:
    opened(store)
    refresh = leased(store)
    if lost == "taken":
        leased(store, NOW + MINUTE, "other")
    else:
        store.cancel("heads", NOW)
    before = store.of("heads")
    assert not write(store, refresh)
    assert store.of("heads") == before


def test_the_newest_attempt_says_whether_it_held(store: RefreshStore) -> None:
    opened(store)
    tried = on_trial(store)
    assert (tried.state, tried.candidate_name, tried.location) == (RefreshState.TRIAL, "heads-2", FOUND["location"])
    assert tried.lease_owner is None
    assert store.trials("t1") == [tried]
    assert store.trials("t2") == []
    assert store.end(tried.id, tried.attempt, RefreshState.KEPT, sentence="faster in 5 tasks")
    (kept,) = store.trials("t1")
    assert (kept.state, kept.figures, kept.sentence) == (RefreshState.KEPT, {"tokens": 2}, "faster in 5 tasks")
    assert not store.end(tried.id, tried.attempt, RefreshState.FAILED, sentence="late")


def test_workers_load_no_candidate_that_was_retired(store: RefreshStore, database: Database) -> None:
    opened(store)
    on_trial(store)
    drafts = DraftRegistry(database)
    drafts.register("heads-2", "h2", "t1")
    assert len(store.trials("t1")) == 1
    drafts.set_retired("heads-2", is_retired=True)
    assert store.trials("t1") == []


@pytest.mark.parametrize("how", ["rejected", "cancelled"])
def test_a_candidate_that_is_not_kept_is_retired_and_can_be_restored(
    store: RefreshStore, database: Database, how: str
) -> None:
    opened(store)
    tried = on_trial(store)
    drafts = DraftRegistry(database)
    drafts.register("heads-2", "h2", "t1")
    drafts.register("heads-2", "h2", "t2")
    if how == "rejected":
        assert store.end(tried.id, tried.attempt, RefreshState.REJECTED, sentence="no task uses it")
    else:
        (cancelled,) = store.cancel("heads", NOW)
        assert cancelled.state is RefreshState.CANCELLED
    assert drafts.stale("t1") == {("heads-2", "h2")}
    assert drafts.stale("t2") == set(), "its trial was of another target"
    assert drafts.retired() == set(), "it drafts for another target"
    drafts.set_retired("heads-2", is_retired=False)
    opened(store)
    again = leased(store, NOW + MINUTE)
    assert store.end(again.id, again.attempt, RefreshState.FAILED, sentence="no texts")
    assert drafts.stale("t1") == set(), "what an operator restored stays"


def test_a_candidate_that_is_not_loaded_says_why(store: RefreshStore) -> None:
    opened(store)
    tried = on_trial(store)
    assert store.say(tried.id, tried.attempt, "not loaded: no memory")
    (found,) = store.of("heads")
    assert (found.state, found.sentence, found.changed_at) == (
        RefreshState.TRIAL,
        "not loaded: no memory",
        tried.changed_at,
    )
    assert not store.say(tried.id, tried.attempt + 1, "late")
    store.cancel("heads", NOW)
    assert not store.say(tried.id, tried.attempt, "late")


def test_the_jobs_of_a_trial_are_those_of_its_target_since_it_began(store: RefreshStore, database: Database) -> None:
    opened(store)
    tried = on_trial(store)
    later = tried.changed_at + MINUTE

    def decode(at: datetime, target: str = "t1", purpose: Purpose = Purpose.TRAFFIC) -> None:
        record(database, decode_run(vanilla_counts(8), mode=Mode.VANILLA, target=target, purpose=purpose, at=at))

    decode(tried.changed_at - SECOND)
    decode(tried.changed_at + SECOND, target="t2")
    decode(tried.changed_at + SECOND, purpose=Purpose.PROBE)
    decode(later + SECOND)
    assert store.num_jobs(tried, later) == 0
    decode(tried.changed_at + SECOND)
    assert store.num_jobs(tried, later) == 1


def test_one_that_is_released_waits_until_then(store: RefreshStore) -> None:
    opened(store)
    refresh = leased(store)
    assert store.release(refresh.id, 1, sentence="the device is busy", not_before=NOW + MINUTE)
    assert store.lease("trainer", NOW + 59 * SECOND, LEASE_S) is None
    assert leased(store, NOW + MINUTE).attempt == 2


def test_a_refresh_whose_trainings_break_off_fails(store: RefreshStore) -> None:
    opened(store)
    for number in range(MAX_ATTEMPTS):
        refresh = leased(store, NOW + number * MINUTE)
        assert store.release(refresh.id, refresh.attempt, sentence="out of memory", not_before=NOW)
    assert store.lease("trainer", NOW + MAX_ATTEMPTS * MINUTE, LEASE_S) is None
    (failed,) = store.of("heads")
    assert (failed.state, failed.sentence) == (
        RefreshState.FAILED,
        "training broke off 5 times, at last: out of memory",
    )


@pytest.mark.roles  # an erasure is its owner's
def test_it_trains_with_jobs_that_are_known_and_not_erased(store: RefreshStore, database: Database) -> None:
    opened(store)
    refresh = leased(store)
    ended(database, "a", "b")
    claim(database, "running")
    erase(database, job_ids=("b",))
    given = [("a", "p1", False), ("b", "p2", True), ("unseen", "p3", False), ("running", "p4", False)]
    assert store.prompts(refresh.id, 1, given) == frozenset("a")
    assert store.prompts(refresh.id, 1, given) == frozenset("a"), "in place of those before"
    rows = database.rows(text("SELECT job_id, prompt_id, is_held_out, segment FROM refresh_prompts"))
    assert [tuple(row) for row in rows] == [("a", "p1", False, "acme")]
    assert store.prompts(refresh.id, 1, []) == frozenset()
    assert database.rows(text("SELECT FROM refresh_prompts")) == []


def test_a_refresh_that_no_trainer_takes_says_so(store: RefreshStore) -> None:
    waiting = opened(store)
    late = NOW + TRAINER_MISSED_AFTER + SECOND
    assert not is_trainer_missing(waiting, [], NOW + TRAINER_MISSED_AFTER)
    assert is_trainer_missing(waiting, [], late)
    opened(store, target="t0")
    busy = leased(store)
    assert not is_trainer_missing(busy, [], late)
    assert is_trainer_missing(waiting, [busy], late), "its lease ran out"
    renewed = replace(busy, lease_expires_at=late + SECOND)
    assert not is_trainer_missing(waiting, [renewed], late)
    again_at = replace(waiting, lease_expires_at=late)
    assert not is_trainer_missing(again_at, [], late)


def test_the_seconds_of_a_day_are_those_of_what_changed_in_it(store: RefreshStore) -> None:
    opened(store)
    refresh = leased(store)
    assert store.renew(refresh.id, 1, "trainer", NOW + 25 * SECOND, LEASE_S)
    assert store.device_s_since(NOW) == 25.0
    assert store.device_s_since(NOW + MINUTE) == 0.0
    assert [r.id for r in store.all(NOW + MINUTE)] == [refresh.id], "open"


@pytest.mark.roles  # an erasure is its owner's
@pytest.mark.parametrize(
    "whose",
    [{"job_ids": ("a",)}, {"job_ids": ("c",)}, {"segment": "acme"}, {"before": NOW + timedelta(days=1)}],
    ids=["job", "held out", "segment", "before"],
)
@pytest.mark.parametrize("state", [RefreshState.TRAINING, RefreshState.TRIAL])
def test_an_erasure_ends_a_refresh_that_holds_the_job(
    store: RefreshStore, database: Database, whose: dict[str, Any], state: RefreshState
) -> None:
    refresh = taught(store, database)
    if state is RefreshState.TRIAL:
        store.trial(refresh.id, 1, **FOUND, sentence="")  # type: ignore[arg-type]
    counted = EraseStore(database).count(Erasure(**whose))
    assert store.of("heads")[0].state is state, "counting ends nothing"
    assert erase(database, **whose) == counted
    assert counted.num_refreshes == 1
    (ended_now,) = store.of("heads")
    assert (ended_now.state, ended_now.sentence) == (RefreshState.FAILED, "texts of its jobs were erased")
    assert not store.end(refresh.id, 1, RefreshState.KEPT, sentence="")
    assert EraseStore(database).count(Erasure(**whose)).num_refreshes == 0
    opened(store)
    again = leased(store)
    gone = frozenset(whose.get("job_ids", "abc"))
    every = [(job_id, job_id, False) for job_id in "abc"]
    assert store.prompts(again.id, 1, every) == frozenset("abc") - gone, "no later one takes it"


@pytest.mark.roles  # an erasure is its owner's
def test_an_erasure_of_another_segment_ends_nothing(store: RefreshStore, database: Database) -> None:
    taught(store, database)
    claim(database, "other", segment="other")
    assert erase(database, segment="other").num_refreshes == 0
    assert store.of("heads")[0].state is RefreshState.TRAINING


@pytest.mark.roles  # an erasure is its owner's
def test_weights_that_were_trained_with_an_erased_job_are_named_and_retired_if_asked(
    store: RefreshStore, database: Database
) -> None:
    refresh, drafts = taught(store, database), DraftRegistry(database)
    store.trial(refresh.id, 1, **FOUND, sentence="")  # type: ignore[arg-type]
    store.end(refresh.id, 1, RefreshState.KEPT, sentence="")
    for name, revision in (("heads-2", "h2"), ("heads", "h1")):
        drafts.register(name, revision, "t1")
    database.change(text("DELETE FROM outbox"))
    database.change(text("DELETE FROM jobs"))
    assert erase(database, job_ids=("c",)).drafts == [], "it was judged on it, not trained with it"
    assert erase(database, job_ids=("a",)).drafts == ["heads-2"]
    (kept,) = store.trials("t1")
    assert (kept.state, kept.num_erased) == (RefreshState.KEPT, 1)
    assert erase(database, segment="acme", retires_drafts=True).drafts == ["heads-2"]
    assert store.trials("t1") == []
    assert drafts.retired() == {"heads-2"}
    assert EraseStore(database).count(Erasure(segment="acme")).drafts == []


@pytest.mark.roles  # an erasure is its owner's
def test_a_training_waits_for_an_erasure_of_its_job(store: RefreshStore, database: Database) -> None:
    """The erasure has locked the job's row: whoever asks then learns that the text is gone."""
    opened(store)
    refresh = leased(store)
    ended(database, "a")
    waits = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    with ThreadPoolExecutor(1) as pool:
        with database.begin() as erasing:
            erasing.execute(text("SELECT FROM jobs FOR UPDATE"))
            taken = pool.submit(store.prompts, refresh.id, 1, [("a", "p1", False)])
            until(lambda: database.scalar(text(waits)) == 1, "the training waits")
            erasing.execute(text("""UPDATE jobs SET outcome = '{"erased_at":"2026-01-01"}'"""))
        assert taken.result() == frozenset()
