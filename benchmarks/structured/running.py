"""How much of the engine's rounds masks take."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from alphaloop.engine import PreparedJob, Step
from benchmarks.contestants.our_engine import FedEngine, FedRun
from benchmarks.paired import percentile

#: What a round does about masks on its own thread: to begin them, to wait for them, and to apply what they say.
_DELAYING = ("begin_masks", "best", "restrict")


@dataclass(slots=True)
class MaskShares:
    """For each round of a full batch with masks, the shares of its time that they took."""

    #: Computing masks, on whatever thread: beside a pass they wait for a processor too.
    computing: list[float] = field(default_factory=list)
    #: By which masks and questions to the grammar delayed the round.
    delays: list[float] = field(default_factory=list)

    @property
    def p95(self) -> dict[str, float | None]:
        """None where no round had masks."""
        return {
            name: percentile(shares, 0.95) if shares else None
            for name, shares in (("computing", self.computing), ("delaying", self.delays))
        }


class TimedMasks:
    """The engine with clocks around whatever it does about masks."""

    def __init__(self, engine: FedEngine) -> None:
        from engine.constraint import ConstrainedText

        self.engine = engine
        self._computing = _Clock()
        self._delaying = _Clock()
        engine.grammars.__dict__["executor"] = _Timed(engine.grammars.executor, self._computing)
        _time(ConstrainedText, ("_computed",), self._computing)
        _time(ConstrainedText, _DELAYING, self._delaying)

    def run(
        self,
        prepared: Sequence[PreparedJob],
        *,
        k: int = 0,
        takes_forced: bool = True,
        shares: MaskShares | None = None,
    ) -> FedRun:
        """Decode all jobs, by look-up with k > 0."""
        self.engine.grammars.takes_forced = takes_forced
        decisions = {one.job.job_id: ("lookup", k) if k else None for one in prepared}

        def take(step: Step) -> None:
            computing, delaying = self._computing.take(), self._delaying.take()
            if shares is not None and step.batch == self.engine.num_slots and (computing or delaying):
                shares.computing.append(computing / step.wall_s)
                shares.delays.append(delaying / step.wall_s)

        return self.engine.run(prepared, decisions, after_step=take)


class _Clock:
    """Seconds of calls, those inside another counted once."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._is_running = False

    def call(self, method: Any, *arguments: Any) -> Any:
        if self._is_running:
            return method(*arguments)
        self._is_running, began = True, time.perf_counter()
        try:
            return method(*arguments)
        finally:
            self._seconds += time.perf_counter() - began
            self._is_running = False

    def take(self) -> float:
        seconds, self._seconds = self._seconds, 0.0
        return seconds


def _time(kind: type, names: Sequence[str], clock: _Clock) -> None:
    for name in names:
        method = getattr(kind, name)
        setattr(kind, name, lambda *arguments, method=method: clock.call(method, *arguments))


class _Timed:
    """The library's threads with a clock."""

    def __init__(self, executor: Any, clock: _Clock) -> None:
        self._executor = executor
        self._clock = clock

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._executor, name)
        return lambda *arguments: self._clock.call(method, *arguments)
