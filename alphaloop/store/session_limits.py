"""How long a session may wait and hold others up: without limits a suspended process blocks every other one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """Limits of every session of a pool, in seconds; 0 is none. Past a limit Postgres ends the statement or session."""

    lock_s: float = 5.0  #: wait for a lock of another transaction
    statement_s: float = 60.0  #: one statement, its waits included
    idle_transaction_s: float = 20.0  #: a transaction whose process sends nothing, so that its locks become free
    unacknowledged_s: float = 20.0  #: data that the other machine does not acknowledge, so that a lost one is noticed
    through_pooler: bool = False  #: set for each transaction, because a pooler hands each one another session

    @property
    def parameters(self) -> Mapping[str, str]:
        """The server's parameters by name; times come back in UTC."""
        return {
            "timezone": "UTC",
            "lock_timeout": _milliseconds(self.lock_s),
            "statement_timeout": _milliseconds(self.statement_s),
            "idle_in_transaction_session_timeout": _milliseconds(self.idle_transaction_s),
        }

    @property
    def connecting(self) -> Mapping[str, Any]:
        """What the driver is told for each new connection."""
        ours = {"tcp_user_timeout": int(self.unacknowledged_s * 1000), "keepalives_idle": 30}
        if self.through_pooler:
            # A statement that one session has prepared is not known to the next.
            return {**ours, "prepare_threshold": None}
        return {**ours, "options": " ".join(f"-c {name}={value}" for name, value in self.parameters.items())}


#: The longest statement of the scheduler and of commands, which read much.
LONG_STATEMENT_S: Final = 1800.0
DEFAULT_LIMITS: Final = SessionLimits()
#: For migrations: they rewrite tables, and wait for each other.
UNLIMITED: Final = SessionLimits(lock_s=0, statement_s=0, idle_transaction_s=0)


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.0f}ms"
