"""Shadows against a real PostgreSQL: evidence under the drafter's own key, and never taken for jobs that ran."""

from __future__ import annotations

import random
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import text

from alphaloop.acceptance import AcceptanceCounts
from alphaloop.messages import Mode
from alphaloop.store.acceptance_state import AcceptanceStateStore
from alphaloop.store.database import Database
from alphaloop.store.decode_runs import ShadowRun
from alphaloop.store.hourly_sums import RollupStore
from alphaloop.store.jobs import JobStore
from alphaloop.store.outcomes import OutcomeStore
from alphaloop.store.task_figures import recent_tasks
from alphaloop.store.traffic import TrafficStore
from tests.fixtures.runs import ENGINE, TARGET, claim_request, decode_run, outcome, simulated_counts, vanilla_counts

pytestmark = [pytest.mark.postgres, pytest.mark.roles("alphaloop_worker")]
NUM_OUTPUT = 90  #: tokens of every text, of whose beginning the shadows are


def record(database: Database, rng: random.Random, num_jobs: int, at: datetime) -> list[AcceptanceCounts]:
    """Jobs decoded vanilla, each with a shadow of look-up; returns the shadows' counts."""
    jobs, outcomes = JobStore(database), OutcomeStore(database)
    found = []
    for number in range(num_jobs):
        job_id = f"{number}"
        jobs.claim([claim_request(job_id)], owner="w1", lease_s=60.0, max_attempts=9)
        run = decode_run(vanilla_counts(NUM_OUTPUT), mode=Mode.VANILLA, at=at)
        counts = simulated_counts(rng, [0.8, 0.5], 10)
        shadow = ShadowRun(
            replace(run.key, drafter="lookup", draft_revision="draft-1"),
            2,
            counts,
            run.num_prompt_tokens,
            run.num_tokens,
            run.decoded_at,
        )
        outcomes.record([replace(outcome(job_id, run=run), shadows=(shadow,))], owner="w1")
        found.append(counts)
    return found


@pytest.mark.roles  # it does what no worker may
def test_a_shadow_is_evidence_of_its_drafter_and_no_job_of_its_own(database: Database, rng: random.Random) -> None:
    at = datetime.now(UTC)
    shadows = record(database, rng, 5, at)
    total = sum(shadows, AcceptanceCounts())
    history = TrafficStore(database)
    rows = AcceptanceStateStore(database).read(TARGET, ENGINE, {"lookup": "draft-1"}).rows
    (row,) = (row for row in rows if row.pair.drafter)
    sums = row.evidence.all
    assert (row.num_jobs, sums.trials, sums.accepts) == (5, total.trials, total.accepts)
    assert (sums.texts, sums.output_tokens) == (0, 0), "the run counts for the length"
    (vanilla,) = (row.evidence.all for row in rows if not row.pair.drafter)
    assert (vanilla.texts, vanilla.output_tokens) == (5, 5 * NUM_OUTPUT)
    assert sums.tokens == total.num_tokens - 5, "tokens of its rounds are its own"

    spent = history.spent(at - timedelta(days=1), at)["code"]
    assert spent.num_tokens == NUM_OUTPUT * spent.num_jobs, "each text counts once"
    (now,) = recent_tasks(database, timedelta(days=1))
    assert (now.trials, now.measured) == (0, None)
    with database.begin() as connection:
        assert connection.execute(text("SELECT count(*) FROM decode_runs WHERE drafter <> ''")).scalar_one() == 0
        assert connection.execute(text("SELECT * FROM task_alpha_now")).all() == []
        assert connection.execute(text("SELECT * FROM task_speedup_now")).all() == []


def test_a_shadow_of_parts_of_rounds_is_evidence_and_in_no_hour(database: Database, rng: random.Random) -> None:
    """The rounds are a shared-weight drafter's. In some, this drafter would have gone on, and nobody knows how far."""
    JobStore(database).claim([claim_request("0")], owner="w1", lease_s=60.0, max_attempts=9)
    run = decode_run(simulated_counts(rng, [0.8, 0.5], 10))
    chances = (run.counts.trials[0], run.counts.trials[1], 0, 0)
    shadow = ShadowRun(
        replace(run.key, drafter="gated", draft_revision="draft-1"),
        4,
        run.counts,
        run.num_prompt_tokens,
        run.num_tokens,
        run.decoded_at,
        chances,
    )
    OutcomeStore(database).record([replace(outcome("0", run=run), shadows=(shadow,))], owner="w1")
    read = AcceptanceStateStore(database).read(TARGET, run.key.engine, {"gated": "draft-1"})
    (row,) = (row for row in read.rows if row.pair.drafter == "gated")
    sums = row.evidence.all
    assert (row.num_jobs, sums.chances, sums.accepts[:2]) == (1, chances, run.counts.accepts[:2])
    hours = database.scalars(text("SELECT mode FROM acceptance_hourly"))
    assert hours == ["speculative"]


@pytest.mark.roles  # it does what no worker may
def test_days_hold_the_shadows_of_their_hours(database: Database, rng: random.Random) -> None:
    at = datetime.now(UTC)
    total = sum(record(database, rng, 3, at), AcceptanceCounts())
    RollupStore(database).roll_up_day(at.date())
    day = database.one(text("SELECT num_jobs, accepts, wall_s, device_s FROM acceptance_daily WHERE mode = 'shadow'"))
    assert tuple(day) == (3, list(total.accepts), 0.0, 0.0)


def test_a_lost_claim_adds_no_shadow(database: Database, rng: random.Random) -> None:
    record(database, rng, 1, datetime.now(UTC))
    run = decode_run(vanilla_counts(9), mode=Mode.VANILLA)
    shadow = ShadowRun(
        replace(run.key, drafter="lookup", draft_revision="draft-1"),
        2,
        simulated_counts(rng, [0.5], 3),
        1,
        9,
        run.decoded_at,
    )
    assert OutcomeStore(database).record([replace(outcome("0", run=run), shadows=(shadow,))], owner="w1") == []
    assert database.rows(text("SELECT num_jobs FROM acceptance_hourly WHERE mode = 'shadow'")) == [(1,)]


def test_a_run_scored_with_longer_drafts_counts_once(database: Database, rng: random.Random) -> None:
    """As evidence by its longer score, in the hours by what ran."""
    JobStore(database).claim([claim_request("0")], owner="w1", lease_s=60.0, max_attempts=9)
    run = decode_run(simulated_counts(rng, [0.8], 10))
    longer = simulated_counts(rng, [0.8, 0.6, 0.4], 10)
    shadow = ShadowRun(run.key, 3, longer, run.num_prompt_tokens, run.num_tokens, run.decoded_at)
    OutcomeStore(database).record([replace(outcome("0", run=run), shadows=(shadow,))], owner="w1")
    read = AcceptanceStateStore(database).read(TARGET, run.key.engine, {run.key.drafter: run.key.draft_revision})
    (row,) = (row for row in read.rows if row.pair.drafter)
    assert (row.num_jobs, row.evidence.all.trials) == (1, longer.trials)
    hours = database.rows(text("SELECT mode, trials FROM acceptance_hourly"))
    assert [tuple(hour) for hour in hours] == [("speculative", list(run.counts.trials))]
