"""A worker with a vLLM of its own, as its users have it: jobs through Kafka, kill -9 of either, and no process left."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from safetensors.torch import save_file
from sqlalchemy import text

from alphaloop.kafka.topics import RESULTS
from alphaloop.messages import Body, Job, encode_job
from alphaloop.settings import Settings
from alphaloop.store.database import Database
from benchmarks.engines.serve import ENVIRONMENT
from tests.fixtures.drift import record_probes
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


LOOKUP: Final = {"lookup": {"max_draft_tokens": 4}}


def environment_of(
    settings: Settings,
    source: str,
    drafters: Mapping[str, Mapping[str, object]] = LOOKUP,
    adapters: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Of a worker that starts a vLLM over `source`. `adapters`: name and folder."""
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
        "VLLM__LORA_MODULES": json.dumps(adapters or {}),
    }
    return {
        **ENVIRONMENT,
        **{f"ALPHALOOP_MODELS__TARGET__{name}": value for name, value in target.items()},
        "ALPHALOOP_MODELS__DRAFTERS": json.dumps(drafters),
        "ALPHALOOP_KAFKA__GROUP_ID": settings.kafka.group_id,
        "ALPHALOOP_KAFKA__SESSION_TIMEOUT_MS": str(settings.kafka.session_timeout_ms),
        "ALPHALOOP_WORKER__CALIBRATION_BUDGET_S": "0",
        "ALPHALOOP_WORKER__LEASE_S": "5",
    }


def random_adapter(folder: Path, *, hidden: int, num_layers: int) -> Path:
    """An adapter that changes what each layer's attention asks for, in the files that vLLM loads."""
    folder.mkdir()
    rank = 8
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": ["q_proj"],
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)
    name = "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.weight"
    shapes = {"A": (rank, hidden), "B": (hidden, rank)}
    weights = {
        name.format(layer, part): torch.randn(shape, generator=generator) * 0.1
        for layer in range(num_layers)
        for part, shape in shapes.items()
    }
    save_file(weights, folder / "adapter_model.safetensors")
    return folder


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


def servers_of(settings: Settings) -> dict[str, str]:
    """Where the processes find Kafka and PostgreSQL."""
    assert settings.postgres.url is not None
    return {
        "KAFKA_BOOTSTRAP_SERVERS": settings.kafka.bootstrap_servers or "",
        "DATABASE_URL": settings.postgres.url.get_secret_value(),
    }


def test_nothing_is_lost_or_done_twice_and_no_process_is_left_when_either_is_killed(
    worker_settings: Settings, processes: Any, database: Database, tmp_path: Path, source: str
) -> None:
    servers = servers_of(worker_settings)
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


def test_one_vllm_has_two_drafters_and_an_adapter_by_job(
    worker_settings: Settings, processes: Any, database: Database, tmp_path: Path, source: str
) -> None:
    adapter = random_adapter(tmp_path / "adapter", hidden=576, num_layers=30)
    drafters = {**LOOKUP, "small": {"method": "draft_model", "source": source, "max_draft_tokens": 2}}
    environment = environment_of(worker_settings, source, drafters, {"noisy": str(adapter)})
    worker = processes("worker", servers_of(worker_settings), **environment)
    client = Client(worker_settings)

    def message(name: str, prompt: str, model: str | None, **fields: object) -> tuple[str, bytes]:
        body = {"prompt": prompt, "max_tokens": 48, "ignore_eos": True, "temperature": 0.0}
        return "code", json.dumps({"job_id": name, **fields, "body": {**body, "model": model}}).encode()

    ways: dict[str, dict[str, object]] = {
        "vanilla": {"decoding": "vanilla"},
        "lookup": {"purpose": "probe", "probe_drafter": "lookup", "probe_num_draft_tokens": 4},
        "small": {"purpose": "probe", "probe_drafter": "small", "probe_num_draft_tokens": 2},
    }
    models = ("smollm2", "noisy")
    messages = [
        message(f"{model}-{way}-{number}", prompt, model, **fields)
        for model in models
        for way, fields in ways.items()
        for number, prompt in enumerate(PROMPTS)
    ]
    worker.event("worker_ready")
    record_probes(database, messages)
    client.send("code", [value for _, value in messages])
    results = by_id(client.read([RESULTS], lambda records: len(by_id(records)) == len(messages)))
    texts = {
        model: {way: [results[f"{model}-{way}-{number}"].text for number in range(len(PROMPTS))] for way in ways}
        for model in models
    }
    for model in models:
        assert texts[model]["lookup"] == texts[model]["small"] == texts[model]["vanilla"]
    assert texts["noisy"]["vanilla"] != texts["smollm2"]["vanilla"]
    runs = text("SELECT job_id, drafter, num_draft_tokens, proposed, trials, accepts, target_revision FROM decode_runs")
    revisions: dict[str, set[str]] = {model: set() for model in models}
    num_proposed: Counter[str] = Counter()
    for job_id, drafter, k, proposed, trials, accepts, revision in database.rows(runs):
        model, way, _ = job_id.split("-")
        revisions[model].add(revision)
        num_proposed[way] += sum(proposed)
        assert (drafter or "vanilla", k) == (way, {"vanilla": 0, "lookup": 4, "small": 2}[way])
        assert len(proposed) <= k
        if (model, way) == ("smollm2", "small"):
            assert list(accepts) == list(trials), "the target is its own draft"
    assert {way for way in ways if num_proposed[way]} == {"lookup", "small"}
    assert [len(revisions[model]) for model in models] == [1, 1]
    assert revisions["smollm2"] != revisions["noisy"]
