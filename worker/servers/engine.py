"""The engine that sends jobs to inference servers: `worker.engine.Engine` over the endpoints of a fleet.

A decision names a drafter or none. The endpoint of that route with most room takes the job, or one of another route
where that one is full or away, because the distribution of a text does not depend on what drafts. A request stays where
it began.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final

from alphaloop.deciding.goodput import DrafterState
from alphaloop.deciding.policy import Decision, Reason
from alphaloop.errors import DecodeFailed, EngineSick, InvalidField
from alphaloop.messages import Job
from alphaloop.server_identity import ServerIdentity
from worker.engine import (
    CacheMemory,
    EngineIdentity,
    FailedRequest,
    Generation,
    Load,
    PreparedJob,
    Sampling,
    SamplingDefaults,
    Step,
    TokenDelta,
)
from worker.servers.arrivals import Arrivals
from worker.servers.connecting import client_of
from worker.servers.fleet import Fleet
from worker.servers.fleet_member import EndpointStatus, SuspectCounts
from worker.servers.load_watch import LoadWatch
from worker.servers.loop_thread import LoopThread
from worker.servers.preparing import TokenEstimate, prepare, refusal_of
from worker.servers.request import Failed, Finished, InLine, Interrupted, Request, Streamed
from worker.servers.sending import Sending
from worker.servers.server import Server, drafters_of
from worker.servers.testing import Tests
from worker.servers.timing import Timing

#: A step waits so long for something to happen, unless it is woken.
_WAIT_S: Final = 0.2
#: Jobs that are decoded for these reasons mean the route of their decision and no other. Jobs that explore do not: new
#: tasks would wait in line for one route while the other is empty.
_BOUND: Final = frozenset({Reason.PROBE, Reason.CONTROL, Reason.FORCED})


class ServerEngine:
    """`worker.engine.Engine` over inference servers. One thread owns it; any may call `prepare` and `wake`."""

    def __init__(
        self,
        identity: EngineIdentity,
        servers: Sequence[Server],
        fleet: Fleet,
        *,
        known: Mapping[str, ServerIdentity] | None = None,
        num_slots: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
        thread: LoopThread | None = None,
    ) -> None:
        """`known`: what each endpoint is; one that comes back as another server is out.

        `num_slots`: most jobs at once; all that the endpoints take unless given. `thread`: where endpoints inside this
        process were started; the engine ends it.
        """
        self._identity, self._servers, self._fleet, self._clock = identity, tuple(servers), fleet, clock
        self._tokens = TokenEstimate()
        self._running: dict[str, Request] = {}
        self._arrivals = Arrivals()
        self._in_line = InLine()
        most = sum(server.max_requests for server in servers)
        self._num_slots = most if num_slots is None else min(num_slots, most)
        self._thread = thread or LoopThread("servers")
        self._clients = {
            server.name: client_of(server.endpoint, context_length=server.context_length) for server in servers
        }
        self._sending = Sending(
            self._clients,
            {server.name: server.drafter for server in servers},
            fleet,
            Tests(self._clients, {server.name: server for server in servers}, fleet, known or {}),
            self._tokens,
            tell=self._arrivals.put,
            tell_line=self._take_line,
            clock=clock,
        )
        self._loads = LoadWatch(self._servers, self._clients, fleet.load, clock=clock)
        self._timing = Timing(self._servers, self._clients, self._thread)
        self._thread.wait_for(self._open())

    async def _open(self) -> None:
        for client in self._clients.values():
            await client.__aenter__()
        self._thread.keep(self._sending.watch())
        self._thread.keep(self._loads.run())

    @property
    def identity(self) -> EngineIdentity:
        """What decodes."""
        return self._identity

    @property
    def drafters(self) -> tuple[DrafterState, ...]:
        """What drafts at the endpoints, each once."""
        return drafters_of(self._servers, self._fleet.obeys)

    @property
    def sampling_defaults(self) -> SamplingDefaults:
        """Every request has every setting, so what a server's model suggests changes nothing."""
        return SamplingDefaults()

    @property
    def can_redraft(self) -> bool:
        """A request stays where it began."""
        return False

    def prepare(self, job: Job, sampling: Sampling) -> PreparedJob:
        """Check what can be checked here. Raises InvalidField where no server can follow the job's settings."""
        if job.body.model not in (None, self._identity.target):
            raise InvalidField(f"expected {self._identity.target!r}, the model served here", field="body.model")
        return prepare(job, sampling, self._servers, limit=self._identity.context_length, tokens=self._tokens)

    def has_room(self, prepared: PreparedJob) -> bool:
        """Whether an endpoint could take another request."""
        return self.load().num_free > 0

    def admit(self, prepared: PreparedJob, decision: Decision) -> None:
        """Send the job, or let it wait for its endpoint. Raises DecodeFailed for a drafter that no endpoint has."""
        if not self.load().num_free:
            raise DecodeFailed(
                f"no room for another of {self._num_slots} requests", hint="ask has_room() before admit()"
            )
        if decision.drafter is not None and decision.drafter not in {one.name for one in self.drafters}:
            raise DecodeFailed(f"no endpoint has the drafter {decision.drafter!r}")
        sampling = prepared.sampling
        barred = {server.name for server in self._servers if refusal_of(server, sampling) is not None}
        of_route = {server.name for server in self._servers if decision.drafter in server.routes}
        request = Request(
            prepared,
            decision.drafter,
            decision.reason in _BOUND and not of_route <= barred,
            self._clock(),
            decision.num_draft_tokens if decision.drafter is not None else None,
            frozenset(barred),
            sampling.max_tokens,
        )
        self._running[request.job_id] = request
        self._thread.call(partial(self._sending.put, request))

    def redraft(self, job_id: str, drafter: str | None, num_draft_tokens: int) -> None:
        """A request stays where it began."""

    def step(self) -> Step:
        """What came from the servers since the last step; waits a little if nothing did.

        Raises EngineSick where an endpoint inside this process cannot decode any more, and where all endpoints came
        back as other servers.
        """
        for client in self._clients.values():
            if client.sick is not None:
                raise EngineSick(client.sick)
        if (told := self._fleet.all_retired()) is not None:
            raise EngineSick(f"no inference server is left: {told}", hint="the worker's next start takes them in anew")
        began = self._clock()
        num_decoding = self.load().num_decoding
        deltas: list[TokenDelta] = []
        finished: list[Generation] = []
        failed: list[FailedRequest] = []
        interrupted: list[str] = []
        for event in self._arrivals.take(_WAIT_S):
            if self._running.get(event.request.job_id) is not event.request:
                continue  # cancelled meanwhile
            match event:
                case Streamed(delta=delta):
                    deltas.append(delta)
                    continue
                case Finished(generation=generation):
                    finished.append(generation)
                case Failed(failure=failure):
                    failed.append(failure)
                case Interrupted():
                    interrupted.append(event.request.job_id)
            del self._running[event.request.job_id]
        return Step(
            tuple(finished),
            tuple(deltas),
            num_decoding,
            1,
            self._clock() - began,
            tokens_by_job={one.job_id: one.counts.num_tokens for one in finished},
            proposed_by_job={one.job_id: one.served.num_proposed for one in finished if one.served},
            failed=tuple(failed),
            interrupted=tuple(interrupted),
        )

    def wake(self) -> None:
        """End the wait of `step`."""
        self._arrivals.wake()

    def cancel(self, job_id: str) -> bool:
        """Close the request's connection, so that its server aborts it; False if it is not here."""
        request = self._running.pop(job_id, None)
        if request is None:
            return False
        self._thread.call(partial(self._sending.drop, request))
        return True

    def abandon(self) -> None:
        """Close the connections of all requests."""
        self._running.clear()
        self._thread.call(self._sending.drop_all)

    def close(self) -> None:
        """Close all connections and end the event loop."""
        self._running.clear()
        self._thread.wait_for(self._close())
        self._thread.close()

    async def _close(self) -> None:
        await self._thread.end_kept()  # it asks the clients
        await self._sending.end()
        for client in self._clients.values():
            await client.__aexit__(None, None, None)

    def load(self) -> Load:
        """How full the engine is. A request that waits for its route alone leaves its slot to one that does not."""
        running, in_line = self._running, self._in_line
        waiting, absent = (
            frozenset(job_id for job_id in one if job_id in running) for one in (in_line.waiting, in_line.absent)
        )
        return Load(len(running), self._num_slots, waiting, absent)

    def memory(self) -> CacheMemory | None:
        """The servers have it."""
        return None

    def unserved(self, jobs: Sequence[PreparedJob]) -> Mapping[str, str]:
        """Drafters none of whose endpoints can follow the settings of any of the jobs."""
        found: dict[str, str] = {}
        for drafter in self.drafters:
            theirs = [server for server in self._servers if server.drafter_name == drafter.name]
            refusals = [refusal_of(server, job.sampling) for server in theirs for job in jobs]
            if refusals and all(refusals):
                found[drafter.name] = next(refusal.message for refusal in refusals if refusal)
        return found

    def measure_round_ms(self, drafter: str | None, batch: int, width: int, context: int, num_samples: int) -> float:
        """Median milliseconds of a round of `batch` requests at one endpoint; a drafter's round has its pass in it."""
        return self._timing.round_ms(drafter, batch, width, context, num_samples)

    def measure_prefill_ms(self, drafter: str | None, num_tokens: int, num_samples: int) -> float:
        """Median milliseconds to the first token of a prompt that the server has never seen."""
        return self._timing.prefill_ms(drafter, num_tokens, num_samples)

    def unavailable(self) -> str | None:
        """Why no job can be sent, in words; None where one can."""
        return self._fleet.unavailable()

    def endpoints(self) -> Sequence[EndpointStatus]:
        """How each endpoint is."""
        return self._fleet.statuses()

    def suspects(self) -> SuspectCounts:
        """Jobs that have to run alone at a server."""
        return self._fleet.suspects()

    def _take_line(self, in_line: InLine) -> None:
        """Another number of slots is free now, so `step` ends."""
        self._in_line = in_line
        self.wake()
