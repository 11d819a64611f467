"""What a process says of itself over HTTP: its checks, and what it holds."""

from __future__ import annotations

import urllib.request
from dataclasses import dataclass
from http import HTTPStatus
from http.client import HTTPException, HTTPResponse
from typing import Final

_TIMEOUT_S: Final = 1.0
READY: Final = "ready"
#: How a process begins and ends.
SILENT: Final = "not up"
_HELD: Final = "alphaloop_intake_in_flight "
_WAITING: Final = "alphaloop_num_requests_waiting "


class _AnyStatus(urllib.request.HTTPErrorProcessor):
    """Every answer is one, whatever its status."""

    def http_response(self, request: urllib.request.Request, response: HTTPResponse) -> HTTPResponse:
        return response


_OPENER: Final = urllib.request.build_opener(_AnyStatus)


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


def ask(port: int, path: str) -> tuple[int | None, str]:
    """The status and the text of the answer; None while nothing answers."""
    request = f"http://127.0.0.1:{port}/{path}"
    try:
        with _OPENER.open(request, timeout=_TIMEOUT_S) as answer:
            return int(answer.status), answer.read().decode()
    except (OSError, HTTPException):
        return None, ""


def _value(metrics: str, name: str) -> str:
    return next((line.removeprefix(name) for line in metrics.splitlines() if line.startswith(name)), "0")
