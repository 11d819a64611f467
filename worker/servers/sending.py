"""Sends requests to the endpoints of a fleet, and reports what became of each.

Everything here runs on one event loop. A request waits in line until its endpoint has room. If a server is away, the
request goes to another or waits; the engine does not learn of it, because the job is not at fault.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from typing import Final, TypeAlias

from alphaloop.engine import AnswerPiece, FailedRequest, Generation, PreparedJob, Sampling, TokenDelta
from alphaloop.errors import AlphaloopError, InvalidField, PromptTooLong, RequestRefused, ServerFailed, reason_of
from alphaloop.messages import Job, Purpose
from alphaloop.messages.capabilities import features_of, refusal_of
from alphaloop.probes import is_beside_sampled
from worker.servers.client import ServerClient
from worker.servers.counters import Counting
from worker.servers.fleet import Fleet
from worker.servers.fleet_member import InferenceServer
from worker.servers.load import Flight, RequestKind
from worker.servers.obedience import why_not_obeyed
from worker.servers.replies import Reply, SentRequest, generation_of
from worker.servers.request_body import AskedDrafts, Measured
from worker.servers.testing import Tests

log = logging.getLogger(__name__)

#: Between two looks at which endpoints are due for a test.
_LOOK_EVERY_S: Final = 0.25
#: English text with a vocabulary of 50,000; the counts of servers replace it.
_FIRST_BYTES_PER_TOKEN: Final = 4.0
#: Bytes of prompts that the first estimate weighs as much as.
_FIRST_WEIGHT: Final = 4096.0
#: Bytes that are remembered: a change of the kind of prompts is followed.
_MEMORY: Final = 1e6
#: Tokens that a chat template adds to a message, about.
_AROUND_A_MESSAGE: Final = 5

_Wish: TypeAlias = tuple[str | None, bool, frozenset[str], frozenset[str], bool, RequestKind]


@dataclass(eq=False)
class Sending:
    """The requests that are in line or on their way.

    `tell` takes what is new from the loop's thread; None: only `in_line` is.
    """

    clients: Mapping[str, ServerClient]
    fleet: Fleet
    tests: Tests
    tokens: TokenEstimate
    _: KW_ONLY
    tell: Callable[[Arrival | None], None]
    clock: Callable[[], float]

    def __post_init__(self) -> None:
        self.in_line = InLine()  #: any thread may read it
        self._line: list[ServerRequest] = []
        self._on_their_way: set[ServerRequest] = set()
        self._counting = Counting(self.clients)

    def put(self, request: ServerRequest) -> None:
        """Let it wait for its endpoint; a job that left after a failure goes on as it would have here."""
        if (standing := self.fleet.suspicion.standing(request.job_id)) is not None:
            request.avoid, request.must_be_alone = standing.avoid, standing.action == "alone"
        self._line.append(request)
        self._dispatch()

    def drop(self, request: ServerRequest) -> None:
        """Forget a request and close its connection, so that its server aborts it."""
        request.is_dropped = True
        self.fleet.suspicion.forget(request.job_id)
        if request in self._line:
            self._line.remove(request)
        # A task that is cancelled before its first step never runs: it would not give its place back.
        if request.task is not None and request.is_begun:
            request.task.cancel()

    def drop_all(self) -> None:
        """Drop every request."""
        for request in [*self._line, *self._on_their_way]:
            self.drop(request)

    async def end(self) -> None:
        """Drop all of them and end all tests; nothing is asked any more once it returns."""
        on_their_way = [request.task for request in self._on_their_way if request.task is not None]
        self.drop_all()
        await asyncio.gather(*on_their_way, self.tests.end(), return_exceptions=True)

    async def watch(self) -> None:
        """Test endpoints when they are due, and send what waits for them; runs until it is cancelled."""
        while True:
            for name in self.fleet.due_tests():
                self.tests.begin(name)
            self._dispatch()
            next_s = self.fleet.next_change_s()
            await asyncio.sleep(_LOOK_EVERY_S if next_s is None else min(_LOOK_EVERY_S, max(0.0, next_s)))

    def _dispatch(self) -> None:
        """Send what can be sent, in the order of the line. The fleet is asked once for requests that are alike."""
        waiting: list[ServerRequest] = []
        refused: set[_Wish] = set()
        for request in self._line:
            wish = (
                *(request.drafter, request.is_bound, request.avoid, request.barred),
                *(request.must_be_alone, request.kind),
            )
            name = None
            if wish not in refused:
                name = self.fleet.choose(
                    request.drafter,
                    is_bound=request.is_bound,
                    avoid=request.avoid,
                    barred=request.barred,
                    alone=request.must_be_alone,
                    kind=request.kind,
                )
            if name is None:
                refused.add(wish)
                waiting.append(request)
                continue
            flight = self.fleet.began(
                name,
                drafter=request.drafter,
                num_draft_tokens=request.num_draft_tokens,
                alone=request.must_be_alone,
                kind=request.kind,
                num_texts=request.prepared.sampling.n,
            )
            self._on_their_way.add(request)
            request.task = asyncio.create_task(self._send(request, flight))
        self._line = waiting
        if (in_line := self._find_in_line()) != self.in_line:
            self.in_line = in_line
            self.tell(None)

    def _find_in_line(self) -> InLine:
        """The waiting requests that not every endpoint may take, and those that are held for the sake of others.

        The fleet is asked once for each route.
        """
        by_route: dict[tuple[str | None, bool, frozenset[str]], set[str]] = {}
        for request in self._line:
            by_route.setdefault((request.drafter, request.is_bound, request.barred), set()).add(request.job_id)
        waiting, absent, held, num_held = set[str](), set[str](), set[str](), Counter[str]()
        for (drafter, is_bound, barred), job_ids in by_route.items():
            if is_bound or barred:
                waiting |= job_ids
                absent |= job_ids if self.fleet.is_away(drafter, is_bound=is_bound, barred=barred) else set()
            if endpoints := self.fleet.held_by(drafter, is_bound=is_bound, barred=barred):
                held |= job_ids
                num_held.update(dict.fromkeys(endpoints, len(job_ids)))
        return InLine(frozenset(waiting), frozenset(absent), frozenset(held), num_held)

    async def _send(self, request: ServerRequest, flight: Flight) -> None:
        name, sent_at = flight.endpoint, self.clock()
        outcome: Reply | AlphaloopError | None = None
        request.is_begun = True
        self._counting.began(name, request.prepared)
        try:
            try:
                if request.is_dropped:
                    raise asyncio.CancelledError
                outcome = await self._ask(request, name, flight.asked)
            except AlphaloopError as error:
                outcome = error
            except Exception as error:
                log.error("a request failed", exc_info=error, extra={"action": "request_raised", "endpoint": name})
                outcome = ServerFailed(f"asking the server failed: {reason_of(error)}")
            finally:
                ended_at, landing = self.clock(), self.fleet.ended(flight)
                due = self._counting.ended(name, outcome if isinstance(outcome, Reply) else None)
            if isinstance(outcome, AlphaloopError):
                await self._after(request, flight, outcome)
            else:
                self.fleet.members[name].succeeded()
                self.fleet.suspicion.forget(request.job_id)
                self.tokens.learn(request.prepared.job, outcome.num_prompt_tokens)
                obeyed = self._obeyed(flight, outcome)
                slice_counts = await self._counting.read(name, due) if due is not None else None
                sent = SentRequest(
                    endpoint=name,
                    drafter=self.fleet.servers[name].drafting(obeyed),
                    admitted_at=request.admitted_at,
                    sent_at=sent_at,
                    ended_at=ended_at,
                    num_beside=landing.num_beside,
                    share_s=landing.share_s,
                    # Counts of two kinds are never added up.
                    is_counted_apart=self._counting.counts(name),
                    slice_counts=slice_counts,
                    load=landing.load,
                    requested_k=None if obeyed is None else obeyed.num_draft_tokens,
                    own_drafter=self.fleet.servers[name].drafter_name,
                )
                self._report(request, generation_of(request.job_id, outcome, sent))
        except Exception as error:  # without a report the job would wait for ever
            log.error("a reply cannot be used", exc_info=error, extra={"action": "reply_raised", "endpoint": name})
            failure = ServerFailed(f"reading the reply failed: {reason_of(error)}")
            self._report(request, FailedRequest(request.job_id, failure, is_final=False))
        finally:
            self._on_their_way.discard(request)
            request.task, request.is_begun = None, False
            self._dispatch()

    def _obeyed(self, flight: Flight, reply: Reply) -> AskedDrafts | None:
        """The drafts that were asked for and given; None: those of the server's start.

        An endpoint that did not obey is asked for none any more.
        """
        name, asked = flight.endpoint, flight.asked
        reason = None if asked is None else why_not_obeyed(reply, asked.num_draft_tokens)
        if reason is None:
            return asked
        self.fleet.switches(name, False)
        log.error("endpoint %s: %s", name, reason, extra={"action": "drafts_not_switched", "endpoint": name})
        return None

    async def _ask(self, request: ServerRequest, name: str, asked: AskedDrafts | None) -> Reply:
        """The reply. A prompt that leaves less than the job's limit in the context is asked for what it leaves.

        A share of the probes has a sampled neighbour, whose text is dropped; none where the two never meet.
        """
        client, prepared = self.clients[name], request.prepared
        on_piece = partial(self._streamed, request) if client.must_stream or prepared.job.body.stream else None
        measured = request.measured if self.fleet.members[name].switches else None
        ask = partial(client.complete, prepared.job, on_piece=on_piece, asked=asked, measured=measured)
        beside: asyncio.Task[Reply] | None = None
        may_meet = not (request.must_be_alone or self.fleet.members[name].keeps_apart.is_sampled)
        if prepared.job.purpose is Purpose.PROBE and is_beside_sampled(request.job_id) and may_meet:
            sampled = replace(prepared.sampling, temperature=1.0)
            beside = asyncio.create_task(client.complete(prepared.job, sampled, asked=asked))
        try:
            return await ask(replace(prepared.sampling, max_tokens=request.max_tokens))
        except PromptTooLong:
            room = await client.room_after(prepared.job)
            if room is None or not 0 < room < request.max_tokens:
                raise
            request.max_tokens = room
            return await ask(replace(prepared.sampling, max_tokens=room))
        finally:
            if beside is not None:
                beside.cancel()
                await asyncio.gather(beside, return_exceptions=True)

    def _streamed(self, request: ServerRequest, new: AnswerPiece) -> None:
        if request.prepared.job.body.stream:
            place = new.choice, new.part, new.tool_call, new.logprobs
            self._report(request, TokenDelta(request.job_id, new.text, request.num_deltas, *place))
            request.num_deltas += 1

    async def _after(self, request: ServerRequest, flight: Flight, error: AlphaloopError) -> None:
        """What follows a failure: another endpoint, a turn alone, or the job's end."""
        name, fleet = flight.endpoint, self.fleet
        fleet.failed(name, error)
        self._dispatch()  # others need not wait for the test
        test = await self.tests.of(name) if fleet.needs_test(flight, error) else None
        verdict = fleet.judge(request.job_id, flight, error, test)
        while verdict is None:  # not known until tests of other endpoints have ended
            await self.tests.next_end()
            verdict = fleet.judge(request.job_id, flight, error, test)
        is_blamed = verdict.action == "blame"
        if is_blamed and isinstance(error, RequestRefused) and self._has_other_route(request, name):
            is_blamed = False
        extra = {"action": f"request_{verdict.action}", "endpoint": name, "job_id": request.job_id, "code": error.code}
        log.warning("a request failed: %s", error.message, extra=extra)
        if is_blamed:
            fleet.suspicion.forget(request.job_id)
            self._report(request, FailedRequest(request.job_id, verdict.error, is_final=verdict.is_final))
        elif request.num_deltas:
            self._report(request, None)
        elif not request.is_dropped:
            request.avoid, request.must_be_alone = verdict.avoid, verdict.action == "alone"
            self._line.insert(0, request)

    def _has_other_route(self, request: ServerRequest, name: str) -> bool:
        """Bar the route that refused the request; whether another is left that may take it.

        A server that drafts may refuse settings that the same server without drafts takes.
        """
        servers = self.fleet.servers
        request.barred |= {other for other, server in servers.items() if server.drafter == servers[name].drafter}
        left = [other for other in servers if other not in request.barred]
        return any(not request.is_bound or request.drafter in self.fleet.members[other].routes for other in left)

    def _report(self, request: ServerRequest, what: TokenDelta | Generation | FailedRequest | None) -> None:
        if not request.is_dropped:
            self.tell(Arrival(request, what))


@dataclass(slots=True, eq=False)
class ServerRequest:
    """One job, from its admission to its end. The event loop's thread owns it."""

    prepared: PreparedJob
    drafter: str | None  #: as decided; None: vanilla
    is_bound: bool  #: whether no other route may take it: a probe, a control, an arm of an experiment
    admitted_at: float  #: by the engine's clock, seconds
    num_draft_tokens: int | None = None  #: as decided; None: as the endpoint was started
    measured: Measured | None = None  #: what a server that measures its rounds is told
    barred: frozenset[str] = frozenset()  #: endpoints that cannot follow its settings
    is_adapted: bool = False  #: it asks for an adapter of the model
    max_tokens: int = 0  #: of the text; lowered where the server's context leaves less
    num_deltas: int = 0  #: pieces of text that are out
    avoid: frozenset[str] = frozenset()  #: endpoints on which it failed
    must_be_alone: bool = False  #: nothing else may run where it runs, because servers died with it
    task: asyncio.Task[None] | None = None
    is_begun: bool = False  #: whether `task` has taken its first step
    is_dropped: bool = False

    @property
    def job_id(self) -> str:
        """The job's."""
        return self.prepared.job.job_id

    @property
    def kind(self) -> RequestKind:
        """By what an endpoint may have to keep it from others."""
        return RequestKind(self.prepared.sampling.temperature > 0, self.is_adapted)


@dataclass(frozen=True, slots=True)
class Arrival:
    """What came of a request: a piece of its text, its end, or the failure of its job.

    None: its server went away when a part of the text was out, so that the job is decoded again.
    """

    request: ServerRequest
    what: TokenDelta | Generation | FailedRequest | None


@dataclass(frozen=True, slots=True)
class InLine:
    """Requests that wait while the engine may have room for others, and why; by job_id.

    `waiting`: for endpoints of their own, because others may not take them.
    """

    waiting: frozenset[str] = frozenset()
    absent: frozenset[str] = frozenset()  #: those of them whose endpoints are all away
    held: frozenset[str] = frozenset()  #: requests that an endpoint would take if it kept nothing for others
    #: Of these, by endpoint; one that several would take counts at each.
    num_held: Mapping[str, int] = field(default_factory=dict)


class TokenEstimate:
    """Tokens of a prompt by its bytes, learned from what servers count. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_bytes, self._num_tokens = _FIRST_WEIGHT, _FIRST_WEIGHT / _FIRST_BYTES_PER_TOKEN

    def of(self, job: Job) -> int:
        """At least 1."""
        with self._lock:
            rate = self._num_tokens / self._num_bytes
        return max(1, round(rate * num_prompt_bytes(job)) + _AROUND_A_MESSAGE * len(job.body.messages or ()))

    def learn(self, job: Job, num_tokens: int) -> None:
        """Learn that a server counted `num_tokens`."""
        added = max(0, num_tokens - _AROUND_A_MESSAGE * len(job.body.messages or ()))
        num_bytes = num_prompt_bytes(job)
        with self._lock:
            fade = min(1.0, _MEMORY / (self._num_bytes + num_bytes))
            self._num_bytes = fade * self._num_bytes + num_bytes
            self._num_tokens = fade * self._num_tokens + added


def num_prompt_bytes(job: Job) -> int:
    """Bytes of the prompt's text in UTF-8."""
    texts: Iterable[str] = (
        (job.body.prompt,) if job.body.prompt is not None else (message.text for message in job.body.messages or ())
    )
    return sum(len(text.encode()) for text in texts)


def prepare(
    job: Job, sampling: Sampling, servers: Sequence[InferenceServer], *, limit: int, tokens: TokenEstimate
) -> PreparedJob:
    """The job as an engine of servers takes it; `limit` is the longest context of the servers, in tokens.

    Raises InvalidField for what none of the servers can do. How long the prompt is only the servers know,
    so they refuse one that is too long.
    """
    if job.body.prompt == "":
        raise InvalidField("expected a prompt of at least one token, found none", field="body.prompt")
    features = features_of(job.body, sampling)
    if (refusal := refusal_of(job.body, features, [server.served for server in servers])) is not None:
        raise refusal
    fitting = replace(sampling, max_tokens=min(sampling.max_tokens, limit - 1))
    return PreparedJob(job, (), fitting, num_estimated_tokens=tokens.of(job), features=features)
