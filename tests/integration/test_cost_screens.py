"""What jobs took and cost, on every screen: the same seconds and the same money, and no money without a price."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import openai
import pytest
from openai.types import Batch
from pydantic import SecretStr
from sqlalchemy import text

from alphaloop.prices import NO_PRICE
from alphaloop.settings import PriceSettings, Settings, TaskSettings
from alphaloop.store.database import Database
from alphaloop.store.reports import ReportStore
from alphaloop.store.switchback import SwitchbackStore
from tests.fakes import FakeEngine
from tests.fixtures.cli import Cli
from tests.fixtures.console import Visitor, console
from tests.fixtures.drift import scheduler_of
from tests.fixtures.openai_api import client, create_key, ended, served
from tests.fixtures.runs import block_rows, decode_run, record, subject, vanilla_counts
from tests.fixtures.worker import running_worker
from tests.integration.test_openai_batches import create, jsonl

pytestmark = pytest.mark.postgres

PRICES = PriceSettings(per_hour=3600.0, currency="EUR")  # a device second costs one


@contextmanager
def batch_of_three(
    settings: Settings, database: Database, folder: Path
) -> Iterator[tuple[Visitor, openai.OpenAI, Batch]]:
    """A batch that a worker has decoded, and a console that shows it."""
    key = create_key(database, "nightly", segment="gold", tasks=["chat"])
    with served(settings, folder) as url, client(url, key) as api:
        with running_worker(settings, FakeEngine(num_slots=2)):
            done = ended(api, create(api, jsonl(3)).id)
        assert done.status == "completed"
        yield Visitor(url), api, done


@pytest.mark.kafka
@pytest.mark.usefixtures("looks_often")
def test_every_screen_says_the_same_of_a_batch_and_its_jobs(
    stack_cli: Cli, worker_settings: Settings, database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALPHALOOP_PRICES__PER_HOUR", "3600")
    monkeypatch.setenv("ALPHALOOP_PRICES__CURRENCY", "EUR")
    settings = worker_settings.model_copy(update={"prices": PRICES, "data_dir": tmp_path})
    with batch_of_three(settings, database, tmp_path) as (visitor, api, done):
        seconds = dict(tuple(row) for row in database.rows(text("SELECT job_id, device_s FROM decode_runs")))
        assert len(seconds) == 3
        job_id, of_job = next(iter(seconds.items()))
        of_batch = pytest.approx(sum(seconds.values()))
        spent = {"device_s": of_batch, "cost": of_batch, "currency": "EUR"}
        assert done.model_extra is not None
        assert done.model_extra["alphaloop"]["spent"] == spent
        assert [batch.model_extra["alphaloop"]["spent"] for batch in api.batches.list()] == [spent]  # type: ignore[index]
        assert done.usage is not None
        assert done.usage.total_tokens == done.usage.input_tokens + done.usage.output_tokens > 0
        assert visitor.read(f"/batch.json?id={done.id}")["spent"] == spent
        assert stack_cli("batch", "status", done.id, "--json").json["spent"] == spent
        (listed,) = stack_cli("batch", "list", "--json").json
        assert listed["spent"] == spent
        assert stack_cli("batch", "list").out.split()[-1] == "EUR"
        own = {"device_s": of_job, "cost": pytest.approx(of_job), "currency": "EUR"}
        assert visitor.get(f"/job.json?id={job_id}").data["spent"] == own
        assert [job["spent"] for job in stack_cli("job", job_id, "--json").json] == [own]
        target = FakeEngine().identity.target
        owners = (("batch", done.id), ("key", "nightly"), ("segment", "gold"), ("task", "chat"), ("target", target))
        for by, name in owners:
            (row,) = stack_cli("cost", "--by", by, "--json").json["rows"]
            assert (row["name"], row["num_jobs"], row["device_s"], row["cost"]) == (name, 3, of_batch, of_batch)
            (shown,) = visitor.read(f"/cost.json?by={by}")["spent"]["rows"]
            assert shown == row
            (cells,) = csv.DictReader(io.StringIO(stack_cli("cost", "--by", by, "--csv").out))
            assert (cells["name"], float(cells["cost"]), cells["currency"]) == (name, of_batch, "EUR")
        by_job = {row["name"]: row["cost"] for row in stack_cli("cost", "--by", "job", "--json").json["rows"]}
        assert by_job == pytest.approx(seconds)
        (in_sql,) = database.rows(text("SELECT batch_id, sum(device_s) FROM job_spending GROUP BY 1"))
        assert tuple(in_sql) == (done.id, of_batch)
        scheduler_of(database, settings).run_once(datetime.now(UTC))
        report = ReportStore(database).latest()
        assert report is not None
        found = {(line["by"], line["name"]): (line["num_jobs"], line["cost"]) for line in report.content["spending"]}
        assert found == {
            ("segment", "gold"): (3, of_batch),
            ("key", "nightly"): (3, of_batch),
            ("batch", done.id): (3, of_batch),
        }
        (task,) = (line for line in report.content["tasks"] if line["task"] == "chat")
        assert (task["cost"]["cost"], report.content["cost"]) == (of_batch, of_batch)
        for screen in (
            stack_cli("cost").out,
            stack_cli("batch", "status", done.id).err,
            stack_cli("job", job_id).out,
            visitor.get("/cost").text,
            visitor.get(f"/batch?id={done.id}").text,
            visitor.get(f"/job?id={job_id}").text,
            report.text,
            report.html,
        ):
            assert " EUR" in screen


@pytest.mark.kafka
@pytest.mark.usefixtures("looks_often")
def test_without_a_price_no_screen_has_money(
    stack_cli: Cli, worker_settings: Settings, database: Database, tmp_path: Path
) -> None:
    settings = worker_settings.model_copy(update={"data_dir": tmp_path})
    with batch_of_three(settings, database, tmp_path) as (visitor, _, done):
        (job_id,) = database.rows(text("SELECT job_id FROM decode_runs LIMIT 1"))[0]
        assert done.model_extra is not None
        for spent in (
            done.model_extra["alphaloop"]["spent"],
            visitor.read(f"/batch.json?id={done.id}")["spent"],
            stack_cli("batch", "status", done.id, "--json").json["spent"],
            visitor.get(f"/job.json?id={job_id}").data["spent"],
            stack_cli("job", job_id, "--json").json[0]["spent"],
        ):
            assert spent["device_s"] > 0
            assert (spent["cost"], spent["currency"]) == (None, None)
        for table in (stack_cli("cost", "--json").json, visitor.read("/cost.json")["spent"]):
            assert (table["rows"][0]["cost"], table["rows"][0]["saved"], table["currency"]) == (None, None, None)
            assert table["no_cost_because"] == NO_PRICE
        printed = stack_cli("cost")
        assert NO_PRICE in printed.err
        assert "cost" not in printed.out
        cells = next(csv.DictReader(io.StringIO(stack_cli("cost", "--csv").out)))
        assert (cells["cost"], cells["currency"], cells["saved"]) == ("", "", "")
        page = visitor.get("/cost").text
        assert NO_PRICE in page
        assert ">Cost</th>" not in page


@pytest.fixture
def visitor(database_url: SecretStr) -> Iterator[Visitor]:
    with console(database_url) as found:
        yield found


def test_saved_time_is_priced_alike_in_the_report_the_console_and_the_command_line(
    cli: Cli,
    cli_environment: None,
    twelve_jobs: Database,
    database_url: SecretStr,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The interval is the speed-up's, at the mean price of the task's jobs; another time has none."""
    monkeypatch.setenv("ALPHALOOP_PRICES__PER_HOUR", "7200")
    slices, now = SwitchbackStore(twelve_jobs), datetime.now(UTC)
    slices.add(block_rows(subject("code"), now - timedelta(minutes=5), 12))
    slices.refresh(now)
    saved_s = slices.shown(now)["code"].saved_device_s
    assert saved_s is not None
    expected = {"mean": saved_s.mean * 2, "low": saved_s.low * 2, "high": saved_s.high * 2}
    (row,) = cli("cost", "--json").json["rows"]
    assert row["saved"] == pytest.approx(expected)
    settings = Settings(data_dir=tmp_path, tasks={"code": TaskSettings()}, prices=PriceSettings(per_hour=7200.0))
    scheduler_of(twelve_jobs, settings).run_once(datetime.now(UTC))
    report = ReportStore(twelve_jobs).latest()
    assert report is not None
    assert report.content["tasks"][0]["cost"]["saved"] == pytest.approx(expected)
    assert "[" in cli("cost").out
    for options in (("--since", "2h"), ("--until", "0m"), ("--by", "segment")):
        assert [row["saved"] for row in cli("cost", *options, "--json").json["rows"]] in ([None], [])


def test_names_that_a_spreadsheet_would_run_are_text(cli: Cli, cli_environment: None, database: Database) -> None:
    hostile = ("=1+1", "+1", "-1", "@SUM(A1)", "\tx", 'a "quoted", name\nof two lines')
    run = decode_run(vanilla_counts(9), at=datetime.now(UTC))
    for number, name in enumerate(hostile):
        record(database, replace(run, batch_id=name), job_ids=[f"job-{number}"])
    rows = csv.DictReader(io.StringIO(cli("cost", "--by", "batch", "--csv").out))
    assert {row["name"] for row in rows} == {*(f"'{name}" for name in hostile[:5]), hostile[5]}
    shown = cli("cost", "--by", "batch").out
    assert "of two lines" in shown
    assert "\t" not in shown


def test_a_time_without_a_job_and_options_that_cannot_be(cli: Cli, cli_environment: None, visitor: Visitor) -> None:
    assert "no job was decoded from" in cli("cost").err
    assert cli("cost", "--csv", "--json").code == 2
    assert cli("cost", "--since", "1h", "--until", "2h").code == 2
    assert cli("cost", "--by", "colour").code == 2
    assert visitor.get("/cost?by=job").status == 400
    assert visitor.get("/cost?since=1h&until=2h").status == 400
    assert visitor.read("/cost.json")["spent"]["rows"] == []
    assert "No job was decoded in this time." in visitor.get("/cost").text
