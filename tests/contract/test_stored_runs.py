"""The benchmark of stored runs: what it fills is consistent, and it measures every query and every read."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest
from pydantic import SecretStr
from sqlalchemy import text

from alphaloop.store.database import Database
from alphaloop.store.known_jobs import check
from benchmarks.stored_runs.__main__ import fill
from benchmarks.stored_runs.filling import NUM_DAYS, TASKS, all_keys
from benchmarks.stored_runs.questions import all_questions, ask, plan, questions
from benchmarks.stored_runs.scheduler_run import run_scheduler
from tests.fixtures.postgres import fresh_database

pytestmark = pytest.mark.postgres

NUM_RUNS = 50 * NUM_DAYS
KEY = (
    "task, segment, target_revision, drafter, draft_revision, engine, sampling_bucket, prompt_bucket, num_draft_tokens"
)
SUMS = """
    count(*), sum(rounds), sum(num_empty_rounds), sum(num_prompt_tokens), sum({tokens}), sum(rounds * {tokens}),
    sum_by_position(proposed), sum_by_position(trials), sum_by_position(accepts),
    sum_by_position(bench.products(accepts, trials))
"""
OF_RUNS = f"""
    SELECT date_trunc('hour', decoded_at, 'UTC'), {KEY}, purpose, mode, {SUMS.format(tokens="num_tokens")}
    FROM decode_runs GROUP BY 1, {KEY}, purpose, mode
"""
OF_SHADOWS = f"""
    SELECT date_trunc('hour', decoded_at, 'UTC'), {KEY}, 'traffic', 'shadow',
        {SUMS.format(tokens="(rounds + array_sum(accepts))")}
    FROM evidence_rows GROUP BY 1, {KEY}
"""
OF_HOURS = f"""
    SELECT bucket, {KEY}, purpose, mode, num_jobs, rounds, num_empty_rounds, num_prompt_tokens, num_tokens,
        rounds_tokens, proposed, trials, accepts, accepts_trials FROM acceptance_hourly
"""


@pytest.fixture(scope="module")
def filled_url(postgres_server: str, migrated_template: str) -> Iterator[SecretStr]:
    """Filled once; the tests only read, but the last."""
    with fresh_database(postgres_server, migrated_template) as url:
        fill(url.get_secret_value(), NUM_RUNS)
        yield url


def test_there_are_a_thousand_keys_and_each_has_a_share() -> None:
    keys = all_keys()
    assert len(keys) == len({(k.task, k.segment, k.drafter, k.num_draft_tokens) for k in keys}) == 1000
    uppers = [key.upper for key in keys]
    assert uppers == sorted(set(uppers))
    assert uppers[-1] == pytest.approx(1.0)


def test_jobs_and_runs_agree_and_counts_add_up(filled_url: SecretStr) -> None:
    with Database(filled_url) as database:
        with (
            database.begin() as connection
        ):  # a text may hold the character NUL, whose documents PostgreSQL cannot read
            with_nul = r"""replace(outcome::text, '{"', '{"x":"\u0000", "')::json"""
            chosen = "SELECT job_id FROM jobs WHERE outcome IS NOT NULL LIMIT 3"
            changed = connection.execute(text(f"UPDATE jobs SET outcome = {with_nul} WHERE job_id IN ({chosen})"))
            assert changed.rowcount == 3
        found = check(database)
    assert found.num_succeeded == found.num_decoded_once > NUM_RUNS // 10
    assert (found.num_wrong_counts, found.num_wrong_tokens) == (0, 0)


def test_the_sums_are_those_of_the_runs(filled_url: SecretStr) -> None:
    with psycopg.connect(filled_url.get_secret_value()) as connection:
        runs = f"({OF_RUNS}) UNION ALL ({OF_SHADOWS})"
        assert connection.execute(f"({runs}) EXCEPT ({OF_HOURS})".encode()).fetchall() == []
        assert connection.execute(f"({OF_HOURS}) EXCEPT ({runs})".encode()).fetchall() == []
        rows = connection.execute(
            "SELECT count(*), sum(num_jobs) FROM acceptance_hourly WHERE mode <> 'shadow'"
        ).fetchone()
        days = connection.execute("SELECT sum(num_jobs) FROM acceptance_daily WHERE mode <> 'shadow'").fetchone()
    assert rows is not None
    assert days is not None
    assert days[0] == rows[1] > NUM_RUNS


def test_every_query_of_the_cookbook_finds_rows_and_is_explained(filled_url: SecretStr) -> None:
    empty = {"24. Do the counts add up?"}
    with psycopg.connect(filled_url.get_secret_value(), autocommit=True) as connection:
        run_scheduler(filled_url.get_secret_value(), 1)
        for question in questions("docs/reference/sql.md"):
            asked = ask(connection, question, 1)
            assert asked.cpu_ms is not None, question.name
            assert bool(asked.num_rows) is (question.title not in empty), question.name
            assert "rows" in plan(connection, question.sql)


def test_a_run_of_the_scheduler_is_measured_statement_by_statement(filled_url: SecretStr) -> None:
    runs = run_scheduler(filled_url.get_secret_value(), 1)
    names = {one.name for one in runs.statements}
    assert {"traffic.streams", "probes.results", "switchback.refresh", "drift.page", "reports.latest"} <= names
    pages = next(one for one in runs.statements if one.name == "drift.page")
    assert 5 <= pages.calls[-1] <= len(TASKS), "a page of each task that drafted"
    assert runs.grown > 0


def test_every_page_is_asked() -> None:
    assert {question.page for question in all_questions()} >= {
        "docs/guides/ask-the-database.md",
        "docs/guides/operate.md",
    }
