"""A worker and a scheduler that start before their servers: they wait, say for what, and serve once both answer."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
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
from tests.fixtures.processes import START_S
from tests.fixtures.worker import Client

pytestmark = [pytest.mark.postgres, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
PASSWORD = "planted-password"


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


def test_a_process_that_waits_ends_cleanly_when_asked(processes: Any, nowhere: dict[str, str], tmp_path: Path) -> None:
    for module, process in {module: processes(module, nowhere) for module in ("worker", "scheduler")}.items():
        process.event("server_awaited")
        assert process.stop() == 0
        assert process.events[-1]["action"] == f"{module}_stopped"
        assert PASSWORD not in (tmp_path / f"{module}.log").read_text(encoding="utf-8")


def test_the_wait_has_its_limit(processes: Any, nowhere: dict[str, str]) -> None:
    process = processes("scheduler", nowhere, ALPHALOOP_STARTUP__SERVER_WAIT_S="0")
    assert process.process.wait(60) == 1
    assert "did not answer within startup.server_wait_s" in process.events[-1]["message"]
    assert process.events[-1]["code"] == "store_unavailable"


#: What is wrong with the address of a database that answers, and the code with which the start ends.
WRONG_DATABASES: dict[str, tuple[Callable[[str], str], str]] = {
    "password": (lambda url: url.replace("alphaloop:", "alphaloop:x", 1), "store_login_refused"),
    "database": (lambda url: f"{url.rsplit('/', 1)[0]}/no_such_database", "store_login_refused"),
    "tls": (lambda url: f"{url}?sslmode=require", "store_login_refused"),
    "schema": (lambda url: url, "schema_mismatch"),
}


def test_what_waiting_does_not_mend_ends_the_start_at_once(
    processes: Any, nowhere: dict[str, str], empty_database_url: SecretStr
) -> None:
    url, started = empty_database_url.get_secret_value(), {}
    for name, (wrong, _) in WRONG_DATABASES.items():
        started[name] = processes("scheduler", nowhere | {"DATABASE_URL": wrong(url)}, folder=name)
    for name, process in started.items():
        assert process.process.wait(START_S) == 1, name
        assert process.events[-1]["code"] == WRONG_DATABASES[name][1], name
        assert not [line for line in process.events if line.get("action") == "server_awaited"], name
