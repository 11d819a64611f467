"""Claims against a real PostgreSQL: who gets a job, when, at which attempt. test_store_model.py walks all histories."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from functools import partial

import pytest
from sqlalchemy import text

from alphaloop.store.database import Database
from alphaloop.store.jobs import Claim, ClaimState, JobStore
from alphaloop.store.known_jobs import known_jobs
from alphaloop.store.outcomes import OutcomeStore
from tests.fixtures import runs
from tests.fixtures.postgres import wait_until_blocked
from tests.fixtures.runs import claim_request, outcome, recorded_results

pytestmark = [pytest.mark.postgres, pytest.mark.roles("alphaloop_worker")]
claim = partial(runs.claim, owner="w1")


@pytest.fixture
def jobs(database: Database) -> JobStore:
    return JobStore(database)


@pytest.fixture
def outcomes(database: Database) -> OutcomeStore:
    return OutcomeStore(database)


def expire_leases(database: Database) -> None:
    database.change(text("UPDATE jobs SET lease_expires_at = now() - interval '1 s' WHERE status = 'running'"))


def states(claims: list[Claim]) -> list[tuple[ClaimState, int]]:
    return [(found.state, found.attempt) for found in claims]


def test_a_job_twice_in_one_call_is_claimed_once(jobs: JobStore) -> None:
    asked = claim_request("b"), claim_request("a"), claim_request("a"), claim_request("a", b"other")
    answers = jobs.claim(asked, owner="w1", lease_s=60.0, max_attempts=3)
    assert [answer.job_id for answer in answers] == ["b", "a", "a", "a"]
    claimed, held = (ClaimState.CLAIMED, 1), (ClaimState.HELD, 1)
    assert states(answers) == [claimed, claimed, held, (ClaimState.CONFLICT, 1)]
    assert answers[2].held_for_s == 60.0


def test_an_ended_job_answers_with_its_recorded_bytes(
    database: Database, jobs: JobStore, outcomes: OutcomeStore
) -> None:
    texts = {"a": "plain", "b": "NUL \x00 inside", "c": "é 漢字 🙂 \u2028", "d": 'line\nbreak\t\\ "quoted"'}
    claim(database, *texts)
    recorded = {job_id: outcome(job_id, text=its) for job_id, its in texts.items()}
    outcomes.record(list(recorded.values()), owner="w1")
    for answer in claim(database, *texts, owner="w2"):
        assert (answer.state, answer.attempt) == (ClaimState.ENDED, 1)
        assert answer.outcome == recorded[answer.job_id].result
    assert recorded_results(database, [*texts, "unknown"]) == {job_id: one.result for job_id, one in recorded.items()}


def test_a_job_with_which_too_many_workers_died_is_claimed_to_be_failed(
    database: Database, outcomes: OutcomeStore
) -> None:
    """The first crash is not counted against the job, because the worker may have died of another one."""
    for attempt in (1, 2, 3):
        [found] = claim(database, "a", owner=f"w{attempt}", max_attempts=2)
        assert (found.state, found.attempt, found.num_crashes) == (ClaimState.CLAIMED, attempt, attempt - 1)
        expire_leases(database)
    [found] = claim(database, "a", owner="w4", max_attempts=2)
    assert (found.state, found.attempt, found.num_crashes) == (ClaimState.EXHAUSTED, 4, 3)
    assert len(outcomes.record([outcome("a", 4)], owner="w4")) == 1


def test_a_suspect_is_counted_once_and_held_by_nobody_until_it_is_asked_for_alone(database: Database) -> None:
    """Workers may die as often as they like between the claim of a group and its end: a suspect is none of theirs."""
    claim(database, "a", "b")
    expire_leases(database)
    for number in range(5):
        owner = f"died-{number}"
        answers = claim(database, "a", "b", owner=owner, max_attempts=3, alone=False)
        assert [(one.state, one.num_crashes) for one in answers] == [(ClaimState.SUSPECT, 1)] * 2
        expire_leases(database)
    [found] = claim(database, "a", owner="alone", max_attempts=3)
    assert (found.state, found.num_crashes) == (ClaimState.CLAIMED, 1)
    expire_leases(database)
    [found] = claim(database, "a", owner="next", max_attempts=1, alone=False)
    assert (found.state, found.num_crashes) == (ClaimState.EXHAUSTED, 2)


def test_a_claim_whose_answer_was_lost_is_no_crash(database: Database) -> None:
    """The connection breaks after the commit, and the same worker asks again."""
    for attempt in range(1, 10):
        [found] = claim(database, "a", max_attempts=1)
        assert (found.state, found.attempt, found.num_crashes) == (ClaimState.CLAIMED, attempt, 0)


def test_a_cancelled_job_is_claimed_to_be_cancelled(database: Database, jobs: JobStore, outcomes: OutcomeStore) -> None:
    jobs.request_cancel("unseen")
    jobs.request_cancel("unseen")
    claim(database, "running")
    jobs.request_cancel("running")
    assert jobs.cancelled(["running", "unseen", "other"]) == {"running", "unseen"}
    assert states(claim(database, "unseen")) == [(ClaimState.CANCELLED, 1)]
    assert states(claim(database, "running", owner="w2")) == [(ClaimState.HELD, 1)]
    expire_leases(database)
    assert states(claim(database, "running", owner="w2", max_attempts=1)) == [(ClaimState.CANCELLED, 2)]
    outcomes.record([outcome("running", 2)], owner="w2")
    assert jobs.cancelled(["running", "unseen"]) == {"unseen"}


def test_what_is_sent_after_the_end_of_a_cancellation_is_decoded(database: Database, jobs: JobStore) -> None:
    """By when it was sent, however long it waits in Kafka. A later request moves the end, an earlier one does not."""
    now, hour = datetime.now(UTC), timedelta(hours=1)
    jobs.request_cancel("moved-early", "moved-late", until=now + hour)
    jobs.request_cancel("over-early", "over-late", "moved-early", "moved-late", until=now - hour)
    jobs.request_cancel("a-day")
    assert database.scalar(text("SELECT ends_at - requested_at FROM cancellations WHERE job_id = 'a-day'")) == 24 * hour
    for job_id, state in (("over-late", ClaimState.CLAIMED), ("over-early", ClaimState.CANCELLED)):
        sent_at = {"early": now - timedelta(days=2), "late": now}
        for name in (job_id, job_id.replace("over", "moved")):
            asked = claim_request(name)._replace(sent_at=sent_at[name.partition("-")[2]])
            [found] = jobs.claim([asked], owner="w1", lease_s=60.0, max_attempts=3)
            assert found.state is (state if name == job_id else ClaimState.CANCELLED), name
    assert jobs.cancelled(["over-late", "moved-late", "a-day"]) == {"moved-late", "a-day"}
    assert not known_jobs(database, ["over-late"])["over-late"].is_cancelling


def test_a_released_job_is_free_at_once_and_no_crash_is_counted(database: Database, jobs: JobStore) -> None:
    claim(database, "new", "again", "taken")
    assert states(claim(database, "again")) == [(ClaimState.CLAIMED, 2)]
    expire_leases(database)
    claim(database, "taken", owner="w2")
    assert jobs.release({"new": 1, "again": 2, "taken": 1}, owner="w1") == {"new", "again"}
    answers = claim(database, "new", "again", "taken", owner="w3")
    assert states(answers) == [(ClaimState.CLAIMED, 2), (ClaimState.CLAIMED, 3), (ClaimState.HELD, 2)]
    assert [found.num_crashes for found in answers] == [0, 0, 0]
    expire_leases(database)
    [found] = claim(database, "taken", owner="w3")
    assert found.num_crashes == 2  # of w1 and of w2


def test_a_released_job_never_gets_an_earlier_attempt_again(
    database: Database, jobs: JobStore, outcomes: OutcomeStore
) -> None:
    """Else what the first claim still sends, streamed text or an outcome, would pass for the second claim's."""
    for attempt in range(1, 6):
        assert states(claim(database, "a", max_attempts=1)) == [(ClaimState.CLAIMED, attempt)]
        assert jobs.release({"a": attempt}, owner="w1") == {"a"}
        assert outcomes.record([outcome("a", attempt)], owner="w1") == []


def test_of_many_racing_workers_exactly_one_gets_each_job(database: Database) -> None:
    """New jobs first, then those whose owners have died."""
    num_workers, job_ids = 4, [f"job-{n}" for n in range(20)]
    barrier = threading.Barrier(num_workers)

    def race(number: int) -> list[Claim]:
        # Each asks in another order: whoever locked in order of asking would deadlock here.
        asked = job_ids[number * 5 :] + job_ids[: number * 5]
        barrier.wait()
        return claim(database, *(asked if number % 2 else asked[::-1]), owner=f"w{number}-{attempt}")

    with ThreadPoolExecutor(num_workers) as pool:
        for attempt in (1, 2):
            answers = [answer for answers in pool.map(race, range(num_workers)) for answer in answers]
            for job_id in job_ids:
                found = sorted(answer.state for answer in answers if answer.job_id == job_id)
                assert found == [ClaimState.CLAIMED] + [ClaimState.HELD] * (num_workers - 1)
            assert {answer.attempt for answer in answers} == {attempt}
            expire_leases(database)


def test_a_claim_waits_for_a_row_that_is_being_deleted(database: Database) -> None:
    """Retention may delete the row that a claim waits for; the claim must then find itself first."""
    claim(database, "a")
    with ThreadPoolExecutor(1) as pool:
        with database.begin() as connection:
            connection.execute(text("DELETE FROM jobs WHERE job_id = 'a'"))
            waiting = pool.submit(claim, database, "a", owner="w2")
            wait_until_blocked(database)
        assert states(waiting.result(30)) == [(ClaimState.CLAIMED, 1)]


def test_the_order_of_locks_does_not_depend_on_the_collation(database: Database, jobs: JobStore) -> None:
    """A dictionary sorts a, B, c; Python, which orders the claims, sorts B, a, c. Both sides have to agree."""
    claim(database, *("aBc"))
    with ThreadPoolExecutor(1) as pool, database.begin() as connection:
        connection.execute(text("SELECT FROM jobs WHERE job_id = 'B' FOR UPDATE"))
        waiting = pool.submit(jobs.renew, {"a": 1, "B": 1, "c": 1}, owner="w1", lease_s=60.0)
        wait_until_blocked(database)
        asked = text(
            "SELECT query FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
        )
        (statement,) = connection.execute(asked).scalars()
        free = text("SELECT job_id FROM jobs WHERE job_id IN ('a', 'c') FOR UPDATE NOWAIT")
        assert len(connection.execute(free).all()) == 2
        connection.rollback()
        assert waiting.result(30) == {"a", "B", "c"}
    assert 'job_id COLLATE "C"' in statement


def test_a_failure_is_counted_once_and_gives_the_claim_back(database: Database, jobs: JobStore) -> None:
    claim(database, "a", "b")
    assert jobs.fail({"a": 1, "b": 7}, owner="w1") == {"a"}, "b is not held at this attempt"
    assert jobs.fail({"a": 1}, owner="w1") == set(), "the claim is gone: a repeated call counts nothing"
    assert jobs.fail({"b": 1}, owner="w2") == set()
    (again,) = claim(database, "a", owner="w2")
    assert again == Claim("a", ClaimState.CLAIMED, attempt=2, num_crashes=0, num_failures=1)
    assert jobs.fail({}, owner="w1") == set()
