"""The commands that read and write Postgres, on a real one, and `status` with a real Kafka beside it."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psycopg
import pytest
from pydantic import SecretStr
from sqlalchemy import text

from alphaloop.kafka.backlog import unfinished
from alphaloop.kafka.producer import Producer
from alphaloop.kafka.topics import ensure_topics
from alphaloop.measurements import DriftSubject
from alphaloop.messages.topics import jobs_topic
from alphaloop.settings import KafkaSettings
from alphaloop.settings.models import HybridDrafterSettings, LookupDrafterSettings, ModelSettings
from alphaloop.store.database import Database, DatabaseClock
from alphaloop.store.decision_inputs import DraftRegistry, DraftStatus
from alphaloop.store.drift import DriftEventStore, EventChange, EventState
from alphaloop.store.jobs import JobStore
from alphaloop.store.known_jobs import check
from alphaloop.store.reports import ReportStore, StoredReport
from tests.fixtures.cli import Cli
from tests.fixtures.drift import content, live_worker
from tests.fixtures.postgres import with_database
from tests.fixtures.runs import claim_request

pytestmark = pytest.mark.postgres


def test_migrate(cli: Cli, empty_database_url: SecretStr, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE_URL", empty_database_url.get_secret_value())
    assert cli("migrate", "--check").code == 1
    before = cli("report")
    assert (before.code, "hint: alphaloop migrate" in before.err) == (1, True)
    ran = cli("migrate", "--json")
    assert ran.code == 0
    assert ran.json["from"] is None
    head = ran.json["to"]
    assert cli("migrate", "--check").code == 0
    assert cli("migrate", "--json").json == {"from": head, "to": head}
    wrong = cli("migrate", "--revision", "nonesuch")
    assert (wrong.code, "error: " in wrong.err) == (1, True)


@pytest.mark.parametrize("encoding", ["LATIN1", "SQL_ASCII"])
def test_a_database_that_cannot_hold_every_text_is_not_migrated(
    cli: Cli, postgres_server: str, monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    name = f"in_{encoding.lower()}"
    with psycopg.connect(postgres_server, autocommit=True) as connection:
        connection.execute(
            f"CREATE DATABASE {name} TEMPLATE template0 ENCODING '{encoding}' LOCALE_PROVIDER libc LOCALE 'C'".encode()
        )
        monkeypatch.setenv("DATABASE_URL", with_database(postgres_server, name))
        ran = cli("migrate")
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())
    assert ran.code == 1
    assert f"expected a database in the encoding UTF8, found {encoding}" in ran.err.replace("\n", " ")
    assert "ENCODING 'UTF8'" in ran.err


def test_report(cli: Cli, cli_environment: None, database: Database, tmp_path: Path) -> None:
    none = cli("report")
    assert (none.code, none.err.splitlines()[0]) == (1, "error: there is no report yet")
    now = datetime.now(UTC)
    ReportStore(database).save(
        StoredReport(
            now, now - timedelta(days=1), now, "All is well.", {"tasks": []}, "All is [well].\n", "<p>well</p>"
        )
    )
    assert cli("report").out.strip() == "All is [well]."
    assert cli("report", "--json").json["summary"] == "All is well."
    assert cli("report", "--html", "-").out == "<p>well</p>"
    page = tmp_path / "page.html"
    assert page.as_uri() in cli("report", "--html", page).err
    assert page.read_text() == "<p>well</p>"
    assert cli("report", "--html", tmp_path / "none" / "page.html").code == 1


def test_a_report_says_that_it_is_old(cli: Cli, cli_environment: None, database: Database) -> None:
    now = datetime.now(UTC)
    for due, is_old in ((now - timedelta(minutes=1), True), (now + timedelta(hours=1), False)):
        content = {"next_due": due.isoformat()}
        ReportStore(database).save(StoredReport(now, now - timedelta(days=1), now, "Well.", content, "Well.\n", ""))
        assert ("this report is old" in cli("report").err) is is_old


def test_drift_is_listed_acknowledged_and_accepted_as_a_new_level(
    cli: Cli, cli_environment: None, database: Database
) -> None:
    assert "no drift is open" in cli("drift", "list").err
    assert cli("drift", "list", "--json").json == []
    said = content(DriftSubject("code", "small", "draft-1", "target-1"), "draft_stale", lost_tokens_per_s=41.7)
    opened = EventChange(None, EventState.OPENED, said, said.verdict)
    DriftEventStore(database).write([opened], datetime.now(UTC))
    (event,) = cli("drift", "list", "--json").json
    assert (event["cause"], event["state"], event["task"], event["lost_tokens_per_s"]) == (
        "draft_stale",
        "opened",
        "code",
        41.7,
    )
    number = event["id"]
    assert "41.7 tokens/s" in cli("drift", "list").out
    acknowledged = cli("drift", "ack", number, "--by", "Ada", "--note", "in training")
    assert (acknowledged.code, f"Ada has taken note of event {number}" in acknowledged.err) == (0, True)
    shown = cli("drift", "show", number, "--json").json
    assert (shown["state"], shown["note"]) == ("acknowledged", "in training")
    assert [state["actor"] for state in shown["history"]] == ["scheduler", "Ada"]
    told = cli("drift", "show", number).out
    assert "acknowledged by Ada (draft stale): in training" in told
    assert "Train it." in told
    accept = ("ack", number, "--by", "Ada", "--new-level")
    done = cli("drift", *accept, "--note", "so be it")
    assert (done.code, f"event {number} is closed" in done.err) == (0, True)
    assert cli("drift", "list", "--json").json == []
    (shown,) = cli("drift", "list", "--since", "1d", "--json").json
    assert (shown["state"], shown["closed_because"]) == ("closed", "accepted as the new level: so be it")
    assert shown["accepted_at"] is not None
    assert "closed by Ada (draft stale): accepted as the new level: so be it" in cli("drift", "show", number).out
    for wrong in (("show", number + 1), ("ack", number, "--by", "Ada"), ("ack", number, "--by", " "), accept):
        failed = cli("drift", *wrong)
        assert (failed.code, "hint: " in failed.err) == (1, True)


def test_probe_sets(cli: Cli, cli_environment: None, tmp_path: Path) -> None:
    assert cli("probes", "list", "--json").json == []
    file = tmp_path / "probes.jsonl"
    file.write_text("".join(json.dumps({"id": i, "task": "code", "prompt": f"p {i}"}) + "\n" for i in range(3)))
    assert cli("probes", "register", file, "--task", "code").code == 0
    (found,) = cli("probes", "list", "--json").json
    assert (found["task"], found["num_prompts"]) == ("code", 3)
    assert cli("probes", "register", file, "--task", "code").code == 0
    assert cli("probes", "list", "--json").json == [found]
    assert found["version"] in cli("probes", "list").out
    stranger = cli("probes", "register", file, "--task", "sql")
    assert (stranger.code, "found some of code" in stranger.err) == (1, True)
    file.write_text('{"prompt": 3}\n')
    assert cli("probes", "register", file, "--task", "code").code == 1
    assert cli("probes", "list", "--json").json == [found]


def test_versions_of_a_probe_set_are_compared_without_their_texts(
    cli: Cli, cli_environment: None, tmp_path: Path
) -> None:
    file = tmp_path / "probes.jsonl"
    for texts in (["secret one", "secret two"], ["secret two", "secret three"]):
        file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
        assert cli("probes", "register", file, "--task", "code", "--k", 4).code == 0
    now, before = cli("probes", "list", "--task", "code", "--json").json
    assert [(one["in_use"], one["num_draft_tokens"], one["source"]) for one in (now, before)] == [
        (True, 4, "file"),
        (False, 4, "file"),
    ]
    shown = cli("probes", "show", "code", "--against", before["version"])
    assert "1 prompt in both, 1 only here, 1 only there" in shown.err
    assert "secret" not in shown.out + shown.err
    lines = cli("probes", "show", "code", "--against", before["version"], "--json").json["prompts"]
    assert sorted(line["is_shared"] for line in lines) == [False, True]
    assert cli("probes", "show", "code", "--version", "unheard-of").code == 1
    assert cli("probes", "show", "sql").code == 1


def test_the_plan_of_the_next_probes(cli: Cli, cli_environment: None, twelve_jobs: Database, tmp_path: Path) -> None:
    assert "no task has a probe set" in cli("probes", "plan").err
    file = tmp_path / "probes.jsonl"
    file.write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
    assert cli("probes", "register", file, "--task", "code").code == 0
    assert cli("probes", "plan", "--json").json["measurements"] == [], "no worker runs that has the drafter"
    live_worker(twelve_jobs)
    planned = cli("probes", "plan", "--json").json
    (one,) = planned["measurements"]
    assert (one["task"], one["drafter"], one["why"], one["num_prompts"]) == ("code", "lookup", "new", 2)
    assert one["is_sent"]
    assert one["device_s"] <= planned["budget_device_s"]
    ran = cli("probes", "plan")
    assert "the next run sends 1 of 1 measurements" in ran.err
    assert "lookup" in ran.out


def test_a_drafter_is_retired_and_restored(cli: Cli, cli_environment: None, database: Database) -> None:
    drafts = DraftRegistry(database)
    for revision in ("one", "two"):
        drafts.register("small", revision, "target-1")
    for name in ("retire", "restore"):
        ran = cli("draft", name, "smal")
        assert (ran.code, "expected a known drafter, one of small, found 'smal'" in ran.err) == (1, True)
    assert "small is in use" in cli("draft", "restore", "small").err
    assert "small is retired" in cli("draft", "retire", "small").err
    drafts.register("small", "two", "target-1")
    assert (drafts.retired(), drafts.stale("target-1")) == ({"small"}, {("small", "one"), ("small", "two")})
    assert {one["status"] for one in cli("draft", "list", "--json").json} == {"retired"}
    models = ModelSettings(
        drafters={
            **{name: LookupDrafterSettings() for name in ("small", "lookup")},
            "both": HybridDrafterSettings(sources=("lookup", "small")),
        }
    )
    assert set(models.without(drafts.retired()).drafters) == {"lookup"}
    assert "small is in use" in cli("draft", "restore", "small").err
    assert (drafts.retired(), {one.status for one in drafts.all()}) == (set(), {DraftStatus.ACTIVE})


@pytest.mark.kafka
def test_status(
    cli: Cli,
    cli_environment: None,
    twelve_jobs: Database,
    clean_kafka: KafkaSettings,  # jobs that wait for other tests would take width from the table
    kafka_broker: str,
    fresh_prefix: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KAFKA_BOOTSTRAP_SERVERS", kafka_broker)
    monkeypatch.setenv("ALPHALOOP_KAFKA__GROUP_ID", fresh_prefix)
    ensure_topics(clean_kafka, [fresh_prefix])
    producer = Producer(clean_kafka)
    for _ in range(3):
        producer.send(jobs_topic(fresh_prefix), key=None, value=b"{}")
    producer.flush(10)
    producer.close()
    assert unfinished(clean_kafka.model_copy(update={"group_id": fresh_prefix}))[fresh_prefix].num_messages == 3
    ran = cli("status", "--json")
    assert ran.code == 0
    by_task = {task["task"]: task for task in ran.json["tasks"]}
    assert by_task["code"]["jobs"] == {"succeeded": 12}
    seen = twelve_jobs.one(text("SELECT sum(accepts[1]), sum(trials[1]) FROM decode_runs"))
    alpha_1 = by_task["code"]["alpha_1"]
    assert alpha_1["mean"] == pytest.approx(int(seen[0]) / int(seen[1]))
    assert alpha_1["low"] < alpha_1["mean"] <= alpha_1["high"] <= 1
    assert by_task["code"]["measured"] is None, "the task was on no trial"
    assert by_task[fresh_prefix]["waiting"] == 3
    monkeypatch.setenv("COLUMNS", "100")
    shown = cli("status").out
    assert max(map(len, shown.splitlines())) <= 100
    assert "12 succeeded" in shown
    assert ":***@" in shown


def test_integrity_finds_what_does_not_hold(twelve_jobs: Database) -> None:
    found = check(twelve_jobs)
    assert (found.num_jobs, found.num_outcomes, found.num_succeeded, found.num_decoded_once) == (12, 12, 12, 12)
    assert found.num_wrong_counts == 0
    JobStore(twelve_jobs).claim([claim_request("running")], owner="w", lease_s=60, max_attempts=3)
    assert not check(twelve_jobs).holds


def test_integrity_leaves_out_jobs_that_were_claimed_earlier(twelve_jobs: Database) -> None:
    """A demo that was stopped with jobs open does not make the next one fail."""
    JobStore(twelve_jobs).claim([claim_request("running")], owner="w", lease_s=60, max_attempts=3)
    since = DatabaseClock(twelve_jobs).measure()
    assert check(twelve_jobs, since).num_jobs == 0
    JobStore(twelve_jobs).claim([claim_request("later")], owner="w", lease_s=60, max_attempts=3)
    later = check(twelve_jobs, since)
    assert (later.num_jobs, later.num_outcomes, later.holds) == (1, 0, False)
