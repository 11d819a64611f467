"""Looks from time to time whether a topic was deleted and made again, which the offsets alone do not always show."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from alphaloop.errors import BrokerError
from worker.intake.polling import Intake

log = logging.getLogger(__name__)


class TopicWatch:
    """Asks the broker for the ids of the topics that intakes read, and tells the intakes. One thread uses it."""

    def __init__(
        self,
        intakes: Sequence[Intake],
        ask: Callable[[Collection[str]], Mapping[str, str]],
        *,
        every_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`ask` gives ids by topic and raises BrokerError."""
        self._intakes, self._ask = intakes, ask
        self._every_s, self._clock = every_s, clock
        self._due = clock()
        self._assignments: list[int] = []

    def check(self) -> None:
        """Ask if that is due: after each assignment, and each `every_s`."""
        assignments = [intake.assignment_number for intake in self._intakes]
        if self._clock() < self._due and assignments == self._assignments:
            return
        self._due, self._assignments = self._clock() + self._every_s, assignments
        topics = set().union(*(intake.topics for intake in self._intakes))
        try:
            ids = self._ask(topics)
        except BrokerError as error:
            log.debug("ids of topics: %s", error.message)  # the poll says that the broker is away
            return
        for intake in self._intakes:
            intake.tell_topic_ids(ids)
