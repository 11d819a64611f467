"""A refresh over real processes, each of which is killed in each state: it ends as it would have without."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest
from sqlalchemy import text

from alphaloop.settings import Settings
from alphaloop.store.database import Database
from alphaloop.store.decision_inputs import DraftRegistry, DraftStatus
from alphaloop.store.refreshes import Refresh, RefreshReason, RefreshState, RefreshStore
from tests.fixtures.heads import noisy_heads
from tests.fixtures.processes import ROOT, Process
from tests.fixtures.worker import Client, until

pytestmark = [pytest.mark.kafka, pytest.mark.postgres, pytest.mark.slow, pytest.mark.timeout(1200)]

NUM_JOBS: Final = 100
#: More than a trial lasts, with those before it.
NUM_MORE: Final = 2_000
LONG_S: Final = 240.0


@pytest.fixture
def target(trainable_target: Path) -> Path:
    return trainable_target


def write_configs(folder: Path, target: Path, heads: Path) -> None:
    (folder / "models.toml").write_text(
        f'[models.target]\nname = "tiny"\nsource = "{target}"\ndtype = "float32"\ndevice = "cpu"\n'
        f'[models.drafters.heads]\nmethod = "heads"\nsource = "{heads}"\n'
    )
    (folder / "tasks.toml").write_text("[tasks.code]\ntrain_from_traffic = true\n")
    (folder / "scheduler.toml").write_text("[refresh]\nmin_texts = 10\nautomatic = true\n")


class World:
    """The processes, a client, and what the database says."""

    def __init__(self, settings: Settings, database: Database, folder: Path, processes: Any) -> None:
        assert settings.postgres.url is not None
        self.servers = {
            "KAFKA_BOOTSTRAP_SERVERS": settings.kafka.bootstrap_servers or "",
            "DATABASE_URL": settings.postgres.url.get_secret_value(),
        }
        self.more = {
            "ALPHALOOP_KAFKA__GROUP_ID": settings.kafka.group_id,
            "ALPHALOOP_KAFKA__SESSION_TIMEOUT_MS": str(settings.kafka.session_timeout_ms),
            "ALPHALOOP_WORKER__CALIBRATION_BUDGET_S": "0",
            "ALPHALOOP_WORKER__LEASE_S": "5",
        }
        self.database, self.folder, self.processes = database, folder, processes
        self.client, self.num_sent = Client(settings), 0

    def worker(self) -> Process:
        started: Process = self.processes("worker", self.servers, **self.more)
        started.event("worker_ready")
        return started

    def child(self, *module: str) -> subprocess.Popen[bytes]:
        """A trainer, or a run of the scheduler, with the settings of the worker."""
        environment: Mapping[str, str] = {
            **os.environ,
            **self.servers,
            "ALPHALOOP_CONFIGS": str(self.folder),
            "ALPHALOOP_DATA_DIR": str(self.folder / "data"),
            "ALPHALOOP_SCHEDULER__HTTP_PORT": "0",
            "ALPHALOOP_CONSOLE__HTTP_PORT": "0",
            "ALPHALOOP_KAFKA__NUM_PARTITIONS": "1",
        }
        with (self.folder / f"{module[0]}.log").open("ab") as sink:
            return subprocess.Popen(
                [sys.executable, "-m", *module], cwd=ROOT, env=environment, stdout=sink, stderr=sink
            )

    def run_scheduler(self) -> None:
        assert self.child("scheduler", "once").wait(120) == 0, (self.folder / "scheduler.log").read_text()

    def send(self, num: int, max_tokens: int) -> None:
        first, self.num_sent = self.num_sent, self.num_sent + num
        bodies = [{"prompt": f"code number {first + n}", "max_tokens": max_tokens} for n in range(num)]
        lines = [{"job_id": f"job-{first + n}", "task": "code", "body": body} for n, body in enumerate(bodies)]
        self.client.send("code", [json.dumps(line).encode() for line in lines])

    def all_ended(self) -> None:
        ended = text("SELECT count(*) FROM jobs WHERE status = 'succeeded'")
        until(lambda: bool(self.database.scalar(ended) == self.num_sent), "all have ended", LONG_S)

    def refresh(self) -> Refresh:
        (only,) = RefreshStore(self.database).of("heads")
        return only

    def state(self, state: RefreshState) -> None:
        def is_there() -> bool:
            refresh = self.refresh()
            assert refresh.is_open or refresh.state is state, refresh.sentence
            return refresh.state is state

        until(is_there, f"it is in {state.value}", LONG_S)


def test_a_refresh_ends_as_without_when_each_process_is_killed_in_each_state(
    worker_settings: Settings, processes: Any, database: Database, tmp_path: Path, target: Path
) -> None:
    write_configs(tmp_path, target, noisy_heads(target, tmp_path / "heads", target="tiny", target_revision="another"))
    world = World(worker_settings, database, tmp_path, processes)
    worker = world.worker()
    world.send(NUM_JOBS, 16)
    world.all_ended()

    # A run of the scheduler that is killed, and the next one: the refresh is opened once.
    killed = world.child("scheduler", "once")
    until(lambda: bool(database.scalar(text("SELECT count(*) FROM schedule_runs"))), "a run has begun")
    killed.kill()
    killed.wait()
    world.run_scheduler()
    world.run_scheduler()
    opened = world.refresh()
    assert (opened.state, opened.reason) == (RefreshState.WAITING, RefreshReason.NEW_TARGET)

    # The worker while it waits, the trainer while it writes texts.
    worker.process.kill()
    trainer = world.child("worker.trainer")
    texts = tmp_path / "data" / "refreshes" / str(opened.id) / "draft" / ".training" / "texts.jsonl"
    until(lambda: texts.exists() and texts.stat().st_size > 0, "a text is written", LONG_S)
    trainer.kill()
    trainer.wait()
    assert world.refresh().state is RefreshState.TRAINING
    worker = world.worker()
    trainer = world.child("worker.trainer")
    world.state(RefreshState.TRIAL)
    trainer.kill()
    trainer.wait()
    refresh = world.refresh()
    assert refresh.attempt == 2

    # The worker when it has loaded the candidate and decodes with both; the next one loads it too.
    worker.event("candidate_loaded")
    world.send(NUM_MORE, 8)
    running = text("SELECT count(*) FROM jobs WHERE status = 'running'")
    until(lambda: bool(database.scalar(running)), "it decodes")
    worker.process.send_signal(signal.SIGKILL)
    worker = world.worker()
    worker.event("candidate_loaded")
    world.all_ended()

    # A run that ends the trial, killed and repeated.
    killed = world.child("scheduler", "once")
    num_runs = database.scalar(text("SELECT count(*) FROM schedule_runs"))
    until(lambda: database.scalar(text("SELECT count(*) FROM schedule_runs")) > num_runs, "a run has begun")
    killed.kill()
    killed.wait()
    world.run_scheduler()
    ended = world.refresh()
    assert ended.state in (RefreshState.KEPT, RefreshState.REJECTED), ended.sentence
    statuses = {draft.drafter: draft.status for draft in DraftRegistry(database).all()}
    kept = ended.state is RefreshState.KEPT
    assert statuses["heads-2"] is (DraftStatus.ACTIVE if kept else DraftStatus.RETIRED)
    assert statuses["heads"] is DraftStatus.ACTIVE, "the parent stays for a day"
    world.send(8, 8)
    world.all_ended()
    assert worker.stop() == 0
    runs = database.rows(text("SELECT job_id, count(*) FROM decode_runs WHERE purpose = 'traffic' GROUP BY job_id"))
    assert len(runs) == world.num_sent
    assert Counter(num for _, num in runs) == {1: world.num_sent}
