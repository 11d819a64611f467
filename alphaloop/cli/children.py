"""Other processes that commands run: a worker and a scheduler as children, and orders to `python -m worker.commands`.

The command line does not import the worker, because decoding needs torch. It starts a process, and shows the events
that the process writes: as a progress bar on a terminal, as a line every few seconds in a log.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import IO, Any, Final, TypeVar

import typer
from pydantic import TypeAdapter

import alphaloop
from alphaloop.cli.options import GlobalOptions, global_options
from alphaloop.cli.screen import err, note, progress
from alphaloop.commands import (
    EVENT,
    LOADING,
    AdvanceEvent,
    FailedEvent,
    NoteEvent,
    Order,
    ReportEvent,
    StageEvent,
    line_of,
)
from alphaloop.embedded.process import ChildProcess
from alphaloop.errors import AlphaloopError
from alphaloop.files import STANDARD
from alphaloop.logs import START_PROGRESS
from alphaloop.settings import Settings

#: Loading a model from a slow disk, converting it once, calibrating.
START_TIMEOUT_S: Final = 300.0
_GRACE_S: Final = 15.0
#: Variables that the parent replaces by its resolved addresses.
_ADDRESSES: Final = frozenset(
    {"KAFKA_BOOTSTRAP_SERVERS", "DATABASE_URL", "ALPHALOOP_KAFKA__BOOTSTRAP_SERVERS", "ALPHALOOP_POSTGRES__URL"}
)
INTERRUPTED: Final = 130
Data = TypeVar("Data")
EVERY_S: Final = 5.0


def carry_out(
    context: typer.Context,
    order: Order,
    data: type[Data],
    show: Callable[[Data], None],
    *,
    on_interrupt: str | None = None,
) -> None:
    """Have `order` carried out; `show` is called with the report, whose type is `data`.

    `on_interrupt` is said at once at the first Ctrl-C, where the process then takes a moment to end.

    Raises AlphaloopError for an error that the process reports, and typer.Exit with the process's exit code if that is
    not 0.
    """
    options = global_options(context)
    with subprocess.Popen(
        child_command("worker.commands", []),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=child_environment(options, options.settings()),
        # A group of its own: Ctrl-C in a terminal reaches a whole group, and the process should get each signal once.
        process_group=0,
    ) as child:
        assert child.stdin is not None  # noqa: S101
        assert child.stdout is not None  # noqa: S101
        try:
            _send(order, child.stdin)
            stopping = _Stopping(child, on_interrupt)
            with signals_to(stopping.on_signal):
                failure = _show_events(
                    child.stdout, lambda report: show(TypeAdapter(data).validate_python(report)), stopping.on_stage
                )
                code = child.wait()
                code = INTERRUPTED if stopping.was_ended else code
        except KeyboardInterrupt:
            note("interrupted")
            raise typer.Exit(INTERRUPTED) from None
        finally:
            child.kill()
    if failure is not None:
        raise AlphaloopError(failure.message, hint=failure.hint)
    if code:
        # A process that a signal ended has minus the signal's number; a shell shows 128 plus the number.
        raise typer.Exit(code if code > 0 else 128 - code)


def _send(order: Order, stdin: IO[bytes]) -> None:
    """Write the order, followed by the prompts that come from standard input."""
    # If the process has ended, its events say why.
    with contextlib.suppress(BrokenPipeError), stdin:
        stdin.write(line_of(order))
        stdin.flush()
        files = {name: str(file) for name, file in order if name in ("prompts", "held_out")}
        if STANDARD in files.values():
            shutil.copyfileobj(sys.stdin.buffer, stdin)


def _show_events(lines: IO[bytes], show: Callable[[Any], None], on_stage: Callable[[str], None]) -> FailedEvent | None:
    """Show events until the process ends; returns the error if it reported one."""
    failure = None
    written = None if err().is_terminal else ProgressLines(note)
    with progress() as bar:
        task = bar.add_task("starting", total=None, note="")
        for line in lines:
            match event := EVENT.validate_python(json.loads(line)):
                case StageEvent():
                    on_stage(event.name)
                    # The total of a task cannot be set to unknown, so another task replaces it.
                    bar.remove_task(task)
                    task = bar.add_task(event.name, total=event.total, completed=event.done, note="")
                    if written:
                        written.stage(event.name, event.done, event.total)
                case AdvanceEvent():
                    bar.update(task, advance=event.num, total=event.total, note=event.note)
                    if written:
                        written.advance(event.num, event.total)
                case NoteEvent():
                    note(event.text)
                case ReportEvent():
                    bar.stop()
                    show(event.data)
                case FailedEvent():
                    failure = event
    return failure


class _Stopping:
    """What a signal does to the process: it gets it, and a person reads `said` at the first one.

    A process that loads its models answers late and has nothing to report: it is ended.
    """

    def __init__(self, child: subprocess.Popen[bytes], said: str | None) -> None:
        self._child, self._unsaid, self._is_loading = child, [said] if said else [], False
        self.was_ended = False  #: while it loaded

    def on_stage(self, name: str) -> None:
        """The process has begun a stage."""
        self._is_loading = name == LOADING

    def on_signal(self, received: int, frame: FrameType | None) -> None:
        """Handles a signal."""
        if self._is_loading:
            self.was_ended = True
            self._unsaid = ["interrupted before anything was measured"]
            self._child.kill()
        else:
            self._child.send_signal(received)
        if self._unsaid:  # past the console, in whose middle the signal may have come
            os.write(sys.stderr.fileno(), f"{self._unsaid.pop()}\n".encode())


@contextmanager
def signals_to(handle: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """While the block runs, SIGINT and SIGTERM call `handle`."""
    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class ProgressLines:
    """Follows the stages of a command, and writes a line every few seconds and when the models are loaded."""

    def __init__(self, write: Callable[[str], object], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._write, self._clock = write, clock
        self._began = self._told_at = clock()
        self._name, self._done, self._total = "starting", 0, None  # type: str, int, int | None

    def stage(self, name: str, done: int, total: int | None) -> None:
        """A new stage begins; `done` of its `total` things were done before."""
        self._name, self._done, self._total = name, done, total
        if name == LOADING:  # it may take a minute, in which nothing else is shown
            self._write(f"{name} …")
        self._tell_when_due()

    def advance(self, num: int, total: int | None) -> None:
        """`num` more things are done; `total` where it has changed."""
        self._done += num
        self._total = self._total if total is None else total
        self._tell_when_due()

    def _tell_when_due(self) -> None:
        now = self._clock()
        if now - self._told_at >= EVERY_S:
            self._told_at = now
            of = "" if self._total is None else f" of {self._total}"
            done = f": {self._done}{of}" if self._done or self._total is not None else ""
            self._write(f"{self._name}{done}, after {now - self._began:.0f} s")


def child_process(
    module: str,
    arguments: Sequence[str],
    options: GlobalOptions,
    settings: Settings,
    *,
    environment: Mapping[str, str] | None = None,
) -> ChildProcess:
    """A worker, a scheduler or a trainer, not started; `environment` is laid over the child's.

    Stopping a worker lets the running batch finish.
    """
    name = module.rpartition(".")[2]
    return ChildProcess(
        name,
        child_command(module, arguments),
        log=child_log(settings, name),
        env={**child_environment(options, settings), **(environment or {})},
        grace_s=_GRACE_S + (settings.worker.drain_s if module == "worker" else 0.0),
    )


def child_log(settings: Settings, module: str) -> Path:
    """Where a child's log is kept."""
    return settings.data_dir / "logs" / f"{module}.log"


def child_command(module: str, arguments: Sequence[str]) -> list[str]:
    """How this interpreter runs one of our modules: -P keeps a folder of the same name in the current one out."""
    return [sys.executable, "-P", "-m", module, *arguments]


def child_environment(options: GlobalOptions, settings: Settings) -> dict[str, str]:
    """The environment that gives a child the same settings, broker and database.

    It holds the addresses, because arguments are visible to every user of the machine.
    """
    environment = {name: value for name, value in options.environment().items() if name not in _ADDRESSES}
    environment["ALPHALOOP_DATA_DIR"] = str(settings.data_dir.absolute())
    environment["ALPHALOOP_KAFKA__SESSION_TIMEOUT_MS"] = str(settings.kafka.session_timeout_ms)
    if settings.kafka.bootstrap_servers is not None:
        environment["KAFKA_BOOTSTRAP_SERVERS"] = settings.kafka.bootstrap_servers
    if settings.postgres.url is not None:
        environment["DATABASE_URL"] = settings.postgres.url.get_secret_value()
    package = Path(alphaloop.__file__).resolve().parent
    if alphaloop.shipped("migrations").parent != package:
        # In a checkout that is not installed, worker and scheduler lie beside alphaloop.
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(package.parent), os.environ.get("PYTHONPATH"))))
    return environment


class LogFollower:
    """Finds events in what a child adds to its log from now on."""

    def __init__(self, path: Path, *, from_start: bool = False) -> None:
        self._path = path
        self._position = path.stat().st_size if path.exists() and not from_start else 0
        self._rest = b""
        self.events: list[str] = []

    def find(self, action: str, *, last: bool = False) -> str | None:
        """The first line logged since with this action, or the last one."""
        self._read()
        lines = reversed(self.events) if last else iter(self.events)
        return next((line for line in lines if _has_action(line, action)), None)

    def _read(self) -> None:
        try:
            with self._path.open("rb") as file:
                file.seek(self._position)
                added = file.read()
        except OSError:
            return
        self._position += len(added)
        *lines, self._rest = (self._rest + added).split(b"\n")
        self.events.extend(line.decode("utf-8", "replace") for line in lines)


def field_of(line: str, name: str) -> str | None:
    """A field of a logged event, in either format of alphaloop.logs."""
    if line.startswith("{"):
        field = json.loads(line).get(name)
        return None if field is None else str(field)
    match = re.search(rf'(?:^| ){re.escape(name)}=("[^"]*"|\S+)', line)
    return match[1].strip('"') if match else None


def await_event(
    child: ChildProcess, log: LogFollower, action: str, is_stopped: Callable[[], bool] = lambda: False
) -> str | None:
    """Wait until the child logs this action, and return the line. None when stopped before.

    What the child loads and measures meanwhile is shown. Raises StartFailed with the end of its log when it ends first,
    or stays silent for START_TIMEOUT_S.
    """
    shown: str | None = None

    def has_news() -> bool:
        return is_stopped() or log.find(action) is not None or log.find(START_PROGRESS, last=True) != shown

    while True:
        child.wait_until(has_news, START_TIMEOUT_S)
        if (line := log.find(START_PROGRESS, last=True)) is None or line == shown:
            return log.find(action)
        shown = line
        note(field_of(line, "message") or line.partition(f" {START_PROGRESS} ")[2])


def _has_action(line: str, action: str) -> bool:
    if not line.startswith("{"):
        return f" {action} " in f"{line} "
    with contextlib.suppress(ValueError):
        return bool(json.loads(line).get("action") == action)
    return False
