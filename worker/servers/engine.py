"""The engine that sends jobs to inference servers: `alphaloop.engine.Engine` over the endpoints of a fleet.

A decision names a drafter or none. The endpoint of that route with most room takes the job, or one of another route
where that one is full or away, because the distribution of a text does not depend on what drafts. A request stays where
it began. Whatever waits for servers runs on one event loop, on a thread of its own.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

from alphaloop.deciding.decision import Decision, Reason
from alphaloop.deciding.goodput import DrafterState
from alphaloop.engine import (
    EndpointStatus,
    Engine,
    EngineIdentity,
    FailedRequest,
    Generation,
    Load,
    PreparedJob,
    Sampling,
    Step,
    SuspectCounts,
    TokenDelta,
)
from alphaloop.errors import (
    AlphaloopError,
    ConfigError,
    DecodeFailed,
    EngineSick,
    InvalidField,
    ModelNotServed,
    ServerError,
)
from alphaloop.experiment.observe import Treatment, TrialGroup
from alphaloop.experiment.rounds import subject_of
from alphaloop.measurements import UnansweredAlarm
from alphaloop.messages import Job, Purpose
from alphaloop.messages.capabilities import Feature, refusal_of
from alphaloop.server_identity import SERVERS, ServerIdentity
from alphaloop.settings.endpoints import EndpointSettings
from alphaloop.settings.models import ModelSettings
from alphaloop.store.workers import ServerIdentityStore
from worker.servers.client import ServerClient
from worker.servers.counters import LoadWatch
from worker.servers.features import ask_lacking
from worker.servers.fleet import Fleet
from worker.servers.fleet_member import InferenceServer
from worker.servers.identity import NamedServers, ask_identity, name_servers
from worker.servers.load import NEITHER, RequestKind
from worker.servers.obedience import Obedience, obedience_of
from worker.servers.request_body import Measured
from worker.servers.sending import Arrival, Sending, ServerRequest, TokenEstimate, prepare
from worker.servers.step_timing import PART_OF_PASS_MS, StepTiming, reports_steps
from worker.servers.testing import Tests, Timing

log = logging.getLogger(__name__)

#: Where no server says how long its context is.
_UNKNOWN_CONTEXT: Final = 1 << 20
_HASH_CHARS: Final = 12
_MOST_NAME_CHARS: Final = 200
#: A step waits so long for something to happen, unless it is woken.
_WAIT_S: Final = 0.2
#: Jobs that are decoded for these reasons mean the route of their decision and no other. Jobs that explore do not: new
#: tasks would wait in line for one route while the other is empty.
_BOUND: Final = frozenset({Reason.PROBE, Reason.CONTROL, Reason.FORCED})
_END_S: Final = 5.0  #: wait for the thread's end

Result = TypeVar("Result")


def open_server_engine(
    models: ModelSettings, *, identities: ServerIdentityStore | None = None, control_share: float | None = None
) -> ServerEngine:
    """Ask every endpoint what it is, and build the engine over those that answer; the others are tested again later.

    `identities` has what endpoints were in earlier lives; without it every life is the first. `control_share`: of the
    time of servers that measure their own rounds. Raises ConfigError where
    an endpoint does not serve what the settings say, or another model than the others, ServerError where none answers,
    and StoreError.
    """
    thread = LoopThread("servers")
    try:
        known, missing = thread.wait_for(_ask_all(models.endpoints))
        if not known:
            name, error = next(iter(missing.items()))
            raise _named(name, models.endpoints[name], error)
        named = name_servers(known, identities)
        models, started = thread.wait_for(_started(models, known))
        identity = _identity(models, named)
        servers = [
            _server(models, name, known.get(name), identity, started.get(name, _Started()))
            for name, settings in models.endpoints.items()
            if name in known or settings.model is not None
        ]
        fleet = Fleet(servers, clock=time.monotonic, rng=random.Random())
        for name, error in missing.items():
            log.warning("%s: %s", name, error.message, extra={"action": "endpoint_away", "endpoint": name})
            if name in {server.name for server in servers}:
                fleet.failed(name, error)
        return ServerEngine(identity, fleet, known=known, thread=thread, control_share=control_share)
    except BaseException:
        thread.close()
        raise


class ServerEngine(Engine):
    """An engine over inference servers. One thread owns it; any may call `prepare` and `wake`."""

    def __init__(
        self,
        identity: EngineIdentity,
        fleet: Fleet,
        *,
        known: dict[str, ServerIdentity],
        thread: LoopThread,
        control_share: float | None = None,
    ) -> None:
        """`known`: what each endpoint is; one that comes back as another server is out.

        `thread`: runs the event loop; the engine ends it.
        """
        self._identity, self._servers, self._fleet = identity, tuple(fleet.servers.values()), fleet
        self._control_share = control_share
        self._times_steps = len(self._servers) == 1 and self._servers[0].times_steps
        self._tokens = TokenEstimate()
        self._running: dict[str, ServerRequest] = {}
        self._arrivals = SimpleQueue[Arrival | None]()  #: None ends the wait of `step`, as another slot may be free
        self._alarms: tuple[UnansweredAlarm, ...] = ()
        self._num_slots = sum(server.most_ours for server in self._servers)
        self._thread = thread
        self._clients = {
            server.name: ServerClient(server.endpoint, context_length=server.context_length, adapters=server.adapters)
            for server in self._servers
        }
        self._tests = tests = Tests(self._clients, fleet, known)
        self._sending = Sending(
            self._clients,
            fleet,
            tests,
            self._tokens,
            tell=self._arrivals.put,
            clock=time.perf_counter,
        )
        self._loads = LoadWatch(self._clients, fleet, clock=time.perf_counter)
        self._timing = Timing(self._servers, self._clients)
        self._thread.wait_for(self._open())

    async def _open(self) -> None:
        self._watching = asyncio.gather(self._sending.watch(), self._loads.run())

    @property
    def identity(self) -> EngineIdentity:
        """What decodes."""
        return self._identity

    @property
    def drafters(self) -> tuple[DrafterState, ...]:
        """What drafts at the endpoints, each once."""
        return self._fleet.drafters()

    @property
    def features(self) -> frozenset[Feature]:
        """What a job may ask for at some endpoint, as they were started."""
        return frozenset().union(*(server.served.features for server in self._servers))

    def prepare(self, job: Job, sampling: Sampling) -> PreparedJob:
        """Check what can be checked here. Raises InvalidField where no server can follow the job's settings."""
        if not self._identity.decodes(job.body.model):
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
        if decision.drafter is not None and decision.drafter not in {drafter.name for drafter in self.drafters}:
            raise DecodeFailed(f"no endpoint has the drafter {decision.drafter!r}")
        model = prepared.job.body.model
        if model not in self._identity.adapters:
            model = None  # the target, under its name or none
        barred = {server.name for server in self._servers if not prepared.features <= server.served.features}
        barred |= {server.name for server in self._servers if model is not None and model not in server.adapters}
        of_route = {server.name for server in self._servers if decision.drafter in server.routes}
        request = ServerRequest(
            prepared,
            drafter=decision.drafter,
            is_bound=decision.reason in _BOUND and not of_route <= barred,
            is_adapted=model is not None,
            admitted_at=time.perf_counter(),
            num_draft_tokens=decision.num_draft_tokens if decision.drafter is not None else None,
            measured=self._measured(prepared, decision),
            barred=frozenset(barred),
            max_tokens=prepared.sampling.max_tokens,
        )
        self._running[request.job_id] = request
        self._thread.call(partial(self._sending.put, request))

    def _measured(self, prepared: PreparedJob, decision: Decision) -> Measured | None:
        job = prepared.job
        if not self.measures_itself:
            return None
        drafter, k = decision.drafter, decision.num_draft_tokens
        if not (drafter and k and decision.was_free and job.purpose is Purpose.TRAFFIC):
            return Measured(self._control_share)
        trial = TrialGroup(subject_of(job.task, prepared.sampling.bucket), Treatment(drafter, k))
        return Measured(self._control_share, trial, decision.expected)

    def step(self) -> Step:
        """What came from the servers since the last step; waits a little if nothing did.

        Raises EngineSick where all endpoints came back as other servers.
        """
        if (reasons := self._fleet.all_retired()) is not None:
            raise EngineSick(
                f"no inference server is left: {reasons}", hint="the worker's next start takes them in anew"
            )
        began = time.perf_counter()
        num_decoding = self.load().num_decoding
        deltas: list[TokenDelta] = []
        finished: list[Generation] = []
        failed: list[FailedRequest] = []
        interrupted: list[str] = []
        for arrival in self._arrived():
            request, what = arrival.request, arrival.what
            if self._running.get(request.job_id) is not request:
                continue  # cancelled meanwhile
            match what:
                case TokenDelta():
                    deltas.append(what)
                    continue
                case Generation():
                    finished.append(what)
                case FailedRequest():
                    failed.append(what)
                case None:
                    interrupted.append(request.job_id)
            del self._running[request.job_id]
        return Step(
            tuple(finished),
            tuple(deltas),
            num_decoding,
            1,
            time.perf_counter() - began,
            tokens_by_job={text.job_id: text.counts.num_tokens for text in finished},
            proposed_by_job={text.job_id: text.served.num_proposed for text in finished if text.served},
            failed=tuple(failed),
            interrupted=tuple(interrupted),
        )

    def wake(self) -> None:
        """End the wait of `step`, or of the next one."""
        self._arrivals.put(None)

    def cancel(self, job_id: str) -> bool:
        """Close the request's connection, so that its server aborts it; False if it is not here."""
        if (request := self._running.pop(job_id, None)) is None:
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
        self._watching.cancel()  # it asks the clients
        await asyncio.gather(self._watching, return_exceptions=True)
        await self._sending.end()
        for client in self._clients.values():
            await client.__aexit__()

    def load(self) -> Load:
        """How full the engine is. A request that waits for its route alone leaves its slot to one that does not."""
        running, in_line = self._running, self._sending.in_line
        waiting, absent, held = (
            frozenset(filter(running.__contains__, job_ids))
            for job_ids in (in_line.waiting, in_line.absent, in_line.held)
        )
        return Load(len(running), self._num_slots, waiting, absent, held)

    def unserved(self, jobs: Sequence[PreparedJob]) -> Mapping[str, str]:
        """Drafters none of whose endpoints can follow the settings of any of the jobs, or that wait for a probe."""
        revisions = {drafter.name: drafter.revision for drafter in self.drafters}
        reasons = {
            alarm.subject.drafter: alarm.what_waits
            for alarm in (self._alarms if jobs else ())
            if revisions.get(alarm.subject.drafter) == alarm.subject.draft_revision
        }
        for drafter in self.drafters:
            theirs = [server for server in self._servers if drafter.name in {own.name for own in server.drafters}]
            refusals = [refusal_of(job.job.body, job.features, [server.served]) for server in theirs for job in jobs]
            if refusals and all(refusals):
                reasons[drafter.name] = next(refusal.message for refusal in refusals if refusal)
        return reasons

    def measure_round_ms(self, drafter: str | None, batch: int, width: int, context: int, num_samples: int) -> float:
        """Milliseconds of a round of `batch` requests at one endpoint.

        A drafter's round has its pass in it, but where the times of steps are known (`times_steps`).
        """
        if self.times_steps:
            (server,) = self._servers
            if drafter is not None and drafter != server.drafter_name:
                return PART_OF_PASS_MS  # look-up, whose drafts the scheduler writes
            timing = StepTiming(self._clients[server.name])
            try:
                return self._thread.wait_for(timing.round_ms(drafter, batch, width, context))
            except DecodeFailed:
                self._times_steps = False
                raise
        return self._thread.wait_for(self._timing.round_ms(drafter, batch, width, context, num_samples))

    def measure_prefill_ms(self, drafter: str | None, num_tokens: int, num_samples: int) -> float:
        """Median milliseconds to the first token of a prompt that the server has never seen."""
        if not num_tokens:
            return PART_OF_PASS_MS  # a drafter that adds nothing to it
        return self._thread.wait_for(self._timing.prefill_ms(drafter, num_tokens, num_samples))

    @property
    def measures_itself(self) -> bool:
        """Whether a server drafts as each request asks: its scheduler class measures its rounds."""
        return any(server.endpoint.switches_drafts for server in self._servers)

    @property
    def times_steps(self) -> bool:
        """Whether the only server reports the times of its steps, so that costs are known as on a device."""
        return self._times_steps

    def unavailable(self) -> str | None:
        """Why no job can be sent, in words; None where one can."""
        return self._fleet.unavailable()

    def endpoints(self) -> Sequence[EndpointStatus]:
        """How each endpoint is."""
        return self._fleet.statuses(self._sending.in_line.num_held)

    def suspects(self) -> SuspectCounts:
        """Jobs that have to run alone at a server."""
        return self._fleet.suspects()

    def doubt(self, alarms: Sequence[UnansweredAlarm]) -> None:
        """Use no drafter of `alarms` but for probes; ask the servers of new ones again who they are."""
        new = {(alarm.subject.drafter, alarm.subject.draft_revision) for alarm in set(alarms).difference(self._alarms)}
        self._alarms = tuple(alarms)
        for server in self._servers:
            if server.drafter is not None and (server.drafter.name, server.drafter.revision) in new:
                self._thread.call(partial(self._tests.identify, server.name))

    def _arrived(self) -> list[Arrival]:
        """What came, in its order; waits a little if nothing did."""
        arrivals: list[Arrival] = []
        with suppress(Empty):
            arrival = self._arrivals.get(timeout=_WAIT_S)
            while True:
                if arrival is not None:
                    arrivals.append(arrival)
                arrival = self._arrivals.get_nowait()
        return arrivals


async def _ask_all(
    endpoints: Mapping[str, EndpointSettings],
) -> tuple[dict[str, ServerIdentity], dict[str, ServerError]]:
    """What each endpoint said, and why the others did not. Raises ConfigError."""
    answers = await asyncio.gather(*map(ask_identity, endpoints.values()), return_exceptions=True)
    known: dict[str, ServerIdentity] = {}
    missing: dict[str, ServerError] = {}
    for name, answer in zip(endpoints, answers, strict=True):
        if isinstance(answer, ServerIdentity):
            known[name] = answer
        elif isinstance(answer, ConfigError | ModelNotServed):
            raise ConfigError(f"models.endpoints.{name}: {answer.message}", hint=answer.hint) from answer
        elif isinstance(answer, ServerError):
            missing[name] = answer
        else:
            raise answer
    return known, missing


@dataclass(frozen=True, slots=True)
class _Started:
    """What follows from how a server was started."""

    switches_drafts: bool = False  #: set, and not refuted by test texts
    keeps_apart: RequestKind = NEITHER  #: beside which kinds of requests test texts changed
    times_steps: bool = False  #: whether it reports the times of its steps
    lacking: frozenset[Feature] = frozenset()  #: features of its kind that it does not serve


async def _started(
    models: ModelSettings, known: Mapping[str, ServerIdentity]
) -> tuple[ModelSettings, dict[str, _Started]]:
    """The settings with endpoints that cannot switch drafts as ones that always draft, and how each was started.

    Each that answers is asked. Raises ServerError.
    """

    async def ask(name: str) -> _Started:
        settings = models.endpoints[name]
        endpoint = settings.model_copy(update={"model": known[name].model})
        adapters = frozenset(known[name].adapters)
        async with ServerClient(endpoint, context_length=known[name].context_length, adapters=adapters) as client:
            is_tested = settings.drafter is not None or adapters
            obedience = await _obedience_of(name, client) if is_tested else Obedience()
            try:
                lacking = await ask_lacking(client)
            except ServerError as error:
                raise _named(name, settings, error) from error
            switches_drafts = settings.switches_drafts and obedience.fault is None
            times_steps = switches_drafts and await _times_steps(name, client)
        if lacking:
            extra = {"action": "features_lacking", "endpoint": name}
            reasons = "; ".join(f"{feature.value}: {why}" for feature, why in sorted(lacking.items()))
            log.info("endpoint %s does not serve all of its kind: %s", name, reasons, extra=extra)
        return _Started(switches_drafts, obedience.keeps_apart, times_steps, frozenset(lacking))

    started = dict(zip(known, await asyncio.gather(*map(ask, known)), strict=True))
    endpoints = {
        name: settings.model_copy(update={"switches_drafts": started[name].switches_drafts})
        if name in started
        else settings
        for name, settings in models.endpoints.items()
    }
    return models.model_copy(update={"endpoints": endpoints}), started


async def _times_steps(name: str, client: ServerClient) -> bool:
    try:
        return await reports_steps(client)
    except AlphaloopError as error:
        extra = {"action": "not_tested", "endpoint": name}
        log.warning("endpoint %s: its times could not be asked: %s", name, error.message, extra=extra)
        return False


async def _obedience_of(name: str, client: ServerClient) -> Obedience:
    """What test texts show, and the log of it. A server that cannot be tested switches no drafts."""
    may_switch = client.endpoint.switches_drafts
    try:
        obedience = await obedience_of(client, may_switch=may_switch)
    except AlphaloopError as error:
        why = f"it could not be asked: {error.message}"
        log.warning("endpoint %s: test texts failed, %s", name, why, extra={"action": "not_tested", "endpoint": name})
        obedience = Obedience(fault=why)
    if may_switch and obedience.fault is not None:
        effect = "all its requests are drafted for, until the worker starts again"
        extra = {"action": "drafts_not_switched", "endpoint": name}
        log.error("endpoint %s cannot switch drafts: %s; %s", name, obedience.fault, effect, extra=extra)
    for warning in obedience.warnings(name):
        log.error("%s", warning, extra={"action": "greedy_texts_spoiled", "endpoint": name})
    return obedience


def _named(name: str, endpoint: EndpointSettings, error: ServerError) -> ServerError:
    error.message = f"models.endpoints.{name} at {endpoint.url}: {error.message}"
    return error


def _server(
    models: ModelSettings,
    name: str,
    known: ServerIdentity | None,
    identity: EngineIdentity,
    started: _Started,
) -> InferenceServer:
    settings = models.endpoints[name]
    endpoint = settings.model_copy(update={"model": known.model}) if known else settings
    length = (known.context_length if known else None) or identity.context_length
    server = known.server if known else settings.kind
    revision = f"{server}-{settings.counted}" if settings.counted else server

    def drafting(drafter: str | None) -> DrafterState | None:
        if drafter is None:
            return None
        own = revision
        if models.target.engine == "vllm":  # its settings are known, and what it proposes follows from them
            own = f"{revision}-{models.drafters[drafter].in_vllm().fingerprint}"
        state = models.drafter_state(drafter, own)
        # The server's drafter reads every prompt, whether a request wants drafts or not: they cost nothing more.
        return replace(state, max_prompt_tokens=0) if started.times_steps else state

    return InferenceServer(
        name=name,
        endpoint=endpoint,
        drafter=drafting(settings.drafter),
        lookup=drafting(settings.lookup_drafter if settings.switches_drafts else None),
        max_requests=settings.max_requests,
        context_length=length,
        adapters=frozenset(known.adapters) if known else frozenset(),
        lacking=started.lacking,
        keeps_apart=started.keeps_apart,
        times_steps=started.times_steps,
    )


def _identity(models: ModelSettings, named: NamedServers) -> EngineIdentity:
    """The identity of all endpoints together: they serve one model."""
    target, endpoints = models.target, models.endpoints
    if target.engine == "vllm":  # its port is another one after each start of the worker
        hosts, addresses = {socket.gethostname()}, f"{socket.gethostname()} {target.source} {target.vllm!r}"
    else:
        hosts = {urlsplit(endpoint.url).netloc for endpoint in endpoints.values()}
        addresses = "\n".join(sorted(f"{name} {endpoint.url}" for name, endpoint in endpoints.items()))
    return EngineIdentity(
        engine=named.engine[:_MOST_NAME_CHARS],
        target=target.name,
        target_revision=target.revision or named.target_revision,
        dtype=target.dtype,
        device=f"{SERVERS}{hashlib.sha256(addresses.encode()).hexdigest()[:_HASH_CHARS]}",
        context_length=named.context_length or _UNKNOWN_CONTEXT,
        host=",".join(sorted(hosts))[:_MOST_NAME_CHARS],
        adapters=named.adapters,
    )


class LoopThread:
    """Runs from its making until `close`. Any thread may call it."""

    def __init__(self, name: str) -> None:
        self._loop, self._end = asyncio.new_event_loop(), asyncio.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, act: Callable[[], object]) -> None:
        """Have the loop call `act` soon; calls keep their order. Nothing happens once the thread has ended."""
        try:
            self._loop.call_soon_threadsafe(act)
        except RuntimeError:  # the loop is closed
            if not self._loop.is_closed():
                raise

    def wait_for(self, work: Coroutine[Any, Any, Result], timeout_s: float | None = None) -> Result:
        """The result of a coroutine that the loop runs, or what it raised."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout_s)

    def close(self) -> None:
        """Cancel all that runs and end the thread."""
        self.call(self._end.set)
        self._thread.join(_END_S)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._end.wait())
