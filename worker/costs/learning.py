"""The costs that a worker knows, and goes on learning: of its own device from rounds, of servers from requests.

`LiveCosts` starts from what was calibrated. Each round corrects it, and corrections of drafters that are not used fade.

`RequestCosts` learns from answers, because a round inside a server cannot be timed. Each request shows how long its
rounds took on average, with how many others in flight, and at what context. A regression over these times (laws.py) is
the law of each route, the vanilla one and each drafter's. Its values at a few loads and contexts are the points of the
cost table. What was calibrated or stored before counts as times that were taken before all others. Where requests
choose their draft length, the law has a slope over it, and the route has points for the shortest and the longest draft.

With nothing known of it, a route takes `ASSUMED_RATIO` of what vanilla takes, within a factor of 2.2: so it is tried
where that may pay, and its first requests show. Routes without new times grow doubtful, as drafters do on a device
(`alphaloop.costs.faded`).
"""

from __future__ import annotations

import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import product
from typing import Final, NamedTuple

from alphaloop.costs import (
    BASE_CONTEXT,
    CostKind,
    CostPoint,
    CostTable,
    LogEstimate,
    faded,
    num_half_lives,
    with_shared_weights,
)
from alphaloop.deciding.goodput import DrafterState
from alphaloop.engine import Engine, Generation, ProposalShape, Served, Step, StepTimes
from alphaloop.errors import DecodeFailed, StoreError
from alphaloop.settings import WorkerSettings
from alphaloop.store.decision_inputs import CostStore, CostSubject
from worker.background import Write
from worker.costs.calibration import FAR_CONTEXT, Shape, calibrate, calibrate_servers, is_timed_by_step, plan, timed_by
from worker.costs.correction import Correction, Moment
from worker.costs.laws import FITTED_EVERY_S, Route, RouteLaws, Time, UsualShape, loads_up_to

log = logging.getLogger(__name__)

_HALF_LIFE_ROUNDS: Final = 32  #: rounds after which a lasting change of speed is followed
_SAVE_EVERY_S: Final = 60.0  #: between two times at which corrected costs are stored

#: A logarithm that moved by less is not worth a write.
_NEWS: Final = math.log(1.01)
#: A standard deviation that moved by less neither.
_DOUBT_NEWS: Final = 0.02
#: Most seconds until corrections that rest on new rounds are stored, though they did not move: after a restart they are
#: as doubtful as they are old.
_STORED_EVERY_S: Final = 600.0
#: A table has the doubt of the moment when it was made, and is made again after this time.
_TABLE_LASTS_S: Final = 10.0
#: Contexts are rounded to multiples of this, because a context changes a pass's time little and grows every round.
_CONTEXT_STEP: Final = 64
#: Most steps that wait to be observed. Observed together between two decisions, a step takes a quarter of the time
#: that it takes right after a pass, because a pass fills the processor's caches with weights.
_MOST_WAITING: Final = 64
#: Shapes whose calibrated time is remembered.
_MOST_KNOWN: Final = 10_000
#: Time of a round with drafts over a vanilla one, with nothing known of that server: the pass is wider, and something
#: drafts.
ASSUMED_RATIO: Final = 1.25
#: Requests of a half-life, for each round of `_HALF_LIFE_ROUNDS`: they vary more than rounds.
_REQUESTS_A_ROUND: Final = 4
#: Reading takes in proportion to the tokens of a prompt, and a little more.
_PROMPTS: Final = UsualShape((64.0, 512.0, 4096.0), (0.5, 1.0, 5.0), 2.0)
#: Time that a further request in flight adds, in proportion to the first: mean and standard deviation.
_LOAD_SLOPE, _LOAD_SLOPE_SD = 0.05, 0.3
#: A stored point stands for times that other points of its law share.
_STORED_SHARE: Final = 2.0
#: A request of few rounds says less: the clock, the network and the first round weigh as much as eight rounds.
_ROUNDS_OF_OWN: Final = 8
#: Correlation of the errors of requests that share their rounds. Assumed: they differ in prompt and text, not in the
#: minute.
_CORRELATION: Final = 0.25


def open_costs(
    settings: WorkerSettings,
    engine: Engine,
    store: CostStore,
    *,
    revisions: Mapping[str, str] | None = None,
    clock: Callable[[], float] = time.monotonic,
    write: Write = lambda what, act: act(),
) -> KnownCosts:
    """Costs stored for this host, device, engine, target and drafters; what they lack is measured and stored first.

    `revisions`: of the drafters, by name; a drafter that is added later is added there too. None: none is.

    What is learned is stored through `write`, which may do it later. Servers are asked only where nothing is stored of
    them, and not at all with `calibration_budget_s` = 0.
    """
    identity, drafters = engine.identity, engine.drafters
    if revisions is None:
        revisions = {drafter.name: drafter.revision for drafter in drafters}
    key = CostSubject(identity.host, identity.device, identity.engine, identity.target_revision, revisions)
    known = store.load(key).points
    extra = {"action": "calibration_started", "device": identity.device}
    may_ask = engine.can_redraft or known or settings.calibration_budget_s > 0
    if is_timed_by_step(engine) and may_ask:
        try:
            return _costs_by_step(settings, engine, store, key, clock=clock, write=write)
        except DecodeFailed as error:
            if engine.can_redraft:
                raise
            log.warning("costs are learned from requests: %s", error.message, extra={"action": "calibration_skipped"})
    if not known and settings.calibration_budget_s > 0:
        log.info("asking servers what a round costs", extra=extra)
        store.save(key, calibrate_servers(engine, budget_s=settings.calibration_budget_s))
        known = store.load(key).points
    return RequestCosts(
        drafters,
        known,
        most_in_flight=engine.load().num_slots,
        half_life=_HALF_LIFE_ROUNDS,
        save=lambda learned: write("costs of servers", lambda: store.save(key, learned)),
        clock=clock,
    )


def _costs_by_step(
    settings: WorkerSettings,
    engine: Engine,
    store: CostStore,
    key: CostSubject,
    *,
    clock: Callable[[], float],
    write: Write,
) -> LiveCosts:
    """The costs of passes and drafts. Raises DecodeFailed."""
    drafters = engine.drafters
    known = [point for point in store.load(key).points if point.kind is not CostKind.SERVED]
    extra = {"action": "calibration_started", "device": engine.identity.device}
    timed, points = timed_by(drafters), known
    if (lacking := plan(engine, settings, known).missing(known)).needed:
        log.info("measuring what a round costs here", extra=extra)
        measured = calibrate(engine, lacking, budget_s=settings.calibration_budget_s)
        store.save(key, with_shared_weights(measured, timed))
        points = [point for point in store.load(key).points if point.kind is not CostKind.SERVED]
    num_new = len(points) - len(known)
    log.info("costs: %d points, %d of them measured now", len(points), num_new, extra={"action": "calibration_done"})
    live = LiveCosts if engine.can_redraft else StepCosts
    return live(
        points,
        half_life=_HALF_LIFE_ROUNDS,
        save=lambda corrected: write("corrected costs", lambda: store.save_corrections(key, corrected)),
        timed=timed,
        mixed=[drafter.name for drafter in drafters if drafter.is_mixed],
        clock=clock,
    )


class KnownCosts(ABC):
    """Costs that follow what steps take. One thread owns them; others may ask `level` and `read_s`.

    `points` are those stored. `save` is given points whenever there is news, at most every minute. `clock` returns
    seconds from any beginning.
    """

    def __init__(
        self,
        points: Sequence[CostPoint],
        save: Callable[[Sequence[CostPoint]], object],
        clock: Callable[[], float],
    ) -> None:
        self._save, self._clock = save, clock
        self._remember(points)
        self._due = clock() + _SAVE_EVERY_S
        self._has_learned = False  # since the last save
        self._made: tuple[float, CostTable] | None = None

    @property
    @abstractmethod
    def parts(self) -> tuple[str | None, ...]:
        """What is timed: None, the target, and the names of drafters."""

    @property
    def table(self) -> CostTable:
        """The costs as they are now."""
        self._take_in(math.inf)
        if self._made is None or self._clock() - self._made[0] >= _TABLE_LASTS_S:
            self._made = self._clock(), CostTable(self._points_now())
        return self._made[1]

    @abstractmethod
    def level(self, part: str | None) -> float:
        """How much slower than first known the target or a drafter is now."""

    @abstractmethod
    def read_s(self, num_tokens: int) -> float:
        """Seconds in which the target reads `num_tokens` of a prompt; 0 if not known."""

    @abstractmethod
    def observe(self, step: Step) -> None:
        """Learn from what a step took."""

    def save_when_due(self) -> bool:
        """Store what was learned if it is time and there is news; True if it was stored.

        Called when no job waits for a decision: here laws are fitted, which takes time.
        """
        if self._clock() < self._due:
            return False
        self._due = self._clock() + _SAVE_EVERY_S
        return self.save()

    def save(self) -> bool:
        """Store what was learned if there is news; a database that is away is tried again later."""
        self._take_in(0.0)
        points = [point for point in self._points_now() if point.num_samples]  # what is assumed is not stored
        is_old = self._clock() - self._saved_at >= _STORED_EVERY_S
        if not (self._has_learned and (is_old or any(map(self._is_news, points)))):
            return False
        try:
            self._save(points)
        except StoreError as error:
            log.warning("learned costs not stored: %s", error.message, extra={"action": "costs_not_saved"})
            return False
        self._has_learned = False
        self._remember(points)
        return True

    @abstractmethod
    def _take_in(self, pause_s: float) -> None:
        """Learn from what was observed, and forget the table where that moves it.

        Where learning takes long, what is known to be enough for now is left alone for `pause_s`.
        """

    @abstractmethod
    def _points_now(self) -> Sequence[CostPoint]:
        """The costs of this moment."""

    def _remember(self, saved: Sequence[CostPoint]) -> None:
        self._saved, self._saved_at = {Shape.of(point): point for point in saved}, self._clock()

    def _is_news(self, now: CostPoint) -> bool:
        """Whether it has moved since it was stored; fading alone is no news."""
        if (then := self._saved.get(Shape.of(now))) is None:
            return True
        more_doubt = math.sqrt(now.correction_variance) - math.sqrt(then.correction_variance)
        return abs(math.log(now.ms / then.ms)) >= _NEWS or abs(more_doubt) >= _DOUBT_NEWS


class _Timed(NamedTuple):
    """What took a time: the shape of a round, or of a prompt that was read."""

    part: str | None  #: None: the target
    batch: int
    width: float
    context: int
    kind: CostKind = CostKind.ROUND


def _prompt(part: str | None, num_tokens: int) -> _Timed:
    return _Timed(part, 1, num_tokens, 0, CostKind.PREFILL)


class LiveCosts(KnownCosts):
    """Measured points of a device, and what real rounds make of them.

    Steps are learned from when the costs are asked for, so `level` is as of the last decision, or 64 steps old. `save`
    is given every point. Drafters named in `timed` have the times of the other one, corrections included. Those of
    `mixed` ask one source or another: their rounds are learned from by the running mean of what was taken over what was
    calibrated, because the median of two kinds of rounds is the time of either kind.
    """

    def __init__(
        self,
        points: Sequence[CostPoint],
        *,
        half_life: int,
        save: Callable[[Sequence[CostPoint]], object],
        timed: Mapping[str, str] | None = None,
        mixed: Collection[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._timed = dict(timed or {})
        self._means = {name: (0.0, 0.0) for name in mixed}  # of ratios, fading: their sum and their number
        self._kept = 2 ** (-1 / half_life)
        points = [point for point in points if point.drafter not in self._timed]
        super().__init__(with_shared_weights(points, self._timed), save, clock)
        self._calibrated = CostTable(replace(point, correction=1.0) for point in points)
        self._points = tuple(points)
        self._num_rounds = 0  # of the target
        self._by_part = {part: [p for p in points if p.drafter == part] for part in {p.drafter for p in points}}
        self._known = lru_cache(_MOST_KNOWN)(self._calibrated_for)
        self._corrections = {
            part: Correction(
                half_life,
                {point: LogEstimate(math.log(point.correction), point.correction_variance) for point in measured},
                self._now(),
            )
            for part, measured in self._by_part.items()
        }
        self._waiting: list[tuple[float, Step]] = []  # with the clock's seconds

    @property
    def parts(self) -> tuple[str | None, ...]:
        """What was timed: None, the target, and the names of drafters; of those with the same weights one."""
        return tuple(self._corrections)

    def level(self, part: str | None) -> float:
        """How much slower than calibrated the target or a drafter is now."""
        return self._corrections[part].level(self._now(), self._towards(part)).factor

    def read_s(self, num_tokens: int) -> float:
        """Seconds in which the target reads `num_tokens` of a prompt, as slow as it is now; 0 if never measured."""
        ms = self._calibrated.prefill_ms(None, num_tokens)
        return ms * self.level(None) / 1000 if ms else 0.0

    def observe(self, step: Step) -> None:
        """Observe a step. Time that is not the draft's counts as the target's, because a vanilla round takes it too.

        A step that reads prompts beside a round is left out, because they were not timed separately.
        """
        if step.batch == 0 or step.verify_s <= 0 or (step.num_prefill_tokens and step.num_positions):
            return
        self._waiting.append((self._clock(), step))
        if len(self._waiting) >= _MOST_WAITING:
            self._take_in(0.0)

    def copy(self, drafter: str, name: str) -> Sequence[CostPoint]:
        """From now on `name`, a drafter of the same network, has the times of `drafter`; returns them."""
        self._timed[name] = self._timed.get(drafter, drafter)
        self._made = None
        copied = [point for point in self._points_now() if point.drafter == name]
        self._saved |= {Shape.of(point): point for point in copied}
        return copied

    def _take_in(self, pause_s: float) -> None:
        if self._waiting:
            self._made = None
        for at_s, step in self._waiting:
            self._num_rounds += not step.num_prefill_tokens
            self._learn_from(step, Moment(at_s, self._num_rounds))
        self._waiting.clear()

    def _learn_from(self, step: Step, at: Moment) -> None:
        if step.num_prefill_tokens:
            self._learn(at, _prompt(None, step.num_prefill_tokens), step.verify_s)
            return
        # A pass holds what its sequences proposed, side by side; a drafter is done when its longest proposal is.
        mean_width = step.num_positions / step.batch if step.num_positions else step.width
        context = step.context - step.context % _CONTEXT_STEP
        self._learn(at, _Timed(None, step.batch, mean_width, context), step.verify_s + step.overhead_s)
        if step.drafter is not None and step.draft_s_by_proposer.keys() <= {step.drafter}:
            shape = ProposalShape(step.batch, step.width, step.num_draft_prefill_tokens)
            self._learn_from_draft(at, step.drafter, step.draft_s, shape, context)
            return
        whole = ProposalShape(step.batch, step.width)
        for name, seconds in step.draft_s_by_proposer.items():
            self._learn_from_draft(at, name, seconds, step.shape_by_proposer.get(name, whole), context)

    def _learn_from_draft(self, at: Moment, name: str, draft_s: float, shape: ProposalShape, context: int) -> None:
        part = self._timed.get(name, name)
        if draft_s <= 0 or part not in self._corrections:
            return
        if not shape.num_read:
            self._learn(at, _Timed(part, shape.batch, shape.width, context), draft_s)
            return
        # A prompt is measured up to its first token, which is the first of these drafts.
        first, all_of_them = (self._expected_ms(part, shape.batch, width, context) for width in (2, shape.width))
        if first is not None and all_of_them is not None and shape.width > 1:
            seconds = draft_s - (all_of_them - first) / 1000
            if seconds > 0:
                self._learn(at, _prompt(part, shape.num_read), seconds)

    def _expected_ms(self, part: str, batch: int, width: int, context: int) -> float | None:
        """Milliseconds of a proposal, as slow as the drafter is on the whole now."""
        ms = self._calibrated.part_ms(part, batch, width, context)
        return None if ms is None else ms * self.level(part)

    def _learn(self, at: Moment, timed: _Timed, seconds: float) -> None:
        self._has_learned = True
        if (known := self._known(timed)) is not None:
            (nearest, ms), part = known, timed.part
            ratio = 1000 * seconds / ms
            if timed.kind is CostKind.ROUND and part in self._means:
                total, num = self._means[part]
                self._means[part] = total, num = self._kept * total + ratio, self._kept * num + 1
                ratio = total / num
            self._corrections[part].observe(nearest, ratio, at, self._towards(part))

    def _calibrated_for(self, timed: _Timed) -> tuple[CostPoint, float] | None:
        """The measured point of the most similar shape, and the milliseconds calibrated for this one; None without.

        What a point lacks or has too much is counted in doublings.
        """
        part, *shape, kind = timed
        if kind is CostKind.PREFILL:
            ms: float | None = self._calibrated.prefill_ms(part, timed.width)
        else:
            ms = self._calibrated.part_ms(part, timed.batch, timed.width, timed.context)
        if not ms:
            return None

        def distance(point: CostPoint) -> float:
            sizes = zip((point.batch, point.width, point.context), shape, strict=True)
            return sum(abs(math.log((measured + 1) / (size + 1))) for measured, size in sizes)

        return min((point for point in self._by_part[part] if point.kind is kind), key=distance), ms

    def _points_now(self) -> Sequence[CostPoint]:
        """Every point as it is now: a decision asks for them, so points are not made by `replace`, twice as slow."""
        now, points = self._now(), []
        levels = {part: corrections.level(now, self._towards(part)) for part, corrections in self._corrections.items()}
        for point in self._points:
            level, own = levels[point.drafter], self._corrections[point.drafter].deviation(point)
            points.append(
                CostPoint(
                    point.drafter,
                    point.batch,
                    point.width,
                    point.median_ms,
                    point.num_samples,
                    context=point.context,
                    kind=point.kind,
                    correction=math.exp(level.mean + own.mean),
                    num_corrections=point.num_corrections + own.num_rounds,
                    correction_variance=level.variance + own.variance,
                )
            )
        return with_shared_weights(points, self._timed)

    def _now(self) -> Moment:
        return Moment(self._clock(), self._num_rounds)

    def _towards(self, part: str | None) -> float | None:
        """ln(the level) that a drafter fades towards while it is not used; None for the target."""
        if part is None:
            return None
        return self._corrections[None].log_level if None in self._corrections else 0.0


class StepCosts(LiveCosts):
    """The same for a server that reports the times of its steps with its replies."""

    def observe(self, step: Step) -> None:
        """Learn from the server's steps that came with the texts that ended."""
        for generation in step.finished:
            served = generation.served
            for times in served.steps if served is not None else ():
                super().observe(_as_step(times))


def _as_step(times: StepTimes) -> Step:
    return Step(
        finished=(),
        deltas=(),
        batch=times.batch,
        width=1 + times.num_drafted,
        wall_s=times.wall_s,
        draft_s=times.drafter_s,
        verify_s=times.wall_s - times.drafter_s,
        num_positions=max(times.batch, round(times.width * times.batch)),
        context=round(times.context),
        drafter=times.drafter,
    )


class RequestCosts(KnownCosts):
    """The costs of the routes to servers.

    `points` are what was calibrated or stored. `most_in_flight` is the largest load that one server may get. `save` is
    given points in place of those stored.
    """

    def __init__(
        self,
        drafters: Sequence[DrafterState],
        points: Sequence[CostPoint],
        *,
        most_in_flight: int,
        half_life: int,
        save: Callable[[Sequence[CostPoint]], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(points, save, clock)
        self._drafters: dict[Route, DrafterState | None] = {None: None} | {d.name: d for d in drafters}
        loads = tuple(map(float, loads_up_to(most_in_flight)))
        slopes = UsualShape(loads, tuple(1 + _LOAD_SLOPE * (load - 1) for load in loads), _LOAD_SLOPE_SD)
        half_life, now = _REQUESTS_A_ROUND * half_life, clock()
        assumed: dict[Route, float] = {route: ASSUMED_RATIO if route else 1.0 for route in self._drafters}
        self._rounds = RouteLaws(assumed, slopes, half_life=half_life, now=now)
        self._prompts = RouteLaws(dict.fromkeys(self._drafters, 1.0), _PROMPTS, half_life=half_life, now=now)
        self._first_ms: dict[Route, float] = {}  # of a round with one request in flight, when it was first known
        for point in points:
            self._take_stored(point)

    @property
    def parts(self) -> tuple[Route, ...]:
        """None, the vanilla route, and the drafters."""
        return tuple(self._drafters)

    def level(self, part: Route) -> float:
        """How much slower a route is than when it was first known, with one request in flight; 1 before that."""
        law = self._rounds.law(part)
        return 1.0 if law is None or part not in self._first_ms else math.exp(law.at(1).mean) / self._first_ms[part]

    def read_s(self, num_tokens: int) -> float:
        """Seconds in which a server on which nothing drafts reads `num_tokens` of a prompt; 0 if not known."""
        law = self._prompts.law(None)
        return math.exp(law.at(num_tokens).mean) / 1000 if law is not None and num_tokens > 0 else 0.0

    def observe(self, step: Step) -> None:
        """Learn from the texts that ended in a step."""
        now = self._clock()
        for generation in step.finished:
            if generation.served is not None and generation.served.drafter in self._drafters:
                self._learn(generation, generation.served, now)

    def _learn(self, generation: Generation, served: Served, now: float) -> None:
        """The times that a text of a server gives: of its rounds, and of its prompt.

        Requests that are in flight together share their rounds, so their times are correlated and n of them tell less
        than n others would.
        """
        load, num_tokens = max(1.0, served.num_beside), generation.counts.num_tokens
        num_rounds = served.num_passes(num_tokens)
        # The first pass read the prompt.
        if served.decode_s and num_rounds is not None and num_rounds > 1:
            ms = 1000 * served.decode_s / (num_rounds - 1)
            variance = (1 + (load - 1) * _CORRELATION) * (1 + _ROUNDS_OF_OWN / (num_rounds - 1))
            context = generation.num_prompt_tokens + num_tokens / 2
            length = self._length(served.drafter, served.num_draft_tokens + 1)
            self._rounds.take(served.drafter, Time(load, context, ms, variance, length=length), now)
            self._has_learned = True
        if served.prefill_s and generation.num_prompt_tokens:
            taken = Time(generation.num_prompt_tokens, BASE_CONTEXT, 1000 * served.prefill_s, 1.0)
            self._prompts.take(served.drafter, taken, now)
            self._has_learned = True

    def save_when_due(self) -> bool:
        """Fit the laws to the times that came, at most once a second: that takes some milliseconds. Then store them."""
        self._take_in(FITTED_EVERY_S)
        return super().save_when_due()

    def _take_in(self, pause_s: float) -> None:
        """Fit where times came and the pause is over; a route's first times count at once."""
        has_moved = [laws.fit(self._clock(), pause_s=pause_s) for laws in (self._rounds, self._prompts)]
        if any(has_moved):
            self._made = None
            for route in self._drafters:
                if route not in self._first_ms and (law := self._rounds.law(route)) is not None:
                    self._first_ms[route] = math.exp(law.at(1).mean)

    def _points_now(self) -> Sequence[CostPoint]:
        """What the laws say now; the doubt about a route grows while it gets no requests.

        Another's load, or a restart, may have changed its speed.
        """
        points, now = list[CostPoint](), self._clock()
        for route, drafter in self._drafters.items():
            unused = num_half_lives(self._rounds.seconds_unused(route, now))
            doubt = faded(LogEstimate(0.0, 0.0), 0.0, unused).variance
            # Where requests choose their draft length, the shortest draft and the longest.
            widths = {1} if drafter is None else {drafter.least_draft_tokens + 1, drafter.max_draft_tokens + 1}
            kind = CostKind.ROUND if drafter is None else CostKind.SERVED
            said: list[tuple[Shape, int, LogEstimate]] = []
            if (law := self._rounds.law(route)) is not None:
                for context, load, width in product((BASE_CONTEXT, FAR_CONTEXT), law.nodes, sorted(widths)):
                    length = self._length(route, width)
                    number, time = self._rounds.num_times(route, length=length), law.at(load, context, length=length)
                    said.append((Shape(route or "", int(load), width, context, kind), number, time))
            if (law := self._prompts.law(route)) is not None:
                number = self._prompts.num_times(route)
                prompts = [(Shape(route or "", 1, int(size), 0, CostKind.PREFILL), law.at(size)) for size in law.nodes]
                said += [(shape, number, time) for shape, time in prompts]
            points += [shape.point(math.exp(time.mean), number, time.variance + doubt) for shape, number, time in said]
        return points

    def _take_stored(self, point: CostPoint) -> None:
        """As a time from before: its error is what is stored with it."""
        is_part_of_round = point.drafter is not None and point.kind is CostKind.ROUND
        if point.drafter not in self._drafters or is_part_of_round:
            return
        variance = _STORED_SHARE * max(point.correction_variance, 1e-4)
        if point.kind is CostKind.PREFILL:
            laws, taken = self._prompts, Time(float(point.width), BASE_CONTEXT, point.ms, variance, is_relative=False)
        else:
            length = self._length(point.drafter, point.width)
            taken = Time(float(point.batch), float(point.context), point.ms, variance, False, length)
            laws = self._rounds
        laws.take_stored(point.drafter, taken, point.num_samples)

    def _length(self, route: Route, width: int) -> float:
        """The draft of such a round, as a share of the route's longest draft; 1 where it has one length."""
        drafter = self._drafters[route]
        if drafter is None or drafter.least_draft_tokens == drafter.max_draft_tokens:
            return 1.0
        return drafter.within(width - 1) / drafter.max_draft_tokens
