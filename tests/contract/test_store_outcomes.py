"""Recording against a real PostgreSQL: once, whole, and only by whoever holds the claim."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial

import pytest
from sqlalchemy import text

from alphaloop.acceptance import AcceptanceCounts
from alphaloop.errors import StoreError
from alphaloop.messages import Mode, Status
from alphaloop.store.database import Database
from alphaloop.store.job_counts import ShadowRun
from alphaloop.store.outcomes import Outbox, OutboxMessage, OutcomeStore
from tests.fixtures import runs
from tests.fixtures.postgres import count
from tests.fixtures.runs import (
    decode_run,
    num_pending,
    outcome,
    recorded_results,
    simulated_counts,
    vanilla_counts,
)

pytestmark = [pytest.mark.postgres, pytest.mark.roles("alphaloop_worker")]


@pytest.fixture
def outcomes(database: Database) -> OutcomeStore:
    return OutcomeStore(database)


@pytest.fixture
def outbox(database: Database) -> Outbox:
    return Outbox(database)


claim = partial(runs.claim, owner="w1")


def test_outcome_counts_status_and_message_appear_together(
    outcomes: OutcomeStore, database: Database, rng: random.Random
) -> None:
    claim(database, "b", "a", "undecoded")
    counts = {job_id: simulated_counts(rng, [0.8, 0.5], 10) for job_id in "ab"}
    done = [outcome(job_id, run=decode_run(counts[job_id])) for job_id in ("b", "a")]
    done.append(outcome("undecoded", status=Status.EXPIRED))
    messages = outcomes.record(done, owner="w1")
    assert [(m.key, m.value, m.topic) for m in messages] == [(o.job_id.encode(), o.result, "results") for o in done]
    assert [m.id for m in messages] == sorted(m.id for m in messages)
    assert messages[0].headers == {"ce_type": "alphaloop.result"}
    assert recorded_results(database, ["a", "b", "undecoded"]) == {o.job_id: o.result for o in done}
    assert num_pending(database) == 3
    with database.begin() as connection:
        stored = connection.execute(text("SELECT job_id, attempt, trials, accepts, num_tokens FROM decode_runs"))
        assert {row.job_id: tuple(row) for row in stored} == {
            k: (k, 1, list(c.trials), list(c.accepts), c.num_tokens) for k, c in counts.items()
        }
        ended = connection.execute(text("SELECT owner, lease_expires_at, finished_at <= now() FROM jobs")).all()
        assert ended == [(None, None, True)] * 3


def test_texts_are_stored_as_they_are(outcomes: OutcomeStore, database: Database) -> None:
    odd = "a\\tb\\\\N \\. \t\n\r é"
    run = replace(decode_run(vanilla_counts(3), mode=Mode.VANILLA, segment=odd), reason=r"\N", device="", wall_s=1e-300)
    run = replace(run, time_to_first_token_s=None)
    claim(database, r"\.")
    shadow = ShadowRun(replace(run.key, drafter="lookup"), 2, vanilla_counts(3), 40, 3, run.decoded_at)
    outcomes.record([replace(outcome(r"\.", run=run), shadows=(shadow,))], owner="w1")
    columns = "job_id, segment, reason, device, wall_s, time_to_first_token_s, is_evidence, decoded_at, chances"
    stored = database.one(text(f"SELECT {columns} FROM decode_runs"))
    assert tuple(stored) == (r"\.", odd, r"\N", "", 1e-300, None, True, run.decoded_at, [])
    stored = database.one(text("SELECT job_id, segment, drafter, source, is_whole FROM evidence_rows"))
    assert tuple(stored) == (r"\.", odd, "lookup", "shadow", True)


def test_the_hour_holds_the_sums_of_its_runs(outcomes: OutcomeStore, database: Database, rng: random.Random) -> None:
    """Array sums over runs of different k, and sums of squares, against the same taken from the runs by SQL."""
    for number in range(30):
        claim(database, f"{number}-a", f"{number}-b")
        at = datetime.now(UTC) - timedelta(hours=rng.randrange(4))
        runs = [decode_run(simulated_counts(rng, [0.7] * rng.randint(1, 4), rng.randint(1, 9)), at=at) for _ in "ab"]
        outcomes.record(
            [outcome(f"{number}-{name}", run=run) for name, run in zip("ab", runs, strict=True)], owner="w1"
        )
    sums = """
        count(*)::bigint AS num_jobs, sum(rounds)::bigint AS rounds, sum(num_empty_rounds)::bigint AS num_empty_rounds,
        sum(num_cropped)::bigint AS num_cropped, sum(num_tokens)::bigint AS num_tokens,
        sum(num_prompt_tokens)::bigint AS num_prompt_tokens,
        sum_by_position(proposed) AS proposed, sum_by_position(trials) AS trials, sum_by_position(accepts) AS accepts,
        sum(rounds * rounds)::bigint AS rounds_sq, sum(num_tokens * num_tokens)::bigint AS tokens_sq,
        sum(rounds * num_tokens)::bigint AS rounds_tokens,
        sum_by_position(ARRAY(SELECT t * t FROM unnest(trials) WITH ORDINALITY AS u(t, i) ORDER BY i)) AS trials_sq,
        sum_by_position(ARRAY(SELECT a * a FROM unnest(accepts) WITH ORDINALITY AS u(a, i) ORDER BY i)) AS accepts_sq,
        sum_by_position(ARRAY(SELECT a * t FROM unnest(accepts, trials) WITH ORDINALITY AS u(a, t, i) ORDER BY i))
            AS accepts_trials
    """
    by_hour = "date_trunc('hour', decoded_at)"
    with database.begin() as connection:
        expected = connection.execute(
            text(f"SELECT {by_hour} AS bucket, num_draft_tokens, {sums} FROM decode_runs GROUP BY 1, 2 ORDER BY 1, 2")
        )
        names = ", ".join(expected.keys())
        found = connection.execute(text(f"SELECT {names} FROM acceptance_hourly ORDER BY 1, 2"))
        assert found.all() == expected.all()


def test_racing_recorders_of_one_claim_record_once(database: Database, outcomes: OutcomeStore) -> None:
    job_ids = [f"job-{n}" for n in range(10)]
    claim(database, *job_ids)
    barrier = threading.Barrier(3)

    def record(number: int) -> list[OutboxMessage]:
        barrier.wait()
        run = decode_run(vanilla_counts(3), mode=Mode.VANILLA)
        order = job_ids if number else job_ids[::-1]
        return outcomes.record([outcome(job_id, text=str(number), run=run) for job_id in order], owner="w1")

    with ThreadPoolExecutor(3) as pool:
        recorded = [message for messages in pool.map(record, range(3)) for message in messages]
    assert sorted(message.key or b"" for message in recorded) == sorted(job_id.encode() for job_id in job_ids)
    assert num_pending(database) == len(job_ids)
    assert {m.job_id: m.value for m in recorded} == recorded_results(database, job_ids)


def test_a_failure_in_the_middle_leaves_nothing(outcomes: OutcomeStore, database: Database) -> None:
    claim(database, "good", "bad")
    run = decode_run(vanilla_counts(5), mode=Mode.VANILLA)
    wrong = replace(run, num_tokens=4)  # breaks tokens = rounds + accepted - cropped
    with pytest.raises(StoreError, match="tokens_add_up"):
        outcomes.record([outcome("good", run=run), outcome("bad", run=wrong)], owner="w1")
    assert recorded_results(database, ["good", "bad"]) == {}
    assert num_pending(database) == 0
    for sums in ("acceptance_hourly", "acceptance_state"):
        assert count(database, sums) == 0
    assert len(outcomes.record([outcome("good", run=run), outcome("bad", run=run)], owner="w1")) == 2


@pytest.mark.roles  # it does what no worker may
def test_the_database_refuses_counts_that_no_rounds_can_produce(outcomes: OutcomeStore, database: Database) -> None:
    claim(database, "a")
    counts = AcceptanceCounts(rounds=3, num_empty_rounds=1, proposed=(2, 1), trials=(2, 1), accepts=(1, 1))
    outcomes.record([outcome("a", run=decode_run(counts))], owner="w1")
    for change in ("accepts = '{1,2}', num_tokens = 6", "trials = '{3,1}'", "proposed = '{2}'"):
        with pytest.raises(StoreError, match="counts_ordered"), database.begin() as connection:
            connection.execute(text(f"UPDATE decode_runs SET {change}"))


def test_what_a_dead_worker_left_is_taken_over(database: Database, outcomes: OutcomeStore, outbox: Outbox) -> None:
    claim(database, *"abcd")
    recorded = [outcomes.record([outcome(job_id) for job_id in group], owner="w1") for group in ("ab", "c", "d")]
    outbox.delete([recorded[1][0].id])
    outbox.delete([])
    assert outbox.take_over(older_than_s=3600.0, limit=4) == {}
    assert outbox.take_over(older_than_s=0.0, limit=1) == {recorded[0][0].id: recorded[0]}
    assert outbox.take_over(older_than_s=0.0, limit=4) == {group[0].id: group for group in (recorded[0], recorded[2])}
    outbox.delete([recorded[0][0].id, recorded[2][0].id])
    assert num_pending(database) == 0
    assert outbox.take_over(older_than_s=0.0, limit=4) == {}


def test_headers_come_back_as_they_went_in(database: Database, outcomes: OutcomeStore, outbox: Outbox) -> None:
    """What a producer put into its trace must never make an outcome unrecordable."""
    headers = {"tracestate": 'NUL \x00, é, \N{SLIGHTLY SMILING FACE}, \ufffd, "quoted", \\', "empty": ""}
    claim(database, "a")
    [recorded] = outcomes.record([replace(outcome("a"), headers=headers)], owner="w1")
    assert outbox.take_over(older_than_s=0.0, limit=1) == {recorded.id: [recorded]}
    assert recorded.headers == headers


def test_what_was_taken_over_is_nobody_elses_for_a_while(
    outcomes: OutcomeStore, outbox: Outbox, database: Database
) -> None:
    claim(database, "a", "b")
    for job_id in "ab":
        outcomes.record([outcome(job_id)], owner="w1")
    database.change(text("UPDATE outbox SET created_at = now() - interval '2 h'"))
    (first,) = outbox.take_over(older_than_s=3600.0, limit=1).values()
    (second,) = outbox.take_over(older_than_s=3600.0, limit=4).values()
    assert [message.key for message in (*first, *second)] == [b"a", b"b"]
    assert outbox.take_over(older_than_s=3600.0, limit=4) == {}
    assert num_pending(database) == 2, "they stay until somebody deletes them"
