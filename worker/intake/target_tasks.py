"""Which tasks this worker's target has, and so which topics its intake reads: both may change while it runs.

What the task list says changes in one order: first the intake is given its new list of topics,
then the new bindings hold. So whoever leaves a delivery to another target, because a binding says so, knows that its
partition leaves too, and is read by the other target's workers from the offset that is committed.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Final

from alphaloop.errors import BrokerError
from alphaloop.kafka.topics import topic_lister
from alphaloop.settings import Bindings, TasksFile
from worker.background import BackgroundThread

if TYPE_CHECKING:
    from worker.foundation import Foundation
    from worker.intake.polling import Intake

log = logging.getLogger(__name__)

#: Between two looks at the file and at the broker's topics.
LOOK_S: Final = 2.0
_MOST_NAMED: Final = 10


class TargetTasks:
    """The bindings in force. Threads share it."""

    def __init__(
        self,
        target: str,
        bindings: Bindings,
        *,
        file: TasksFile | None = None,
        topics_now: Callable[[], Collection[str]],
        read_topics: Callable[[Collection[str]], object],
    ) -> None:
        """`topics_now` asks the broker, and may raise BrokerError; `read_topics` is called with each new list.

        Without a `file` the `bindings` stay.
        """
        self.target, self.bindings = target, bindings
        self._file, self._topics_now, self._read_topics = file, topics_now, read_topics
        self._topics: frozenset[str] = frozenset()
        self._found: frozenset[str] = frozenset()
        self._listed: frozenset[str] | None = None
        self._lock = threading.Lock()
        self.thread = BackgroundThread("tasks", self.look, every_s=LOOK_S)

    def look(self) -> None:
        """Follow the file and the broker's topics. While no broker answers, the topics known stay."""
        try:
            topics = frozenset(self._topics_now())
        except BrokerError as error:
            log.debug("topics: %s", error.message)  # the poll says that the broker is away
            topics = self._found
        with self._lock:
            # A broker that lags does not name every topic: one is gone when two looks lack it.
            self._topics, self._found = topics | self._found, topics
            self._follow()

    def reread(self) -> None:
        """Follow the file now: a message names a task that is not known, so it may be new."""
        with self._lock:
            self._follow()

    def is_ours(self, task: str) -> bool:
        """Whether this worker's target decodes the task's jobs."""
        return self.bindings.is_of(self.target, task)

    def _follow(self) -> None:
        bindings = self.bindings if self._file is None else self._file.newest(self.bindings)
        listed = bindings.topics_of(self.target, self._topics)
        if listed != self._listed:
            self._log(listed)
            self._listed = listed
            self._read_topics(listed)
        self.bindings = bindings

    def _log(self, listed: frozenset[str]) -> None:
        if not listed:
            log.warning("no topic of a task of %s: nothing is read", self.target, extra={"action": "nothing_to_read"})
            return
        before = self._listed or frozenset()
        log.info(
            "%d topics are read; new: %s; left: %s",
            len(listed),
            _names(listed - before),
            _names(before - listed),
            extra={"action": "topics_listed"},
        )


def open_target_tasks(base: Foundation, file: TasksFile | None, intake: Intake) -> TargetTasks:
    """The bindings as they are now; `intake` has its first list of topics. Without a `file` they stay."""
    bound = TargetTasks(
        base.engine.identity.target,
        base.settings.bindings,
        file=file,
        topics_now=topic_lister(base.settings.kafka),
        read_topics=intake.read_topics,
    )
    bound.look()
    return bound


def _names(topics: Collection[str]) -> str:
    shown = sorted(topics)[:_MOST_NAMED]
    more = f" and {len(topics) - len(shown)} more" if len(topics) > len(shown) else ""
    return (", ".join(shown) or "none") + more
