"""What happens to a request that failed: it goes on elsewhere, it runs alone, or its job is to blame.

| what failed, and what a test of the server says | then |
|---|---|
| the request is refused, or too long | blame, for good |
| it never reached the server, or that is busy, or refuses the login | again, as often as it takes |
| an error of the server or an invalid reply, the server is well | again elsewhere; the second time blame |
| cut or silent, the server is well | again elsewhere; the second time alone; the third time blame |
| the server is gone | again elsewhere; the second time alone; gone twice with it alone: blame, for good |
| all servers are gone at once | again; after ten times alone; three times more while it is alone: blame |

Innocent requests are in flight when a server dies, too, and a rolling restart may follow one of them from server to
server. So no death counts that a job shared with others, and one alone may be chance.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal

from alphaloop.errors import (
    AlphaloopError,
    MessageError,
    ModelNotServed,
    ReplyCut,
    ReplyInvalid,
    RequestKillsServer,
    RequestRefused,
    ServerBusy,
    ServerFailed,
    ServerLoginRefused,
    ServerSilent,
    ServerUnavailable,
    ServerUnreachable,
)
from worker.servers.deaths import Death, Deaths
from worker.servers.fleet_member import is_gone
from worker.servers.places import Flight

Action = Literal["again", "alone", "blame"]

_JOBS_FAULT: Final = (MessageError, RequestRefused)
_NOBODYS_FAULT: Final = (ServerUnreachable, ServerBusy, ServerLoginRefused, ModelNotServed)
#: Said by a server about one request; what is lost on the way may have had other causes.
_SAID: Final = (ServerFailed, ReplyInvalid)
_LOST: Final = (ServerSilent, ReplyCut, ServerUnavailable)

_SAID_TO_BLAME: Final = 2
_FAILED_TO_BE_ALONE: Final = 2
_FAILED_TO_BLAME: Final = 3
_DEATHS_TO_BE_ALONE: Final = 2
_OUTAGES_TO_BE_ALONE: Final = 10
_OUTAGES_ALONE_TO_BLAME: Final = 3
DEATHS_ALONE_TO_BLAME: Final = 2
_MOST_RECORDS: Final = 10_000


def needs_test(error: AlphaloopError) -> bool:
    """Whether the server has to be tested before it can be judged whose fault it was."""
    return isinstance(error, _SAID + _LOST) and not isinstance(error, _NOBODYS_FAULT)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What happens to a request that failed."""

    action: Action
    error: AlphaloopError  #: of a job that is to blame: what its result says
    is_final: bool = False  #: of a job that is to blame: whether the same request would fail for ever
    avoid: frozenset[str] = frozenset()  #: endpoints that the next try avoids


@dataclass(slots=True)
class _Record:
    """The failures of one job."""

    last: AlphaloopError | None = None
    num_said: int = 0
    num_lost: int = 0
    failed_at: set[str] = field(default_factory=set)
    deaths: list[tuple[Death, bool]] = field(default_factory=list)  #: each with whether the job was alone then


class Suspicion:
    """The failures of jobs that have not ended. One thread uses it."""

    def __init__(self, deaths: Deaths, *, deaths_alone_to_blame: int = DEATHS_ALONE_TO_BLAME) -> None:
        self._deaths, self._deaths_alone_to_blame = deaths, deaths_alone_to_blame
        self._records: dict[str, _Record] = {}

    @property
    def num_alone(self) -> int:
        """Jobs that have to run alone. Any thread may ask."""
        return sum(self._is_suspect(record) for record in list(self._records.values()))

    def judge(self, job_id: str, flight: Flight, error: AlphaloopError, test: AlphaloopError | None) -> Verdict | None:
        """What happens to a job whose request failed; `test` is the error of the test of the server that followed.

        None: not known until tests of other endpoints have ended.
        """
        if isinstance(error, _JOBS_FAULT):
            return Verdict("blame", error, is_final=True)
        if isinstance(error, _NOBODYS_FAULT):
            return self._next_try(self._records.get(job_id, _Record()), error)
        if not needs_test(error):
            return Verdict("blame", error)
        record = self._record_of(job_id)
        record.last = error
        death = self._deaths.in_flight(flight)
        if death is None and test is not None and is_gone(test):
            death = self._deaths.note(flight.endpoint)  # of one that was down already, and still answered
        if death is not None:
            if flight.is_alone and not self._deaths.is_settled(death):
                return None
            record.deaths.append((death, flight.is_alone))
            return self._of_deaths(record, error)
        if test is None or isinstance(test, ServerBusy):
            return self._of_failures(record, flight.endpoint, error)
        return self._next_try(record, error)  # the server is wrong in a way that its test shows

    def standing(self, job_id: str) -> Verdict | None:
        """How a job that has failed here goes on now; None of one that has not."""
        record = self._records.get(job_id)
        return None if record is None or record.last is None else self._next_try(record, record.last)

    def forget(self, job_id: str) -> None:
        """The job has ended."""
        self._records.pop(job_id, None)

    def _record_of(self, job_id: str) -> _Record:
        """The job's record. Whoever sends a job away without its end does not say `forget`, so the oldest go."""
        if job_id not in self._records and len(self._records) >= _MOST_RECORDS:
            del self._records[next(iter(self._records))]
        return self._records.setdefault(job_id, _Record())

    def _of_deaths(self, record: _Record, error: AlphaloopError) -> Verdict:
        alone = [death for death, was_alone in record.deaths if was_alone]
        outages = [death for death in alone if self._deaths.is_outage(death)]
        num_counted = len(alone) - len(outages)
        if num_counted < self._deaths_alone_to_blame and len(outages) < _OUTAGES_ALONE_TO_BLAME:
            return self._next_try(record, error)
        killed = RequestKillsServer(
            f"{len(alone)} times a server died while it worked on this request alone: "
            f"{', '.join(sorted({death.endpoint for death in alone}))}",
            hint="read the server's own log at that time, and report the request to its makers",
        )
        return Verdict("blame", killed, is_final=num_counted >= self._deaths_alone_to_blame)

    def _of_failures(self, record: _Record, endpoint: str, error: AlphaloopError) -> Verdict:
        """The server is well."""
        record.failed_at.add(endpoint)
        if isinstance(error, _SAID):
            record.num_said += 1
        else:
            record.num_lost += 1
        if record.num_said >= _SAID_TO_BLAME or record.num_said + record.num_lost >= _FAILED_TO_BLAME:
            return Verdict("blame", error)
        return self._next_try(record, error)

    def _next_try(self, record: _Record, error: AlphaloopError) -> Verdict:
        deaths = [death for death, _ in record.deaths]
        if not self._is_suspect(record):
            return Verdict("again", error, avoid=frozenset(record.failed_at | {death.endpoint for death in deaths}))
        # Alone it goes rather to endpoints that have just started, which a rolling restart has behind it; so those
        # where it died with others are not avoided, but those that die without it are.
        alone = {death.endpoint for death, was_alone in record.deaths if was_alone}
        return Verdict("alone", error, avoid=frozenset(record.failed_at | alone | self._deaths.flapping(deaths)))

    def _is_suspect(self, record: _Record) -> bool:
        num_outages = sum(self._deaths.is_outage(death) for death, _ in record.deaths)
        return (
            record.num_said + record.num_lost >= _FAILED_TO_BE_ALONE
            or len(record.deaths) - num_outages >= _DEATHS_TO_BE_ALONE
            or num_outages >= _OUTAGES_TO_BE_ALONE
        )
