"""Two simulated servers and the workers that ask them: what is simulated, what a worker sees of the load, and a run."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final, Literal, TypeAlias

import numpy as np

from alphaloop.engine import ServerLoad
from alphaloop.experiment.observe import RequestFacts, Treatment, TrialGroup
from benchmarks.switchback.world import Host, Spells, Truth
from worker.servers.fleet import Fleet
from worker.servers.fleet_member import InferenceServer
from worker.servers.http import endpoint_of
from worker.servers.load import Flight

_NAMES: Final = ("vanilla", "speculative")  #: by whether a server speculates
_MOST: Final = 100_000  #: requests at a server: never the limit here


#: What a worker counts as load: the requests of everybody at every moment; its own alone; or its own at every moment,
#: with those of others as the servers tell them now and then.
KnownLoad: TypeAlias = Literal["all", "own", "read"]


@dataclass(frozen=True, slots=True)
class RequestScenario:
    """One experiment over requests, to be repeated with many seeds."""

    name: str
    is_shared: bool = False  #: both servers on one device: a pass takes what the requests of both make it take
    num_draft_tokens: int = 0  #: 0: the speculating server decodes vanilla too, the null experiment
    mean_acceptance: float = 0.7
    correlation: float = 0.2  #: of the trials of one text
    cost: float = 1.0  #: of a pass that drafts, in vanilla passes
    num_workers: int = 1  #: that ask both servers, and switch by themselves
    known_load: KnownLoad = "all"
    read_every_s: float = 0.5  #: between two answers of a server about its load, where they are read
    read_delay_s: float = 0.05  #: the number in such an answer is so old when it comes
    num_slots: int = 8  #: requests on trial at once, at most, of each worker
    jobs_per_s: float = math.inf  #: arrivals in a burst; infinite: a backlog
    burst_s: float = 60.0  #: mean length of a burst, and of the quieter time behind it, with a quarter of the arrivals
    num_others: int = 0  #: requests of other tasks, always at the vanilla server, of no worker's own; they wander
    spread: float = 1.2  #: of the logarithm of a text's length
    slow_every_s: float = math.inf  #: mean time between slow spells of the host
    slow_s: float = 60.0  #: mean length of one; the host is 1.5 to 4 times slower
    noise: float = 0.04


class SeenLoad:
    """Counts a worker's requests, and reads now and then how many each server has.

    `every_s` infinite: it never reads, and knows of its own requests alone. A number read is `delay_s` old.
    """

    def __init__(self, clock: Callable[[], float], rng: random.Random, every_s: float, delay_s: float) -> None:
        endpoint = endpoint_of("http://simulated", "vllm", "m")
        self._fleet = Fleet(
            [InferenceServer(name, endpoint, None, _MOST, 4096) for name in _NAMES], clock=clock, rng=random.Random(0)
        )
        self._clock, self._rng, self._every_s, self._delay_s = clock, rng, every_s, delay_s
        self._asks_at_s = math.inf if math.isinf(every_s) else rng.uniform(0.0, every_s)
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
                places.reported(present, (own + places.num_in_flight) / 2)
            self._answered_at_s = math.inf
        if now_s >= self._asks_at_s:
            ours = [self._fleet.members[name].places.num_in_flight for name in _NAMES]
            self._answer = tuple(zip(num_at, ours, strict=True))
            self._answered_at_s = now_s + self._delay_s
            self._asks_at_s = now_s + max(self._every_s * self._rng.uniform(0.9, 1.1), self._delay_s)

    def began(self, speculates: bool) -> Flight:
        """A request of the worker goes to a server."""
        return self._fleet.began(_NAMES[speculates])

    def ended(self, flight: Flight) -> ServerLoad:
        """It ended: the load meanwhile, the means."""
        return self._fleet.ended(flight).load


TRIAL: Final = TrialGroup("task greedy", Treatment("draft", 4))
_EPOCH: Final = datetime(2026, 1, 1, tzinfo=UTC)
_READ_S: Final = 0.05
#: Changes of the host's speed are seen at least so often.
_LONGEST_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Experiment:
    """One worker's: it draws the arm of a request when that starts, and takes what is known of one that ended."""

    start: Callable[[str, TrialGroup, datetime], bool]
    end: Callable[[str, RequestFacts | None, datetime], None]


@dataclass(slots=True)
class _Text:
    name: str
    worker: int | None  #: whose it is; None: of another task
    speculates: bool
    num_tokens: int  #: behind the first
    num_rounds: int
    context: float
    started_s: float
    rounds_left: float
    slowness: float  #: of its passes, by its context
    tokens_per_round: float
    prompt_left_s: float = _READ_S
    prompt_s: float = 0.0
    decode_s: float = 0.0
    beside_s: float = 0.0  #: seconds times requests at its server
    elsewhere_s: float = 0.0  #: the same, at the other one
    flight: Flight | None = None  #: as its worker counts it


class RequestWorld:
    """Repeatable traffic of as many workers as there are experiments."""

    def __init__(self, scenario: RequestScenario, seed: int, experiments: Sequence[Experiment]) -> None:
        self.scenario, self._experiments = scenario, experiments
        self._rng = random.Random(f"{scenario.name} {seed}")
        self._numbers = np.random.default_rng(self._rng.getrandbits(32))
        self._running: list[_Text] = []
        self._num_waiting = 0
        self._num_started = 0
        self._num_others = scenario.num_others
        self._num_here, self._num_others_here = [0] * len(experiments), 0
        self._spells = Spells(Host(slow_every_s=scenario.slow_every_s, slow_s=scenario.slow_s), self._rng)
        self._is_burst, self._burst_ends_s = True, 0.0
        self._next_arrival_s = 0.0
        self.now_s = 0.0
        every_s = scenario.read_every_s if scenario.known_load == "read" else math.inf
        self._seen = [
            SeenLoad(lambda: self.now_s, random.Random(f"reading {seed} {one}"), every_s, scenario.read_delay_s)
            for one in range(len(experiments))
        ]
        self.truth = Truth()
        self.control_s = 0.0  #: seconds times requests
        self.trial_s = 0.0

    @property
    def now(self) -> datetime:
        """The simulated moment."""
        return _EPOCH + timedelta(seconds=self.now_s)

    def run(self, num_requests: int) -> None:
        """Until so many requests on trial have started."""
        while self._num_started < num_requests:
            self._arrive()
            self._admit()
            for seen in self._seen:
                if seen.next_s <= self.now_s:
                    seen.look(self._num_at())
            self._pass()

    def _arrive(self) -> None:
        scenario = self.scenario
        if math.isinf(scenario.jobs_per_s):
            self._num_waiting = scenario.num_slots * len(self._num_here)
            return
        while self._next_arrival_s <= self.now_s:
            self._num_waiting += 1
            if self._next_arrival_s >= self._burst_ends_s:
                self._is_burst = not self._is_burst
                self._burst_ends_s = self._next_arrival_s + self._rng.expovariate(1 / scenario.burst_s)
            rate = scenario.jobs_per_s * (1.0 if self._is_burst else 0.25)
            self._next_arrival_s += self._rng.expovariate(rate)

    def _admit(self) -> None:
        scenario = self.scenario
        while self._num_waiting and min(self._num_here) < scenario.num_slots:
            worker = self._num_here.index(min(self._num_here))
            self._num_waiting -= 1
            self._num_here[worker] += 1
            self._num_started += 1
            name = f"{self._num_started}"
            text = self._text(name, worker, self._experiments[worker].start(name, TRIAL, self.now))
            text.flight = self._seen[worker].began(text.speculates)
            self._running.append(text)
        if not scenario.num_others:
            return
        if self._rng.random() < 0.05:
            self._num_others = min(max(self._num_others + self._rng.choice((-1, 1)), 0), 2 * scenario.num_others)
        while self._num_others_here < self._num_others:
            self._num_others_here += 1
            self._running.append(self._text("", None, speculates=False))

    def _text(self, name: str, worker: int | None, speculates: bool) -> _Text:
        scenario, rng = self.scenario, self._rng
        num_tokens = min(max(round(rng.lognormvariate(math.log(80), scenario.spread)), 2), 4000) - 1
        num_rounds = num_tokens
        if speculates and scenario.num_draft_tokens:
            spread = 1 / scenario.correlation - 1
            acceptance = rng.betavariate(spread * scenario.mean_acceptance, spread * (1 - scenario.mean_acceptance))
            yields = np.minimum(
                self._numbers.geometric(max(1 - acceptance, 1e-9), num_tokens), scenario.num_draft_tokens + 1
            )
            num_rounds = int(np.searchsorted(np.cumsum(yields), num_tokens)) + 1
        context = rng.uniform(50, 500) + num_tokens / 2
        return _Text(
            name,
            worker,
            speculates,
            num_tokens,
            num_rounds,
            context,
            self.now_s,
            float(num_rounds),
            1 + context / 8000,
            num_tokens / num_rounds,
        )

    def _pass(self) -> None:
        """Go on to the next event: a prompt read, a text ended, an arrival, a change of the host."""
        scenario, running = self.scenario, self._running
        if not running:
            self.now_s = self._next_arrival_s
            return
        num_at = self._num_at()
        factor = self._spells.factor(self.now_s) * math.exp(self._rng.gauss(0.0, scenario.noise))
        load = [len(running)] * 2 if scenario.is_shared else num_at
        pass_s = [1e-3 * (15.0 + 1.5 * load[0]) * factor, 1e-3 * (15.0 + 1.5 * load[1]) * factor * scenario.cost]
        took = [
            text.prompt_left_s * factor
            if text.prompt_left_s
            else text.rounds_left * pass_s[text.speculates] * text.slowness
            for text in running
        ]
        step_s = min(*took, _LONGEST_S)
        if not math.isinf(scenario.jobs_per_s):
            step_s = min(step_s, max(self._next_arrival_s - self.now_s, 1e-6))
        step_s = min(step_s, max(min(seen.next_s for seen in self._seen) - self.now_s, 1e-6))
        self._go_on(step_s, took, num_at, pass_s, factor)

    def _go_on(self, step_s: float, took: list[float], num_at: list[int], pass_s: list[float], factor: float) -> None:
        running = self._running
        num_control = sum(not text.speculates and text.worker is not None for text in running)
        self.control_s += step_s * num_control
        self.trial_s += step_s * (num_at[1] + num_control)
        ended: list[_Text] = []
        for text, left_s in zip(running, took, strict=True):
            text.beside_s += step_s * num_at[text.speculates]
            text.elsewhere_s += step_s * num_at[not text.speculates]
            if text.prompt_left_s:
                text.prompt_s += step_s
                text.prompt_left_s = 0.0 if left_s <= step_s else text.prompt_left_s - step_s / factor
                if text.speculates and not num_control:
                    self.truth.prompt_s += step_s
                continue
            text.decode_s += step_s
            text.rounds_left -= step_s / (pass_s[text.speculates] * text.slowness)
            if left_s <= step_s:
                ended.append(text)
            if text.speculates and not num_control:
                # The time of the same tokens at the vanilla server, in the same moment and at the same load.
                self.truth.treatment_s += step_s
                self.truth.vanilla_s += step_s * text.tokens_per_round / self.scenario.cost
        self.now_s += step_s
        for text in ended:
            running.remove(text)
            if text.worker is None or text.flight is None:
                self._num_others_here -= 1
                continue
            self._num_here[text.worker] -= 1
            seen = self._seen[text.worker].ended(text.flight)
            known = self.scenario.known_load
            facts = _facts(text, _true_load(text) if known == "all" else seen)
            self._experiments[text.worker].end(text.name, facts if seen.is_whole or known != "read" else None, self.now)

    def _num_at(self) -> list[int]:
        """Requests at the vanilla server, and at the other one."""
        num_at = [0, 0]
        for text in self._running:
            num_at[text.speculates] += 1
        return num_at


def _true_load(text: _Text) -> ServerLoad:
    life_s = text.decode_s + text.prompt_s
    return ServerLoad(text.beside_s / life_s, text.elsewhere_s / life_s, is_whole=True)


def _facts(text: _Text, load: ServerLoad) -> RequestFacts:
    return RequestFacts(
        started_at=_EPOCH + timedelta(seconds=text.started_s),
        num_rounds=text.num_rounds,
        num_tokens=text.num_tokens,
        num_proposed=TRIAL.treatment.num_draft_tokens * text.num_rounds if text.speculates else 0,
        decode_s=text.decode_s,
        prompt_s=text.prompt_s,
        num_beside=load.num_beside,
        num_elsewhere=load.num_elsewhere,
        mean_context_tokens=text.context,
    )
