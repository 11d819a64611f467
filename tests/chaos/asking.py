"""What a process says of itself over HTTP: its checks, and what it holds."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from typing import Final

READY: Final = "ready"
#: How a process begins and ends.
SILENT: Final = "not up"
_HELD: Final = "alphaloop_intake_in_flight "
_WAITING: Final = "alphaloop_num_requests_waiting "


@dataclass(frozen=True, slots=True)
class Look:
    """One look at one process."""

    fleet: str
    at_s: float
    said: str  #: READY, or the reason of /readyz, or SILENT
    num_held: int  #: messages taken from Kafka and not finished
    num_waiting: int  #: jobs taken that wait for a slot of the engine


def look(fleet: str, port: int, at_s: float) -> Look:
    """Ask the process at this port."""
    ready, reason = ask(port, "readyz")
    if ready is None:
        return Look(fleet, at_s, SILENT, 0, 0)
    _, metrics = ask(port, "metrics")
    gauges = {name: int(float(_value(metrics, name))) for name in (_HELD, _WAITING)}
    said = READY if ready == HTTPStatus.OK else reason.strip()
    return Look(fleet, at_s, said, gauges[_HELD], gauges[_WAITING])


def ask(port: int, path: str, timeout_s: float = 1.0) -> tuple[int | None, str]:
    """The status and the text of the answer; None while nothing answers."""
    with closing(HTTPConnection("127.0.0.1", port, timeout=timeout_s)) as connection:
        try:
            connection.request("GET", f"/{path}")
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        except (OSError, HTTPException):
            return None, ""


def _value(metrics: str, name: str) -> str:
    return next((line.removeprefix(name) for line in metrics.splitlines() if line.startswith(name)), "0")
