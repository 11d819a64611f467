"""The benchmark of stored runs: what it fills is consistent."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest
from pydantic import SecretStr
from sqlalchemy import text

from alphaloop.store.database import Database
from alphaloop.store.known_jobs import check
from benchmarks.stored_runs import filling
from benchmarks.stored_runs.__main__ import fill
from tests.fixtures.postgres import fresh_database

pytestmark = pytest.mark.postgres

NUM_DAYS = 20
NUM_RUNS = 10 * NUM_DAYS
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
    with fresh_database(postgres_server, migrated_template) as url, pytest.MonkeyPatch.context() as patch:
        patch.setattr(filling, "NUM_DAYS", NUM_DAYS)
        fill(url.get_secret_value(), NUM_RUNS)
        yield url


def test_jobs_and_runs_agree_and_counts_add_up(filled_url: SecretStr) -> None:
    with Database(filled_url) as database:
        # A text may hold the character NUL, whose documents PostgreSQL cannot read.
        with_nul = r"""replace(outcome::text, '{"', '{"x":"\u0000", "')::json"""
        chosen = "SELECT job_id FROM jobs WHERE outcome IS NOT NULL LIMIT 3"
        assert database.change(text(f"UPDATE jobs SET outcome = {with_nul} WHERE job_id IN ({chosen})")) == 3
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
    assert days[0] == rows[1] > NUM_RUNS
