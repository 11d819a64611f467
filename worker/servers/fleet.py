"""Which endpoint a request goes to, and what its outcome says about that endpoint.

    choose → began → the request → ended → succeeded, or failed → judge
    due_tests → a test → tested

Pure: the caller sends requests and tests, and asks again when something changed. One thread uses it.

Whose fault a failure was is judged here too, of servers that die and of jobs that kill them.
`Suspicion` says what happens to a request that failed: it goes on elsewhere, it runs alone, or its job is to blame.

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

`Deaths` knows when endpoints went away, and whether all of them did so at once. As soon as one has gone, the others are
tested. One that passes shows that the network is well; where none does, it was an outage of all, and says nothing
against the requests that were in flight.

`Alone` keeps endpoints for requests that have to run alone. A kept endpoint takes nothing new; once it is empty and has
just shown that it is well, a suspect goes there. At most half of the fleet is kept at a time, or one. The only open
endpoint of a route rests after a suspect for as long as it was kept, if others wanted it meanwhile.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Final, Literal

from alphaloop.deciding.goodput import DrafterState
from alphaloop.engine import EndpointStatus, SuspectCounts
from alphaloop.errors import (
    AlphaloopError,
    ModelNotServed,
    ReplyCut,
    ReplyInvalid,
    RequestKillsServer,
    ServerBusy,
    ServerFailed,
    ServerLoginRefused,
    ServerSilent,
    ServerUnavailable,
    ServerUnreachable,
)
from worker.servers.fleet_member import JOBS_FAULT, InferenceServer, Member, is_gone
from worker.servers.load import NEITHER, Flight, Landing, LoadSums, RequestKind

_NEITHERS_FAULT: Final = (ServerUnreachable, ServerBusy, ServerLoginRefused, ModelNotServed)
#: Said by a server about one request; what is lost on the way may have had other causes.
_SAID: Final = (ServerFailed, ReplyInvalid)
_LOST: Final = (ServerSilent, ReplyCut, ServerUnavailable)

_SAID_TO_BLAME: Final = 2
_FAILED_TO_BE_ALONE: Final = 2
_FAILED_TO_BLAME: Final = 3
_DEATHS_TO_BE_ALONE: Final = 2
_OUTAGES_TO_BE_ALONE: Final = 10
_OUTAGES_ALONE_TO_BLAME: Final = 3
_DEATHS_ALONE_TO_BLAME: Final = 2
_MOST_RECORDS: Final = 10_000
#: Endpoints that go away within this time of each other did so at once: a test may take as long until it is given up.
_AT_ONCE_S: Final = 90.0
_RECENT_S: Final = 600.0
_REMEMBERED: Final = 256
#: A caller that waits asks again within this time; an endpoint that no caller asks for is not kept.
ASKS_AGAIN_S: Final = 5.0
#: A server that was well so lately will be alive when the suspect comes.
_WELL_S: Final = 5.0
_JUST_STARTED_S: Final = 600.0


def needs_test(error: AlphaloopError) -> bool:
    """Whether the server has to be tested before it can be judged whose fault it was."""
    return isinstance(error, _SAID + _LOST) and not isinstance(error, _NEITHERS_FAULT)


@dataclass(frozen=True, slots=True)
class FailureVerdict:
    """What happens to a request that failed."""

    action: Literal["again", "alone", "blame"]
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

    def __init__(self, deaths: Deaths) -> None:
        self._deaths = deaths
        self._records: dict[str, _Record] = {}

    @property
    def num_alone(self) -> int:
        """Jobs that have to run alone. Any thread may ask."""
        return sum(self._is_suspect(record) for record in list(self._records.values()))

    def judge(
        self, job_id: str, flight: Flight, error: AlphaloopError, test: AlphaloopError | None
    ) -> FailureVerdict | None:
        """What happens to a job whose request failed; `test` is the error of the test of the server that followed.

        None: not known until tests of other endpoints have ended.
        """
        if isinstance(error, JOBS_FAULT):
            return FailureVerdict("blame", error, is_final=True)
        if isinstance(error, _NEITHERS_FAULT):
            return self._next_try(self._records.get(job_id, _Record()), error)
        if not needs_test(error):
            return FailureVerdict("blame", error)
        record = self._record_of(job_id)
        record.last = error
        if (death := self._deaths.in_flight(flight)) is None and test is not None and is_gone(test):
            death = self._deaths.note(flight.endpoint)  # of one that was down already, and still answered
        if death is not None:
            if flight.is_alone and not self._deaths.is_settled(death):
                return None
            record.deaths.append((death, flight.is_alone))
            return self._of_deaths(record, error)
        if test is None or isinstance(test, ServerBusy):
            return self._of_failures(record, flight.endpoint, error)
        return self._next_try(record, error)  # the server is wrong in a way that its test shows

    def standing(self, job_id: str) -> FailureVerdict | None:
        """How a job that has failed here goes on now; None of one that has not."""
        record = self._records.get(job_id)
        return None if record is None or record.last is None else self._next_try(record, record.last)

    def forget(self, job_id: str) -> None:
        """The job has ended."""
        self._records.pop(job_id, None)

    def _record_of(self, job_id: str) -> _Record:
        """The job's record. A caller that gives a job back does not call `forget`, so the oldest records go."""
        if job_id not in self._records and len(self._records) >= _MOST_RECORDS:
            del self._records[next(iter(self._records))]
        return self._records.setdefault(job_id, _Record())

    def _of_deaths(self, record: _Record, error: AlphaloopError) -> FailureVerdict:
        alone = [death for death, was_alone in record.deaths if was_alone]
        outages = [death for death in alone if self._deaths.is_outage(death)]
        num_counted = len(alone) - len(outages)
        if num_counted < _DEATHS_ALONE_TO_BLAME and len(outages) < _OUTAGES_ALONE_TO_BLAME:
            return self._next_try(record, error)
        killed = RequestKillsServer(
            f"{len(alone)} times a server died while it worked on this request alone: "
            f"{', '.join(sorted({death.endpoint for death in alone}))}",
            hint="read the server's own log at that time, and report the request to its makers",
        )
        return FailureVerdict("blame", killed, is_final=num_counted >= _DEATHS_ALONE_TO_BLAME)

    def _of_failures(self, record: _Record, endpoint: str, error: AlphaloopError) -> FailureVerdict:
        """The server is well."""
        record.failed_at.add(endpoint)
        if isinstance(error, _SAID):
            record.num_said += 1
        else:
            record.num_lost += 1
        if record.num_said >= _SAID_TO_BLAME or record.num_said + record.num_lost >= _FAILED_TO_BLAME:
            return FailureVerdict("blame", error)
        return self._next_try(record, error)

    def _next_try(self, record: _Record, error: AlphaloopError) -> FailureVerdict:
        deaths = [death for death, _ in record.deaths]
        if not self._is_suspect(record):
            return FailureVerdict(
                "again", error, avoid=frozenset(record.failed_at | {death.endpoint for death in deaths})
            )
        # Alone it goes rather to endpoints that have just started, where a rolling restart is over; so those where it
        # died with others are not avoided, but those that die without it are.
        alone = {death.endpoint for death, was_alone in record.deaths if was_alone}
        return FailureVerdict("alone", error, avoid=frozenset(record.failed_at | alone | self._deaths.flapping(deaths)))

    def _is_suspect(self, record: _Record) -> bool:
        num_outages = sum(self._deaths.is_outage(death) for death, _ in record.deaths)
        return (
            record.num_said + record.num_lost >= _FAILED_TO_BE_ALONE
            or len(record.deaths) - num_outages >= _DEATHS_TO_BE_ALONE
            or num_outages >= _OUTAGES_TO_BE_ALONE
        )


@dataclass(slots=True, eq=False)
class Death:
    """An endpoint that was up went away."""

    endpoint: str
    at_s: float
    left: frozenset[str]  #: endpoints that were still there
    is_witnessed: bool = False  #: whether one of them was well afterwards, before it went away too


class Deaths:
    """The last deaths of a fleet's endpoints. One thread uses it; times are seconds on the clock."""

    def __init__(self, members: Mapping[str, Member], *, clock: Callable[[], float]) -> None:
        self._members, self._clock = members, clock
        self._deaths = {name: deque[Death](maxlen=_REMEMBERED) for name in members}

    def note(self, name: str) -> Death:
        """The endpoint has gone away now. Those that are left are to be tested."""
        states = {other: member.circuit.state for other, member in self._members.items() if other != name}
        left = frozenset(other for other, state in states.items() if state in ("up", "doubted"))
        for other in left:
            self._members[other].circuit.ask_for_test()
        death = Death(name, self._clock(), left)
        self._deaths[name].append(death)
        return death

    def passed(self, name: str) -> None:
        """An endpoint that was not down has passed a test: it is a witness of the deaths between its start and that."""
        circuit = self._members[name].circuit
        up_since_s = -math.inf if circuit.up_again_s is None else circuit.up_again_s
        for deaths in self._deaths.values():
            for death in deaths:
                if name in death.left and up_since_s <= death.at_s <= circuit.test_began_s:
                    death.is_witnessed = True

    def in_flight(self, flight: Flight) -> Death | None:
        """The last death of the endpoint while the request was there; None where there was none."""
        deaths = self._deaths[flight.endpoint]
        return deaths[-1] if deaths and deaths[-1].at_s >= flight.began_s else None

    def is_outage(self, death: Death) -> bool:
        """Whether all endpoints went away at the same time, this one last or not: then it was none of the requests."""
        if death.is_witnessed:
            return False
        if death.left:
            return all(self._went_after(other, death) for other in death.left)
        return any(self._went_before(other, death) for other in self._members if other != death.endpoint)

    def is_settled(self, death: Death) -> bool:
        """Whether it is known if the death was an outage's; if not, tests of other endpoints are under way."""
        if death.is_witnessed:
            return True
        not_gone = [other for other in death.left if not self._went_after(other, death)]
        return not any(self._members[other].circuit.is_test_coming for other in not_gone)

    def flapping(self, besides: Collection[Death]) -> set[str]:
        """Endpoints that died more than once lately, deaths in `besides` not counted."""
        since_s = self._clock() - _RECENT_S
        return {
            name
            for name, deaths in self._deaths.items()
            if sum(death.at_s >= since_s and death not in besides for death in deaths) > 1
        }

    def _went_after(self, name: str, death: Death) -> bool:
        return any(0 <= other.at_s - death.at_s <= _AT_ONCE_S for other in self._deaths[name])

    def _went_before(self, name: str, death: Death) -> bool:
        return any(
            0 <= death.at_s - other.at_s <= _AT_ONCE_S and death.endpoint in other.left and not other.is_witnessed
            for other in self._deaths[name]
        )


class Alone:
    """Keeps endpoints of a fleet for suspects. One thread uses it."""

    def __init__(self, members: Mapping[str, Member], *, clock: Callable[[], float], rng: Random) -> None:
        self._members, self._clock, self._rng = members, clock, rng
        self._asked_until_s = -math.inf

    def choose(self, candidates: Sequence[Member]) -> str | None:
        """One of the open `candidates` that is empty and well; None: wait, one is kept as soon as it may be."""
        now = self._clock()
        self._asked_until_s = now + ASKS_AGAIN_S
        kept = [member for member in candidates if member.is_kept and not member.has_suspect]
        if not kept and (picked := self._pick(candidates)) is not None:
            picked.reserved_since_s = now
            kept = [picked]
        for member in kept:
            member.reserved_until_s = now + ASKS_AGAIN_S
            if member.places.num_in_flight or not member.places.has_room:
                continue
            if member.circuit.well_s is not None and now - member.circuit.well_s <= _WELL_S:
                return member.server.name
            member.circuit.ask_for_test()
        return None

    def ended(self, member: Member) -> None:
        """The suspect is there no more. Where another waits the endpoint is kept on, unless it has to rest."""
        now = self._clock()
        must_rest = member.is_wanted and self._is_last_of_route(member)
        member.rests_until_s = now + max(0.0, now - member.reserved_since_s) if must_rest else now
        member.has_suspect = member.is_wanted = False
        is_kept_on = now < self._asked_until_s and not must_rest
        member.reserved_since_s, member.reserved_until_s = now, now + ASKS_AGAIN_S if is_kept_on else -math.inf

    def _pick(self, candidates: Sequence[Member]) -> Member | None:
        """The endpoint to keep: rather not the only one of its route, just started, with few in flight."""
        opened = [member for member in self._members.values() if member.is_open]
        if sum(member.is_kept for member in opened) >= max(1, len(opened) // 2):
            return None
        now = self._clock()
        free = [
            (self._is_last_of_route(member), not self._has_just_started(member), member.places.num_in_flight, member)
            for member in candidates
            if not member.is_kept
        ]
        free = [ranked for ranked in free if not ranked[0] or now >= ranked[3].rests_until_s]
        if not free:
            return None
        least = min(ranked[:3] for ranked in free)
        return self._rng.choice([member for *key, member in free if tuple(key) == least])

    def _is_last_of_route(self, member: Member) -> bool:
        others = [other for other in self._members.values() if other is not member]
        served = {route for other in others if other.is_open and not other.is_kept for route in other.routes}
        return not served.issuperset(member.routes)

    def _has_just_started(self, member: Member) -> bool:
        up_again_s = member.circuit.up_again_s
        return up_again_s is not None and self._clock() - up_again_s <= _JUST_STARTED_S


#: Servers are asked for their load so long after the last request of ours began, or waited for others.
_LOAD_LINGERS_S: Final = 10.0


class Fleet:
    """The endpoints of one worker. `clock` gives seconds and never goes back."""

    def __init__(
        self,
        servers: Sequence[InferenceServer],
        *,
        clock: Callable[[], float],
        rng: Random,
    ) -> None:
        self.servers: Final = {server.name: server for server in servers}
        self.members: Final = {server.name: Member(server, clock=clock, rng=rng) for server in servers}
        self._clock, self._rng = clock, rng
        self._last_wanted_s = -math.inf  # when a request began, or waited for others
        self._alone = Alone(self.members, clock=clock, rng=rng)
        self._deaths = Deaths(self.members, clock=clock)
        self._num_killers = 0
        self.suspicion: Final = Suspicion(self._deaths)

    def choose(
        self,
        drafter: str | None,
        *,
        is_bound: bool,
        avoid: Collection[str] = (),
        barred: Collection[str] = (),
        alone: bool = False,
        kind: RequestKind = NEITHER,
    ) -> str | None:
        """The endpoint for a request of a route: the least loaded that has room; None: wait, and ask again.

        A request that is not bound goes to another route where its own has no room, and so does one whose route no
        endpoint has any more. While a bound one waits, it takes no place where that one may go. Endpoints in `avoid`
        get a request only where no other is open, and those in `barred` never. `alone`: the endpoint has nothing in
        flight, and takes nothing else until the request has ended. `kind`: an endpoint whose texts change beside
        such a request gets requests of another kind only when none of this kind is in flight, and the other way round.

        Whoever waits asks again when something changed, at least every `ASKS_AGAIN_S` seconds, the longest waiting
        first. Whoever got a name says `began` before anyone asks again.
        """
        candidates = self._candidates(drafter, is_bound=is_bound, barred=barred)
        is_bound = is_bound and any(drafter in member.routes for member in candidates)
        usable = [member for member in candidates if member.is_open]
        usable = [member for member in usable if member.server.name not in avoid] or usable
        if alone:
            return self._alone.choose(usable)
        for member in usable:
            member.is_wanted |= member.is_kept
        usable = [member for member in usable if not member.is_kept]
        apart = [member for member in usable if not member.may_join(kind)]
        name = self._of_usable(drafter, [member for member in usable if member not in apart], is_bound=is_bound)
        if name is None:
            for member in apart:
                member.wait_for_turn(kind)
        return name

    def held_by(self, drafter: str | None, *, is_bound: bool, barred: Collection[str] = ()) -> tuple[str, ...]:
        """Endpoints that `choose` could name for such a request if nothing were kept for others."""
        candidates = self._candidates(drafter, is_bound=is_bound, barred=barred)
        names = tuple(member.server.name for member in candidates if member.is_held)
        if names:
            self._last_wanted_s = self._clock()
        return names

    def _of_usable(self, drafter: str | None, usable: Sequence[Member], *, is_bound: bool) -> str | None:
        own = [member for member in usable if drafter in member.routes]
        if is_bound:
            return self._bound(own)
        own, usable = self._left_to_ordinary(own), self._left_to_ordinary(usable)
        return self._least_loaded(own) or self._least_loaded(usable)

    def is_away(self, drafter: str | None, *, is_bound: bool, barred: Collection[str] = ()) -> bool:
        """Whether every endpoint is away that `choose` could name for such a request."""
        return all(member.is_away for member in self._candidates(drafter, is_bound=is_bound, barred=barred))

    def _candidates(self, drafter: str | None, *, is_bound: bool, barred: Collection[str]) -> list[Member]:
        """Where such a request may go: a bound one only to its route, as long as an endpoint has that."""
        members = [member for name, member in self.members.items() if name not in barred]
        of_route = [member for member in members if drafter in member.routes]
        return of_route if is_bound and of_route else members

    def switches(self, name: str, obeys: bool) -> None:
        """Whether the endpoint drafts as each request asks. If not, it is no vanilla route, and drafts as started."""
        member = self.members[name]
        member.switches = obeys and member.server.endpoint.switches_drafts

    def drafters(self) -> tuple[DrafterState, ...]:
        """What drafts, each once; of one length where any of its endpoints does not draft as requests ask."""
        drafters: dict[str, DrafterState] = {}
        for member in self.members.values():
            for drafter in member.server.drafters:
                drafters.setdefault(drafter.name, drafter)
            if not member.switches and (as_started := member.server.as_started) is not None:
                drafters[as_started.name] = as_started
        return tuple(drafters.values())

    def began(
        self,
        name: str,
        *,
        drafter: str | None = None,
        num_draft_tokens: int | None = None,
        alone: bool = False,
        kind: RequestKind = NEITHER,
        num_texts: int = 1,
    ) -> Flight:
        """A request goes to the endpoint now. The flight is handed back to `ended`, however the request ends.

        `drafter` is its route, `num_draft_tokens` the k of its decision, if any. The flight says which drafts the
        request has to ask the endpoint for.
        """
        member = self.members[name]
        if alone:
            member.has_suspect = True
        asked = member.server.asked(drafter, num_draft_tokens) if member.switches else None
        self._last_wanted_s = self._clock()
        member.began()
        sums = self._load_sums()
        return member.places.add(name, sums, is_alone=alone, asked=asked, kind=kind, num_texts=num_texts)

    def ended(self, flight: Flight) -> Landing:
        """A request ended or was given up: how many were in flight while it was."""
        member = self.members[flight.endpoint]
        landing = member.places.remove(flight, self._load_sums())
        if flight.is_alone:
            self._alone.ended(member)
        return landing

    def is_load_wanted(self) -> bool:
        """Whether requests of ours are under way or held, or were a moment ago: the load is worth asking for."""
        return self.num_in_flight > 0 or self._clock() - self._last_wanted_s < _LOAD_LINGERS_S

    def failed(self, name: str, error: AlphaloopError) -> None:
        """A request failed there. Not called for one that was cancelled or is over its deadline."""
        if self.members[name].failed(error):
            self._deaths.note(name)

    def needs_test(self, flight: Flight, error: AlphaloopError) -> bool:
        """After `failed`: whether a test of the endpoint has to end before `judge` can tell whose fault it was.

        One is due then, or under way. It is not waited for where the endpoint is known to be gone, or is retired.
        """
        state = self.members[flight.endpoint].circuit.state
        return state != "retired" and needs_test(error) and self._deaths.in_flight(flight) is None

    def judge(
        self, job_id: str, flight: Flight, error: AlphaloopError, test: AlphaloopError | None = None
    ) -> FailureVerdict | None:
        """What happens to a job whose request failed, after `failed`.

        Where `needs_test` said so, after the next `tested` of that endpoint, whose error `test` is; None: it passed.
        No verdict yet: a job was alone where a server died, and it is not known if all servers are gone, so that it was
        the network; ask again after each `tested`.
        """
        if needs_test(error) and self.members[flight.endpoint].circuit.state == "retired":
            test = ModelNotServed()
        verdict = self.suspicion.judge(job_id, flight, error, test)
        self._num_killers += verdict is not None and isinstance(verdict.error, RequestKillsServer)
        return verdict

    def all_retired(self) -> str | None:
        """Where no endpoint is left, and waiting brings none back: why, in words."""
        if any(member.circuit.state != "retired" for member in self.members.values()):
            return None
        return "; ".join(f"{status.name}: {status.reason}" for status in self.statuses())

    def due_tests(self) -> tuple[str, ...]:
        """Endpoints to test now. Each is under test until the caller says `tested`.

        A test should ask for a short text: servers whose engine has died may still list their models.
        """
        due = tuple(name for name, member in self.members.items() if member.circuit.is_test_due())
        for name in due:
            self.members[name].circuit.test_begins()
        return due

    def tested(self, name: str, error: AlphaloopError | None) -> None:
        """The test of the endpoint ended; None: it passed."""
        member = self.members[name]
        was_down = member.circuit.state == "down"
        if member.tested(error):
            self._deaths.note(name)
        elif error is None and not was_down:
            self._deaths.passed(name)

    def next_change_s(self) -> float | None:
        """Seconds until time alone changes something: a test is due, or a pause ends. None: nothing is pending.

        Look again after each call of `choose` and `failed`, because both can make a test due.
        """
        now = self._clock()
        tests = [member.circuit.test_due_s for member in self.members.values()]
        pauses = [member.places.paused_until_s for member in self.members.values() if member.places.is_paused]
        moments = [moment for moment in tests if moment is not None] + pauses
        return max(0.0, min(moments) - now) if moments else None

    @property
    def num_in_flight(self) -> int:
        """Requests that began and have not ended."""
        return sum(member.places.num_in_flight for member in self.members.values())

    def suspects(self) -> SuspectCounts:
        """Jobs that failed and have to run alone, and those that killed servers."""
        return SuspectCounts(self.suspicion.num_alone, self._num_killers)

    def unavailable(self) -> str | None:
        """Why no job can be sent at all, in words; None where an endpoint is up, if only busy."""
        if any(member.circuit.state in ("up", "doubted") for member in self.members.values()):
            return None
        states = [f"{s.name} is {s.state} for {s.since_s:.0f} s ({s.reason})" for s in self.statuses()]
        return f"no inference server can be sent jobs: {'; '.join(states)}"

    def statuses(self, num_held: Mapping[str, int] | None = None) -> tuple[EndpointStatus, ...]:
        """How each endpoint is; `num_held`: requests that wait while it takes nothing, for the sake of others."""
        return tuple(member.status((num_held or {}).get(name, 0)) for name, member in self.members.items())

    def _load_sums(self) -> LoadSums:
        """Requests summed over time, of all endpoints, up to now."""
        return LoadSums.of_all(member.places.load_sums for member in self.members.values())

    def _bound(self, own: Sequence[Member]) -> str | None:
        name = self._least_loaded(own)
        for member in own:
            member.awaited_until_s = self._clock() + ASKS_AGAIN_S if name is None else -math.inf
        return name

    def _left_to_ordinary(self, members: Sequence[Member]) -> list[Member]:
        """The endpoints for which no bound request waits."""
        now = self._clock()
        return [member for member in members if now >= member.awaited_until_s]

    def _least_loaded(self, members: Sequence[Member]) -> str | None:
        if not (free := [member for member in members if member.has_room]):
            return None
        least = min(member.load for member in free)
        return self._rng.choice([member for member in free if member.load == least]).server.name
