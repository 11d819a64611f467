"""One endpoint of a fleet: what it is, whether it may be sent requests, and how many.

`Circuit` says whether:

    up ──a failure that may be the server's──▶ doubted ──test passed──▶ up, at the limit it had
    up, doubted ──away──▶ down ──test passed──▶ up, with a slow start
    any ──another model or other settings──▶ retired, until the worker starts again

One test at a time. That of a doubted endpoint is due at once, those of one that is down after 1 s, 2 s, 4 s … 30 s.
`Member` is the endpoint with its circuit and its places.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import Final, Literal

from alphaloop.deciding.goodput import DrafterState
from alphaloop.engine import EndpointState, EndpointStatus, HeldRequests
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
from alphaloop.messages.capabilities import EngineFeatures, Feature, served_by
from alphaloop.settings.endpoints import EndpointSettings
from worker.servers.load import NEITHER, Places, RequestKind
from worker.servers.request_body import AskedDrafts

_State = Literal["up", "doubted", "down", "retired"]

_FIRST_WAIT_S: Final = 1.0  #: before the next test of an endpoint that is down
_LONGEST_WAIT_S: Final = 30.0
#: Failures that may be the server's fault or the job's: a test shows which.
_DOUBTFUL: Final = (ServerSilent, ServerFailed, ReplyCut, ReplyInvalid)
#: A server that asks for a longer quiet is away for those who wait for it.
_LONG_PAUSE_S: Final = 5.0
#: Failures that no server can help.
JOBS_FAULT: Final = (MessageError, RequestRefused)
_INVALID_IN_A_ROW: Final = 3


def is_gone(error: AlphaloopError) -> bool:
    """Whether a test with this error shows that nothing decodes there any more: a server that refuses it is alive."""
    gone = isinstance(error, ServerUnavailable | ServerFailed | ReplyCut)
    return gone and not isinstance(error, ServerBusy | ServerLoginRefused)


@dataclass(frozen=True, slots=True)
class InferenceServer:
    """An endpoint of the fleet. Those with the same drafter are replicas of one route."""

    name: str
    endpoint: EndpointSettings
    drafter: DrafterState | None  #: what drafts there, unless a request asks for something else
    max_requests: int  #: at once, at least 1; with a reserve, of all its clients together
    context_length: int
    adapters: frozenset[str] = frozenset()  #: of its model, that jobs may ask for
    lacking: frozenset[Feature] = frozenset()  #: of what its kind serves, what it does not as it was started
    keeps_apart: RequestKind = NEITHER  #: by which parts of their kinds it decodes requests in turn
    times_steps: bool = False  #: whether it reports the times of its steps
    lookup: DrafterState | None = None  #: alphaloop's look-up, where it drafts beside `drafter` for requests that ask

    @property
    def drafter_name(self) -> str | None:
        """The route of a request that asks for nothing."""
        return self.drafter.name if self.drafter else None

    @property
    def drafters(self) -> tuple[DrafterState, ...]:
        """All that drafts there."""
        return tuple(drafter for drafter in (self.drafter, self.lookup) if drafter is not None)

    @property
    def as_started(self) -> DrafterState | None:
        """What drafts for a request that asks for nothing, with the k of the server's start."""
        if self.drafter is None:
            return None
        k = self.endpoint.num_draft_tokens or self.drafter.max_draft_tokens
        return replace(self.drafter, max_draft_tokens=k, least_draft_tokens=k)

    @property
    def served(self) -> EngineFeatures:
        """What it can do with a job."""
        of_kind = served_by(self.endpoint.kind, drafts=self.drafter is not None)
        if not self.lacking:
            return of_kind
        return EngineFeatures(f"{of_kind.whose} as it was started", of_kind.features - self.lacking)

    @property
    def routes(self) -> tuple[str | None, ...]:
        """Drafters that a request may have there; None: vanilla. Where each may ask for its k, it may ask for none."""
        if not self.endpoint.switches_drafts:
            return (self.drafter_name,)
        return (*(drafter.name for drafter in self.drafters), None)

    @property
    def most_ours(self) -> int:
        """Requests of ours at once, at most: the others of `max_requests` stay free for other clients."""
        return self.max_requests - self.endpoint.num_kept

    def asked(self, drafter: str | None, num_draft_tokens: int | None) -> AskedDrafts | None:
        """The drafts that a request of this route has to ask for here; None: it asks for none, so as it was started.

        A request of another endpoint's route has this server's own drafter.
        """
        if (own := self.drafter) is None or not self.endpoint.switches_drafts:
            return None
        if drafter is None:
            return AskedDrafts(0)
        wanted = self.lookup if self.lookup is not None and drafter == self.lookup.name else own
        k = wanted.max_draft_tokens
        if drafter == wanted.name and num_draft_tokens is not None:
            k = min(k, num_draft_tokens)
        if wanted is own and k == self.endpoint.num_draft_tokens:
            return None
        return AskedDrafts(k, is_lookup=wanted is not own)

    def drafting(self, asked: AskedDrafts | None) -> DrafterState | None:
        """What drafts for a request that asked for this, and got it; None: nothing."""
        if asked is None:
            return self.as_started
        if not asked.num_draft_tokens:
            return None
        return self.lookup if asked.is_lookup else self.drafter


class Member:
    """An endpoint's health and load. One thread uses it."""

    def __init__(self, server: InferenceServer, *, clock: Callable[[], float], rng: Random) -> None:
        self.server = server
        self.circuit = Circuit(clock=clock, rng=rng)
        self.places = Places(server.max_requests, num_kept=server.endpoint.num_kept, clock=clock, rng=rng)
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
        self.switches = server.endpoint.switches_drafts
        #: By which parts of their kinds requests take turns, because test texts changed beside such a request.
        self.keeps_apart = server.keeps_apart
        self._next_kind: RequestKind | None = None  # of the requests that wait for those of another kind to end

    @property
    def routes(self) -> tuple[str | None, ...]:
        """Drafters that a request may have here now; None: vanilla."""
        return self.server.routes if self.switches else (self.server.drafter_name,)

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
        return self.is_open and self.places.has_room

    @property
    def is_held(self) -> bool:
        """Whether only others' requests, or a load that is not known, keep it from taking one more now."""
        return self.is_open and self.places.held is not None

    @property
    def load(self) -> float:
        """Requests in flight relative to what it may take now."""
        return self.places.num_in_flight / max(1, self.places.limit)

    @property
    def is_kept(self) -> bool:
        """Whether it is kept for a request that has to run alone, or has one."""
        return self.has_suspect or self._clock() < self.reserved_until_s

    def may_join(self, kind: RequestKind) -> bool:
        """Whether a request may run beside those in flight."""
        if not any(self.keeps_apart) or not self.places.num_in_flight:
            return True
        own = kind.only(self.keeps_apart)
        return own == self.places.kind.only(self.keeps_apart) and self._next_kind in (None, own)

    def wait_for_turn(self, kind: RequestKind) -> None:
        """A request waits for those of another kind: no new one of that kind joins them."""
        own = kind.only(self.keeps_apart)
        if self._next_kind is None and own != self.places.kind.only(self.keeps_apart):
            self._next_kind = own

    def began(self) -> None:
        """A request goes there now; the first one of an empty endpoint ends the waiting for a turn."""
        if not self.places.num_in_flight:
            self._next_kind = None

    def succeeded(self) -> None:
        """A request was finished."""
        self._num_invalid = 0
        self.circuit.worked()
        self.places.worked()

    def failed(self, error: AlphaloopError) -> bool:
        """A request failed. Whether the server has gone away by it."""
        self._num_failed[error.code] += 1
        if isinstance(error, JOBS_FAULT):
            self.succeeded()
        elif isinstance(error, ModelNotServed):
            self.circuit.retire(reason_of(error))
        elif isinstance(error, ServerBusy):
            if self.places.refused(error.retry_after_s):
                self.circuit.down(reason_of(error))
        elif isinstance(error, _DOUBTFUL):
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

    def status(self, num_held: int = 0) -> EndpointStatus:
        """How it is now; `num_held` requests wait while it takes nothing, for the sake of others."""
        state, places = self.circuit.state, self.places
        shown: EndpointState = state
        if state == "up" and (places.is_paused or places.is_busy):
            shown = "busy"
        elif state == "up" and not places.is_full_size:
            shown = "starting"
        may_switch = self.server.endpoint.switches_drafts
        return EndpointStatus(
            name=self.server.name,
            drafter=self.server.drafter_name,
            state=shown,
            num_in_flight=places.num_in_flight,
            limit=places.limit if self.is_open else 0,
            since_s=self._clock() - self.circuit.since_s,
            reason=self.circuit.reason,
            num_failed=dict(self._num_failed),
            num_undrafted=places.num_undrafted if may_switch else None,
            is_obeying=self.switches or not may_switch,
            num_others=places.num_others,
            num_kept=places.num_kept,
            held=HeldRequests(num_held, reason) if num_held and (reason := places.held) is not None else None,
        )

    def _doubt(self, error: AlphaloopError) -> None:
        self._num_invalid = self._num_invalid + 1 if isinstance(error, ReplyInvalid) else 0
        if self._num_invalid >= _INVALID_IN_A_ROW:
            self.circuit.down(reason_of(error))
        else:
            self.circuit.doubt(reason_of(error))


class Circuit:
    """The health of one endpoint. One thread uses it; times are seconds on the clock."""

    def __init__(self, *, clock: Callable[[], float], rng: Random) -> None:
        self._clock, self._rng = clock, rng
        self.state: _State = "up"
        self.reason: str | None = None  #: why it is not up
        self.since_s = clock()  #: when the state began
        self.well_s: float | None = None  #: when the server last finished a request or passed a test
        self.up_again_s: float | None = None  #: when it last came back from being down
        self.test_began_s = -math.inf  #: the last test
        self._is_tested = self._is_asked_for = False
        self._num_failed_tests = 0
        self._test_s = 0.0

    @property
    def test_due_s(self) -> float | None:
        """When the next test is due; None where none is."""
        is_due = self.state in ("doubted", "down") or (self.state == "up" and self._is_asked_for)
        return self._test_s if is_due and not self._is_tested else None

    @property
    def is_test_coming(self) -> bool:
        """Whether a test of an endpoint that is not down is under way or due."""
        return self.state == "doubted" or (self.state == "up" and (self._is_asked_for or self._is_tested))

    def is_test_due(self) -> bool:
        """Whether a test shall begin now."""
        return self.test_due_s is not None and self.test_due_s <= self._clock()

    def ask_for_test(self) -> None:
        """Let an endpoint that is not down be tested at once, or again after the test that is under way."""
        if self.state in ("up", "doubted") and not self._is_asked_for:
            self._is_asked_for, self._test_s = True, self._clock()

    def test_begins(self) -> None:
        """A test is under way until `passed`, `test_failed` or `retire`."""
        self._is_tested, self._is_asked_for = True, False
        self.test_began_s = self._clock()

    def worked(self) -> None:
        """The server finished a request. A doubt stays until the test, which is newer."""
        self.well_s = self._clock()

    def doubt(self, reason: str) -> None:
        """Something failed that may be the server's fault."""
        if self.state == "up":
            self._become("doubted", reason)
            self._test_s = self._clock()

    def down(self, reason: str) -> bool:
        """The server is away. Whether that is news; a test that is under way goes on."""
        if self.state not in ("up", "doubted"):
            return False
        self._become("down", reason)
        self._is_asked_for = False
        self._num_failed_tests = 0
        self._next_test()
        return True

    def test_failed(self, reason: str) -> bool:
        """A test failed: the server is away, or still is. Whether that is news."""
        self._is_tested = False
        if self.state != "down":
            return self.down(reason)
        self.reason = reason
        self._num_failed_tests += 1
        self._next_test()
        return False

    def passed(self) -> bool:
        """A test passed. Whether the endpoint was down, so that it starts slowly."""
        self._is_tested = False
        if self.state == "retired":
            return False
        self.well_s = self._clock()
        was_down = self.state == "down"
        if was_down:
            self.up_again_s = self.well_s
        if self.state != "up":
            self._become("up", None)
        return was_down

    def retire(self, reason: str) -> None:
        """Another server stands there now: nothing goes there until the worker starts again."""
        self._is_tested = False
        if self.state != "retired":
            self._become("retired", reason)

    def _next_test(self) -> None:
        wait_s = min(_FIRST_WAIT_S * 2 ** min(self._num_failed_tests, 10), _LONGEST_WAIT_S)
        self._test_s = self._clock() + wait_s * self._rng.uniform(0.5, 1.0)

    def _become(self, state: _State, reason: str | None) -> None:
        self.state, self.reason, self.since_s = state, reason, self._clock()
