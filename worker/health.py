"""What /healthz and /readyz of a worker say, and what is done before a worker that hangs is ended."""

from __future__ import annotations

from alphaloop.kafka.topics import RESULTS
from alphaloop.start_wait import StartWait
from worker.components import Components
from worker.ending import release
from worker.loop import Worker


class ProcessHealth:
    """The two checks of a worker's process: of its start first, of its threads from `started` on."""

    def __init__(self, start_wait: StartWait) -> None:
        self._start_wait = start_wait
        self._running: WorkerHealth | None = None

    def started(self, running: WorkerHealth) -> None:
        """From now on ask the worker that runs."""
        self._running = running

    def unhealthy(self) -> str | None:
        """Why this process should be replaced. While it waits for a server it is well: a new one would wait too."""
        return None if self._running is None else self._running.unhealthy()

    def unready(self) -> str | None:
        """Why this process takes no jobs: which server it waits for, or what its worker says."""
        if self._running is not None:
            return self._running.unready()
        return self._start_wait.reason or "starting"


class WorkerHealth:
    """Looks from outside at every thread of a worker. Any thread may ask."""

    def __init__(self, worker: Worker, components: Components) -> None:
        self._worker = worker
        self._c = components

    def unhealthy(self) -> str | None:
        """Why this process should be replaced: a thread died, or a thread or a step hangs; None while all is well."""
        return self._c.died() or self._c.liveness.hung()

    def unready(self) -> str | None:
        """Why this process takes no jobs; None while it does."""
        if (reason := self._worker.ending.reason) is not None:
            return f"ending, jobs are given back: {reason}"
        if (wrong := self.unhealthy()) is not None:
            return wrong
        if self._c.stop.is_set():
            return "draining"
        if (reason := self._c.topics.reason(RESULTS)) is not None:
            return f"no result can be published: {reason}"
        if (reason := self._c.engine.unavailable()) is not None:
            return reason
        return None if self._c.intake.is_assigned else "no partitions assigned yet"

    def give_back_unstarted(self) -> None:
        """Give back what no step has touched. What is in the engine may be what hangs, so that counts as a crash."""
        self._c.leases.close()
        release(self._c, self._c.feed.ready.take_all())
