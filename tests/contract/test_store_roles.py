"""The group roles: what each may do is enough for its process, and no more."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psycopg
import pytest
from psycopg.errors import InsufficientPrivilege
from pydantic import SecretStr
from sqlalchemy import text

from alphaloop.embedded.servers import EmbeddedPostgres
from alphaloop.notifying import open_sinks
from alphaloop.settings import RefreshSettings, SchedulerSettings, Settings, TaskSettings
from alphaloop.settings.models import HeadsDrafterSettings, ModelSettings
from alphaloop.store import schema
from alphaloop.store.coordination import LeaderLease
from alphaloop.store.database import Database
from alphaloop.store.decision_inputs import DraftRegistry, DraftStatus
from alphaloop.store.housekeeping import ensure_ahead
from alphaloop.store.outcomes import OutcomeStore
from alphaloop.store.refreshes import RefreshStore
from alphaloop.tables import metadata
from scheduler.metrics import SchedulerMetrics
from scheduler.notifying import Notifier
from tests.fixtures.drift import live_worker, register_probe_set, scheduler_of
from tests.fixtures.history import DRAFT, TARGET, History
from tests.fixtures.hook import running_hook
from tests.fixtures.postgres import as_member
from tests.fixtures.runs import claim, outcome, partition_days, recorded_results

pytestmark = pytest.mark.postgres

NOW = datetime.now(UTC).replace(microsecond=0)
TEXT = "what a caller was told"
VIEWS = ("evidence_now", "task_alpha_now", "task_speedup_now", "decision_log", "failed_jobs", "open_drift")


@pytest.fixture
def filled(database: Database, rng: random.Random) -> Database:
    """By its owner: a job that failed long ago, traffic, a draft and a probe set."""
    claim(database, "old")
    OutcomeStore(database).record([outcome("old", text=TEXT)], owner="w")
    database.change(text("DELETE FROM outbox"))
    database.change(text("UPDATE jobs SET created_at = now() - interval '90 d', finished_at = now() - interval '90 d'"))
    History(database, rng).traffic("code", 0.7, 20, NOW - timedelta(hours=3), timedelta(minutes=1))
    DraftRegistry(database).register("lookup", DRAFT, TARGET)
    register_probe_set(database, "code", [{"prompt": "one"}], NOW)
    return database


def test_the_scheduler_leads_and_measures_with_its_role(
    filled: Database, database_url: SecretStr, postgres_server: str, tmp_path: Path
) -> None:
    ensure_ahead(filled, NOW - timedelta(days=100), 0)
    live_worker(filled)
    DraftRegistry(filled).register("small", "small-1", "target-1")
    DraftRegistry(filled).set_status("small", "small-1", "target-1", DraftStatus.STALE, "α₁ fell")
    url = as_member(postgres_server, database_url, "alphaloop_scheduler")
    with Database(url) as database:
        lease = LeaderLease(database, "test", lease_s=600.0)
        assert database.check_revision()
        assert lease.try_acquire()
        models = ModelSettings(drafters={"small": HeadsDrafterSettings(source="drafts/small")})
        refresh = RefreshSettings(automatic=True)
        settings = Settings(data_dir=tmp_path, tasks={"code": TaskSettings()}, models=models, refresh=refresh)
        summary = scheduler_of(database.guarded(lease.begin_term().check), settings).run_once(NOW)
        with running_hook() as hook:
            dials = SchedulerSettings(notify_reports="always")
            notifier = Notifier(database, open_sinks([hook.url]), dials, SchedulerMetrics())
            notifier.add_sinks(NOW)
            assert notifier.send_due(NOW) == 1
        assert lease.is_held()
        lease.release()
    assert (summary.num_jobs, summary.num_probes_sent) == (20, 3), "a probe of each drafter, and their control"
    assert [refresh.drafter for refresh in RefreshStore(filled).all()] == ["small"]
    assert recorded_results(filled, ["old"]) == {}, "deleted unread"
    assert partition_days(filled)[0] > (NOW - timedelta(days=91)).date()


def test_a_reader_reads_views_and_counts_but_no_text(
    filled: Database, database_url: SecretStr, postgres_server: str
) -> None:
    url = as_member(postgres_server, database_url, "alphaloop_reader").get_secret_value()
    with psycopg.connect(url, autocommit=True) as reader:
        for view in VIEWS:
            reader.execute(f"SELECT * FROM {view}")  # type: ignore[arg-type]
        assert reader.execute("SELECT status FROM jobs WHERE job_id = 'old'").fetchone() == ("succeeded",)
        for refused in (
            "SELECT outcome FROM jobs",
            "SELECT * FROM jobs",
            "SELECT headers FROM jobs",
            "SELECT body FROM probe_prompts",
            "SELECT snapshot FROM decision_snapshots",
        ):
            with pytest.raises(InsufficientPrivilege):
                reader.execute(refused)  # type: ignore[arg-type]
        for table in metadata.sorted_tables:
            with pytest.raises(InsufficientPrivilege):
                reader.execute(f"DELETE FROM {table.name}")  # type: ignore[arg-type]


def test_no_process_may_change_the_schema(database_url: SecretStr, postgres_server: str) -> None:
    """A worker drops no day either, and a scheduler reads no text."""
    more = {"worker": "SELECT drop_partitions('2100-01-01')", "scheduler": "SELECT outcome FROM jobs"}
    for role in ("worker", "scheduler", "reader"):
        url = as_member(postgres_server, database_url, f"alphaloop_{role}").get_secret_value()
        with psycopg.connect(url, autocommit=True) as member:
            for refused in (
                "CREATE TABLE mine (a int)",
                "ALTER TABLE jobs ADD COLUMN mine int",
                "DROP TABLE jobs",
                "TRUNCATE jobs",
                "CREATE FUNCTION mine() RETURNS int LANGUAGE sql RETURN 1",
                "UPDATE alembic_version SET version_num = 'mine'",
                "DELETE FROM code_revisions",
                *([more[role]] if role in more else []),
            ):
                with pytest.raises(InsufficientPrivilege):
                    member.execute(refused)  # type: ignore[arg-type]


def test_a_user_who_may_not_create_roles_migrates_without_them(tmp_path: Path) -> None:
    """On a server of its own, because roles are shared by all databases of a server."""
    server = EmbeddedPostgres(tmp_path / "server", durable=False)
    try:
        owner = server.start()
        with psycopg.connect(owner, autocommit=True) as connection:
            connection.execute("CREATE ROLE plain LOGIN PASSWORD 'plain'")
            connection.execute("CREATE DATABASE plain OWNER plain")
        address = owner.rsplit("@", 1)[1].rsplit("/", 1)[0]
        url = SecretStr(f"postgresql://plain:plain@{address}/plain")
        schema.upgrade(url)
        missing = ["alphaloop_worker", "alphaloop_scheduler", "alphaloop_reader"]
        assert set(schema.grant_to_roles(url)) == set(missing)
        with Database(url) as database:
            claim(database, "a")
        with psycopg.connect(owner, autocommit=True) as connection:
            for role in missing:
                connection.execute(f"CREATE ROLE {role}")  # type: ignore[arg-type]
        assert schema.grant_to_roles(url) == []
        with psycopg.connect(url.get_secret_value()) as connection:
            found = connection.execute("SELECT has_table_privilege('alphaloop_worker', 'jobs', 'INSERT')").fetchone()
        assert found == (True,)
    finally:
        server.stop()
