"""A worker and a scheduler that start before their servers: they wait, say for what, and serve once both answer."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr
from sqlalchemy import make_url

from alphaloop.kafka.topics import RESULTS
from alphaloop.messages import Result
from alphaloop.settings import KafkaSettings, load_settings
from alphaloop.store.database import Database
from alphaloop.store.decision_inputs import DraftRegistry
from tests.chaos.proxy import Proxy
from tests.fixtures.postgres import as_member
from tests.fixtures.worker import Client

pytestmark = [pytest.mark.postgres, pytest.mark.slow]

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
    processes: Any,
    kafka_broker: str,
    clean_kafka: KafkaSettings,
    postgres_server: str,
    database_url: SecretStr,
    tiny_models: dict[str, Path],
    ports: tuple[int, int],
    tmp_path: Path,
) -> None:
    """Nothing listens at the servers' addresses until a proxy does."""
    kafka_port, postgres_port = ports
    servers = {"KAFKA_BOOTSTRAP_SERVERS": f"127.0.0.1:{kafka_port}"}
    quick = {
        "ALPHALOOP_MODELS__TARGET__SOURCE": str(tiny_models["llama"]),
        "ALPHALOOP_MODELS__TARGET__DTYPE": "float32",
        "ALPHALOOP_MODELS__DRAFTERS": json.dumps({name: {"method": "lookup"} for name in ("mine", "removed")}),
        "ALPHALOOP_WORKER__CALIBRATION_BUDGET_S": "0",
    }
    with Database(database_url) as database:
        DraftRegistry(database).register("removed", "1", "target-1")
        DraftRegistry(database).set_retired("removed", True)

    def start(module: str, **settings: str) -> Any:
        # With the rights of its role, as the Compose stack runs it.
        login = as_member(postgres_server, database_url, f"alphaloop_{module}").get_secret_value()
        there = make_url(login).set(port=postgres_port).render_as_string(hide_password=False)
        return processes(module, servers | {"DATABASE_URL": there}, **settings)

    url = make_url(database_url.get_secret_value())
    assert url.port is not None
    both = start("worker", **quick), start("scheduler")
    with ExitStack() as proxies:
        for process in both:
            process.event("server_awaited")
            process.awaits(f"PostgreSQL at 127.0.0.1:{postgres_port}/{url.database}")
        proxies.enter_context(closing(Proxy(url.port, port=postgres_port)))
        for process in both:
            process.awaits(f"Kafka at 127.0.0.1:{kafka_port}")
        proxies.enter_context(closing(Proxy(int(kafka_broker.rpartition(":")[2]), port=kafka_port)))
        both[1].event("leader_elected")
        both[0].event("worker_ready")
        kafka = {"bootstrap_servers": kafka_broker, "retry_delays_s": ()}
        client = Client(load_settings(tmp_path, overrides={"kafka": kafka}))
        client.send("code", [b'{"job_id": "first", "prompt": "Hello", "max_tokens": 2}'])
        (record,) = client.read([RESULTS], lambda records: bool(records))
        assert Result.decode(record.value or b"").job_id == "first"
        assert [process.stop() for process in both] == [0, 0]
    for process in both:
        lines = [line["message"] for line in process.events if line.get("action") == "server_awaited"]
        assert len(lines) == 2, "one line a server"
    told = [line["message"] for line in both[0].events if line.get("action") == "start_progress"]
    assert [line for line in told if "drafter" in line] == ["loading the drafter mine, 1 of 1"], "one is retired"
    assert "loading the target" in told[0]
    assert told[2].startswith("measuring the target, 1 of ")


def test_a_process_that_waits_ends_cleanly_when_asked(processes: Any, nowhere: dict[str, str], tmp_path: Path) -> None:
    for module, process in {module: processes(module, nowhere) for module in ("worker", "scheduler")}.items():
        process.event("server_awaited")
        assert process.stop() == 0
        assert process.events[-1]["action"] == f"{module}_stopped"
        assert PASSWORD not in (tmp_path / f"{module}.log").read_text(encoding="utf-8")


def test_the_wait_has_its_limit(here: Any, nowhere: dict[str, str]) -> None:
    code, told = here("scheduler", nowhere, ALPHALOOP_STARTUP__SERVER_WAIT_S="0")
    assert (code, told[-1]["code"]) == (1, "store_unavailable")
    assert "did not answer within startup.server_wait_s" in told[-1]["message"]


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        pytest.param(lambda url: url.replace("alphaloop:", "alphaloop:x", 1), "store_login_refused", id="password"),
        pytest.param(lambda url: f"{url.rsplit('/', 1)[0]}/no_such_database", "store_login_refused", id="database"),
        pytest.param(lambda url: f"{url}?sslmode=require", "store_login_refused", id="tls"),
        pytest.param(lambda url: url, "schema_mismatch", id="schema"),
    ],
)
def test_what_waiting_does_not_mend_ends_the_start_at_once(
    here: Any, nowhere: dict[str, str], empty_database_url: SecretStr, wrong: Callable[[str], str], reason: str
) -> None:
    code, told = here("scheduler", nowhere | {"DATABASE_URL": wrong(empty_database_url.get_secret_value())})
    assert (code, told[-1]["code"]) == (1, reason)
    assert not [line for line in told if line.get("action") == "server_awaited"]
