"""`up`, `down` and `demo` for real: servers started and stopped, a demo in small, a demo that fails."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import psycopg
import pytest

from alphaloop.cli.demo import TASKS
from alphaloop.demo_prompts import harvest
from alphaloop.embedded.process import is_locked
from alphaloop.embedded.stack import running_stack
from alphaloop.kafka.topics import list_topics
from alphaloop.settings import KafkaSettings
from tests.chaos.log_search import leaks
from tests.fixtures.cli import Cli
from tests.fixtures.worker import until

pytestmark = [pytest.mark.postgres, pytest.mark.slow]
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A data folder in which nothing may be left running."""
    data = tmp_path / "data"
    yield data
    assert running_stack(data) is None
    assert not is_locked(data / "stack.lock")


def command(folder: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "alphaloop.cli", "--data-dir", str(folder), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "100", **environment},
    )


@pytest.mark.parametrize("start", [("up", "--no-scheduler"), ("demo",)], ids=lambda start: start[0])
def test_why_a_model_does_not_load_is_told(
    tiny_models: dict[str, Path], folder: Path, tmp_path: Path, start: tuple[str, ...]
) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_models["llama"], model)
    weights = model / "model.safetensors"
    os.truncate(weights, weights.stat().st_size - 100)
    source = {"ALPHALOOP_EMBEDDED__BROKER": "tansu", "ALPHALOOP_MODELS__TARGET__SOURCE": str(model)}
    process = command(folder, *start, **source)
    try:
        told = process.communicate(timeout=240)[1]
    finally:
        process.kill()
    assert process.returncode == 1, told
    shown = " ".join(told.split())
    assert "model.safetensors: Error while deserializing header: incomplete metadata, file not fully covered" in shown
    assert "is the download complete? Fetch the file again" in shown
    assert "Traceback" not in told
    if start == ("demo",):
        assert f"The demo failed while starting the worker. Logs: {folder / 'logs'}" in told
        assert "error: worker ended with code 1" in told
        assert "hint: " in told


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds the child in /proc")
def test_up_prints_addresses_that_work_starts_a_scheduler_that_was_killed_again_and_stops_clean(
    cli: Cli, folder: Path
) -> None:
    process = command(folder, "up", "--no-worker", ALPHALOOP_EMBEDDED__BROKER="tansu")
    try:
        assert process.stdout is not None
        addresses: dict[str, str] = {}
        while "logs" not in addresses and (line := process.stdout.readline()):
            name, value = re.split(r"\s{2,}", line.strip(), maxsplit=1)
            addresses[name] = value
        assert addresses, process.communicate()[1]
        printed = cli("--data-dir", folder, "env").out
        exported = dict(line.removeprefix("export ").split("=", 1) for line in printed.splitlines())
        assert exported["KAFKA_BOOTSTRAP_SERVERS"] == addresses["broker"]
        password = (folder / "postgres" / "password").read_text().strip()
        assert password in exported["DATABASE_URL"]
        assert password not in str(addresses), "what `up` prints is often kept as a log"
        with psycopg.connect(exported["DATABASE_URL"]) as connection:
            row = connection.execute("SELECT count(*) FROM jobs").fetchone()
        assert row == (0,)
        status = cli("--data-dir", folder, "status", "--json")
        assert status.json["broker"] == addresses["broker"]
        assert status.json["scheduler"] == addresses["scheduler metrics"]
        second = cli("--data-dir", folder, "up")
        assert (second.code, "is in use" in second.err) == (1, True)
        killed, log = child_pid(folder, "scheduler"), folder / "logs" / "scheduler.log"
        assert killed is not None
        os.kill(killed, signal.SIGKILL)
        until(lambda: log.read_text().count("scheduler_ready") == 2, "it is up again")
        assert child_pid(folder, "scheduler") not in (None, killed)
        assert cli("--data-dir", folder, "down").err == "stopped\n"
        _, told = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0, told
    assert "stopping the scheduler" in told
    assert "the scheduler ended with code 137 (killed by signal 9); starting it again in 1 s" in " ".join(told.split())
    assert "Traceback" not in told


def child_pid(folder: Path, module: str) -> int | None:
    """The process that runs this module for this data folder."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes().split(b"\0")
            environment = (process / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if command[1:4] == [b"-P", b"-m", module.encode()] and f"ALPHALOOP_DATA_DIR={folder}".encode() in environment:
            return int(process.name)
    return None


@pytest.mark.kafka
def test_up_starts_servers_that_were_killed_again_at_their_old_addresses(folder: Path, kafka_home: Path) -> None:
    few_topics = {"ALPHALOOP_KAFKA__RETRY_DELAYS_S": "[]", "ALPHALOOP_KAFKA__NUM_PARTITIONS": "1"}
    process = command(folder, "up", "--no-worker", "--no-scheduler", KAFKA_HOME=str(kafka_home), **few_topics)
    try:
        until(lambda: running_stack(folder) is not None, "the servers are up", 120)
        before = running_stack(folder)
        assert before is not None
        assert process.stdout is not None
        process.stdout.readline()  # addresses are shown once everything is up and watched
        assert before.database_url is not None
        with psycopg.connect(before.database_url.get_secret_value()) as connection:
            connection.execute("CREATE TABLE kept AS SELECT 7 AS number")
        topics = list_topics(KafkaSettings(bootstrap_servers=before.bootstrap_servers))
        for part in ("postgres", "broker"):
            os.kill(before.pids[part], signal.SIGKILL)

        def is_new() -> bool:
            now = running_stack(folder)
            return now is not None and not set(now.pids.values()) & {before.pids["postgres"], before.pids["broker"], 0}

        until(is_new, "both servers run again", 120)
        after = running_stack(folder)
        assert after is not None
        assert after.model_copy(update={"pids": before.pids}) == before
        with psycopg.connect(before.database_url.get_secret_value()) as connection:
            assert connection.execute("SELECT number FROM kept").fetchone() == (7,)
        assert list_topics(KafkaSettings(bootstrap_servers=before.bootstrap_servers)) == topics
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0, told
    told = " ".join(told.split())
    for name in ("PostgreSQL", "Apache Kafka"):
        assert f"{name} ended with code 137 (killed by signal 9); starting it again in 1 s" in told


@pytest.mark.model
@pytest.mark.kafka
@pytest.mark.timeout(600)
def test_a_demo_in_small(cli: Cli, folder: Path, kafka_home: Path) -> None:
    # Of the costs, what no decision can be taken without is measured, and no more.
    process = command(
        folder,
        "demo",
        "--jobs",
        "2",
        ALPHALOOP_SCHEDULER__PROBE_PROMPTS="1",
        KAFKA_HOME=str(kafka_home),
        ALPHALOOP_WORKER__CALIBRATION_SAMPLES="1",
        ALPHALOOP_WORKER__CALIBRATION_BUDGET_S="0",
    )
    shown, told = process.communicate(timeout=580)
    assert process.returncode == 0, told
    for task in TASKS:
        assert re.search(rf"^{task} +2 ", shown, re.MULTILINE), shown
    page = re.search(r"file://(\S+latest\.html)", shown)
    assert page is not None
    assert "<html" in Path(page[1]).read_text(encoding="utf-8")
    assert "in Postgres: 12 jobs, 12 recorded outcomes" in shown  # 3 tasks: 2 jobs, a probe and its control each
    assert "counts that do not add up: 0" in shown
    (folder / "logs" / "told.log").write_text(told)
    assert_nothing_is_told(folder)


def assert_nothing_is_told(folder: Path) -> None:
    """No log of the processes or of the servers holds the password, or a line of a prompt of test_a_demo_in_small."""
    prompts = harvest(7, num_traffic=2, num_probes=1, tasks=TASKS)
    its = [prompt for kind in (prompts.traffic, prompts.probes) for prompt in chain(*kind.values())]
    # A line each, because a log in JSON writes the end of a line in another way.
    lines = {f"prompt {number}": max(prompt.splitlines(), key=len).strip() for number, prompt in enumerate(its)}
    password = (folder / "postgres" / "password").read_text().strip()
    logged = {path.name for path in (folder / "logs").rglob("*.log")}
    assert {"worker.log", "scheduler.log", "postgres.log", "told.log"} <= logged
    assert leaks(folder / "logs", {"the password": password, **lines}) == []
