"""The worker and the scheduler as children of `alphaloop up` and `alphaloop demo`."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import alphaloop
from alphaloop.cli.options import GlobalOptions
from alphaloop.embedded.process import ChildProcess
from alphaloop.settings import Settings

#: Loading a model from a slow disk, converting it once, calibrating.
START_TIMEOUT_S: Final = 300.0
_GRACE_S: Final = 15.0
#: Variables that the parent replaces by its resolved addresses.
_ADDRESSES: Final = frozenset(
    {"KAFKA_BOOTSTRAP_SERVERS", "DATABASE_URL", "ALPHALOOP_KAFKA__BOOTSTRAP_SERVERS", "ALPHALOOP_POSTGRES__URL"}
)


def worker_process(
    options: GlobalOptions,
    settings: Settings,
    *,
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> ChildProcess:
    """A worker, not started; `environment` is laid over the child's. Stopping it lets the running batch finish."""
    grace_s = settings.worker.drain_s + _GRACE_S
    return _process("worker", arguments, options, settings, grace_s=grace_s, environment=environment)


def scheduler_process(
    options: GlobalOptions, settings: Settings, mode: str, *, environment: Mapping[str, str] | None = None
) -> ChildProcess:
    """A scheduler, not started; `environment` is laid over the child's."""
    return _process("scheduler", [mode], options, settings, grace_s=_GRACE_S, environment=environment)


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
        found = json.loads(line).get(name)
        return None if found is None else str(found)
    match = re.search(rf'(?:^| ){re.escape(name)}=("[^"]*"|\S+)', line)
    return match[1].strip('"') if match else None


def await_event(
    child: ChildProcess, log: LogFollower, action: str, is_stopped: Callable[[], bool] = lambda: False
) -> str | None:
    """Wait until the child logs this action, and return the line. None when stopped before.

    Raises StartFailed with the end of its log when it ends first, or stays silent for START_TIMEOUT_S.
    """
    child.wait_until(lambda: is_stopped() or log.find(action) is not None, START_TIMEOUT_S)
    return log.find(action)


def _process(
    module: str,
    arguments: Sequence[str],
    options: GlobalOptions,
    settings: Settings,
    *,
    grace_s: float,
    environment: Mapping[str, str] | None = None,
) -> ChildProcess:
    return ChildProcess(
        module,
        child_command(module, arguments),
        log=child_log(settings, module),
        env={**child_environment(options, settings), **(environment or {})},
        grace_s=grace_s,
    )


def _has_action(line: str, action: str) -> bool:
    if line.startswith("{"):
        try:
            return bool(json.loads(line).get("action") == action)
        except ValueError:
            return False
    return f" {action} " in f"{line} "
