"""Whether a job or a server was at fault when a request failed."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from alphaloop.errors import AlphaloopError, MessageError, RequestRefused
from worker.servers.fleet_member import DOUBTFUL
from worker.servers.request import Request

_MOST_FAILURES: Final = 2  #: on servers that are well


class Verdict(StrEnum):
    """What follows."""

    ELSEWHERE = "the request is sent again"
    ALONE = "the request is sent again, alone"
    BLAMED = "the job has failed"
    REFUSED = "the job is refused"


class Judge:
    """Counts the failures of each request on servers that are well."""

    def judge(self, request: Request, error: AlphaloopError, test: AlphaloopError | None) -> Verdict:
        """`test` is what the test of the server found afterwards; None: it is well, or was not asked."""
        if isinstance(error, MessageError | RequestRefused):
            return Verdict.REFUSED
        if not isinstance(error, DOUBTFUL) or test is not None:
            return Verdict.ELSEWHERE
        request.num_failures += 1
        return Verdict.BLAMED if request.num_failures >= _MOST_FAILURES else Verdict.ELSEWHERE
