"""How a worker ends: jobs come to their end or go back, outcomes are published, threads end."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from alphaloop.errors import StoreError
from alphaloop.liveness import beat
from worker.claims import ClaimedJob
from worker.components import Components
from worker.jobs.running import RunningJobs

log = logging.getLogger(__name__)

#: How long the threads beside the loop may take for their turn in hand.
_TURN_S: Final = 2.0
#: Between two looks at what is still to be recorded and published.
_WAIT_S: Final = 0.05


class Ending:
    """The ways in which the loop ends. One thread uses it, the loop's."""

    def __init__(self, components: Components, running: RunningJobs) -> None:
        self._c = components
        self._running = running
        self._until = math.inf
        self.reason: str | None = None  #: why the worker ends by itself

    def drain(self, run_once: Callable[[], object]) -> None:
        """Decode running jobs to their end, or give them back in a hurry; then wait until outcomes are published.

        Jobs that wait for a server go back once nothing else is decoded.
        """
        self._take_no_more()
        self.release(self._c.feed.ready.take_all() + self._running.take_waiting_alone())
        while self._running.num_decoding and not self._c.hurry.is_set():
            run_once()
        self._leave()

    def give_up(self, reason: str) -> None:
        """Give every job back at once, because the engine cannot decode; `/readyz` shows `reason` meanwhile.

        What was decoded before is still recorded and published, as far as that takes no longer than `drain_s`.
        """
        log.error("giving every job back: %s", reason, extra={"action": "engine_sick"})
        self.reason = reason
        self._until = self._c.clock() + self._c.drain_s
        self._c.stop.set()
        self._take_no_more()
        self.release(self._c.feed.ready.take_all())
        self._leave()

    def release_all(self) -> None:
        """Give back every claim, because a server refused: no job caused that, so none may count a crash.

        Outcomes that wait to be recorded are dropped.
        """
        self._running.give_back()
        release_claims(self._c, self._c.leases.held())

    def release(self, claimed: Sequence[ClaimedJob]) -> None:
        """Give these claims back, none of them counted as tried."""
        release(self._c, claimed)

    def save(self) -> None:
        """Write down what the worker learnt: costs, budgets, decisions."""
        self._c.costs.save()
        self._c.decider.save()
        self._c.background.put("decisions", self._c.store_decisions)
        self._c.presence.leave()
        self._c.background.turn(0.0)  # what these have written in the background, whose thread may have ended

    def _take_no_more(self) -> None:
        self._c.intake.stop_taking()
        self._c.feed_thread.end(_TURN_S)

    def _leave(self) -> None:
        self.release(self._running.give_back())
        self._wait_until(lambda: not self._c.num_unpublished)
        if slices := self._c.steering.close():
            self._c.background.put("switchback slices", lambda: self._c.store_slices(slices))
        self._wait_until(lambda: not len(self._c.background))
        self._c.end_neighbours()
        self.release(self._c.feed.ready.take_all())  # claimed by a feed that was slow to end
        if recorded := self._c.recorder.take_recorded():
            self._c.decider.count_scored(recorded)

    def _wait_until(self, is_done: Callable[[], bool]) -> None:
        while not self._c.hurry.is_set() and not is_done() and self._c.clock() < self._until:
            self._c.check()
            beat()
            self._c.hurry.wait(_WAIT_S)


def release(components: Components, claimed: Sequence[ClaimedJob]) -> None:
    """Give claims back, none of them counted as tried."""
    release_claims(components, {one.job_id: one.attempt for one in claimed})
    components.intake.handing_over.settle(one.ready.delivery for one in claimed)


def release_claims(components: Components, attempts: Mapping[str, int]) -> None:
    """The same by job_id and attempt; if the database stays away, their leases run out instead."""
    if not attempts:
        return
    try:
        components.claiming.release(attempts)
    except StoreError as error:
        log.warning("%d jobs not released: %s", len(attempts), error.message, extra={"action": "release_failed"})
    components.leases.let_go(attempts)
