"""The scheduler as a process, on a real broker and a real database."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import pytest
from confluent_kafka import Consumer as ForeignConsumer
from confluent_kafka import Producer as ForeignProducer
from pydantic import SecretStr
from sqlalchemy import select

from alphaloop.kafka.topics import ensure_topics
from alphaloop.messages import Purpose, parse_job
from alphaloop.messages.dead_letter import Origin
from alphaloop.store.database import Database
from alphaloop.store.drafts import DraftRegistry
from alphaloop.store.reports import ReportStore
from alphaloop.tables import schedule_runs
from tests.fixtures.broker import settings_for
from tests.fixtures.drift import register_probe_set
from tests.fixtures.hook import Hook, running_hook
from tests.fixtures.worker import until

pytestmark = [pytest.mark.postgres, pytest.mark.kafka, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 60.0


@dataclass(frozen=True)
class Place:
    """A configuration of this test's own: one task, free ports, short intervals."""

    task: str
    bootstrap_servers: str
    url: SecretStr
    folder: Path
    hook: Hook

    @property
    def environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "KAFKA_BOOTSTRAP_SERVERS": self.bootstrap_servers,
            "DATABASE_URL": self.url.get_secret_value(),
            "ALPHALOOP_DATA_DIR": str(self.folder / "data"),
            "ALPHALOOP_LOGS__FORMAT": "json",
            "ALPHALOOP_SCHEDULER__HTTP_PORT": "0",
            "ALPHALOOP_CONSOLE__HTTP_PORT": "0",
            "ALPHALOOP_SCHEDULER__INTERVAL_S": str(7 * 86_400),  # so that no second run comes due in a test
            "ALPHALOOP_SCHEDULER__LEADER_CHECK_S": "0.2",
            "ALPHALOOP_SCHEDULER__NOTIFY_URLS": json.dumps([self.hook.url.get_secret_value()]),
            "ALPHALOOP_SCHEDULER__NOTIFY_REPORTS": "always",
        }

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "scheduler", *arguments, "--configs", str(self.folder)]


@pytest.fixture
def place(kafka_broker: str, database_url: SecretStr, fresh_prefix: str, tmp_path: Path) -> Iterator[Place]:
    (tmp_path / "tasks.toml").write_text(f"[tasks.{fresh_prefix}]\n", encoding="utf-8")
    with running_hook() as hook:
        yield Place(fresh_prefix, kafka_broker, database_url, tmp_path, hook)


def messages(place: Place, topic: str, *, enough: Callable[[list[bytes]], bool]) -> list[bytes]:
    """Values of a topic from its beginning, until there are enough."""
    consumer = ForeignConsumer(
        {
            "bootstrap.servers": place.bootstrap_servers,
            "group.id": f"{place.task}-{topic}",
            "auto.offset.reset": "earliest",
        }
    )
    found: list[bytes] = []
    try:
        consumer.subscribe([topic])
        deadline = time.monotonic() + WAIT_S
        while not enough(found):
            assert time.monotonic() < deadline, f"{len(found)} messages on {topic}"
            message = consumer.poll(0.5)
            if message is not None and message.error() is None:
                found.append(message.value() or b"")
    finally:
        consumer.close()
    return found


def test_once_sends_probes_and_reports(place: Place, database: Database) -> None:
    DraftRegistry(database).register("lookup", "draft-1", "target-1")
    register_probe_set(database, place.task, [{"prompt": "one"}, {"prompt": "two"}], datetime.now(UTC))
    done = subprocess.run(
        place.command("once"), cwd=ROOT, env=place.environment, capture_output=True, text=True, timeout=WAIT_S
    )
    assert done.returncode == 0, done.stderr
    (finished,) = [line for line in map(json.loads, done.stderr.splitlines()) if line.get("action") == "run_finished"]
    assert finished["num_probes_sent"] == 4
    page = Path(finished["page"])
    assert page.parent == place.folder / "data" / "reports"
    stored = ReportStore(database).latest()
    assert stored is not None
    assert page.read_text(encoding="utf-8") == stored.html
    (told,) = place.hook.taken
    assert told["message"].startswith(stored.summary)
    assert not [secret for secret in ("PASSWORD", "TOKEN") if secret in done.stderr]

    topic = f"jobs.{place.task}"
    sent = messages(place, topic, enough=lambda found: len(found) >= 4)
    jobs = [parse_job(value, Origin("c", topic, 0, 0), task=place.task) for value in sent]
    assert sorted(job.purpose for job in jobs) == [Purpose.CONTROL] * 2 + [Purpose.PROBE] * 2
    published = messages(
        place, "drift-reports", enough=lambda found: any(json.loads(value) == stored.content for value in found)
    )
    assert published


def test_run_leads_reports_shows_the_lag_of_a_task_without_a_worker_and_stops_on_sigterm(
    place: Place, database: Database
) -> None:
    ensure_topics(settings_for(place.bootstrap_servers), [place.task])
    producer = ForeignProducer({"bootstrap.servers": place.bootstrap_servers})
    for number in range(3):
        producer.produce(f"jobs.{place.task}", value=json.dumps({"prompt": f"{number}"}))
    assert producer.flush(WAIT_S) == 0
    lag = f'alphaloop_scheduler_kafka_lag{{task="{place.task}"}} 3.0'
    with running(place) as (process, log):
        ready = event(process, log, "scheduler_ready")
        event(process, log, "run_finished")
        assert place.hook.took_one.wait(WAIT_S)

        def metrics_now() -> str:
            with urllib.request.urlopen(f"{ready['metrics']}/metrics", timeout=30) as response:
                return str(response.read().decode())

        until(lambda: lag in metrics_now().splitlines(), lag, WAIT_S)  # a scrape shows the last count
        metrics = metrics_now()
        assert 'alphaloop_scheduler_runs_total{outcome="succeeded"} 1.0' in metrics
        assert "alphaloop_scheduler_is_leader 1.0" in metrics
        with urllib.request.urlopen(f"{ready['metrics']}/healthz", timeout=30) as response:
            assert response.read() == b"ok\n"
        with urllib.request.urlopen(f"{ready['console']}/reports.json", timeout=30) as response:
            assert len(json.load(response)["reports"]) == 1
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_S) == 0
    (run,) = database.rows(select(schedule_runs))
    assert run.schedule_id == "measure"
    assert (run.scheduled_for.minute, run.scheduled_for.second) == (0, 0)
    assert run.finished_at is not None


def test_the_second_takes_over_when_the_first_is_killed(place: Place) -> None:
    with running(place) as (first, first_log):
        event(first, first_log, "run_finished")
        with running(place) as (second, second_log):
            event(second, second_log, "scheduler_ready")
            first.kill()
            first.wait(WAIT_S)
            event(second, second_log, "leader_elected")
            second.send_signal(signal.SIGTERM)
            assert second.wait(WAIT_S) == 0
        # The run of this week was the first one's: the second one found it taken.
        assert "run_finished" not in second_log.read_text(encoding="utf-8")


class running:
    """A scheduler that stays, its log in a file; killed at the end if it is still there."""

    def __init__(self, place: Place) -> None:
        self._place = place

    def __enter__(self) -> tuple[subprocess.Popen[bytes], Path]:
        log = self._place.folder / f"log-{time.monotonic_ns()}"
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                self._place.command("run"), cwd=ROOT, env=self._place.environment, stderr=file
            )
        return self._process, log

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait(WAIT_S)


def event(process: subprocess.Popen[bytes], log: Path, action: str) -> dict[str, object]:
    """The first log line with this action, waited for while the process lives."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        for line in _events(log):
            if line.get("action") == action:
                return line
        assert process.poll() is None, log.read_text(encoding="utf-8")
        _pause()
    raise AssertionError(f"no {action} in: {log.read_text(encoding='utf-8')}")


def _events(log: Path) -> Iterator[dict[str, object]]:
    for line in log.read_text(encoding="utf-8").splitlines(keepends=True):
        if line.endswith("\n") and line.startswith("{"):
            yield json.loads(line)


def _pause() -> None:
    time.sleep(0.05)
