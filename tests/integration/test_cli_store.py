"""The commands that read and write Postgres, on a real one, and `status` with a real Kafka beside it."""

from __future__ import annotations

import json
import random
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from pydantic import SecretStr

from alphaloop.cli.backlog import backlog
from alphaloop.cost import CostPoint
from alphaloop.kafka.producer import Producer
from alphaloop.kafka.topics import ensure_topics, jobs_topic
from alphaloop.messages import Mode
from alphaloop.settings import KafkaSettings
from alphaloop.store.costs import CostStore
from alphaloop.store.database import Database
from alphaloop.store.drafts import DraftRegistry
from alphaloop.store.integrity import check
from alphaloop.store.jobs import JobStore
from alphaloop.store.outcomes import OutcomeStore
from alphaloop.store.partitions import PartitionKeeper
from alphaloop.store.reports import ReportStore, StoredReport
from tests.fixtures.cli import Cli
from tests.fixtures.runs import (
    DEVICE,
    ENGINE,
    TARGET,
    claim_request,
    decode_run,
    outcome,
    simulated_counts,
    vanilla_counts,
)

pytestmark = pytest.mark.postgres


@pytest.fixture
def environment(database_url: SecretStr, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DATABASE_URL", database_url.get_secret_value())
    monkeypatch.setenv("ALPHALOOP_DATA_DIR", str(tmp_path))


@pytest.fixture
def decoded(database: Database, rng: random.Random) -> Database:
    """A calibrated engine, and twelve jobs of `code`: eight speculative, four vanilla."""
    drafters = {"lookup": "draft-1"}
    points = [CostPoint(None, batch, width, 40.0 + width, 5) for batch in (1, 4) for width in (1, 4, 9)]
    points += [CostPoint("lookup", batch, width, 0.1, 5) for batch in (1, 4) for width in (4, 9)]
    CostStore(database).save(DEVICE, ENGINE, TARGET, drafters, points)
    DraftRegistry(database).register("lookup", "draft-1", TARGET)
    PartitionKeeper(database).ensure(datetime.now(UTC), 2)
    for i in range(12):
        fast = i < 8
        run = decode_run(
            simulated_counts(rng, [0.9, 0.8, 0.7], 20) if fast else vanilla_counts(40),
            mode=Mode.SPECULATIVE if fast else Mode.VANILLA,
        )
        job_id = f"job-{i}"
        JobStore(database).claim([claim_request(job_id)], owner="w", lease_s=60, max_attempts=3)
        OutcomeStore(database).record([outcome(job_id, run=run)], owner="w")
    return database


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


def test_report(cli: Cli, environment: None, database: Database, tmp_path: Path) -> None:
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


def test_probe_sets(cli: Cli, environment: None, tmp_path: Path) -> None:
    assert cli("probes", "list", "--json").json == []
    file = tmp_path / "probes.jsonl"
    file.write_text("".join(json.dumps({"id": i, "task": "code", "prompt": f"p {i}"}) + "\n" for i in range(3)))
    assert cli("probes", "add", "--task", "code", "--file", file).code == 0
    (found,) = cli("probes", "list", "--json").json
    assert (found["task"], found["num_prompts"]) == ("code", 3)
    assert cli("probes", "add", "--task", "code", "--file", file).code == 0
    assert cli("probes", "list", "--json").json == [found]
    assert found["version"] in cli("probes", "list").out
    stranger = cli("probes", "add", "--task", "sql", "--file", file)
    assert (stranger.code, "found some of code" in stranger.err) == (1, True)
    file.write_text('{"prompt": 3}\n')
    assert cli("probes", "add", "--task", "code", "--file", file).code == 1
    assert cli("probes", "list", "--json").json == [found]


def test_explain_decides_as_a_worker_would(cli: Cli, environment: None, decoded: Database) -> None:
    ran = cli("explain", "code", "--json")
    assert ran.code == 0
    told = ran.json
    assert told["beliefs"]["lookup"]["jobs"] == pytest.approx(8, abs=0.1)
    decision = told["decision"]
    assert (decision["mode"], decision["drafter"], decision["reason"]) == ("speculative", "lookup", "faster")
    best = decision["alternatives"][0]
    assert best["speedup"] > 2
    assert best["speedup_low"] <= best["speedup"] <= best["speedup_high"]
    shown = cli("explain", "code").out
    assert shown.startswith(f"code: lookup k={decision['num_draft_tokens']} (faster)")
    assert "vanilla" in shown
    cold = cli("explain", "sql", "--json").json
    assert cold["decision"]["reason"] == "no_history"
    assert cold["beliefs"]["lookup"]["jobs"] == 0
    unknown = cli("explain", "nonesuch")
    assert (unknown.code, "code" in unknown.err.splitlines()[1]) == (1, True)


def test_explain_before_any_calibration(cli: Cli, environment: None) -> None:
    ran = cli("explain", "code")
    assert (ran.code, ran.err.splitlines()[0]) == (1, "error: no worker has measured its device yet")


@pytest.mark.kafka
def test_status(
    cli: Cli, environment: None, decoded: Database, kafka_settings: KafkaSettings, kafka_broker: str, fresh_prefix: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("KAFKA_BOOTSTRAP_SERVERS", kafka_broker)
    monkeypatch.setenv("ALPHALOOP_KAFKA__GROUP_ID", fresh_prefix)
    ensure_topics(kafka_settings, [fresh_prefix])
    producer = Producer(kafka_settings)
    for _ in range(3):
        producer.send(jobs_topic(fresh_prefix), key=None, value=b"{}")
    producer.flush(10)
    producer.close()
    assert backlog(kafka_settings.model_copy(update={"group_id": fresh_prefix}))[fresh_prefix] == 3
    ran = cli("status", "--json")
    assert ran.code == 0
    by_task = {task["task"]: task for task in ran.json["tasks"]}
    assert by_task["code"]["jobs"] == {"succeeded": 12}
    assert by_task["code"]["alpha_1"]["low"] < 0.9 < by_task["code"]["alpha_1"]["high"]
    assert by_task["code"]["speedup"] > 1
    assert by_task[fresh_prefix]["waiting"] == 3
    monkeypatch.setenv("COLUMNS", "100")
    shown = cli("status").out
    assert max(map(len, shown.splitlines())) <= 100
    assert "12 succeeded" in shown
    assert ":***@" in shown


def test_integrity_finds_what_does_not_hold(decoded: Database) -> None:
    found = check(decoded)
    assert (found.num_jobs, found.num_outcomes, found.num_succeeded, found.num_decoded_once) == (12, 12, 12, 12)
    assert found.num_wrong_counts == 0
    JobStore(decoded).claim([claim_request("running")], owner="w", lease_s=60, max_attempts=3)
    assert not check(decoded).holds
