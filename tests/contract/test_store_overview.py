"""What people read: the views, the cookbook of docs/reference/sql.md, and the rows of the status table."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import text

from alphaloop.acceptance import AcceptanceCounts, ProposerCounts
from alphaloop.experiment.observe import Expected
from alphaloop.measurements import DriftSubject
from alphaloop.messages import Mode, Purpose, Status
from alphaloop.messages.result import Failure
from alphaloop.store.database import Database
from alphaloop.store.drift import DriftEventStore, EventChange, EventState
from alphaloop.store.job_counts import RollupStore, ShadowRun
from alphaloop.store.jobs import JobStore
from alphaloop.store.outcomes import OutcomeStore
from alphaloop.store.refreshes import RefreshReason, RefreshStore
from alphaloop.store.switchback import SwitchbackStore
from alphaloop.store.task_figures import recent_tasks
from alphaloop.tables import metadata
from tests.fixtures.drift import content
from tests.fixtures.postgres import fresh_database
from tests.fixtures.runs import (
    ENGINE,
    TARGET,
    block_rows,
    calibrate,
    choose,
    claim_request,
    decode_run,
    outcome,
    record,
    simulated_counts,
    subject,
    vanilla_counts,
)
from tests.fixtures.sql_questions import ROOT, questions

pytestmark = pytest.mark.postgres

PAGE = (ROOT / "docs/reference/sql.md").read_text(encoding="utf-8")
QUERIES = {question.title: question.sql for question in questions("docs/reference/sql.md")}
FAULTS = next(title for title in QUERIES if title.endswith("Do the counts add up?"))
VIEWS = (
    "task_alpha_now",
    "task_jobs_now",
    "task_speedup_now",
    "expectation_now",
    "decision_log",
    "evidence_now",
    "failed_jobs",
    "job_spending",
    "open_drift",
)


@pytest.fixture(scope="module")
def filled(postgres_server: str, migrated_template: str, seed: int) -> Iterator[Database]:
    """A database that every test of this module reads and none changes."""
    with fresh_database(postgres_server, migrated_template) as url, Database(url) as database:
        yield fill(database, random.Random(seed))


def fill(database: Database, rng: random.Random) -> Database:
    """Two tasks: one speculative with controls, one vanilla; a failure, an open drift, a waiting message."""
    jobs, outcomes = JobStore(database), OutcomeStore(database)
    recent = datetime.now(UTC) - timedelta(minutes=1)
    runs = [
        *(decode_run(simulated_counts(rng, [0.8, 0.6, 0.5, 0.4], 12), device_s=0.4, at=recent) for _ in range(8)),
        *(
            decode_run(vanilla_counts(20), mode=Mode.VANILLA, purpose=Purpose.CONTROL, reason="control", at=recent)
            for _ in range(3)
        ),
        *(decode_run(vanilla_counts(30), task="sql", mode=Mode.VANILLA, reason="no_history") for _ in range(4)),
    ]
    runs[0] = replace(runs[0], proposers=(ProposerCounts("lookup", (9, 6), (7, 4)), ProposerCounts("grammar", (), ())))
    runs = [replace(run, batch_id="night") for run in runs]
    ids = [f"job-{number}" for number in range(len(runs))]
    failing = Failure(code="decode_failed", message="a step failed", hint="see the log")
    requests = [
        claim_request(job_id, task=run.key.task, purpose=Purpose(run.purpose), batch_id="night")
        for job_id, run in zip(ids, runs, strict=True)
    ]
    jobs.claim(
        [*requests, claim_request("bad"), claim_request("nul"), claim_request("running")],
        owner="w1",
        lease_s=60,
        max_attempts=3,
    )
    done = [outcome(i, text="NUL \x00", task=run.key.task, run=run) for i, run in zip(ids, runs, strict=True)]
    plain = runs[-1]
    lookup = replace(plain.key, drafter="lookup", draft_revision="draft-1")
    shadow = ShadowRun(lookup, 2, simulated_counts(rng, [0.8, 0.5], 10), 40, plain.num_tokens, plain.decoded_at)
    done[-1] = replace(done[-1], shadows=(shadow,))
    bad = outcome("bad", status=Status.FAILED, error=failing)
    nul = outcome("nul", status=Status.FAILED, error=Failure(code="decode_failed", message="NUL \x00"))
    outcomes.record([*done, bad, nul], owner="w1")
    slices = SwitchbackStore(database)
    expected = Expected(1.9, 1.6, 2.3, 1.9, 0.08)
    slices.add(block_rows(subject("code"), recent - timedelta(minutes=2), 10, expected=expected))
    slices.refresh(recent)
    RollupStore(database).roll_up(datetime.now(UTC))
    calibrate(database)
    choose(database)
    found = content(DriftSubject("code", "lookup", "draft-1", TARGET))
    DriftEventStore(database).write([EventChange(None, EventState.OPENED, found, found.verdict)], recent)
    RefreshStore(database).open("heads", TARGET, "heads-1", RefreshReason.BY_HAND, recent)
    return database


@pytest.mark.parametrize("title", QUERIES)
def test_every_query_of_the_cookbook_answers(filled: Database, title: str) -> None:
    rows = filled.rows(text(QUERIES[title].replace(":", r"\:")))
    assert bool(rows) is (title != FAULTS)


def test_the_cookbook_was_read_whole() -> None:
    assert len(QUERIES) == PAGE.count("```sql") >= 20
    assert [title.split(". ")[0] for title in QUERIES] == [str(number) for number in range(1, len(QUERIES) + 1)]


def test_the_faults_query_finds_a_fault(database: Database, rng: random.Random) -> None:
    with fill(database, rng).begin() as connection:
        connection.execute(text("DELETE FROM decode_runs WHERE job_id = 'job-0'"))
        rows = connection.execute(text(QUERIES[FAULTS])).all()
    assert rows == [("job-0",)]


def test_the_page_names_every_table() -> None:
    tables = PAGE.split("## Tables")[1].split("## Views")[0]
    assert set(re.findall(r"`(\w+)`(?=[, |])", tables.split("`jobs.outcome`")[0])) == set(metadata.tables)


def test_the_page_says_of_each_view_what_the_database_says(filled: Database) -> None:
    views = "SELECT relname FROM pg_class WHERE relkind = 'v' AND relnamespace = 'public'::regnamespace"
    assert set(filled.scalars(text(views))) == set(VIEWS)
    query = """
        SELECT attname, col_description(attrelid, attnum), obj_description(attrelid) FROM pg_attribute
        WHERE attrelid = CAST(:view AS regclass) AND attnum > 0 ORDER BY attnum
    """
    for view in VIEWS:
        section = PAGE.split(f"### {view}\n")[1].split("\n#")[0]
        documented = re.findall(r"^\| `(\w+)` \| (.+) \|$", section, re.MULTILINE)
        rows = filled.rows(text(query), {"view": view})
        assert documented == [(name, comment) for name, comment, _ in rows]
        assert section.strip().splitlines()[0].removesuffix(".") == rows[0][2]


def test_alpha_is_that_of_the_runs(filled: Database) -> None:
    alpha = filled.one(text("SELECT * FROM task_alpha_now"))
    runs = filled.rows(text("SELECT * FROM decode_runs WHERE mode = 'speculative'"))
    trials, accepts = sum(sum(run.trials) for run in runs), sum(sum(run.accepts) for run in runs)
    assert (alpha.task, alpha.num_jobs, alpha.trials, alpha.accepts) == ("code", 8, trials, accepts)
    assert (alpha.drafter, alpha.draft_revision, alpha.sampling_bucket) == ("lookup", "draft-1", "greedy")
    assert (alpha.target_revision, alpha.engine, alpha.purpose) == (TARGET, ENGINE, "traffic")
    assert alpha.alpha == pytest.approx(accepts / trials)
    assert alpha.alpha_1 == pytest.approx(sum(run.accepts[0] for run in runs) / sum(run.trials[0] for run in runs))
    assert (alpha.min_num_draft_tokens, alpha.max_num_draft_tokens) == (4, 4)


def test_alpha_does_not_pool_what_may_not_be_compared(database: Database, rng: random.Random) -> None:
    ways: tuple[dict[str, Any], ...] = (
        {},
        {"engine": "transformers-5.23.0/float32"},
        {"sampling_bucket": "t<=1.0"},
        {"revision": "draft-2"},
        {"target": "target-2"},
        {"purpose": Purpose.PROBE},
    )
    runs = [decode_run(simulated_counts(rng, [0.1 + 0.1 * n], 50), **way) for n, way in enumerate(ways)]
    record(database, *runs)
    shown = database.scalars(text("SELECT alpha FROM task_alpha_now"))
    assert sorted(shown) == pytest.approx(sorted(run.counts.num_accepted / run.counts.num_trials for run in runs))


def test_hours_of_the_day_before_yesterday_are_not_now(database: Database, rng: random.Random) -> None:
    record(database, decode_run(simulated_counts(rng, [0.8], 5), at=datetime.now(UTC) - timedelta(hours=26)))
    assert database.rows(text("SELECT * FROM task_alpha_now")) == []


def test_failed_jobs_say_why_and_survive_the_character_nul(filled: Database) -> None:
    rows = {row.job_id: row for row in filled.rows(text("SELECT * FROM failed_jobs"))}
    assert rows.keys() == {"bad", "nul"}
    assert (rows["bad"].code, rows["bad"].message, rows["bad"].field) == ("decode_failed", "a step failed", None)
    assert rows["nul"].code is None


def test_the_status_table(filled: Database) -> None:
    code, sql = recent_tasks(filled)
    assert (code.task, code.jobs) == ("code", {"succeeded": 8, "failed": 2, "running": 1})
    assert (code.num_jobs, code.num_probes, code.controls) == (11, 0, {"succeeded": 3})
    assert code.decoded.drafters == ("lookup",)
    assert code.next_job is None, "the store does not decide"
    assert code.alpha.mean == pytest.approx(code.accepts / code.trials)
    assert code.alpha.low < code.alpha.mean < code.alpha.high
    assert code.alpha_1.mean > code.alpha.mean
    assert code.measured == SwitchbackStore(filled).shown(datetime.now(UTC))["code"]
    assert (sql.task, sql.decoded.num_drafted_rounds, sql.decoded.drafters) == ("sql", 0, ())
    assert (sql.alpha, sql.alpha_1, sql.measured) == (None, None, None)


def test_the_status_table_shows_the_acceptance_of_most_jobs_and_pools_no_others(
    database: Database, rng: random.Random
) -> None:
    most = [decode_run(simulated_counts(rng, [0.9], 20)) for _ in range(3)]
    others = [decode_run(simulated_counts(rng, [0.1], 90), engine="transformers-5.23.0/float32") for _ in range(2)]
    others += [decode_run(simulated_counts(rng, [0.1], 20), purpose=Purpose.PROBE) for _ in range(4)]
    record(database, *most, *others)
    (code,) = recent_tasks(database)
    counts = sum((run.counts for run in most), AcceptanceCounts())
    assert (code.trials, code.accepts) == (counts.num_trials, counts.num_accepted)
