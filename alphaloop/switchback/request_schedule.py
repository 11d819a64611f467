"""Which arm a request starts in, where an engine cannot change how a running request drafts.

There is an account in seconds. Time in which requests on trial run accrues credit, by the share of them that is
treated; by the share that is vanilla for the experiment, it is spent. A block begins once the balance reaches a random
multiple, 0.5 to 1.5, of what a block takes. So the share of control tends to `control_share` however long requests are,
and no periodic load can follow the blocks.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from alphaloop.switchback.request_block import RequestBlock, RequestDesign
from alphaloop.switchback.requests import RequestFacts, Trial
from alphaloop.switchback.rounds import Census
from alphaloop.switchback.slices import Phase, Slice

#: How far the expected price of a block moves towards the last one's.
_PRICE_WEIGHT: Final = 0.3


@dataclass(frozen=True, slots=True)
class _Request:
    trial: Trial
    speculates: bool
    is_pure: bool  #: treated, and when it started the load was not on its way between endpoints
    block: RequestBlock | None = None  #: that counts it
    phase: Phase | None = None


class RequestSchedule:
    """Tell it when each request on trial starts and ends. Not thread-safe: the loop's thread owns it.

    Requests are named by ids. `start` says how a request is decoded; `end` and `drop` take it out.
    """

    def __init__(self, design: RequestDesign, rng: random.Random) -> None:
        self._design, self._rng = design, rng
        self._account = _Account(design.control_share, rng)
        self._running: dict[str, _Request] = {}
        self._num_control = 0  # of those that run
        #: Treated requests that ended last, undisturbed: the window before the next block.
        self._recent: deque[tuple[Trial, RequestFacts]] = deque()
        self._census: dict[Trial, Census] = defaultdict(Census)
        self._block: RequestBlock | None = None
        self._open: list[RequestBlock] = []  # over, but some requests that they count still run
        self._ended: list[Slice] = []

    def start(self, request_id: str, trial: Trial, now: datetime) -> bool:
        """A request starts: whether it speculates. False: it is decoded vanilla, as control."""
        self._pass_time(now)
        self._account.started()
        self._begin_when_due()
        block = self._block
        speculates = block is None or not block.is_vanilla
        is_pure = block is None or not block.is_disturbed
        phase = block.start() if block is not None else None
        self._running[request_id] = _Request(trial, speculates, is_pure, block if phase else None, phase)
        self._num_control += not speculates
        self._advance()
        return speculates

    def end(self, request_id: str, facts: RequestFacts | None, now: datetime) -> None:
        """A request ended; without facts where nothing is known of it, or another endpoint took it."""
        if request_id not in self._running:
            return
        self._pass_time(now)  # the request ran until now, so it is among those that run
        request = self._running.pop(request_id)
        self._num_control -= not request.speculates
        if request.block is not None and request.phase is not None:
            request.block.end(request.trial, request.phase, facts)
        elif facts is not None and request.speculates:
            self._recent.append((request.trial, facts))
            is_disturbed = self._block is not None and self._block.is_disturbed
            if not request.is_pure or is_disturbed:
                self._count(*self._recent.pop())
        self._forget(self._design.num_window(len(self._running) + 1))
        self._advance()

    def take(self) -> tuple[Slice, ...]:
        """The slices that ended since the last call, to be stored."""
        ended, self._ended = tuple(self._ended), []
        return ended

    def close(self) -> tuple[Slice, ...]:
        """End what runs and hand over all that was counted: when the worker ends."""
        for block in [*self._open, *([self._block] if self._block else [])]:
            self._settle(block)
        self._open, self._block = [], None
        self._running.clear()
        self._num_control = 0
        self._forget(0)
        for trial in list(self._census):
            self._ended += self._census[trial].take(self._new_id(), trial.subject)
        self._census.clear()
        return self.take()

    def _pass_time(self, now: datetime) -> None:
        num = len(self._running)
        spent_s = self._account.pass_time(now, self._num_control / num if num else None)
        if self._block is not None:
            self._block.spent_s += spent_s

    def _begin_when_due(self) -> None:
        num_running = len(self._running)
        num_window = self._design.num_window(num_running)
        if self._block is not None or len(self._recent) < num_window or not self._design.control_share:
            return
        if not self._account.is_due(self._design.num_control(num_running)):
            return
        self._forget(num_window)
        self._block = RequestBlock(self._recent, self._new_id, self._design, num_running)
        self._recent.clear()
        for trial, census in self._census.items():
            self._ended += census.take(self._block.id_of(trial), trial.subject)
        self._census.clear()

    def _advance(self) -> None:
        if (block := self._block) is not None:
            block.advance(len(self._running) - self._num_control, self._num_control)
            if block.is_over:
                self._account.paid(block.spent_s)
                self._open.append(block)
                self._block = None
        for block in [block for block in self._open if block.is_whole]:
            self._open.remove(block)
            self._settle(block)

    def _settle(self, block: RequestBlock) -> None:
        found, alone = block.slices()
        self._ended += found
        for trial, facts in alone:
            self._count(trial, facts)

    def _forget(self, num_kept: int) -> None:
        """Leave so many requests in the window before the next block; older ones are counted outside it."""
        while len(self._recent) > num_kept:
            self._count(*self._recent.popleft())

    def _count(self, trial: Trial, facts: RequestFacts) -> None:
        self._census[trial].add_request(facts, trial.treatment)

    def _new_id(self) -> str:
        return f"{self._rng.getrandbits(64):016x}"


class _Account:
    """What was accrued for control and is not spent, in seconds."""

    def __init__(self, share: float, rng: random.Random) -> None:
        self._earning = share / (1 - share)
        self._rng = rng
        self._last: datetime | None = None
        self._busy_s = 0.0
        self._num_started = 0
        self._balance_s = 0.0
        self._price_s: float | None = None  # of a block, smoothed
        self._due_s: float | None = None

    def started(self) -> None:
        """A request."""
        self._num_started += 1

    def pass_time(self, now: datetime, control: float | None) -> float:
        """The time since the last call, in which this share of requests was control; None: none ran.

        Returns the seconds spent.
        """
        passed_s = (now - self._last).total_seconds() if self._last is not None else 0.0
        self._last = now
        if control is None or passed_s <= 0:
            return 0.0
        self._busy_s += passed_s
        self._balance_s += passed_s * (self._earning * (1 - control) - control)
        return passed_s * control

    def is_due(self, num_vanilla: int) -> bool:
        """Whether the balance has reached the moment drawn, where about so many requests of a block are vanilla."""
        if self._price_s is None:
            self._price_s = num_vanilla * self._busy_s / self._num_started
        if self._due_s is None:
            self._due_s = self._rng.uniform(0.5, 1.5) * self._price_s
        return self._balance_s >= self._due_s

    def paid(self, spent_s: float) -> None:
        """A block is over."""
        before_s = spent_s if self._price_s is None else self._price_s
        self._price_s = before_s + _PRICE_WEIGHT * (spent_s - before_s)
        self._due_s = None
