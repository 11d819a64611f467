"""`python -m worker`: load, calibrate, consume until SIGTERM, drain, leave."""

from __future__ import annotations

import argparse
import logging
import os
import random
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Final

from alphaloop import logs
from alphaloop.embedded.stack import with_running_stack
from alphaloop.errors import AlphaloopError, ConfigError, EngineSick
from alphaloop.kafka.producer import Producer
from alphaloop.liveness import ExitCode, MetricsServer, Watchdog
from alphaloop.settings import ModelSettings, Settings, TasksFile, load_settings
from alphaloop.start_wait import StartStopped, StartWait, await_servers
from alphaloop.store.database import POOL_SIZE, Database
from alphaloop.store.decision_inputs import DraftRegistry
from alphaloop.store.workers import WorkerStore
from worker.assembly import assemble, open_engine
from worker.background import set_up_interpreter
from worker.foundation import lay_foundation
from worker.loop import Worker
from worker.metrics import WorkerMetrics

log = logging.getLogger("worker")

#: Beyond the longest step: what holds the interpreter for longer is ended by the C library.
_BACKSTOP_S: Final = 60.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run one worker; returns why it ended, one of alphaloop.liveness."""
    options = _options(argv)
    try:
        tasks_file = TasksFile(options.configs, options.profile)
        settings = with_running_stack(load_settings(options.configs, profile=options.profile))
        logs.configure(settings.logs.level, settings.logs.format)
        _serve(settings, tasks_file, random.Random(options.seed))
    except AlphaloopError as error:
        log.error("%s", error.message, extra={"action": "worker_failed", "code": error.code, "hint": error.hint or ""})
        return ExitCode.ENGINE_SICK if isinstance(error, EngineSick) else ExitCode.FAILED
    except StartStopped:
        log.info("stopped while it waited for a server", extra={"action": "worker_stopped"})
    return ExitCode.STOPPED


def _serve(settings: Settings, tasks_file: TasksFile, rng: random.Random) -> None:
    stop, hurry = threading.Event(), threading.Event()
    _on_signals(stop, hurry, settings.worker.drain_s)
    if settings.postgres.url is None:
        raise ConfigError("postgres.url: not set", hint="set DATABASE_URL, or start `alphaloop up`")
    with ExitStack() as exits:
        database = Database(settings.postgres.url, pool_size=POOL_SIZE, limits=settings.postgres.limits())
        exits.callback(database.close)
        start_wait = StartWait(stop, settings.startup.server_wait_s)
        health, metrics = ProcessHealth(start_wait), WorkerMetrics()
        endpoint = MetricsServer(
            settings.worker.http_host,
            settings.worker.http_port,
            metrics.registry,
            healthy=health.unhealthy,
            ready=health.unready,
            password=settings.worker.metrics_password,
        )
        exits.callback(endpoint.close)
        log.info("starting", extra={"action": "worker_starting", "metrics": endpoint.url})
        await_servers(settings, database, start_wait)
        producer = Producer(settings.kafka)
        exits.callback(producer.close)
        # Here, so that everything that can be checked without a model is checked before one is read.
        WorkerStore(database).check_target(settings.models.target.name, settings.default_model)
        retired = DraftRegistry(database).retired() & set(settings.models.drafters)
        if retired:
            log.warning("retired drafters are not opened: %s", ", ".join(sorted(retired)))
        configured = settings.models
        settings = settings.model_copy(update={"models": configured.without(retired)})
        models = settings.models
        if models.target.engine == "vllm":
            models = _start_vllm(settings, exits, start_wait)
        engine = start_wait.until_answered(
            "the inference servers",
            partial(
                open_engine,
                models,
                num_slots=settings.worker.batch_size,
                database=database,
                control_share=settings.policy.control_share,
            ),
        )
        exits.callback(engine.close)
        # Loading takes long enough for a server to go away meanwhile.
        await_servers(settings, database, start_wait)
        base = lay_foundation(settings, engine, database, stop=stop, hurry=hurry, rng=rng, metrics=metrics)
        _consume(assemble(base, tasks_file, producer, configured), health, metrics_url=endpoint.url)


def _start_vllm(settings: Settings, exits: ExitStack, start_wait: StartWait) -> ModelSettings:
    """Start the worker's own vLLM, which ends with `exits`, and wait until it has loaded."""
    from worker.servers.vllm_process import VllmProcess

    process = VllmProcess(settings)
    exits.callback(process.stop)
    process.start()
    return start_wait.until_answered("vLLM", process.endpoints)


@dataclass(eq=False)
class ProcessHealth:
    """What /healthz and /readyz say: of the start of the process first, of its worker from then on."""

    start_wait: StartWait
    worker: Worker | None = None  #: once it consumes

    def unhealthy(self) -> str | None:
        """Why this process should be replaced. While it waits for a server it is well: a new one would wait too."""
        return None if self.worker is None else self.worker.threads.unhealthy()

    def unready(self) -> str | None:
        """Why this process takes no jobs: which server it waits for, or what its worker says."""
        return self.worker.unready() if self.worker is not None else self.start_wait.reason or "starting"


def _consume(worker: Worker, health: ProcessHealth, *, metrics_url: str) -> None:
    """Run the worker until it ends; whatever it was assembled from is closed then."""
    health.worker = worker
    threads, owner, limits = worker.threads, worker.base.owner, worker.base.settings.worker
    worker.metrics.watch(worker.intake, lambda: worker.num_waiting)
    worker.metrics.watch_pulses(threads.liveness.pulses)
    watchdog = Watchdog(
        threads.liveness, last_orders=worker.give_back_unstarted, backstop_s=limits.max_step_s + _BACKSTOP_S
    )
    set_up_interpreter()
    try:
        worker.presence.enter(num_slots=worker.engine.load().num_slots)
        log.info("consuming", extra={"action": "worker_ready", "owner": owner, "metrics": metrics_url})
        watchdog.start()
        threads.loop_pulse.around(worker.run)()
    finally:
        watchdog.close()
        worker.close(limits.drain_s)
    log.info("drained", extra={"action": "worker_stopped", "owner": owner})


def _on_signals(stop: threading.Event, hurry: threading.Event, drain_s: float) -> None:
    """First SIGTERM or SIGINT: finish running jobs within `drain_s`. The second: give them back at once."""

    def handle(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            hurry.set()
            return
        stop.set()
        timer = threading.Timer(drain_s, hurry.set)
        timer.daemon = True
        timer.start()

    signal.signal(signal.SIGTERM, handle)
    signal.signal(signal.SIGINT, handle)


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m worker", description=__doc__, epilog="example: python -m worker --profile local"
    )
    configs = os.environ.get("ALPHALOOP_CONFIGS") or None  # argparse gives a default that is text to Path, too
    parser.add_argument("--configs", type=Path, default=configs, help="folder of TOML files")
    parser.add_argument(
        "--profile", default=os.environ.get("ALPHALOOP_PROFILE"), help="one more file of it, laid over the others"
    )
    parser.add_argument("--seed", type=int, default=None, help="seed of exploration; random if not given")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
