"""How many devices a deadline needs, by target: as jobs were decoded, in vanilla decoding, and with a drafter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any, Final

from alphaloop.acceptance import Interval
from alphaloop.capacity.curve import Arrivals, DecodedJobs, LoadCurve, arrivals_of
from alphaloop.capacity.fleet import PERIOD_S, BusyWindow, FleetRun, busiest, least_fleet, work_by_period
from alphaloop.errors import AlphaloopError, ConfigError
from alphaloop.explaining.explanation import AsAWorker, usual_request
from alphaloop.prices import NO_PRICE, per_hour_at
from alphaloop.server_identity import SERVERS
from alphaloop.settings import Settings
from alphaloop.settings.prices import PriceSettings
from alphaloop.store.arrivals import ArrivalStore, SeenArrivals
from alphaloop.store.database import Database
from alphaloop.store.decision_inputs import DraftRegistry
from alphaloop.store.switchback import SwitchbackStore
from alphaloop.store.task_figures import TaskFigures, task_figures
from alphaloop.wording import how_many, minute, money, one_line, span

_WEEK: Final = timedelta(days=7)
_HOUR_S: Final = 3600.0
#: True of every plan.
_ALWAYS: Final = (
    "Plans hold for arrivals and devices like these; jobs that still wait in Kafka are not in them.",
    "Their devices share one queue. Real ones have partitions each: leave room where few have the work.",
)


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """The least fleet for one way of decoding."""

    name: str
    is_expected: bool = False  #: whether it rests on an expectation, not on measurements alone
    fleet: FleetRun | None = None  #: None where it is not known
    devices: tuple[int, int] | None = None  #: by the 95 % bounds of the speed-ups; None of plans without any
    unknown_because: str = ""
    on_h: float = 0.0  #: device hours, with all devices on all the time
    busy_h: float = 0.0  #: device hours in which they decode
    on_cost: float | None = None  #: None without a price
    busy_cost: float | None = None

    @property
    def shown_name(self) -> str:
        """Its name; one that rests on an expectation says so."""
        return one_line(self.name) + (" (expected)" if self.is_expected else "")

    @property
    def shown_devices(self) -> str:
        """`3`, `3 [2 4]`, or `-` where it is not known."""
        if self.fleet is None:
            return "-"
        return str(self.fleet.num_devices) + (f" [{self.devices[0]} {self.devices[1]}]" if self.devices else "")

    def cells(self, currency: str | None) -> list[str]:
        """Its row under `columns`; the name and `-` where it is not known."""
        if self.fleet is None:
            return [self.shown_name, self.shown_devices]
        cells = [self.shown_name, self.shown_devices, f"{self.on_h:,.1f}", f"{self.busy_h:,.1f}"]
        return cells + [money(cost, currency or "") for cost in (self.on_cost, self.busy_cost) if cost is not None]

    @property
    def why_unknown(self) -> str | None:
        """A sentence; None where it is known."""
        if not self.unknown_because:
            return None
        return f"{one_line(self.name)}: not known, because {one_line(self.unknown_because)}."

    def as_json(self) -> dict[str, Any]:
        """Its figures; null where they are not known."""
        known = self.fleet is not None
        return {
            "name": self.name,
            "is_expected": self.is_expected,
            "num_devices": self.fleet.num_devices if self.fleet else None,
            "num_devices_low": self.devices[0] if self.devices else None,
            "num_devices_high": self.devices[1] if self.devices else None,
            "on_h": self.on_h if known else None,
            "busy_h": self.busy_h if known else None,
            "on_cost": self.on_cost,
            "busy_cost": self.busy_cost,
            "slowest_s": self.fleet.slowest_s if self.fleet else None,
            "unknown_because": self.unknown_because or None,
        }


@dataclass(frozen=True, slots=True)
class TargetCapacity:
    """The plans of one target's jobs."""

    seen: SeenArrivals
    span_s: float  #: from the beginning of the arrivals to the end of the time that was seen
    num_too_long: int  #: texts that would miss the deadline alone on a device; no fleet is planned for them
    curve: LoadCurve
    arrived_s: Sequence[float]  #: seconds of full devices that arrived, by periods of `PERIOD_S` from the beginning
    busiest: BusyWindow
    plans: Sequence[FleetPlan]
    limits: Sequence[str]  #: what it cannot know, in sentences

    def headline(self, deadline_s: float) -> str:
        """What was seen, and what is asked."""
        name = f"{one_line(self.seen.target)}: " if self.seen.target else ""
        return f"{name}{how_many(self.seen.num_jobs, 'job')} in {span(self.span_s)}, each within {span(deadline_s)}"

    @property
    def busiest_sentence(self) -> str:
        """When the most work came, and how much."""
        window = self.busiest
        return (
            f"Busiest {span(window.length_s)}: from {minute(self.busiest_at)}, with the work of "
            f"{window.num_devices:.2f} full devices."
        )

    @property
    def notes(self) -> list[str]:
        """Sentences that belong to the figures, without `limits`."""
        notes = [why for plan in self.plans if (why := plan.why_unknown) is not None]
        notes.append(self.busiest_sentence)
        if self.num_too_long:
            notes.append(f"{how_many(self.num_too_long, 'text')} would take longer than that alone on a device.")
        return notes

    @property
    def busiest_at(self) -> datetime:
        """When the busiest stretch begins."""
        return self.seen.begins_at + timedelta(seconds=self.busiest.begins_s)

    def as_json(self) -> dict[str, Any]:
        """Everything, without the arrivals."""
        return {
            "target": self.seen.target,
            "num_jobs": self.seen.num_jobs,
            "begins_at": self.seen.begins_at,
            "span_s": self.span_s,
            "device_s": self.seen.device_s,
            "most_running": self.seen.most_running,
            "num_too_long": self.num_too_long,
            "loads": [
                {"running": load, "slowness": slow}
                for load, slow in zip(self.curve.loads, self.curve.slowness, strict=True)
            ],
            "arrived": {"period_s": PERIOD_S, "device_s": list(self.arrived_s)},
            "busiest": {
                "begins_at": self.busiest_at,
                "length_s": self.busiest.length_s,
                "device_s": self.busiest.device_s,
                "num_devices": self.busiest.num_devices,
            },
            "plans": [plan.as_json() for plan in self.plans],
            "limits": list(self.limits),
        }


@dataclass(frozen=True, slots=True)
class CapacityRequest:
    """What is asked."""

    deadline_s: float
    since: datetime
    until: datetime
    drafter: str | None = None


@dataclass(frozen=True, slots=True)
class Capacity:
    """The answer."""

    request: CapacityRequest
    currency: str | None  #: None where no price is set
    targets: Sequence[TargetCapacity]
    limits: Sequence[str]  #: what no plan can know, in sentences

    @property
    def columns(self) -> tuple[str, ...]:
        """Of the plans, after their names."""
        return ("devices", "hours on", "busy", *(() if self.currency is None else ("cost on", "cost busy")))

    @property
    def no_cost_because(self) -> str | None:
        """Why no money is shown; None where it is."""
        return f"{NO_PRICE} --price gives one here." if self.currency is None else None

    def as_json(self) -> dict[str, Any]:
        """The answer with figures as numbers."""
        return {
            "deadline_s": self.request.deadline_s,
            "since": self.request.since,
            "until": self.request.until,
            "currency": self.currency,
            "targets": [target.as_json() for target in self.targets],
            "limits": list(self.limits),
            "no_cost_because": self.no_cost_because,
        }


def capacity(database: Database, settings: Settings, request: CapacityRequest, now: datetime) -> Capacity:
    """Plans for what was decoded in the request's time. Raises ConfigError for a drafter that was never configured."""
    if request.drafter is not None:
        _check_drafter(database, settings, request.drafter)
    store, prices = ArrivalStore(database), settings.prices
    speedups = _Speedups(database, settings, request.drafter, now)
    seen = store.seen(request.since, request.until)
    targets = [_of_target(of_target, request, prices, speedups) for of_target in seen]
    limits = list(_ALWAYS)
    if num_jobs := store.num_ended_without_text(request.since, request.until):
        limits.insert(0, f"{how_many(num_jobs, 'job')} failed, expired or were cancelled: what they took is not in it.")
    most = max((plan.fleet.num_devices for target in targets for plan in target.plans if plan.fleet), default=0)
    if most > (num_partitions := settings.kafka.num_partitions):
        limits.append(
            f"{most} devices need at least {most} partitions of a topic; kafka.num_partitions is {num_partitions}, and "
            "a worker without a partition gets nothing."
        )
    return Capacity(request, None if prices.per_hour is None else prices.currency, targets, limits)


def _check_drafter(database: Database, settings: Settings, drafter: str) -> None:
    known = sorted({*settings.models.drafter_names, *(draft.drafter for draft in DraftRegistry(database).all())})
    if drafter not in known:
        hint = f"one of {', '.join(known)}" if known else "none is configured"
        raise ConfigError(
            f"--drafter: expected a drafter that is configured or registered, found {drafter!r}", hint=hint
        )


def _of_target(
    seen: SeenArrivals, request: CapacityRequest, prices: PriceSettings, speedups: _Speedups
) -> TargetCapacity:
    span_s = (request.until - seen.begins_at).total_seconds()
    planning = _Planning(seen, LoadCurve.of_jobs(seen.groups), request.deadline_s, span_s, prices)
    arrivals = planning.arrivals()
    plans = [planning.plan("as now", arrivals), planning.vanilla(speedups)]
    if request.drafter is not None:
        plans.append(planning.with_drafter(request.drafter, speedups))
    return TargetCapacity(
        seen=seen,
        span_s=span_s,
        num_too_long=sum(coming.number for coming in arrivals if coming.alone_s > request.deadline_s),
        curve=planning.curve,
        arrived_s=work_by_period(arrivals, planning.curve, num_slots=seen.most_running),
        busiest=busiest(arrivals, planning.curve, num_slots=seen.most_running, length_s=request.deadline_s),
        plans=plans,
        limits=_limits(seen, planning.curve, span_s),
    )


@dataclass(frozen=True, slots=True)
class _Planning:
    """Plans fleets for one target's jobs."""

    seen: SeenArrivals
    curve: LoadCurve
    deadline_s: float
    span_s: float
    prices: PriceSettings

    def arrivals(self, speedup_of: Callable[[DecodedJobs], float] = lambda _: 1.0) -> list[Arrivals]:
        """What the jobs have to do where they are so many times as fast as they were."""
        return [arrivals_of(jobs, self.curve).faster(speedup_of(jobs)) for jobs in self.seen.groups]

    def fleet(self, arrivals: Sequence[Arrivals]) -> FleetRun:
        """The least."""
        return least_fleet(arrivals, self.curve, num_slots=self.seen.most_running, deadline_s=self.deadline_s)

    def plan(self, name: str, arrivals: Sequence[Arrivals]) -> FleetPlan:
        """The least fleet with its hours and its cost."""
        fleet = self.fleet(arrivals)
        on_s = [min(PERIOD_S, self.span_s - begins_s) for begins_s in _periods(self.span_s)]
        return FleetPlan(
            name=name,
            fleet=fleet,
            on_h=fleet.num_devices * self.span_s / _HOUR_S,
            busy_h=fleet.total_busy_s / _HOUR_S,
            on_cost=self._cost([fleet.num_devices * seconds for seconds in on_s]),
            busy_cost=self._cost(fleet.busy_s),
        )

    def vanilla(self, speedups: _Speedups) -> FleetPlan:
        """Jobs that speculated take as much longer as their task's speed-up says that was measured."""
        tasks = sorted({jobs.task for jobs in self.seen.groups if jobs.is_speculative})
        if missing := [task for task in tasks if speedups.measured(task) is None]:
            return FleetPlan("vanilla", unknown_because=_not_measured(missing))
        return self._within("vanilla", lambda jobs, bound: 1 / _bound(speedups.of_jobs(jobs), bound))

    def with_drafter(self, drafter: str, speedups: _Speedups) -> FleetPlan:
        """Vanilla's work, by the speed-up that decisions expect of the drafter at a full device.

        A task that the drafter is expected to slow down is decoded in vanilla.
        """
        name = f"with {drafter}"
        tasks = sorted({jobs.task for jobs in self.seen.groups})
        speculated = sorted({jobs.task for jobs in self.seen.groups if jobs.is_speculative})
        if missing := [task for task in speculated if speedups.measured(task) is None]:
            return FleetPlan(name, is_expected=True, unknown_because=_not_measured(missing))
        expected = {task: speedups.expected(task, self.seen.most_running) for task in tasks}
        if missing := [task for task, bounds in expected.items() if bounds is None]:
            because = f"its workers do not weigh {drafter} for {', '.join(missing)}"
            return FleetPlan(name, is_expected=True, unknown_because=because)

        def speedup_of(jobs: DecodedJobs, bound: str) -> float:
            return max(1.0, _bound(expected[jobs.task], bound)) / _bound(speedups.of_jobs(jobs), "mean")

        return replace(self._within(name, speedup_of), is_expected=True)

    def _within(self, name: str, speedup_of: Callable[[DecodedJobs, str], float]) -> FleetPlan:
        """The plan at the means of the speed-ups, with the fleets at their bounds."""
        planned = self.plan(name, self.arrivals(lambda jobs: speedup_of(jobs, "mean")))
        bounds = [
            self.fleet(self.arrivals(lambda jobs, bound=bound: speedup_of(jobs, bound))).num_devices  # type: ignore[misc]
            for bound in ("low", "high")
        ]
        return replace(planned, devices=(min(bounds), max(bounds)))

    def _cost(self, device_s: Sequence[float]) -> float | None:
        """The cost of device seconds by periods, at the prices of those times."""
        cost = 0.0
        for number, seconds in enumerate(device_s):
            at = self.seen.begins_at + timedelta(seconds=number * PERIOD_S)
            if (per_hour := per_hour_at(self.prices, self.seen.target, at)) is None:
                return None
            cost += seconds * per_hour / _HOUR_S
        return cost


def _periods(span_s: float) -> list[float]:
    """The beginnings of the periods of a time."""
    return [number * PERIOD_S for number in range(int(-(-span_s // PERIOD_S)))]


def _bound(speedup: Interval | None, name: str) -> float:
    """1 where jobs were decoded in vanilla."""
    return 1.0 if speedup is None else {"mean": speedup.mean, "low": speedup.low, "high": speedup.high}[name]


def _not_measured(tasks: Sequence[str]) -> str:
    return f"no speed-up was measured in the last day for {', '.join(tasks)}"


@dataclass(slots=True)
class _Speedups:
    """Measured and expected speed-ups, by task."""

    database: Database
    settings: Settings
    drafter: str | None
    now: datetime
    _measured: Mapping[str, Interval | None] = field(init=False)
    _figures: Mapping[str, TaskFigures] = field(init=False)
    _workers: dict[str | None, AsAWorker | None] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        shown = SwitchbackStore(self.database).shown(self.now)
        self._measured = {task: speedup.speedup for task, speedup in shown.items()}
        self._figures = task_figures(self.database) if self.drafter else {}

    def measured(self, task: str) -> Interval | None:
        """Over vanilla, in the last day; None where there is no verdict yet."""
        return self._measured.get(task)

    def of_jobs(self, jobs: DecodedJobs) -> Interval | None:
        """That of their task where they speculated; None for vanilla jobs."""
        return self.measured(jobs.task) if jobs.is_speculative else None

    def expected(self, task: str, num_running: int) -> Interval | None:
        """That of the drafter at its best draft length over vanilla.

        None where the workers of the task's target do not run it, or the task's jobs may not draft.
        """
        worker = self._worker(self.settings.bindings.target_of(task))
        if worker is None:
            return None
        figures = self._figures.get(task) or TaskFigures(task)
        request = replace(usual_request(figures, self.now, is_now=True), batch=num_running)
        weighed = [a for a in worker.decide(request).decisions[0].alternatives if a.drafter == self.drafter]
        best = max(weighed, key=lambda a: a.speedup, default=None)
        return None if best is None else Interval(best.speedup, best.speedup_low, best.speedup_high)

    def _worker(self, target: str | None) -> AsAWorker | None:
        if target not in self._workers:
            try:
                self._workers[target] = AsAWorker(self.database, self.settings, self.now, target)
            except AlphaloopError:
                self._workers[target] = None
        return self._workers[target]


def _limits(seen: SeenArrivals, curve: LoadCurve, span_s: float) -> list[str]:
    """What the plans of one target cannot know."""
    most = how_many(seen.most_running, "sequence")
    found = [f"No device decoded more than {most} at once: if it can, fewer devices may do."]
    if curve.loads[0] >= 2:
        found.append(f"None had fewer than {curve.loads[0]:.1f}: with fewer, a sequence is taken to be no faster.")
    if span_s < _WEEK.total_seconds():
        found.append(f"Only {span(span_s)} were seen: busier hours of a week may be missing.")
    if len(devices := sorted({jobs.device for jobs in seen.groups})) > 1:
        found.append(f"A device is the mean of these: {', '.join(devices)}.")
    if any(device.startswith(SERVERS) for device in devices):
        found.append("A device is what one worker asks, all its servers together; requests of others slow it down.")
    return found
