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

from alphaloop.cli.demo import TASKS, harvest
from alphaloop.embedded.process import is_locked
from alphaloop.embedded.stack import running_stack
from alphaloop.kafka.topics import list_topics
from alphaloop.settings import KafkaSettings
from tests.chaos.log_search import leaks
from tests.fixtures.cli import Cli
from tests.fixtures.worker import until

pytestmark = [pytest.mark.postgres, pytest.mark.slow]
ROOT = Path(__file__).resolve().parents[2]
#: A new broker takes long to make many.
FEW_TOPICS = {"ALPHALOOP_KAFKA__RETRY_DELAYS_S": "[]", "ALPHALOOP_KAFKA__NUM_PARTITIONS": "1"}


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


def test_why_a_model_does_not_load_is_told(tiny_models: dict[str, Path], folder: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_models["llama"], model)
    weights = model / "model.safetensors"
    os.truncate(weights, weights.stat().st_size - 100)
    source = {"ALPHALOOP_EMBEDDED__BROKER": "tansu", "ALPHALOOP_MODELS__TARGET__SOURCE": str(model)}
    with command(folder, "demo", **source) as process:
        try:
            told = process.communicate(timeout=240)[1]
        finally:
            process.kill()
    assert process.returncode == 1, told
    shown = " ".join(told.split())
    assert "model.safetensors: Error while deserializing header: incomplete metadata, file not fully covered" in shown
    assert "is the download complete? Fetch the file again" in shown
    assert "Traceback" not in told
    assert f"The demo failed while starting the worker. Logs: {folder / 'logs'}" in told
    assert "error: worker ended with code 1" in told
    assert "hint: " in told


@pytest.mark.kafka
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds the child in /proc")
def test_up_prints_addresses_that_work_starts_again_what_was_killed_and_stops_clean(
    cli: Cli, folder: Path, kafka_home: Path
) -> None:
    process = command(folder, "up", "--no-worker", KAFKA_HOME=str(kafka_home), **FEW_TOPICS)
    try:
        assert process.stdout is not None
        addresses: dict[str, str] = {}
        while "logs" not in addresses and (line := process.stdout.readline()):
            name, *shown = re.split(r"\s{2,}", line.strip(), maxsplit=1)
            (value,) = shown or [process.stdout.readline().strip()]  # a long one has a line of its own
            addresses[name] = value
        assert addresses, process.communicate()[1]
        printed = cli("--data-dir", folder, "env").out
        exported = dict(line.removeprefix("export ").split("=", 1) for line in printed.splitlines())
        assert exported["KAFKA_BOOTSTRAP_SERVERS"] == addresses["broker"]
        password = (folder / "postgres" / "password").read_text().strip()
        assert password in exported["DATABASE_URL"]
        assert password not in str(addresses), "what `up` prints is often kept as a log"
        with psycopg.connect(exported["DATABASE_URL"]) as connection:
            assert connection.execute("SELECT count(*) FROM jobs").fetchone() == (0,)
            connection.execute("CREATE TABLE kept AS SELECT 7 AS number")
        topics = list_topics(KafkaSettings(bootstrap_servers=addresses["broker"]))
        status = cli("--data-dir", folder, "status", "--json")
        assert status.json["broker"] == addresses["broker"]
        assert status.json["scheduler"] == addresses["scheduler metrics"]
        second = cli("--data-dir", folder, "up")
        assert (second.code, "is in use" in second.err) == (1, True)

        before, scheduler = running_stack(folder), child_pid(folder, "scheduler")
        assert scheduler is not None
        killed = {before.pids["postgres"], before.pids["broker"], scheduler}
        for pid in killed:
            os.kill(pid, signal.SIGKILL)

        def is_new() -> bool:
            now = running_stack(folder)
            return now is not None and not set(now.pids.values()) & {*killed, 0}

        until(is_new, "both servers run again", 120)
        log = folder / "logs" / "scheduler.log"
        until(lambda: log.read_text().count("scheduler_ready") == 2, "the scheduler is up again", 120)
        assert child_pid(folder, "scheduler") not in (None, scheduler)
        for ready in [line for line in log.read_text().splitlines() if "scheduler_ready" in line]:
            assert f"metrics={addresses['scheduler metrics'].removesuffix('/metrics')} " in f"{ready} "
            assert f"console={addresses['console']} " in f"{ready} "
        after = running_stack(folder)
        assert after.model_copy(update={"pids": before.pids}) == before
        with psycopg.connect(exported["DATABASE_URL"]) as connection:
            assert connection.execute("SELECT number FROM kept").fetchone() == (7,)
        assert {*topics} <= {*list_topics(KafkaSettings(bootstrap_servers=addresses["broker"]))}
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0, told
    assert "Traceback" not in told
    assert "stopping the scheduler" in told
    told = " ".join(told.split())
    for name in ("PostgreSQL", "Apache Kafka", "the scheduler"):
        assert f"{name} ended with code 137 (killed by signal 9); starting it again in 1 s" in told


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


@pytest.mark.model
@pytest.mark.kafka
@pytest.mark.timeout(600)
def test_a_demo_in_small(folder: Path, kafka_home: Path, tiny_models: dict[str, Path]) -> None:
    # Of the costs, what no decision can be taken without is measured, and no more.
    process = command(
        folder,
        "demo",
        "--jobs",
        "2",
        ALPHALOOP_MODELS__TARGET__SOURCE=str(tiny_models["llama"]),
        ALPHALOOP_SCHEDULER__PROBE_PROMPTS="1",
        **FEW_TOPICS,
        KAFKA_HOME=str(kafka_home),
        ALPHALOOP_WORKER__CALIBRATION_BUDGET_S="0",
    )
    shown, told = process.communicate(timeout=580)
    assert process.returncode == 0, told
    for task in TASKS:
        assert re.search(rf"^{task} +2 ", shown, re.MULTILINE), shown
    page = re.search(r"file://(\S+latest\.html)", shown)
    assert "<html" in Path(page[1]).read_text(encoding="utf-8")
    assert "in Postgres: 12 jobs, 12 recorded outcomes" in shown  # 3 tasks: 2 jobs, a probe and its control each
    assert "counts that do not add up: 0" in shown
    (folder / "logs" / "told.log").write_text(told)
    prompts = harvest(7, num_traffic=2, num_probes=1, tasks=TASKS)
    its = [prompt for kind in (prompts.traffic, prompts.probes) for prompt in chain(*kind.values())]
    # A line each, because a log in JSON writes the end of a line in another way.
    lines = {f"prompt {number}": max(prompt.splitlines(), key=len).strip() for number, prompt in enumerate(its)}
    password = (folder / "postgres" / "password").read_text().strip()
    logged = {path.name for path in (folder / "logs").rglob("*.log")}
    assert {"worker.log", "scheduler.log", "postgres.log", "told.log"} <= logged
    assert leaks(folder / "logs", {"the password": password, **lines}) == []
