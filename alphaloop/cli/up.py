"""`alphaloop up` and `alphaloop down`: start and stop everything on one machine."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Final

import typer

from alphaloop.cli.children import LogFollower, await_event, field_of, scheduler_process, worker_process
from alphaloop.cli.environment import command_for
from alphaloop.cli.options import DATA_DIR, GlobalOptions, global_options
from alphaloop.cli.screen import err, note, out
from alphaloop.cli.supervision import Supervised
from alphaloop.embedded.process import ChildProcess, is_locked
from alphaloop.embedded.stack import EmbeddedStack, StackServer, running_stack
from alphaloop.errors import BrokerError, StartFailed
from alphaloop.kafka.topics import ensure_topics
from alphaloop.settings import Settings
from alphaloop.store import schema
from alphaloop.store.database import parse_url, redacted

UP_EXAMPLE: Final = "alphaloop up --data-dir ./data"
DOWN_EXAMPLE: Final = "alphaloop down --data-dir ./data"

_WATCH_S: Final = 0.5


def up(
    context: typer.Context,
    worker: bool = typer.Option(True, help="Start a worker too."),
    scheduler: bool = typer.Option(True, help="Start the scheduler too."),
    data_dir: Path | None = DATA_DIR,
) -> None:
    """Start everything on this machine, and stay.

    Broker, database, worker and scheduler run until Ctrl-C or `alphaloop down`. Each of them that ends by itself is
    started again, up to five times in ten minutes.

    Uses the broker of KAFKA_BOOTSTRAP_SERVERS and the database of DATABASE_URL if set. The data is kept.
    """
    options = global_options(context, data_dir)
    options = replace(options, profile=options.profile or "local")
    stop = threading.Event()
    stack = EmbeddedStack(options.settings(), on_event=note)
    with stopped_by_signals(stop), stack as settings:
        prepare(settings)
        children: list[ChildProcess] = []
        try:
            addresses = _start(options, settings, children, stop, with_worker=worker, with_scheduler=scheduler)
            if not stop.is_set():
                _show_addresses(settings, addresses)
                _stay(stack.servers, children, settings, stop)
        finally:
            for child in children:  # the worker first: it still needs the servers to drain
                note(f"stopping the {child.name}")
                child.stop()
            note("stopping the servers")


def down(
    context: typer.Context,
    timeout: float = typer.Option(90.0, min=0.0, help="Seconds to wait."),
    data_dir: Path | None = DATA_DIR,
) -> None:
    """Stop what `alphaloop up` started, and wait."""
    folder = global_options(context, data_dir).settings().data_dir
    stack = running_stack(folder)
    if stack is None:
        note(f"nothing runs under {folder}")
        return
    owner = stack.pids["alphaloop"]
    os.kill(owner, signal.SIGTERM)
    deadline = time.monotonic() + timeout
    with err().status("waiting for the running batch to finish"):
        while is_locked(folder / "stack.lock"):
            if time.monotonic() >= deadline:
                raise StartFailed(
                    f"process {owner} did not stop within {timeout:g} s", hint=f"its logs are in {folder / 'logs'}"
                )
            time.sleep(_WATCH_S / 5)
    note("stopped")


def prepare(settings: Settings) -> None:
    """Create the schema and the topics. Raises StoreError, BrokerError."""
    assert settings.postgres.url is not None  # noqa: S101 - the embedded stack fills it in
    schema.upgrade(settings.postgres.url)
    ensure_topics(settings.kafka, settings.tasks)


@contextlib.contextmanager
def stopped_by_signals(stop: threading.Event) -> Iterator[None]:
    """The first SIGINT or SIGTERM sets `stop`; the second one ends the process at once."""

    def handle(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _start(
    options: GlobalOptions,
    settings: Settings,
    children: list[ChildProcess],
    stop: threading.Event,
    *,
    with_worker: bool,
    with_scheduler: bool,
) -> dict[str, str]:
    """Start the children into `children`; returns the addresses of the console and of their metrics by name."""
    addresses: dict[str, str] = {}
    if with_worker:
        child = worker_process(options, settings)
        follower = LogFollower(child.log)
        children.append(child)
        child.start()
        note("loading the model, and measuring what a round costs here unless that is known …")
        with err().status("the worker is starting"):
            line = await_event(child, follower, "worker_ready", stop.is_set)
        if line is not None:
            addresses["worker metrics"] = f"{field_of(line, 'metrics')}/metrics"
    if with_scheduler and not stop.is_set():
        child = scheduler_process(options, settings, "run")
        follower = LogFollower(child.log)
        children.append(child)
        child.start()
        if (line := await_event(child, follower, "scheduler_ready", stop.is_set)) is not None:
            addresses["scheduler metrics"] = f"{field_of(line, 'metrics')}/metrics"
            addresses["console"] = field_of(line, "console") or "-"
    return addresses


def _show_addresses(settings: Settings, addresses: dict[str, str]) -> None:
    assert settings.postgres.url is not None  # noqa: S101 - the embedded stack fills it in
    rows = {
        "broker": settings.kafka.bootstrap_servers,
        # Without the password, because this output is often kept as a log.
        "database": redacted(parse_url(settings.postgres.url)),
        "in a shell": command_for(settings.data_dir.absolute()),
        **addresses,
        "reports": settings.report_folder,
        "logs": settings.data_dir / "logs",
    }
    screen = out()
    for name, value in rows.items():  # not a table: what is to be copied must not be folded
        screen.print(f"{name:<20}{value}", markup=False, soft_wrap=True)
    note("up; Ctrl-C stops it")


def _stay(
    servers: Sequence[StackServer], children: Sequence[ChildProcess], settings: Settings, stop: threading.Event
) -> None:
    def make_topics() -> None:
        try:
            ensure_topics(settings.kafka, settings.tasks)
        except BrokerError as error:
            note(f"topics are missing: {error.message}")

    supervised = [Supervised(server, note) for server in servers if server.part != "broker"]
    # A broker that keeps its messages in memory has lost its topics too.
    supervised += [Supervised(server, note, then=make_topics) for server in servers if server.part == "broker"]
    supervised += [Supervised(child, note) for child in children]
    while not stop.wait(_WATCH_S):
        for one in supervised:
            one.look()
