"""Costs, decisions and drafts in a real PostgreSQL."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import text

from alphaloop.acceptance import AcceptanceCounts, EvidenceKey
from alphaloop.costs import CostPoint
from alphaloop.deciding.decision import NOT_A_CHOICE, Decision, Reason
from alphaloop.deciding.evidence import EvidenceSums
from alphaloop.deciding.goodput import Alternative
from alphaloop.messages import Mode
from alphaloop.store.database import Database
from alphaloop.store.decision_inputs import CostStore, CostSubject, DraftRegistry, DraftStatus
from alphaloop.store.decisions import BudgetSubject, ChoiceFigures, DecisionLog, ExpectedSpeedup, LoggedSetting
from tests.fixtures.deciding import add_evidence

pytestmark = [pytest.mark.postgres, pytest.mark.roles("alphaloop_worker")]

NOW, DAY = datetime(2026, 9, 1, tzinfo=UTC), timedelta(days=1)
VANILLA = Decision(Mode.VANILLA, None, None, 0, Reason.NO_HISTORY, "a cold task")
K4 = Decision(Mode.SPECULATIVE, "lookup", "draft-1", 4, Reason.FASTER, "1.6x vanilla expected")
K3 = Decision(Mode.SPECULATIVE, "lookup", "draft-1", 3, Reason.FASTER, "1.7x vanilla expected")


def test_costs_of_another_host_device_engine_target_or_draft_are_not_mine(database: Database) -> None:
    costs = CostStore(database)
    points = [CostPoint(None, 1, 1, 30.0, 5), CostPoint("lookup", 1, 5, 0.5, 5)]
    mine = CostSubject("h", "cpu", "e", "t", {"lookup": "r1"})
    costs.save(mine, points)
    for other in ({"host": "g"}, {"device": "gpu"}, {"engine": "f"}, {"target_revision": "u"}):
        assert not costs.load(mine._replace(**other)).points
    assert costs.load(mine._replace(drafters={"lookup": "r2"})).rounds(1).round_ms("lookup", 4) is None
    assert costs.load(mine._replace(drafters={})).rounds(1).round_ms(None, 0) == 30.0


def test_corrections_come_back_until_the_shape_is_measured_anew(database: Database) -> None:
    costs, where = CostStore(database), CostSubject("h", "cpu", "e", "t", {"lookup": "r1"})
    points = [CostPoint(None, 1, 1, 30.1, 5), CostPoint(None, 1, 9, 36.7, 5), CostPoint("lookup", 1, 9, 0.1, 5)]
    costs.save(where, points)
    corrected = [replace(point, correction=1.7, num_corrections=40, correction_variance=0.02) for point in points]
    costs.save_corrections(where, corrected)
    costs.save_corrections(where, [])
    assert set(costs.load(where).points) == set(corrected)
    anew = CostPoint(None, 1, 1, 50.0, 5)
    costs.save(where, [anew])
    assert set(costs.load(where).points) == {anew, *corrected[1:]}
    # A worker that learned against the old figure must not bend the new one.
    costs.save_corrections(where, [replace(point, correction=2.5) for point in points])
    loaded = {(point.drafter, point.width): point for point in costs.load(where).points}
    assert loaded[None, 1] == anew
    assert loaded[None, 9].correction == loaded["lookup", 9].correction == 2.5


def log_change(log: DecisionLog, decision: Decision, *, device: str = "cpu", owner: str = "w1") -> bool:
    return log.record_change(BudgetSubject("code", "t", device, "greedy"), 4, decision, owner)


def test_only_changes_are_logged(database: Database) -> None:
    log = DecisionLog(database)
    told = [log_change(log, decision) for decision in (VANILLA, VANILLA, K4, K4, K3, K3, VANILLA)]
    assert told == [True, False, True, False, True, False, True]
    changes = log.latest("code")
    assert [(change.before, change.after) for change in changes[::-1]] == [
        (None, LoggedSetting("vanilla", None, 0)),
        (LoggedSetting("vanilla", None, 0), LoggedSetting("speculative", "lookup", 4)),
        (LoggedSetting("speculative", "lookup", 4), LoggedSetting("speculative", "lookup", 3)),
        (LoggedSetting("speculative", "lookup", 3), LoggedSetting("vanilla", None, 0)),
    ]
    assert (changes[1].reason, changes[1].explanation) == ("expected_faster", "1.7x vanilla expected")
    assert changes[1].batch == 4
    assert log.latest("code", limit=1) == changes[:1]
    assert log.latest("sql") == []
    assert [log_change(log, K4, device="gpu") for _ in range(2)] == [True, False], "each device has its own choice"
    for reason in NOT_A_CHOICE:
        assert not log_change(log, Decision(Mode.SPECULATIVE, "lookup", "draft-1", 5, reason, ""))
    assert len(log.latest("code")) == 5


def test_another_reason_for_the_same_choice_is_news(database: Database) -> None:
    log = DecisionLog(database)
    reasons = (Reason.NO_HISTORY, Reason.NO_HISTORY, Reason.UNCERTAIN, Reason.NOT_FASTER, Reason.NOT_FASTER)
    told = [log_change(log, Decision(Mode.VANILLA, None, None, 0, reason, "")) for reason in reasons]
    assert told == [True, False, True, True, False]
    assert [change.reason for change in log.latest("code")] == ["not_faster", "uncertain", "no_history"]
    shown = database.rows(text("SELECT was, became FROM decision_log"))
    assert shown == [(None, "vanilla")], "the view shows changes of the choice alone"


def test_a_change_keeps_what_it_was_made_on(database: Database) -> None:
    """Of the drafter at stake, under whichever keys: the chosen one, or the best that was not chosen."""
    counts = AcceptanceCounts(11, 1, 0, (10, 8), (10, 8), (8, 4))
    job = EvidenceSums.of_job(counts, 2, NOW, counts.num_tokens)
    with database.begin() as connection:
        for bucket in ("<=256", "<=1024"):
            add_evidence(
                connection, [(EvidenceKey("code", "t", "e", "greedy", bucket, "", "lookup", "draft-1"), job)], DAY
            )
    log = DecisionLog(database, half_life=DAY)
    ways = (Alternative("lookup", 4, 2.5, 50.0, 1.6, 1.4, 1.8), Alternative(None, 0, 1.0, 30.0, 1.0, 1.0, 1.0))
    slow = ways[0]._replace(speedup=0.8, speedup_low=0.7, speedup_high=0.9)
    log_change(log, VANILLA)
    log_change(log, replace(K4, alternatives=ways))
    log_change(log, replace(VANILLA, reason=Reason.NOT_FASTER, alternatives=(ways[1], slow)))
    slower, faster, unweighed = [change.figures for change in log.latest("code")]
    assert unweighed is None
    lookup, vanilla = ExpectedSpeedup("lookup", 4, 1.6, 1.4, 1.8), ExpectedSpeedup(None, 0, 1.0, 1.0, 1.0)
    assert faster == ChoiceFigures(2.5, 50.0, lookup, vanilla, 2.0, (20.0, 16.0), (16.0, 8.0))
    assert slower == ChoiceFigures(
        1.0, 30.0, vanilla, ExpectedSpeedup("lookup", 4, 0.8, 0.7, 0.9), 2.0, (20.0, 16.0), (16.0, 8.0)
    )
    row = database.one(text("SELECT was, became, rival, alpha, jobs FROM decision_log LIMIT 1"))
    assert row == ("lookup k=4", "vanilla", "lookup k=4", [0.8, 0.5], 2.0)


def test_workers_that_change_their_minds_together_log_it_once(database: Database) -> None:
    log, barrier = DecisionLog(database), threading.Barrier(4)

    def change(number: int) -> bool:
        barrier.wait(30)
        return log_change(log, K4, owner=f"w{number}")

    with ThreadPoolExecutor(4) as pool:
        assert sorted(pool.map(change, range(4))) == [False, False, False, True]
    assert len(log.latest("code")) == 1


def test_a_new_draft_is_active_and_a_known_one_keeps_its_status(database: Database) -> None:
    drafts = DraftRegistry(database)
    drafts.register("lookup", "r1", "t")
    assert drafts.stale("t") == set()
    assert drafts.set_status("lookup", "r1", "t", DraftStatus.STALE, "probe α_1 fell from .80 to .52")
    assert not drafts.set_status("lookup", "r1", "t", DraftStatus.STALE, "again")
    assert not drafts.set_status("unknown", "r1", "t", DraftStatus.STALE, "nobody")
    drafts.register("lookup", "r1", "t")
    drafts.register("lookup", "r2", "t")
    assert drafts.stale("t") == {("lookup", "r1")}
    assert drafts.stale("u") == set()
    first, second = drafts.all()
    assert (first.draft_revision, first.status) == ("r1", DraftStatus.STALE)
    assert first.status_reason == "probe α_1 fell from .80 to .52"
    assert first.status_changed_at > first.registered_at
    assert (second.draft_revision, second.status) == ("r2", DraftStatus.ACTIVE)
    assert drafts.set_status("lookup", "r1", "t", DraftStatus.ACTIVE, "recovered")
    assert drafts.stale("t") == set()
    drafts.set_status("lookup", "r2", "t", DraftStatus.RETIRED, "replaced")
    assert drafts.stale("t") == {("lookup", "r2")}


def test_a_draft_under_another_target_says_for_which_it_was_trained(database: Database) -> None:
    drafts = DraftRegistry(database)
    drafts.register_trained("small", "d1", "t1", trained_on="3 texts", figures={})
    drafts.register("small", "d1", "t2")
    drafts.register("small", "d2", "t2")
    drafts.register("other", "d1", "t2")
    found = {(d.drafter, d.draft_revision, d.target_revision): (d.trained_for, d.trained_on) for d in drafts.all()}
    assert found == {
        ("small", "d1", "t1"): ("t1", "3 texts"),
        ("small", "d1", "t2"): ("t1", None),
        ("small", "d2", "t2"): (None, None),
        ("other", "d1", "t2"): (None, None),
    }


@pytest.mark.roles  # people register what they trained
def test_a_trained_draft_is_a_candidate_until_a_worker_serves_it(database: Database) -> None:
    drafts, figures = DraftRegistry(database), {"alpha_by_position": [0.5, 0.4], "overlap": 0.37}

    def register(trained_on: str) -> DraftStatus:
        return drafts.register_trained(
            "small", "d1", "t1", parent_revision="d0", trained_on=trained_on, figures=figures
        )

    assert register("3 texts") == DraftStatus.CANDIDATE
    (known,) = drafts.all()
    assert (known.drafter, known.draft_revision, known.target_revision) == ("small", "d1", "t1")
    assert (known.parent_revision, known.trained_for) == ("d0", "t1")
    assert (known.trained_on, known.figures) == ("3 texts", figures)
    assert (known.status, known.status_reason) == (DraftStatus.CANDIDATE, "trained, not served yet")
    assert drafts.stale("t1") == set()
    drafts.register("small", "d1", "t1")
    (known,) = drafts.all()
    assert (known.status, known.status_reason) == (DraftStatus.ACTIVE, "served by a worker")
    assert known.figures == figures
    drafts.set_status("small", "d1", "t1", DraftStatus.STALE, "probe α_1 fell")
    assert register("4 texts") == DraftStatus.STALE, "the facts are renewed, the status stays"
    drafts.register("small", "d1", "t1")
    (known,) = drafts.all()
    assert (known.status, known.status_reason, known.trained_on) == (DraftStatus.STALE, "probe α_1 fell", "4 texts")
