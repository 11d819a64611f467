"""A real inference server as a child process: what is started, on which cores, and when it is ready."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from alphaloop.embedded.process import ChildProcess
from alphaloop.server_identity import ServerKind
from benchmarks.contestants.process import REPOSITORY
from benchmarks.cores import on_cores

#: Threads that wait without spinning: two spinning ones took fifty times as long beside other work. vLLM's n-grams let
#: numba set OpenMP's threads back after each round, so the model would compute with as many threads as numba has.
ENVIRONMENT: Final = {
    "OMP_NUM_THREADS": "1",
    "NUMBA_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
}
#: The model runs in the process of the scheduler, as in vLLM's offline engine. vLLM's CPU platform would replace "uni"
#: by two processes, which poll for each other all the time and for a second behind the last request.
EXECUTOR: Final = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
HOST: Final = "127.0.0.1"
MODEL_NAME: Final = "model"  #: under which every server here serves its model
_START_TIMEOUT_S: Final = 900.0
_GRACE_S: Final = 20.0
_ASK_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Server:
    """One server to start."""

    name: str
    kind: ServerKind
    command: tuple[str, ...]
    port: int
    max_requests: int  #: that it decodes at once
    drafter: str | None = None
    num_draft_tokens: int = 0
    environment: Mapping[str, str] = field(default_factory=lambda: ENVIRONMENT)

    @property
    def url(self) -> str:
        """As OpenAI's clients take it."""
        return f"http://{HOST}:{self.port}/v1"

    def settings(self, *, ahead: int = 0, more: Mapping[str, str] | None = None) -> dict[str, str]:
        """The worker's settings of this endpoint, as environment. `ahead`: requests that may wait in its queue."""
        given: dict[str, Any] = {"kind": self.kind, "url": self.url, "max_requests": self.max_requests + ahead}
        given |= more or {}
        if self.drafter is not None:
            given |= {"drafter": self.drafter, "num_draft_tokens": self.num_draft_tokens}
        place = f"ALPHALOOP_MODELS__ENDPOINTS__{self.name.upper()}"
        return {f"{place}__{key.upper()}": str(value) for key, value in given.items()}


def with_threads(num_threads: int) -> dict[str, str]:
    """The environment of a server that computes with so many threads."""
    return {**ENVIRONMENT, "OMP_NUM_THREADS": str(num_threads), "NUMBA_NUM_THREADS": str(num_threads)}


def vllm(
    name: str,
    python: str,
    model: str,
    port: int,
    *,
    speculative: Mapping[str, Any] | None = None,
    dtype: str = "bfloat16",
    max_requests: int = 8,
    max_model_len: int = 2048,
    num_threads: int = 1,
) -> Server:
    """vLLM's OpenAI server. `speculative` is its --speculative-config, `num_threads` those that compute.

    Prefixes are not cached, so that a prompt that is sent twice costs the same both times.
    """
    command = [
        *(python, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--served-model-name", MODEL_NAME),
        *("--host", HOST, "--port", str(port), "--dtype", dtype, "--max-model-len", str(max_model_len)),
        *("--max-num-seqs", str(max_requests), "--gpu-memory-utilization", "0.3", "--enforce-eager"),
        *("--no-enable-prefix-caching", "--enable-per-request-metrics", "--distributed-executor-backend", EXECUTOR),
    ]
    environment = with_threads(num_threads)
    if speculative is None:
        return Server(name, "vllm", tuple(command), port, max_requests, environment=environment)
    # vLLM refuses to start with these metrics where nothing drafts.
    command += ["--per-request-spec-decode-metrics", "detailed", "--speculative-config", json.dumps(speculative)]
    return Server(
        name,
        "vllm",
        tuple(command),
        port,
        max_requests,
        str(speculative["method"]),
        int(speculative["num_speculative_tokens"]),
        environment,
    )


def llama_cpp(name: str, python: str, gguf: str, port: int, *, drafts: bool, max_requests: int = 2) -> Server:
    """llama.cpp's server from the wheel xllamacpp; it drafts by looking texts up, three tokens a round."""
    script = REPOSITORY / "benchmarks" / "engines" / "llama_server.py"
    drafter, k = ("ngram", 3) if drafts else (None, 0)
    command = (python, str(script), gguf, HOST, str(port), str(max_requests), MODEL_NAME, str(k))
    return Server(name, "llama_cpp", command, port, max_requests, drafter, k)


@contextmanager
def running(servers: Sequence[Server], folder: Path, cores: Sequence[int] = ()) -> Iterator[list[ChildProcess]]:
    """The servers, ready for requests, until the block ends; their logs are FOLDER/NAME.log.

    `cores`: they and all that they start run there and nowhere else. Raises StartFailed where one does not come up.
    """
    processes = [
        ChildProcess(
            server.name,
            server.command,
            log=folder / f"{server.name}.log",
            env={**os.environ, **server.environment},
            grace_s=_GRACE_S,
        )
        for server in servers
    ]
    try:
        for process in processes:
            with on_cores(cores):
                process.start()
        for server, process in zip(servers, processes, strict=True):
            wait_until_ready(server, process)
        yield processes
    finally:
        for process in processes:
            process.stop()


def wait_until_ready(server: Server, process: ChildProcess) -> None:
    """Until it lists its models. Raises StartFailed where it ends first or takes a quarter of an hour."""
    process.wait_until(lambda: is_ready(server.url), _START_TIMEOUT_S)


def is_ready(url: str) -> bool:
    """Whether the server lists its models."""
    try:
        with urllib.request.urlopen(f"{url}/models", timeout=_ASK_S) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def read_json(url: str, body: Mapping[str, Any] | None = None, *, timeout_s: float = 60.0) -> Any:
    """GET, or POST with a body. Raises OSError where the server does not answer, or is silent for so long."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=timeout_s) as answer:
        return json.load(answer)
