"""From a control that a real engine decodes through Postgres to the scheduler: its scores are what probes would be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import text

from alphaloop.deciding.decision import Decision
from alphaloop.measurements import ProbeResult
from alphaloop.messages import Decoding
from alphaloop.probe_plan import DueProbe
from alphaloop.store.database import Database
from alphaloop.store.decision_inputs import AcceptanceStateStore
from alphaloop.store.outcomes import OutcomeStore
from alphaloop.store.probes import ProbeRun, ProbeStore
from engine.own import TransformersEngine
from scheduler.probing import PlannedJob, make_jobs
from tests.fixtures.drift import register_probe_set
from tests.fixtures.ledger import LedgerStore
from tests.fixtures.models import VANILLA, decode_one, lookup_decision
from tests.fixtures.publishing import delivery, validation
from tests.fixtures.runs import claim
from worker.claims import ClaimedJob
from worker.recording import succeeded

pytestmark = pytest.mark.postgres

NOW = datetime.now(UTC).replace(microsecond=0)
HOUR, DAY = timedelta(hours=1), timedelta(days=1)
HALF_LIFE = 3 * DAY
PROMPTS = ("ab one two ab one two ab", "cd cd ab cd cd ab cd", "one two one two one", "ab ab ab")


def carry_out(database: Database, engine: Any, run: ProbeRun, decision: Decision, **given: Any) -> None:
    """What the scheduler records of a job, and a worker after it."""
    ProbeStore(database).record([run])
    claimed = ClaimedJob(validation(engine).read(delivery(run.job_id, **given)), 1, 0)
    generation = decode_one(engine, claimed.ready.prepared, decision)
    claim(database, run.job_id)
    ended = succeeded(claimed, generation, decision, engine.identity, queue_s=0.0, now=run.scheduled_for)
    OutcomeStore(database, half_life=HALF_LIFE).record([ended], owner="w")


def carry_out_planned(database: Database, engine: TransformersEngine, planned: PlannedJob, at: datetime) -> None:
    """As the scheduler planned it."""
    job = planned.job
    run = ProbeRun(
        job.job_id,
        "measure",
        at,
        job.task,
        planned.probe_set,
        planned.position,
        planned.prompt_id,
        job.purpose.value,
        job.probe_drafter,
        job.probe_num_draft_tokens,
        b"digest",
        job.scored_drafters,
    )
    given: dict[str, Any] = job.model_dump(mode="json", exclude_defaults=True, exclude={"job_id", "deadline"})
    given |= given.pop("body")
    carry_out(database, engine, run, VANILLA if job.decoding is Decoding.VANILLA else lookup_decision(3), **given)


def run(
    database: Database, engine: TransformersEngine, at: datetime, *, is_scored: bool, drafter: str = "lookup"
) -> list[ProbeResult]:
    """One measurement, and what the scheduler reads of it."""
    probe_set = register_probe_set(
        database, "code", [{"prompt": prompt, "max_tokens": 24, "temperature": 0.0} for prompt in PROMPTS], NOW
    )
    due = DueProbe("code", drafter, probe_set.num_draft_tokens, None, is_scored=is_scored)
    for planned in make_jobs([due], {"code": probe_set}, at, num_prompts=4, deadline=NOW + DAY):
        carry_out_planned(database, engine, planned, at)
    return [one for one in ProbeStore(database).results(NOW - DAY) if one.scheduled_for == at]


def test_scores_are_the_results_of_probes(database: Database, tiny_engine: Callable[..., TransformersEngine]) -> None:
    engine = tiny_engine("llama")
    decoded = run(database, engine, NOW - 3 * HOUR, is_scored=False)
    before = evidence(database, engine)
    scored = run(database, engine, NOW - 2 * HOUR, is_scored=True)
    assert [one.is_scored for one in decoded] == [False] * 4
    assert sorted(one.is_scored for one in scored) == [False, True, True, True]
    alike = [replace(one, scheduled_for=NOW - 3 * HOUR, is_scored=False) for one in scored]
    assert [replace(one, trials=(), accepts=()) for one in alike] == [
        replace(one, trials=(), accepts=()) for one in decoded
    ]
    assert [counted(one) for one in alike] == [counted(one) for one in decoded]
    assert sum(one.accepts[0] for one in decoded) > 0

    after = evidence(database, engine)
    num_decoded, num_scored = before[0], after[0] - before[0]
    assert (num_decoded, num_scored) == (4, 4), "scores are evidence of the drafter"
    faded = 0.5 ** (HOUR / HALF_LIFE)
    assert after[1] == pytest.approx((1 + faded) * before[1]), "the same trials again"
    assert len(ProbeStore(database).uncompared(NOW - DAY)) == 4 + 1, "pairs for the watch are decoded ones"
    last = ProbeStore(database).last_probed(NOW, HOUR, since=NOW - DAY)
    assert last == {("code", "lookup"): NOW - 2 * HOUR}


def test_the_rows_say_how_they_were_counted_and_take_no_time_of_their_own(
    database: Database, tiny_engine: Callable[..., TransformersEngine]
) -> None:
    engine = tiny_engine("llama")
    run(database, engine, NOW - 2 * HOUR, is_scored=True)
    sources = database.rows(text("SELECT source, is_whole, num_draft_tokens FROM evidence_rows"))
    hours = database.rows(
        text("""SELECT purpose, mode, sum(num_jobs)::int, sum(device_s) FROM acceptance_hourly
                WHERE drafter <> '' GROUP BY purpose, mode ORDER BY mode""")
    )
    assert [tuple(row) for row in sources] == [("scored", True, 3)] * 3
    assert [tuple(row)[:3] for row in hours] == [("probe", "shadow", 3), ("probe", "speculative", 1)]
    assert hours[0][3] == 0.0
    identity = engine.identity
    stored = AcceptanceStateStore(database).read(
        identity.target_revision, identity.engine, {"lookup": engine.drafters[0].revision}
    )
    moment: datetime = database.scalar(text("SELECT clock_timestamp()"))
    folded = LedgerStore(database).evidence(identity.target_revision, identity.engine, moment, HALF_LIFE)
    assert folded == {row.key: row.evidence for row in stored.rows}, "the ledger has them all"


def test_a_score_that_was_never_given_is_no_result(
    database: Database, tiny_engine: Callable[..., TransformersEngine]
) -> None:
    engine = tiny_engine("llama")
    assert run(database, engine, NOW - 2 * HOUR, is_scored=True, drafter="not-loaded-here") == []


def counted(one: ProbeResult) -> list[tuple[int, int]]:
    """Trials and accepts of the positions that were tested."""
    return [(t, a) for t, a in zip(one.trials, one.accepts, strict=True) if t]


def evidence(database: Database, engine: TransformersEngine) -> tuple[int, float]:
    """Number of jobs and trials of position 1 in the evidence of look-up."""
    identity = engine.identity
    revisions = {"lookup": engine.drafters[0].revision}
    rows = AcceptanceStateStore(database).read(identity.target_revision, identity.engine, revisions).rows
    its = [row for row in rows if row.drafter == "lookup"]
    return sum(row.num_jobs for row in its), sum(row.evidence.all.trials[0] for row in its)
