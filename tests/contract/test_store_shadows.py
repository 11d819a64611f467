"""Shadows against a real PostgreSQL: evidence under the drafter's own key, and never taken for jobs that ran."""

from __future__ import annotations

import random
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import text

from alphaloop.acceptance import AcceptanceCounts
from alphaloop.messages import Mode
from alphaloop.store.database import Database
from alphaloop.store.decision_inputs import AcceptanceStateStore, StateRow
from alphaloop.store.job_counts import RollupStore
from alphaloop.store.outcomes import OutcomeStore
from alphaloop.store.task_figures import recent_tasks
from alphaloop.store.traffic import TrafficStore
from tests.fixtures.runs import (
    ENGINE,
    TARGET,
    decode_run,
    outcome,
    record,
    shadow_run,
    simulated_counts,
    vanilla_counts,
)

pytestmark = [pytest.mark.postgres, pytest.mark.roles("alphaloop_worker")]
NUM_OUTPUT = 90  #: tokens of every text, of whose beginning the shadows are


def evidence(database: Database, drafter: str) -> StateRow:
    rows = AcceptanceStateStore(database).read(TARGET, ENGINE, {"lookup": "draft-1", "gated": "draft-1"}).rows
    (row,) = (row for row in rows if row.drafter == drafter)
    return row


@pytest.mark.roles  # it does what no worker may
def test_a_shadow_is_evidence_of_its_drafter_and_no_job_of_its_own(database: Database, rng: random.Random) -> None:
    at, total, run = datetime.now(UTC), AcceptanceCounts(), decode_run(vanilla_counts(NUM_OUTPUT), mode=Mode.VANILLA)
    for number in range(5):
        counts = simulated_counts(rng, [0.8, 0.5], 10)
        run = replace(run, decoded_at=at)
        record(database, run, job_ids=[f"{number}"], shadows=[shadow_run(run, counts)])
        total += counts
    lookup, vanilla = evidence(database, "lookup"), evidence(database, "").evidence.all
    sums = lookup.evidence.all
    assert (lookup.num_jobs, sums.trials, sums.accepts) == (5, total.trials, total.accepts)
    assert (sums.texts, sums.output_tokens) == (0, 0), "the run counts for the length"
    assert (vanilla.texts, vanilla.output_tokens) == (5, 5 * NUM_OUTPUT)
    assert sums.tokens == total.num_tokens - 5, "tokens of its rounds are its own"
    num_tokens = TrafficStore(database).num_tokens(at - timedelta(days=1), at)["code"]
    assert num_tokens == 5 * NUM_OUTPUT, "each text counts once"
    (now,) = recent_tasks(database, timedelta(days=1))
    assert (now.trials, now.measured) == (0, None)
    for nothing in ("decode_runs WHERE drafter <> ''", "task_alpha_now", "task_speedup_now"):
        assert database.rows(text(f"SELECT * FROM {nothing}")) == []
    lost = replace(outcome("0", run=run), shadows=(shadow_run(run, simulated_counts(rng, [0.5], 3)),))
    assert OutcomeStore(database).record([lost], owner="w") == []
    assert database.rows(text("SELECT num_jobs FROM acceptance_hourly WHERE mode = 'shadow'")) == [(5,)]
    RollupStore(database).roll_up_day(at.date())
    day = database.one(text("SELECT num_jobs, accepts, wall_s, device_s FROM acceptance_daily WHERE mode = 'shadow'"))
    assert tuple(day) == (5, list(total.accepts), 0.0, 0.0)


def test_a_shadow_of_parts_of_rounds_is_evidence_and_in_no_hour(database: Database, rng: random.Random) -> None:
    """The rounds are a shared-weight drafter's. In some, this drafter would have gone on, and nobody knows how far."""
    run = decode_run(simulated_counts(rng, [0.8, 0.5], 10))
    chances = (run.counts.trials[0], run.counts.trials[1], 0, 0)
    record(database, run, shadows=[replace(shadow_run(run, run.counts, "gated", chances=chances), num_draft_tokens=4)])
    row = evidence(database, "gated")
    sums = row.evidence.all
    assert (row.num_jobs, sums.chances, sums.accepts[:2]) == (1, chances, run.counts.accepts[:2])
    assert database.scalars(text("SELECT mode FROM acceptance_hourly")) == ["speculative"]


def test_a_run_scored_with_longer_drafts_counts_once(database: Database, rng: random.Random) -> None:
    """As evidence by its longer score, in the hours by what ran."""
    run, longer = decode_run(simulated_counts(rng, [0.8], 10)), simulated_counts(rng, [0.8, 0.6, 0.4], 10)
    record(database, run, shadows=[shadow_run(run, longer)])
    row = evidence(database, "lookup")
    assert (row.num_jobs, row.evidence.all.trials) == (1, longer.trials)
    hours = database.rows(text("SELECT mode, trials FROM acceptance_hourly"))
    assert [tuple(hour) for hour in hours] == [("speculative", list(run.counts.trials))]
