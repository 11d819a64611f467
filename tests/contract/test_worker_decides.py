"""The worker's decisions over a real PostgreSQL: from history at once, without asking it again, and serving on."""

from __future__ import annotations

import random
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from alphaloop.deciding.decision import Decision, DraftSetting, IncumbentKey, Incumbents, Reason
from alphaloop.errors import StoreUnavailable
from alphaloop.messages import Mode, Purpose
from alphaloop.settings import TaskSettings
from alphaloop.store.database import Database
from alphaloop.store.decisions import DecisionLog
from alphaloop.store.job_counts import ShadowRun
from alphaloop.store.outcomes import Outcome
from tests.fixtures.deciding_worker import (
    ENGINE,
    LOOKUP,
    Worker,
    asked,
    record,
    run,
    unreachable,
)
from worker.deciding.decider import StoredChoices

pytestmark = pytest.mark.postgres


def test_a_new_worker_decides_its_first_batch_from_what_others_measured(database: Database, rng: random.Random) -> None:
    """Two tasks that nothing but history tells apart, and a third without any."""
    record(database, *(run("code", rng, 0.95) for _ in range(20)), *(run("chat", rng, 0.02) for _ in range(20)))
    worker = Worker(database)
    code, chat, cold = (worker.decide(task) for task in ("code", "chat", "sql"))
    assert (code.mode, code.reason) == (Mode.SPECULATIVE, Reason.FASTER)
    assert (chat.mode, chat.reason) == (Mode.VANILLA, Reason.NOT_FASTER)
    assert cold.reason is Reason.NO_HISTORY or cold.mode is Mode.SPECULATIVE


def test_the_next_batches_ask_the_database_nothing(
    database: Database, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(database, *(run("code", rng, 0.95) for _ in range(10)))
    worker = Worker(database)
    first = worker.decide("code")
    with unreachable(monkeypatch) as tries:
        again = [worker.decide("code") for _ in range(5)]
    assert tries == []
    assert {decision.num_draft_tokens for decision in again} == {first.num_draft_tokens}


def test_a_first_batch_without_a_database_is_asked_for_again_and_counts_once(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = datetime.now(UTC)
    worker, undisturbed = (Worker(database, 0.02, now=lambda: now) for _ in range(2))
    with unreachable(monkeypatch):
        for _ in range(3):
            with pytest.raises(StoreUnavailable):
                worker.decide("code")
    # Of a task of which as little is known: workers share the budget of one.
    assert worker.decide("code") == undisturbed.decide("chat")


def test_a_change_that_cannot_be_logged_is_logged_with_the_next_batch(
    database: Database, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(database, *(run("code", rng, 0.02) for _ in range(10)))
    worker = Worker(database)
    assert worker.decide("code").mode is Mode.VANILLA
    record(database, *(run("code", rng, 0.97) for _ in range(80)), by=worker)
    with unreachable(monkeypatch) as tries:
        changed = worker.decide("code")
    assert changed.mode is Mode.SPECULATIVE
    assert tries
    assert [change.after.mode for change in DecisionLog(database).latest("code")] == ["vanilla"]
    worker.decide("code")
    worker.decide("code")
    assert [change.after.mode for change in DecisionLog(database).latest("code")] == ["speculative", "vanilla"]


def test_jobs_of_one_batch_are_decided_by_their_groups(database: Database, rng: random.Random) -> None:
    """Short prompts are drafted for well, long ones badly; in another task it is one customer against another."""
    record(database, *(run("code", rng, 0.95) for _ in range(40)))
    record(database, *(run("code", rng, 0.02, num_prompt_tokens=3000) for _ in range(40)))
    record(database, *(run("chat", rng, alpha, segment=name) for name, alpha in (("gold", 0.95), ("free", 0.02)) * 40))
    worker = Worker(database)
    for mixed in (asked("code", 4, lengths=(40, 3000)), asked("chat", 4, segments=("gold", "free"))):
        key, jobs = mixed
        decisions = worker.decider.decide_each(key, jobs, TaskSettings())
        drafts = [decision.num_draft_tokens for decision in decisions]
        assert drafts[0] == drafts[2] > drafts[1] == drafts[3]
    key, jobs = asked("code", 4)
    first, *others = worker.decider.decide_each(key, jobs, TaskSettings())
    assert others == [first] * 3


def test_segments_that_do_not_differ_are_decided_together(database: Database, rng: random.Random) -> None:
    record(database, *(run("chat", rng, 0.8, segment=name) for name in ("gold", "free") * 20))
    key, jobs = asked("chat", 4, segments=("gold", "free"))
    first, *others = Worker(database).decider.decide_each(key, jobs, TaskSettings())
    assert others == [first] * 3


def test_a_restarted_worker_goes_on_with_the_choice_that_was_logged(database: Database) -> None:
    identity, log = ENGINE.identity, DecisionLog(database)
    key = IncumbentKey.of("code", "greedy", "<=256", 2)

    def incumbents(owner: str) -> Incumbents:
        return Incumbents(StoredChoices(log, identity, owner))

    assert incumbents("w").of(key) is None
    chosen = Decision(
        Mode.SPECULATIVE, LOOKUP.name, LOOKUP.revision, 3, Reason.FASTER, "", kept=DraftSetting(LOOKUP.name, 3)
    )
    before = incumbents("w")
    before.keep(key, chosen)
    explored = Decision(Mode.VANILLA, None, None, 0, Reason.EXPLORING, "", kept=DraftSetting(LOOKUP.name, 3))
    before.keep(key, explored)
    assert before.of(key) == incumbents("w2").of(key) == DraftSetting(LOOKUP.name, 3)
    assert incumbents("w2").of(key._replace(task="chat")) is None
    assert len(log.latest("code")) == 1


def test_a_restarted_worker_knows_how_long_a_drafter_was_not_used(database: Database, rng: random.Random) -> None:
    now = datetime.now(UTC)
    runs = [run("code", rng, 0.2, at=now - timedelta(hours=30))]
    runs += [run("code", rng, None, at=now - timedelta(hours=hour)) for hour in range(3, 10)]
    record(database, *runs)
    worker = Worker(database)
    assert worker.budget("code").unseen == {LOOKUP.name: 7.0}
    assert worker.budget("chat").unseen is None
    assert worker.budget("code", "t<=1.0").unseen == {LOOKUP.name: 0.0}


def test_a_drafter_that_is_scored_beside_others_was_seen(database: Database, rng: random.Random) -> None:
    now = datetime.now(UTC)
    record(database, run("code", rng, 0.2, at=now - timedelta(hours=30)), run("code", rng, None))
    worker = Worker(database)
    assert worker.budget().unseen == {LOOKUP.name: 1.0}
    plain = run("code", rng, None)
    scored = run("code", rng, 0.5)
    shadow = ShadowRun(scored.key, 4, scored.counts, 40, 50, now)
    control = replace(plain, purpose=Purpose.CONTROL.value)
    worker.decider.count_scored([Outcome("c", 1, "succeeded", b"{}", "results", {}, control, (shadow,))])
    assert worker.budget().unseen == {LOOKUP.name: 1.0}, "a probe says nothing about how traffic changes"
    worker.decider.count_scored([Outcome("x", 1, "succeeded", b"{}", "results", {}, plain, (shadow,))])
    assert worker.budget().unseen == {LOOKUP.name: 0.0}
