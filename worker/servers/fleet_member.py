"""One endpoint of a fleet: what it is, its circuit and its places."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Final, Literal

from alphaloop.errors import (
    AlphaloopError,
    MessageError,
    ModelNotServed,
    ReplyCut,
    ReplyInvalid,
    RequestRefused,
    ServerBusy,
    ServerFailed,
    ServerLoginRefused,
    ServerSilent,
    ServerUnavailable,
    reason_of,
)
from worker.servers.circuit import Circuit
from worker.servers.places import Places

EndpointState = Literal["up", "starting", "busy", "doubted", "down", "retired"]

#: Failures that may be the server's fault or the job's: a test tells.
DOUBTFUL: Final = (ServerSilent, ServerFailed, ReplyCut, ReplyInvalid)
#: A server that asks for a longer quiet is away for those who wait for it.
_LONG_PAUSE_S: Final = 5.0
_JOBS_FAULT: Final = (MessageError, RequestRefused)
_INVALID_IN_A_ROW: Final = 3


def is_gone(error: AlphaloopError) -> bool:
    """Whether a test with this error shows that nothing decodes there any more: a server that refuses it is alive."""
    gone = isinstance(error, ServerUnavailable | ServerFailed | ReplyCut)
    return gone and not isinstance(error, ServerBusy | ServerLoginRefused)


@dataclass(frozen=True, slots=True)
class FleetEndpoint:
    """An endpoint as requests are routed to it. Those with the same drafter are replicas of one route."""

    name: str
    drafter: str | None  #: what drafts there; None: nothing does
    num_draft_tokens: int  #: 0 without a drafter
    max_requests: int  #: at once, at least 1
    switches_drafts: bool = (
        False  #: whether each request may ask for its k; with none, so that it is a vanilla route too
    )


@dataclass(frozen=True, slots=True)
class EndpointStatus:
    """How an endpoint is, for metrics and `status`."""

    name: str
    drafter: str | None
    state: EndpointState
    num_in_flight: int
    limit: int  #: requests that it may have in flight now; 0 where it gets none
    since_s: float  #: seconds in that state of its circuit
    reason: str | None
    is_for_suspect: bool  #: whether it is kept for a request that has to run alone
    num_failed: Mapping[str, int]  #: requests that failed there, by the error's code
    num_undrafted: int | None = None  #: of those in flight, asked for without drafts; None where nobody can ask so
    is_obeying: bool = True  #: whether it does as requests ask, as far as is known
    num_others: float | None = None  #: requests of others there, as it told a moment ago; None where it did not

    @property
    def is_whole_load_known(self) -> bool:
        """Whether it told a moment ago how many requests it has, whoever sent them."""
        return self.num_others is not None


@dataclass(frozen=True, slots=True)
class SuspectCounts:
    """Jobs that failed and have to run alone at a server, and what came of those before."""

    num_alone: int = 0  #: that wait for a server of their own, or have one
    num_killers: int = 0  #: that failed for good so far, because servers died with them


class Member:
    """An endpoint's health and load. One thread uses it."""

    def __init__(self, endpoint: FleetEndpoint, *, clock: Callable[[], float], rng: Random) -> None:
        self.endpoint = endpoint
        self.circuit = Circuit(clock=clock, rng=rng)
        self.places = Places(endpoint.max_requests, clock=clock, rng=rng)
        self.reserved_until_s = -math.inf  #: until then it is kept for a request that has to run alone
        self.reserved_since_s = -math.inf
        self.rests_until_s = -math.inf  #: until then it is not kept for another one
        self.has_suspect = False  #: whether a request runs alone there now
        self.is_wanted = False  #: whether others would have gone there while it was kept
        self.awaited_until_s = -math.inf  #: until then its free places are for bound requests
        self._clock = clock
        self._num_invalid = 0
        self._num_failed: Counter[str] = Counter()
        #: Whether it drafts as each request asks, as far as is known.
        self.switches = endpoint.switches_drafts

    @property
    def routes(self) -> tuple[str | None, ...]:
        """Drafters that a request may have here now; None: vanilla."""
        return (self.endpoint.drafter, None) if self.switches else (self.endpoint.drafter,)

    def asked_for(self, drafter: str | None, num_draft_tokens: int | None) -> int | None:
        """Draft tokens that a request of this route has to ask for here; None: for nothing, it drafts as it started."""
        if not self.switches:
            return None
        if drafter is None:
            return 0
        if num_draft_tokens is None or drafter != self.endpoint.drafter:
            return None
        return num_draft_tokens if num_draft_tokens < self.endpoint.num_draft_tokens else None

    @property
    def is_open(self) -> bool:
        """Whether it takes requests now, if it has room."""
        return self.circuit.state == "up" and not self.places.is_paused

    @property
    def is_away(self) -> bool:
        """Whether it takes no requests for now, so that waiting for it may take long."""
        is_quiet = self.places.paused_until_s - self._clock() > _LONG_PAUSE_S
        return is_quiet or self.circuit.state in ("down", "retired")

    @property
    def has_room(self) -> bool:
        """Whether it takes one request more now."""
        return self.is_open and self.places.num_in_flight < self.places.limit

    @property
    def load(self) -> float:
        """Requests in flight relative to what it may take now."""
        return self.places.num_in_flight / self.places.limit

    @property
    def is_kept(self) -> bool:
        """Whether it is kept for a request that has to run alone, or has one."""
        return self.has_suspect or self._clock() < self.reserved_until_s

    def succeeded(self) -> None:
        """A request was finished."""
        self._num_invalid = 0
        self.circuit.worked()
        self.places.worked()

    def failed(self, error: AlphaloopError) -> bool:
        """A request failed. Whether the server has gone away by it."""
        self._num_failed[error.code] += 1
        if isinstance(error, _JOBS_FAULT):
            self.succeeded()
        elif isinstance(error, ModelNotServed):
            self.circuit.retire(reason_of(error))
        elif isinstance(error, ServerBusy):
            if self.places.refused(error.retry_after_s):
                self.circuit.down(reason_of(error))
        elif isinstance(error, DOUBTFUL):
            self._doubt(error)
        elif isinstance(error, ServerUnavailable):
            return self.circuit.down(reason_of(error)) and is_gone(error)
        return False

    def tested(self, error: AlphaloopError | None) -> bool:
        """A test ended. Whether it shows that the server has gone away."""
        if isinstance(error, ModelNotServed):
            self.circuit.retire(reason_of(error))
        elif isinstance(error, ServerBusy) and self.circuit.state != "down":
            self.circuit.passed()  # it answers
            self.places.refused(error.retry_after_s)
        elif error is not None:
            return self.circuit.test_failed(reason_of(error)) and is_gone(error)
        elif self.circuit.passed():
            self.places.start_slowly()
        return False

    def status(self) -> EndpointStatus:
        """How it is now."""
        state, places = self.circuit.state, self.places
        shown: EndpointState = state
        if state == "up" and (places.is_paused or places.is_busy):
            shown = "busy"
        elif state == "up" and not places.is_full_size:
            shown = "starting"
        return EndpointStatus(
            self.endpoint.name,
            self.endpoint.drafter,
            shown,
            places.num_in_flight,
            places.limit if self.is_open else 0,
            self._clock() - self.circuit.since_s,
            self.circuit.reason,
            self.is_kept,
            dict(self._num_failed),
            places.num_undrafted if self.endpoint.switches_drafts else None,
            self.switches or not self.endpoint.switches_drafts,
            places.num_others,
        )

    def _doubt(self, error: AlphaloopError) -> None:
        self._num_invalid = self._num_invalid + 1 if isinstance(error, ReplyInvalid) else 0
        if self._num_invalid >= _INVALID_IN_A_ROW:
            self.circuit.down(reason_of(error))
        else:
            self.circuit.doubt(reason_of(error))
