"""Two simulated inference servers, one that speculates and one that does not, and the requests of one worker."""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

import numpy as np

from alphaloop.switchback.requests import RequestFacts, Trial
from alphaloop.switchback.slices import Treatment
from benchmarks.switchback.world import Truth

TRIAL: Final = Trial("task greedy", Treatment("draft", 4))
_EPOCH: Final = datetime(2026, 1, 1, tzinfo=UTC)
_READ_S: Final = 0.05
#: Changes of the host's speed are seen at least so often.
_LONGEST_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class RequestScenario:
    """One experiment over requests, to be repeated with many seeds."""

    name: str
    is_shared: bool = False  #: both servers on one device: a pass takes what the requests of both make it take
    num_draft_tokens: int = 0  #: 0: the speculating server decodes vanilla too, the null experiment
    mean_acceptance: float = 0.7
    correlation: float = 0.2  #: of the trials of one text
    cost: float = 1.0  #: of a pass that drafts, in vanilla passes
    cost_per_request: float = 0.0  #: the same, for each request beside the first in the pass
    num_slots: int = 8  #: requests on trial at once, at most
    jobs_per_s: float = math.inf  #: arrivals in a burst; infinite: a backlog
    burst_s: float = 60.0  #: mean length of a burst, and of the quieter time behind it, with a quarter of the arrivals
    num_others: int = 0  #: requests of other tasks, always at the vanilla server
    are_others_constant: bool = True  #: or their number wanders
    spread: float = 1.2  #: of the logarithm of a text's length
    slow_every_s: float = math.inf  #: mean time between slow spells of the host
    slow_s: float = 60.0  #: mean length of one; the host is 1.5 to 4 times slower
    noise: float = 0.04


@dataclass(slots=True)
class _Text:
    name: str
    speculates: bool
    is_other: bool
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


class RequestWorld:
    """Repeatable traffic. `start` draws the arm of a request, `end` takes what is known of one that ended."""

    def __init__(
        self,
        scenario: RequestScenario,
        seed: int,
        start: Callable[[str, Trial, datetime], bool],
        end: Callable[[str, RequestFacts | None, datetime], None],
    ) -> None:
        self.scenario, self._start, self._end = scenario, start, end
        self._rng = random.Random(f"{scenario.name} {seed}")
        self._numbers = np.random.default_rng(self._rng.getrandbits(32))
        self._running: list[_Text] = []
        self._num_waiting = 0
        self._num_started = 0
        self._num_others = scenario.num_others
        self._num_own_here = self._num_others_here = 0
        self._edges, self._factors = [0.0], [1.0]
        self._is_burst, self._burst_ends_s = True, 0.0
        self._next_arrival_s = 0.0
        self.now_s = 0.0
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
            self._pass()

    def _arrive(self) -> None:
        scenario = self.scenario
        if math.isinf(scenario.jobs_per_s):
            self._num_waiting = scenario.num_slots
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
        while self._num_waiting and self._num_own_here < scenario.num_slots:
            self._num_waiting -= 1
            self._num_own_here += 1
            self._num_started += 1
            name = f"{self._num_started}"
            self._running.append(self._text(name, self._start(name, TRIAL, self.now), is_other=False))
        if not scenario.num_others:
            return
        if not scenario.are_others_constant and self._rng.random() < 0.05:
            self._num_others = min(max(self._num_others + self._rng.choice((-1, 1)), 0), 2 * scenario.num_others)
        while self._num_others_here < self._num_others:
            self._num_others_here += 1
            self._running.append(self._text("", speculates=False, is_other=True))

    def _text(self, name: str, speculates: bool, *, is_other: bool) -> _Text:
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
            speculates,
            is_other,
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
        factor = self._factor() * math.exp(self._rng.gauss(0.0, scenario.noise))
        num_at = [0, 0]
        for text in running:
            num_at[text.speculates] += 1
        cost = scenario.cost + scenario.cost_per_request * max(num_at[1] - 1, 0)
        load = [len(running)] * 2 if scenario.is_shared else num_at
        pass_s = [1e-3 * (15.0 + 1.5 * load[0]) * factor, 1e-3 * (15.0 + 1.5 * load[1]) * factor * cost]
        took = [
            text.prompt_left_s * factor
            if text.prompt_left_s
            else text.rounds_left * pass_s[text.speculates] * text.slowness
            for text in running
        ]
        step_s = min(*took, _LONGEST_S)
        if not math.isinf(scenario.jobs_per_s):
            step_s = min(step_s, max(self._next_arrival_s - self.now_s, 1e-6))
        self._go_on(step_s, took, num_at, pass_s, factor, cost)

    def _go_on(
        self, step_s: float, took: list[float], num_at: list[int], pass_s: list[float], factor: float, cost: float
    ) -> None:
        running = self._running
        num_control = sum(not (text.speculates or text.is_other) for text in running)
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
                self.truth.vanilla_s += step_s * text.tokens_per_round / cost
        self.now_s += step_s
        for text in ended:
            running.remove(text)
            if text.is_other:
                self._num_others_here -= 1
            else:
                self._num_own_here -= 1
                self._end(text.name, _facts(text), self.now)

    def _factor(self) -> float:
        scenario = self.scenario
        if math.isinf(scenario.slow_every_s):
            return 1.0
        while self._edges[-1] <= self.now_s:
            begins = self._edges[-1] + self._rng.expovariate(1 / scenario.slow_every_s)
            self._edges += [begins, begins + self._rng.expovariate(1 / scenario.slow_s)]
            self._factors += [self._rng.uniform(1.5, 4.0), 1.0]
        return self._factors[bisect_right(self._edges, self.now_s) - 1]


def _facts(text: _Text) -> RequestFacts:
    return RequestFacts(
        started_at=_EPOCH + timedelta(seconds=text.started_s),
        num_rounds=text.num_rounds,
        num_tokens=text.num_tokens,
        num_proposed=TRIAL.treatment.num_draft_tokens * text.num_rounds if text.speculates else 0,
        decode_s=text.decode_s,
        prompt_s=text.prompt_s,
        num_beside=text.beside_s / (text.decode_s + text.prompt_s),
        num_elsewhere=text.elsewhere_s / (text.decode_s + text.prompt_s),
        mean_context_tokens=text.context,
    )
