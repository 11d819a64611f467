"""Two simulated servers, and workers that measure the speed-up by whole requests: what a run concludes, and the truth.

The true speed-up is known, because the simulation computes what each moment of a treated request would have taken at
the vanilla server under the same load.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final, Literal, TypeAlias

import numpy as np

from alphaloop.engine import ServerLoad
from alphaloop.experiment.assign import RequestDesign, RequestSchedule
from alphaloop.experiment.estimate import measured_speedup
from alphaloop.experiment.observe import RequestFacts, Slice, Treatment, TrialGroup
from worker.servers.fleet import Fleet
from worker.servers.fleet_member import InferenceServer
from worker.servers.http import endpoint_of
from worker.servers.load import Flight, Present

_NAMES: Final = ("vanilla", "speculative")  #: by whether a server speculates
_MOST: Final = 100_000  #: requests at a server: never the limit here
_NUM_SLOTS: Final = 8  #: requests at once of each worker, which has a backlog
#: A server is asked for its load so often, and its answer is so old when it comes.
_READ_EVERY_S: Final = 0.5
_READ_DELAY_S: Final = 0.05
_MEAN_ACCEPTANCE: Final = 0.7
_CORRELATION: Final = 0.2  #: between the trials of one text
_NOISE: Final = 0.04  #: standard deviation of the logarithm of a pass's time

#: What a worker counts as load: all requests at every moment; its own alone; or its own at every moment, with those of
#: others as the servers report them now and then.
KnownLoad: TypeAlias = Literal["all", "own", "read"]


@dataclass(frozen=True, slots=True)
class RequestScenario:
    """One experiment over requests, to be repeated with many seeds."""

    name: str
    is_shared: bool = False  #: both servers on one device: a pass takes what the requests of both make it take
    num_draft_tokens: int = 0  #: 0: the speculating server decodes vanilla too, the null experiment
    cost: float = 1.0  #: of a pass that drafts, in vanilla passes
    num_workers: int = 1  #: that ask both servers, and switch by themselves
    known_load: KnownLoad = "all"


@dataclass(slots=True)
class Truth:
    """Sequence-seconds of treated requests, and what the same tokens would have taken at the vanilla server."""

    vanilla_s: float = 0.0
    treatment_s: float = 0.0
    prompt_s: float = 0.0


class SeenLoad:
    """Counts a worker's requests, and, if `is_read`, asks the servers now and then how many each of them has."""

    def __init__(self, clock: Callable[[], float], rng: random.Random, *, is_read: bool) -> None:
        endpoint = endpoint_of("http://simulated", "vllm", "m")
        self._fleet = Fleet(
            [InferenceServer(name, endpoint, None, _MOST, 4096) for name in _NAMES], clock=clock, rng=random.Random(0)
        )
        self._clock, self._rng = clock, rng
        self._asks_at_s = rng.uniform(0.0, _READ_EVERY_S) if is_read else math.inf
        self._answered_at_s = math.inf
        self._answer: tuple[tuple[int, int], ...] = ()  # present and our own, by server, when it was asked

    @property
    def next_s(self) -> float:
        """When it asks the servers, or their answer comes."""
        return min(self._asks_at_s, self._answered_at_s)

    def look(self, num_at: Sequence[int]) -> None:
        """Ask, or take the answer, if it is time; `num_at` are the requests at each server now."""
        now_s = self._clock()
        if now_s >= self._answered_at_s:
            for name, (present, own) in zip(_NAMES, self._answer, strict=True):
                places = self._fleet.members[name].places
                places.reported(Present(present, 0), (own + places.num_in_flight) / 2)
            self._answered_at_s = math.inf
        if now_s >= self._asks_at_s:
            ours = [self._fleet.members[name].places.num_in_flight for name in _NAMES]
            self._answer = tuple(zip(num_at, ours, strict=True))
            self._answered_at_s = now_s + _READ_DELAY_S
            self._asks_at_s = now_s + _READ_EVERY_S * self._rng.uniform(0.9, 1.1)

    def began(self, speculates: bool) -> Flight:
        """A request of the worker goes to a server."""
        return self._fleet.began(_NAMES[speculates])

    def ended(self, flight: Flight) -> ServerLoad:
        """It ended: the mean load meanwhile."""
        return self._fleet.ended(flight).load


TRIAL: Final = TrialGroup("task greedy", Treatment("draft", 4))
_EPOCH: Final = datetime(2026, 1, 1, tzinfo=UTC)
_PREFILL_S: Final = 0.05
_LONGEST_STEP_S: Final = 1.0


@dataclass(slots=True)
class _Request:
    name: str
    worker: int
    flight: Flight  #: as its worker counts it
    speculates: bool
    num_tokens: int  #: after the first
    num_rounds: int
    context: float
    started_s: float
    rounds_left: float
    prompt_left_s: float = _PREFILL_S
    prompt_s: float = 0.0
    decode_s: float = 0.0
    beside_s: float = 0.0  #: seconds times requests at its server
    elsewhere_s: float = 0.0  #: the same, at the other one

    @property
    def slowness(self) -> float:
        """Its passes over those of an empty context."""
        return 1 + self.context / 8000


class RequestWorld:
    """Repeatable traffic of as many workers as there are schedules."""

    def __init__(self, scenario: RequestScenario, seed: int, schedules: Sequence[RequestSchedule]) -> None:
        self.scenario, self._schedules = scenario, schedules
        self._rng = random.Random(f"{scenario.name} {seed}")
        self._numbers = np.random.default_rng(self._rng.getrandbits(32))
        self._running: list[_Request] = []
        self._num_started = 0
        self._num_of_worker = [0] * len(schedules)
        self.now_s = 0.0
        self._seen = [
            SeenLoad(
                lambda: self.now_s, random.Random(f"reading {seed} {number}"), is_read=scenario.known_load == "read"
            )
            for number in range(len(schedules))
        ]
        self.slices: list[Slice] = []
        self.truth = Truth()
        self.control_s = 0.0  #: seconds times requests
        self.trial_s = 0.0

    @property
    def now(self) -> datetime:
        """The simulated moment."""
        return _EPOCH + timedelta(seconds=self.now_s)

    def run(self, num_requests: int) -> None:
        """Until `num_requests` have started."""
        while self._num_started < num_requests:
            while min(self._num_of_worker) < _NUM_SLOTS:
                self._start(self._num_of_worker.index(min(self._num_of_worker)))
            for seen in self._seen:
                if seen.next_s <= self.now_s:
                    seen.look(self._num_at())
            self._step()

    def _start(self, worker: int) -> None:
        scenario, rng = self.scenario, self._rng
        self._num_of_worker[worker] += 1
        self._num_started += 1
        name = f"{self._num_started}"
        speculates = self._schedules[worker].start(name, TRIAL, self.now)
        num_tokens = min(max(round(rng.lognormvariate(math.log(80), 1.2)), 2), 4000) - 1
        num_rounds = num_tokens
        if speculates and scenario.num_draft_tokens:
            spread = 1 / _CORRELATION - 1
            acceptance = rng.betavariate(spread * _MEAN_ACCEPTANCE, spread * (1 - _MEAN_ACCEPTANCE))
            yields = np.minimum(
                self._numbers.geometric(max(1 - acceptance, 1e-9), num_tokens), scenario.num_draft_tokens + 1
            )
            num_rounds = int(np.searchsorted(np.cumsum(yields), num_tokens)) + 1
        self._running.append(
            _Request(
                name,
                worker,
                flight=self._seen[worker].began(speculates),
                speculates=speculates,
                num_tokens=num_tokens,
                num_rounds=num_rounds,
                context=rng.uniform(50, 500) + num_tokens / 2,
                started_s=self.now_s,
                rounds_left=float(num_rounds),
            )
        )

    def _step(self) -> None:
        """Go on to the next event: a prompt is read, a text ends, a server is asked or answers."""
        scenario, running, num_at = self.scenario, self._running, self._num_at()
        factor = math.exp(self._rng.gauss(0.0, _NOISE))
        load = [len(running)] * 2 if scenario.is_shared else num_at
        pass_s = [1e-3 * (15.0 + 1.5 * load[0]) * factor, 1e-3 * (15.0 + 1.5 * load[1]) * factor * scenario.cost]
        left_s = [
            request.prompt_left_s * factor
            if request.prompt_left_s
            else request.rounds_left * pass_s[request.speculates] * request.slowness
            for request in running
        ]
        step_s = min(*left_s, _LONGEST_STEP_S)
        step_s = min(step_s, max(min(seen.next_s for seen in self._seen) - self.now_s, 1e-6))
        self._go_on(step_s, left_s, pass_s, factor)

    def _go_on(self, step_s: float, left_s: list[float], pass_s: list[float], factor: float) -> None:
        running, num_at = self._running, self._num_at()
        num_control = num_at[0]
        self.control_s += step_s * num_control
        self.trial_s += step_s * len(running)
        ended: list[_Request] = []
        for request, request_left_s in zip(running, left_s, strict=True):
            request.beside_s += step_s * num_at[request.speculates]
            request.elsewhere_s += step_s * num_at[not request.speculates]
            is_counted = request.speculates and not num_control
            if request.prompt_left_s:
                request.prompt_s += step_s
                request.prompt_left_s = 0.0 if request_left_s <= step_s else request.prompt_left_s - step_s / factor
                self.truth.prompt_s += step_s * is_counted
                continue
            request.decode_s += step_s
            request.rounds_left -= step_s / (pass_s[request.speculates] * request.slowness)
            if request_left_s <= step_s:
                ended.append(request)
            if is_counted:
                # The time of the same tokens at the vanilla server, in the same moment and at the same load.
                self.truth.treatment_s += step_s
                self.truth.vanilla_s += step_s * request.num_tokens / request.num_rounds / self.scenario.cost
        self.now_s += step_s
        for request in ended:
            self._end(request)

    def _end(self, request: _Request) -> None:
        self._running.remove(request)
        self._num_of_worker[request.worker] -= 1
        seen = self._seen[request.worker].ended(request.flight)
        is_known = self.scenario.known_load != "read" or seen.is_whole
        load = _true_load(request) if self.scenario.known_load == "all" else seen
        schedule = self._schedules[request.worker]
        schedule.end(request.name, _facts(request, load) if is_known else None, self.now)
        self.slices += schedule.take()

    def _num_at(self) -> list[int]:
        """Requests at the vanilla server, and at the other one."""
        num_speculating = sum(request.speculates for request in self._running)
        return [len(self._running) - num_speculating, num_speculating]


def _true_load(request: _Request) -> ServerLoad:
    life_s = request.decode_s + request.prompt_s
    return ServerLoad(request.beside_s / life_s, request.elsewhere_s / life_s, is_whole=True)


def _facts(request: _Request, load: ServerLoad) -> RequestFacts:
    return RequestFacts(
        started_at=_EPOCH + timedelta(seconds=request.started_s),
        num_rounds=request.num_rounds,
        num_tokens=request.num_tokens,
        num_proposed=TRIAL.treatment.num_draft_tokens * request.num_rounds if request.speculates else 0,
        decode_s=request.decode_s,
        prompt_s=request.prompt_s,
        num_beside=load.num_beside,
        num_elsewhere=load.num_elsewhere,
        mean_context_tokens=request.context,
    )


@dataclass(frozen=True, slots=True)
class Concluded:
    """What the experiment concluded in one run, and the truth."""

    low: float  #: 0 and infinity where nothing was concluded
    ratio: float
    high: float
    control_share: float  #: of the device's time, as it came out
    truth: Truth


def play(scenario: RequestScenario, seed: int, design: RequestDesign, num_requests: int) -> Concluded:
    """One run of `num_requests` requests of all workers."""
    schedules = [
        RequestSchedule(design, random.Random(f"{seed} {number}" if number else seed))
        for number in range(scenario.num_workers)
    ]
    world = RequestWorld(scenario, seed, schedules)
    world.run(num_requests)
    left = [part for schedule in schedules for part in schedule.close()]
    speedup = measured_speedup((*world.slices, *left)).speedup
    low, ratio, high = (speedup.low, speedup.mean, speedup.high) if speedup else (0.0, math.nan, math.inf)
    return Concluded(low, ratio, high, world.control_s / world.trial_s, world.truth)
