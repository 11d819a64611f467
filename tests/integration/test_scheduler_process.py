"""The scheduler as a process, on a real broker and a real database."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer as ForeignProducer
from pydantic import SecretStr
from sqlalchemy import select

from alphaloop.kafka.topics import DRIFT_REPORTS, ensure_topics
from alphaloop.messages import Purpose, parse_job
from alphaloop.messages.dead_letter import Origin
from alphaloop.store.database import Database
from alphaloop.store.decision_inputs import DraftRegistry
from alphaloop.store.reports import ReportStore
from alphaloop.tables import schedule_runs
from tests.fixtures.broker import settings_for
from tests.fixtures.drift import live_worker, register_probe_set
from tests.fixtures.hook import Hook, running_hook
from tests.fixtures.worker import read, until

pytestmark = [pytest.mark.postgres, pytest.mark.kafka, pytest.mark.slow]

WAIT_S = 60.0


@dataclass(frozen=True)
class Place:
    """A configuration of this test's own: one task, and no second run that comes due."""

    task: str
    bootstrap_servers: str
    url: SecretStr
    folder: Path
    hook: Hook

    @property
    def environment(self) -> dict[str, str]:
        return {
            "KAFKA_BOOTSTRAP_SERVERS": self.bootstrap_servers,
            "DATABASE_URL": self.url.get_secret_value(),
            "ALPHALOOP_CONFIGS": str(self.folder),  # also of a second process
            "ALPHALOOP_SCHEDULER__INTERVAL_S": str(7 * 86_400),  # so that no second run comes due in a test
            "ALPHALOOP_SCHEDULER__NOTIFY_URLS": json.dumps([self.hook.url.get_secret_value()]),
            "ALPHALOOP_SCHEDULER__NOTIFY_REPORTS": "always",
        }


@pytest.fixture
def place(kafka_broker: str, database_url: SecretStr, fresh_prefix: str, tmp_path: Path) -> Iterator[Place]:
    (tmp_path / "tasks.toml").write_text(f"[tasks.{fresh_prefix}]\n", encoding="utf-8")
    with running_hook() as hook:
        yield Place(fresh_prefix, kafka_broker, database_url, tmp_path, hook)


def test_once_sends_probes_and_reports(place: Place, database: Database, here: Any) -> None:
    DraftRegistry(database).register("lookup", "draft-1", "target-1")
    live_worker(database)
    register_probe_set(database, place.task, [{"prompt": "one"}, {"prompt": "two"}], datetime.now(UTC))
    code, told = here("scheduler", place.environment, "once")
    assert code == 0, told
    (finished,) = [line for line in told if line.get("action") == "run_finished"]
    assert finished["num_probes_sent"] == 4
    page = Path(finished["page"])
    assert page.parent == place.folder / "data" / "reports"
    stored = ReportStore(database).latest()
    assert page.read_text(encoding="utf-8") == stored.html
    (told,) = place.hook.taken
    assert told["message"].startswith(stored.summary)
    assert not [secret for secret in ("PASSWORD", "TOKEN") if secret in str(told)]

    topic, kafka = f"jobs.{place.task}", settings_for(place.bootstrap_servers)
    sent = read(kafka, [topic], lambda found: len(found) >= 4)
    jobs = [parse_job(one.value, Origin("c", topic, 0, 0), task=place.task) for one in sent]
    assert sorted(job.purpose for job in jobs) == [Purpose.CONTROL] * 2 + [Purpose.PROBE] * 2
    read(kafka, [DRIFT_REPORTS], lambda found: any(json.loads(one.value or b"") == stored.content for one in found))


def test_run_leads_reports_shows_the_lag_of_a_task_without_a_worker_and_is_followed_when_it_is_killed(
    place: Place, database: Database, processes: Any
) -> None:
    ensure_topics(settings_for(place.bootstrap_servers), [place.task])
    producer = ForeignProducer({"bootstrap.servers": place.bootstrap_servers})
    for number in range(3):
        producer.produce(f"jobs.{place.task}", value=json.dumps({"prompt": f"{number}"}))
    assert producer.flush(WAIT_S) == 0
    lag = f'alphaloop_scheduler_kafka_lag{{task="{place.task}"}} 3.0'
    process = processes("scheduler", place.environment)
    ready = process.event("scheduler_ready")
    process.event("run_finished")
    second = processes("scheduler", place.environment, folder="second")

    def metrics_now() -> str:
        with urllib.request.urlopen(f"{ready['metrics']}/metrics", timeout=30) as response:
            return str(response.read().decode())

    until(lambda: lag in metrics_now().splitlines(), lag, WAIT_S)  # a scrape shows the last count
    metrics = metrics_now()
    assert 'alphaloop_scheduler_runs_total{outcome="succeeded"} 1.0' in metrics
    assert "alphaloop_scheduler_is_leader 1.0" in metrics
    assert process.ask("/healthz") == (200, "ok")
    with urllib.request.urlopen(f"{ready['console']}/reports.json", timeout=30) as response:
        assert len(json.load(response)["reports"]) == 1
    second.event("scheduler_ready")
    assert place.hook.took_one.wait(WAIT_S)
    assert process.stop() == 0
    second.event("leader_elected")
    assert second.stop() == 0
    assert "run_finished" not in {line.get("action") for line in second.events}, "it found the run of this week taken"
    (run,) = database.rows(select(schedule_runs))
    assert run.schedule_id == "measure"
    assert (run.scheduled_for.minute, run.scheduled_for.second) == (0, 0)
    assert run.finished_at is not None
