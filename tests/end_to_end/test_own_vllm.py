"""A worker with a vLLM of its own, as its users have it: jobs through Kafka, kill -9 of either, and no process left."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import pytest
from sqlalchemy import text

from alphaloop.kafka.topics import RESULTS
from alphaloop.messages import Body, Job, encode_job
from alphaloop.settings import Settings
from alphaloop.store.database import Database
from benchmarks.engines.serve import ENVIRONMENT
from tests.fixtures.worker import Client, by_id, until

pytestmark = [
    pytest.mark.kafka,
    pytest.mark.postgres,
    pytest.mark.model,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="follows processes in /proc"),
]

PYTHON: Final = Path(__file__).resolve().parents[2] / ".venv-vllm" / "bin" / "python"
LOADED_S: Final = 240.0  #: for a start of vLLM and the jobs that wait for it
PROMPTS: Final = ("one two three one two three one two", "The capital of France is", "def add(a, b):\n    return")


@pytest.fixture(scope="module")
def source(smollm2_source: str) -> str:
    """SmolLM2's weights in a form that vLLM loads."""
    from engine.device import find_device
    from engine.models import load_weights

    if not PYTHON.exists():
        pytest.skip("no environment with vLLM: make .venv-vllm/.installed")
    return str(load_weights(smollm2_source, None, "float32", find_device("cpu")).folder)


def environment_of(settings: Settings, source: str) -> dict[str, str]:
    """Of a worker that starts a vLLM over `source`."""
    target = {
        "ENGINE": "vllm",
        "NAME": "smollm2",
        "SOURCE": source,
        "DTYPE": "float32",
        "CONTEXT_LENGTH": "512",
        "VLLM__PYTHON": str(PYTHON),
        "VLLM__MAX_NUM_SEQS": "4",
        "VLLM__GPU_MEMORY_UTILIZATION": "0.3",
        "VLLM__EXTRA_ARGS": json.dumps(["--enforce-eager"]),
    }
    return {
        **ENVIRONMENT,
        **{f"ALPHALOOP_MODELS__TARGET__{name}": value for name, value in target.items()},
        "ALPHALOOP_MODELS__DRAFTERS": '{"lookup": {"max_draft_tokens": 4}}',
        "ALPHALOOP_KAFKA__GROUP_ID": settings.kafka.group_id,
        "ALPHALOOP_KAFKA__SESSION_TIMEOUT_MS": str(settings.kafka.session_timeout_ms),
        "ALPHALOOP_WORKER__CALIBRATION_BUDGET_S": "0",
        "ALPHALOOP_WORKER__LEASE_S": "5",
    }


def family(of: int) -> dict[int, str]:
    """The processes below one, with their names."""
    children: dict[int, dict[int, str]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            head, _, rest = stat.read_text().rpartition(")")
        except OSError:
            continue
        pid, _, name = head.partition(" (")
        children.setdefault(int(rest.split()[1]), {})[int(pid)] = name
    below: dict[int, str] = {}
    todo = [of]
    while todo:
        found = children.get(todo.pop(), {})
        below |= found
        todo += found
    return below


def has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def test_nothing_is_lost_or_done_twice_and_no_process_is_left_when_either_is_killed(
    worker_settings: Settings, processes: Any, database: Database, tmp_path: Path, source: str
) -> None:
    assert worker_settings.postgres.url is not None
    servers = {
        "KAFKA_BOOTSTRAP_SERVERS": worker_settings.kafka.bootstrap_servers or "",
        "DATABASE_URL": worker_settings.postgres.url.get_secret_value(),
    }
    environment = environment_of(worker_settings, source)
    (tmp_path / "again").mkdir()
    client, num_sent = Client(worker_settings), 0

    def send(name: str, num: int, decoding: str) -> None:
        nonlocal num_sent
        bodies = [{"prompt": PROMPTS[n % len(PROMPTS)], "max_tokens": 48, "ignore_eos": True} for n in range(num)]
        jobs = [
            Job(job_id=f"{name}-{n}", task="code", decoding=decoding, body=Body.model_validate(body))
            for n, body in enumerate(bodies)
        ]
        client.send("code", [encode_job(job) for job in jobs])
        num_sent += num

    def all_results() -> dict[str, Any]:
        ended = text("SELECT count(*) FROM jobs WHERE status IN ('succeeded', 'failed')")
        until(lambda: bool(database.scalar(ended) >= num_sent), "all have ended", LOADED_S)
        return by_id(client.read([RESULTS], lambda records: len(by_id(records)) >= num_sent))

    def running() -> bool:
        return bool(database.scalar(text("SELECT count(*) FROM jobs WHERE status = 'running'")) > 1)

    def have_ended(pids: Iterable[int]) -> None:
        pids = list(pids)
        until(lambda: all(map(has_ended, pids)), "these processes of vLLM have ended")

    worker = processes("worker", servers, **environment)
    worker.event("worker_ready")
    send("vanilla", 3, "vanilla")
    send("drafted", 3, "speculative")
    results = all_results()
    texts = {name: [results[f"{name}-{n}"].text for n in range(3)] for name in ("vanilla", "drafted")}
    assert texts["vanilla"] == texts["drafted"]
    runs = database.rows(text("SELECT job_id, num_draft_tokens, proposed FROM decode_runs"))
    assert {job_id: k > 0 for job_id, k, _ in runs} == {
        f"{name}-{n}": name == "drafted" for name in texts for n in range(3)
    }
    assert all(not k or len(proposed) <= k for _, k, proposed in runs), runs
    assert (
        sum(sum(proposed) for _, k, proposed in runs if k) > 0 == sum(sum(proposed) for _, k, proposed in runs if not k)
    ), runs

    # The server, and the process that watches it.
    for name, is_killed in (
        ("server", lambda command: "guard.py" not in command),
        ("guard", lambda command: "guard.py" in command),
    ):
        below = family(worker.process.pid)
        assert "VLLM::EngineCor" in below.values()
        send(name, 8, "auto")
        until(running, "it decodes")
        commands = {pid: Path(f"/proc/{pid}/cmdline").read_text() for pid in below}
        (killed,) = (pid for pid, command in commands.items() if "api_server" in command and is_killed(command))
        os.kill(killed, signal.SIGKILL)
        assert len(all_results()) == num_sent
        have_ended(pid for pid, name in below.items() if name.startswith("VLLM"))

    # The worker with all that is between it and the engine.
    below = family(worker.process.pid)
    send("worker", 8, "auto")
    until(running, "it decodes")
    for pid in (worker.process.pid, *(pid for pid, name in below.items() if not name.startswith("VLLM"))):
        os.kill(pid, signal.SIGKILL)
    worker.process.wait(30)
    have_ended(below)
    processes("worker", servers, "again", **environment)
    results = all_results()
    assert len(results) == num_sent
    assert Counter(result.status for result in results.values()) == {"succeeded": num_sent}
    num_runs = database.rows(text("SELECT job_id, count(*) FROM decode_runs GROUP BY job_id"))
    assert {num for _, num in num_runs} == {1}
