"""A worker and a scheduler that start before their servers: they wait, say for what, and serve once both answer."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from alphaloop.embedded.brokers import EmbeddedKafka
from alphaloop.embedded.postgres import EmbeddedPostgres
from alphaloop.kafka.topics import RESULTS
from alphaloop.messages import Result
from alphaloop.settings import load_settings
from alphaloop.store.schema import upgrade
from tests.fixtures.postgres import as_member
from tests.fixtures.worker import Client, until

pytestmark = [pytest.mark.postgres, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
PASSWORD = "planted-password"
#: A model is loaded, on a machine that may be busy.
START_S = 180.0


class Process:
    """A worker or a scheduler on these servers, its log in a file."""

    def __init__(self, module: str, folder: Path, servers: Mapping[str, str], **settings: str) -> None:
        self._log = folder / f"{module}.log"
        (folder / "tasks.toml").write_text("[tasks.code]\n", encoding="utf-8")
        environment = {
            **os.environ,
            **servers,
            "ALPHALOOP_DATA_DIR": str(folder / "data"),
            "ALPHALOOP_LOGS__FORMAT": "json",
            f"ALPHALOOP_{module.upper()}__HTTP_PORT": "0",
            "ALPHALOOP_SCHEDULER__LEADER_CHECK_S": "0.2",
            # Few topics, because a new broker takes long to make many.
            "ALPHALOOP_CONFIGS": str(folder),
            "ALPHALOOP_KAFKA__RETRY_DELAYS_S": "[]",
            "ALPHALOOP_KAFKA__NUM_PARTITIONS": "1",
            **settings,
        }
        command = [sys.executable, "-m", module, *(["run"] if module == "scheduler" else [])]
        with self._log.open("wb") as sink:
            self.process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=sink, stderr=sink)

    @property
    def events(self) -> list[dict[str, Any]]:
        lines = self._log.read_text(encoding="utf-8").splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("\n")]

    def event(self, action: str) -> dict[str, Any]:
        """The first log line with this action, waited for while the process lives."""

        def found() -> list[dict[str, Any]]:
            return [line for line in self.events if line.get("action") == action]

        until(lambda: bool(found()) or self.process.poll() is not None, action, START_S)
        assert found(), self._log.read_text(encoding="utf-8")
        return found()[0]

    def ask(self, path: str) -> tuple[int, str]:
        """Status and text of one of the two checks."""
        url = next(line["metrics"] for line in self.events if "metrics" in line)
        try:
            with urllib.request.urlopen(f"{url}{path}", timeout=10) as response:
                return response.status, response.read().decode().strip()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode().strip()

    def awaits(self, server: str) -> None:
        until(lambda: self.ask("/readyz") == (503, f"waiting for {server}"), f"it waits for {server}")
        assert self.ask("/healthz") == (200, "ok")

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Any]:
    """Starts processes; none outlives the test."""
    with ExitStack() as stack:

        def start(module: str, servers: Mapping[str, str], **settings: str) -> Process:
            process = Process(module, tmp_path, servers, **settings)
            stack.callback(process.process.wait)
            stack.callback(process.process.kill)
            return process

        yield start


@pytest.fixture
def ports() -> Iterator[tuple[int, int]]:
    """Two ports that nobody else is given: a socket that does not listen keeps each, and a server may share it."""
    with socket.socket() as one, socket.socket() as other:
        for keeping in (one, other):
            keeping.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            keeping.bind(("127.0.0.1", 0))
        yield one.getsockname()[1], other.getsockname()[1]


@pytest.fixture
def nowhere(ports: tuple[int, int]) -> dict[str, str]:
    """Addresses at which nothing listens."""
    kafka, postgres = ports
    return {
        "KAFKA_BOOTSTRAP_SERVERS": f"127.0.0.1:{kafka}",
        "DATABASE_URL": f"postgresql://somebody:{PASSWORD}@127.0.0.1:{postgres}/alphaloop",
    }


@pytest.mark.kafka
@pytest.mark.model
@pytest.mark.timeout(500)
def test_both_processes_wait_for_both_servers_and_then_serve(
    processes: Any, kafka_home: Path, tiny_models: dict[str, Path], ports: tuple[int, int], tmp_path: Path
) -> None:
    kafka_port, postgres_port = ports
    postgres = EmbeddedPostgres(tmp_path / "postgres", port=postgres_port, durable=False)
    kafka = EmbeddedKafka(kafka_home, tmp_path / "kafka", port=kafka_port)
    url = postgres.start()
    upgrade(SecretStr(url))
    # With the rights of their roles, as the Compose stack runs them.
    logins = {module: as_member(url, SecretStr(url), f"alphaloop_{module}") for module in ("worker", "scheduler")}
    postgres.stop()
    servers = {"KAFKA_BOOTSTRAP_SERVERS": f"127.0.0.1:{kafka_port}"}
    quick = {
        "ALPHALOOP_MODELS__TARGET__SOURCE": str(tiny_models["llama"]),
        "ALPHALOOP_MODELS__TARGET__DTYPE": "float32",
        "ALPHALOOP_WORKER__CALIBRATION_SAMPLES": "1",
        "ALPHALOOP_WORKER__CALIBRATION_BUDGET_S": "0",
    }
    worker = processes("worker", servers | {"DATABASE_URL": logins["worker"].get_secret_value()}, **quick)
    scheduler = processes("scheduler", servers | {"DATABASE_URL": logins["scheduler"].get_secret_value()})
    try:
        for process in (worker, scheduler):
            process.event("server_awaited")
            process.awaits(f"PostgreSQL at 127.0.0.1:{postgres_port}/alphaloop")
        postgres.start()
        for process in (worker, scheduler):
            process.awaits(f"Kafka at 127.0.0.1:{kafka_port}")
        kafka.start()
        scheduler.event("leader_elected")
        worker.event("worker_ready")
        kafka_settings = {"bootstrap_servers": servers["KAFKA_BOOTSTRAP_SERVERS"], "retry_delays_s": ()}
        settings = load_settings(tmp_path, overrides={"kafka": kafka_settings})
        client = Client(settings)
        client.send("code", [b'{"job_id": "first", "prompt": "Hello", "max_tokens": 2}'])
        (record,) = client.read([RESULTS], lambda records: bool(records))
        assert Result.decode(record.value or b"").job_id == "first"
        assert (worker.stop(), scheduler.stop()) == (0, 0)
    finally:
        for process in (worker, scheduler):
            process.process.kill()
            process.process.wait(60)
        kafka.stop()
        postgres.stop()
    for process in (worker, scheduler):
        lines = [line["message"] for line in process.events if line.get("action") == "server_awaited"]
        assert len(lines) == 2, "one line a server"


@pytest.mark.parametrize("module", ["worker", "scheduler"])
def test_a_process_that_waits_ends_cleanly_when_asked(
    processes: Any, nowhere: dict[str, str], module: str, tmp_path: Path
) -> None:
    process = processes(module, nowhere)
    process.event("server_awaited")
    assert process.stop() == 0
    assert process.events[-1]["action"] == f"{module}_stopped"
    assert PASSWORD not in (tmp_path / f"{module}.log").read_text(encoding="utf-8")


def test_the_wait_has_its_limit(processes: Any, nowhere: dict[str, str]) -> None:
    process = processes("scheduler", nowhere, ALPHALOOP_STARTUP__SERVER_WAIT_S="0")
    assert process.process.wait(60) == 1
    assert "did not answer within startup.server_wait_s" in process.events[-1]["message"]
    assert process.events[-1]["code"] == "store_unavailable"


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        (lambda url: url.replace("alphaloop:", "alphaloop:x", 1), "store_login_refused"),
        (lambda url: url, "schema_mismatch"),
    ],
    ids=["password", "schema"],
)
def test_what_waiting_does_not_mend_ends_the_start_at_once(
    processes: Any, nowhere: dict[str, str], empty_database_url: SecretStr, wrong: Any, code: str
) -> None:
    servers = nowhere | {"DATABASE_URL": wrong(empty_database_url.get_secret_value())}
    process = processes("scheduler", servers)
    assert process.process.wait(60) == 1
    assert process.events[-1]["code"] == code
    assert not [line for line in process.events if line.get("action") == "server_awaited"]
