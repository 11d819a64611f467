"""The wait of a starting process for servers that do not answer yet."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from typing import Final, TypeVar

from alphaloop.errors import (
    BrokerLoginRefused,
    BrokerUnavailable,
    ConfigError,
    DeliveryFailed,
    ServerLoginRefused,
    ServerUnavailable,
    StoreLoginRefused,
    StoreUnavailable,
)
from alphaloop.kafka.client import bootstrap_servers
from alphaloop.kafka.topics import check_reachable, cluster_id, other_databases
from alphaloop.settings import KafkaSettings, Settings
from alphaloop.store.coordination import InstallationStore
from alphaloop.store.database import Database

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")

FIRST_PAUSE_S: Final = 0.2
LONGEST_PAUSE_S: Final = 5.0
#: Between two log lines of one wait.
LOG_EVERY_S: Final = 60.0


class StartStopped(Exception):
    """The process was asked to stop while it waited for a server. Not an error: the process ends with code 0."""


@dataclass(eq=False)
class StartWait:
    """Repeats what a starting process asks of a server until that server answers.

    A server that is away is waited for. A server that answers and refuses (wrong password, unknown database, bad
    certificate, schema out of range) ends the start at once, because waiting mends none of these. The thread that
    starts the process calls `until_answered`; any thread may read `reason`.
    """

    stop: threading.Event
    limit_s: float | None  #: bounds each wait; None does not
    _: KW_ONLY
    clock: Callable[[], float] = time.monotonic
    _awaited: str | None = field(default=None, init=False)

    @property
    def reason(self) -> str | None:
        """Which server the start waits for, in words; None while it waits for none."""
        return None if self._awaited is None else f"waiting for {self._awaited}"

    def until_answered(self, server: str, ask: Callable[[], Answer]) -> Answer:
        """The answer of `ask`. `server` names the server and its address, without credentials.

        Raises StartStopped once the process is asked to stop, the last error when the limit is over, and at once every
        error that does not mean that the server is away.
        """
        begun = self.clock()
        log_at, pause_s = begun, FIRST_PAUSE_S
        try:
            while not self.stop.is_set():
                try:
                    answer = ask()
                except (StoreLoginRefused, BrokerLoginRefused, ServerLoginRefused):
                    raise
                except (StoreUnavailable, BrokerUnavailable, DeliveryFailed, ServerUnavailable) as error:
                    self._awaited, now = server, self.clock()
                    if self.limit_s is not None and now - begun >= self.limit_s:
                        late = f"{server} did not answer within startup.server_wait_s, {self.limit_s:g} s"
                        raise type(error)(f"{late}: {error.message}", hint=error.hint) from error
                    if now >= log_at:
                        log_at = now + LOG_EVERY_S
                        log.warning("waiting for %s: %s", server, error.message, extra={"action": "server_awaited"})
                    self.stop.wait(pause_s)
                    pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
                else:
                    if self._awaited is not None:
                        waited = {"action": "server_answered", "waited_s": round(self.clock() - begun, 1)}
                        log.info("%s answers", server, extra=waited)
                    return answer
            raise StartStopped
        finally:
            self._awaited = None


#: Longest question to the broker, so that a stop is noticed soon.
_ASK_S: Final = 3.0


def await_servers(settings: Settings, database: Database, start_wait: StartWait) -> None:
    """Wait until PostgreSQL holds a schema that this code can run on and a Kafka broker answers, which belong together.

    Raises ConfigError without the address of a broker, the errors of Database.check_revision, check_reachable and
    check_installation that waiting does not mend, and those of StartWait.
    """
    servers = bootstrap_servers(settings.kafka)
    start_wait.until_answered(f"PostgreSQL at {database.address}", database.check_revision)
    start_wait.until_answered(f"Kafka at {servers}", lambda: check_installation(settings.kafka, database))


def check_installation(kafka: KafkaSettings, database: Database) -> None:
    """Note in the database which Kafka it belongs to. Raises BrokerError, StoreError.

    Raises ConfigError where it has noted another, or workers of another database are in the workers' group.
    """
    check_reachable(kafka, _ASK_S)
    database_id = InstallationStore(database).belong(cluster_id(kafka), kafka.prefix)
    if others := other_databases(kafka, database_id):
        raise ConfigError(
            f"workers of the database {', '.join(others)} are in the group {kafka.named(kafka.group_id)}; this one, "
            f"{database.redacted_url}, is {database_id}: each would decode a part of the other's jobs",
            hint="give each installation its own kafka.prefix",
        )
