"""A vLLM that belongs to this worker: the command line, its start, its restarts, its end.

    models.target, models.drafters → command_of → a child process → one endpoint, as if it were named in the settings

Everything else is as with servers of others: the fleet tests it when it fails, and sends nothing until it is well.
A guard between the two ends the child with the worker, also after a kill -9 (alphaloop/embedded/guard.py).
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import shutil
import signal
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any, Final

from pydantic import SecretStr

import alphaloop
from alphaloop.embedded.process import ChildProcess, free_ports, log_tail
from alphaloop.errors import ConfigError, ServerUnavailable, StartFailed
from alphaloop.files import FolderLock
from alphaloop.inside_vllm import ASYNC_SCHEDULER, RESTING_WORKER, SCHEDULER
from alphaloop.inside_vllm.drafting import KEY
from alphaloop.settings import Settings
from alphaloop.settings.endpoints import EndpointSettings
from alphaloop.settings.load import ENV_PREFIX, PLAIN_ENV
from alphaloop.settings.models import STARTED, ModelSettings
from alphaloop.settings.vllm import VllmDrafter

log = logging.getLogger(__name__)

_HOST: Final = "127.0.0.1"
#: Workers of one machine that have the same data folder each start a vLLM of their own.
_MOST_WORKERS: Final = 64
_ASK_S: Final = 5.0
_LOOK_S: Final = 0.5  #: between two looks whether it runs
_FIRST_PAUSE_S: Final = 1.0  #: before the first restart; twice as long before each further one
_LONGEST_PAUSE_S: Final = 30.0
_WELL_AFTER_S: Final = 300.0  #: a server that ran so long is restarted at once
_GRACE_S: Final = 30.0  #: for its running requests, once it is asked to end


def command_of(models: ModelSettings, port: int, *, remember_tasks: Iterable[str] = ()) -> list[str]:
    """The arguments of its Python. `remember_tasks`: tasks whose results look-up may search for all requests.

    `vllm serve` is the same program; some builds have only this way in.
    """
    target, vllm = models.target, models.target.vllm
    options: dict[str, object] = {
        "model": target.source,
        "revision": target.revision,
        "served-model-name": target.name,
        "host": _HOST,
        "port": port,
        "dtype": target.dtype,
        "max-model-len": target.context_length,
        "max-num-seqs": vllm.max_num_seqs,
        "tensor-parallel-size": vllm.tensor_parallel_size,
        "gpu-memory-utilization": vllm.gpu_memory_utilization,
        "quantization": vllm.quantization,
        "limit-mm-per-prompt": json.dumps(vllm.limit_mm_per_prompt) if vllm.limit_mm_per_prompt else None,
    }
    # No prompt stands in its log, nor a line for each of the worker's questions.
    flags = ["--enable-per-request-metrics", "--no-enable-log-requests", "--disable-uvicorn-access-log"]
    if (drafting := models.drafting_in_vllm) is not None:
        options |= _drafting(drafting, remember_tasks)
        options["per-request-spec-decode-metrics"] = "detailed"
        if drafting.lookup is not None:
            flags.append("--no-async-scheduling")
    if vllm.lora_modules:
        flags += ["--enable-lora", "--lora-modules", *(f"{name}={path}" for name, path in vllm.lora_modules.items())]
    given = [part for name, value in options.items() if value is not None for part in (f"--{name}", str(value))]
    return ["-m", "vllm.entrypoints.openai.api_server", *given, *flags, *vllm.extra_args]


def _drafting(drafter: VllmDrafter, remember_tasks: Iterable[str]) -> dict[str, object]:
    options: dict[str, object] = {"speculative-config": json.dumps(drafter.speculative_config)}
    options["scheduler-cls"] = SCHEDULER if drafter.lookup is not None else ASYNC_SCHEDULER
    if drafter.has_cache:
        options["worker-cls"] = RESTING_WORKER
    if drafter.lookup is not None:
        tasks = {"remember_tasks": sorted(remember_tasks)} if drafter.searches_memory else {}
        options["additional-config"] = json.dumps({KEY: {**drafter.lookup, **tasks}})
    return options


class VllmProcess:
    """The child process. One thread calls `start`, `endpoints` and `stop`; another restarts it in between."""

    def __init__(self, settings: Settings) -> None:
        """Raises ConfigError where its Python is no program, StartFailed where its folder cannot be written."""
        self._models = settings.models
        python = _program(settings.models.target.vllm.python)
        self._folder, self._lock = _own_folder(settings.data_dir.expanduser().absolute() / "vllm")
        (self._port,) = free_ports(1)
        self._key = secrets.token_urlsafe(32)
        shared = [name for name, task in settings.tasks.items() if task.memory == "shared"]
        self._process = ChildProcess(
            "vLLM",
            [python, *command_of(settings.models, self._port, remember_tasks=shared)],
            log=self._folder / "vllm.log",
            env=self._environment(os.environ, Path(python).parent),
            stop_signal=signal.SIGTERM,
            # Asked to end, vLLM waits for its connections, also for requests that its dead engine will never answer.
            # With our scheduler class its engine ends when it is killed; without, it would go on.
            orphan_signal=signal.SIGKILL if settings.models.drafters else None,
            grace_s=_GRACE_S,
            lock=self._lock,
        )
        self._process.log.unlink(missing_ok=True)  # a restart adds to it
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="vllm", daemon=True)
        self._num_deaths = 0
        self._started_at = time.monotonic()

    def _environment(self, inherited: Mapping[str, str], programs: Path) -> dict[str, str]:
        # alphaloop alone, and not the environment that it is installed in: vLLM has other versions of everything.
        reachable = self._folder / "import"
        reachable.mkdir(exist_ok=True)
        link = reachable / "alphaloop"
        link.unlink(missing_ok=True)
        link.symlink_to(Path(alphaloop.__file__).parent)
        kept = {name: value for name, value in inherited.items() if not _is_private(name)}
        environment = {
            **kept,
            "PATH": f"{programs}{os.pathsep}{kept.get('PATH', os.defpath)}",  # it compiles with its own tools
            "PYTHONPATH": str(reachable),
            "VLLM_API_KEY": self._key,
            "VLLM_NO_USAGE_STATS": "1",
        }
        drafting = self._models.drafting_in_vllm
        if drafting is not None and drafting.lookup is not None:
            environment["VLLM_USE_V2_MODEL_RUNNER"] = "0"
        return environment

    def start(self) -> None:
        """Start it, without waiting until it answers. Raises StartFailed where its Python cannot be run."""
        log.info("starting vLLM", extra={"action": "vllm_starting", "log": str(self._process.log)})
        self._started_at = time.monotonic()
        try:
            self._process.start()
        except StartFailed as error:
            hint = "models.target.vllm.python: name the Python of an environment in which vLLM is installed"
            raise StartFailed(error.message, hint=hint) from None

    def endpoints(self) -> ModelSettings:
        """The models, with the endpoint at which it answers. From now on it is restarted when it ends by itself.

        Raises ServerUnavailable while it loads, with the last line of its log, and StartFailed where it has ended.
        """
        if (code := self._process.ended_with()) is not None:
            raise self._failed(code)
        if not self._answers():
            last = log_tail(self._process.log).rpartition("\n")[2].strip()
            raise ServerUnavailable(f"vLLM loads {self._models.target.source}: {last or 'nothing said yet'}")
        if not self._thread.is_alive():
            self._thread.start()
        endpoint = self._models.endpoints[STARTED]
        here: dict[str, Any] = {"url": f"http://{_HOST}:{self._port}/v1", "api_key": SecretStr(self._key)}
        endpoints: dict[str, EndpointSettings] = {STARTED: endpoint.model_copy(update=here)}
        return self._models.model_copy(update={"endpoints": endpoints})

    def stop(self) -> None:
        """End it. Safe to call twice."""
        self._ending.set()
        if self._thread.is_alive():
            self._thread.join()
        self._process.stop()
        self._lock.close()

    def _watch(self) -> None:
        """Start it again whenever it has ended by itself, after a pause that grows."""
        while not self._ending.wait(_LOOK_S):
            if (code := self._process.ended_with()) is None:
                continue
            if time.monotonic() - self._started_at > _WELL_AFTER_S:
                self._num_deaths = 0
            pause_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2**self._num_deaths)
            self._num_deaths += 1
            error = self._failed(code)
            extra = {"action": "vllm_ended", "hint": error.hint or "", "pause_s": pause_s}
            log.error("%s; it is started again in %g s", error.message, pause_s, extra=extra)
            if self._ending.wait(pause_s):
                return
            try:
                self.start()
            except StartFailed as failed:
                log.error("%s", failed.message, extra={"action": "vllm_ended", "hint": failed.hint or ""})

    def _failed(self, code: int) -> StartFailed:
        by_signal = code > 128 and code - 128 in {*signal.Signals}
        how = f"was ended by {signal.Signals(code - 128).name}" if by_signal else f"ended with code {code}"
        error = self._process.failed(f"with {self._models.target.source} {how}")
        if by_signal and code - 128 == signal.SIGKILL:
            error.hint = "memory may have run out: the log of the system says so; lower models.target.context_length"
        return error

    def _answers(self) -> bool:
        """Whether it lists its models."""
        connection = HTTPConnection(_HOST, self._port, timeout=_ASK_S)
        try:
            connection.request("GET", "/v1/models", headers={"Authorization": f"Bearer {self._key}"})
            return connection.getresponse().status == HTTPStatus.OK
        except (OSError, HTTPException):
            return False
        finally:
            connection.close()


def _program(named: str) -> str:
    """The path of a program, which PATH may know. Raises ConfigError."""
    if (path := shutil.which(Path(named).expanduser())) is None:
        raise ConfigError(
            f"models.target.vllm.python: expected a program, found {named!r}",
            hint="python3 -m venv FOLDER && FOLDER/bin/pip install vllm, then name FOLDER/bin/python",
        )
    return os.path.abspath(path)  # not resolved: a link is what makes it the Python of its environment


def _is_private(name: str) -> bool:
    """Whether a variable is alphaloop's own: passwords of Kafka and PostgreSQL are nothing to vLLM."""
    return name.startswith(ENV_PREFIX) or name in (*PLAIN_ENV, "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")


def _own_folder(parent: Path) -> tuple[Path, FolderLock]:
    """A folder that no other worker of this machine uses, and its lock. Raises StartFailed."""
    for number in range(_MOST_WORKERS - 1):
        with suppress(StartFailed):
            return _locked(parent / str(number))
    return _locked(parent / str(_MOST_WORKERS - 1))


def _locked(folder: Path) -> tuple[Path, FolderLock]:
    return folder, FolderLock(folder / "lock", what="the vLLM of another worker", wait_s=0.0)
