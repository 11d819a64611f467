"""A worker and a scheduler as processes on an embedded broker and database, and a client that waits for outcomes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from alphaloop.cli.children import (
    START_TIMEOUT_S,
    LogFollower,
    child_command,
    child_environment,
    child_log,
    child_process,
)
from alphaloop.cli.options import GlobalOptions
from alphaloop.client import Client
from alphaloop.embedded.process import ChildProcess
from alphaloop.errors import AlphaloopError
from alphaloop.messages import Job, Status
from alphaloop.settings import Settings
from alphaloop.store.coordination import ScheduleStore
from alphaloop.store.database import Database
from alphaloop.store.probes import probe_progress
from tests.stories.configs import PROFILE
from tests.stories.faults import Faults
from tests.stories.worker_process import FAULTS

_STALLED_S: Final = 300.0
_RUN_S: Final = 300.0
_POLL_S: Final = 0.5
_MANUAL: Final = "manual"


@dataclass(slots=True)
class Deployment:
    """What runs under a data folder; `settings` name its servers."""

    settings: Settings
    database: Database
    data_dir: Path
    seed: int

    @contextmanager
    def worker(self, configs: Path, faults: Faults) -> Iterator[ChildProcess]:
        """A worker that is ready for jobs; it drains at the end."""
        options = GlobalOptions(configs, PROFILE, self.data_dir)
        child = ChildProcess(
            "worker",
            child_command("tests.stories.worker_process", ["--seed", str(self.seed)]),
            log=child_log(self.settings, "worker"),
            env={**child_environment(options, self.settings), FAULTS: faults.model_dump_json()},
            grace_s=60.0,
        )
        follower = LogFollower(child.log)
        child.start()
        try:
            child.wait_until(lambda: follower.find("worker_ready") is not None, START_TIMEOUT_S)
            yield child
        finally:
            child.stop()

    def measure(self, configs: Path, worker: ChildProcess) -> int:
        """A run of the scheduler, and the end of all its probes and controls; their number."""
        self.run_scheduler(configs)
        found = ScheduleStore(self.database).last_finished(_MANUAL)
        if found is None:
            raise AlphaloopError("the scheduler ended without recording its run")
        alive, progress = _patience(worker), probe_progress(self.database, found[0])
        while progress.num_ended < progress.num_sent:
            alive(progress.num_ended)
            time.sleep(_POLL_S)
            progress = probe_progress(self.database, found[0])
        return progress.num_sent

    def run_scheduler(self, configs: Path) -> None:
        """One run; what it sends is not waited for."""
        options = GlobalOptions(configs, PROFILE, self.data_dir)
        scheduler = child_process("scheduler", ["once"], options, self.settings)
        scheduler.start()
        try:
            code = scheduler.wait(_RUN_S)
        finally:
            scheduler.stop()
        if code:
            raise scheduler.failed(f"ended with code {code}")

    def decode(self, jobs: Sequence[Job], worker: ChildProcess) -> None:
        """Send jobs and wait until each has a recorded text. Raises AlphaloopError where one has none."""
        alive, ended = _patience(worker), list[str]()
        with Client(self.settings) as client:
            batch = client.submit(jobs)
            for outcome in client.results(batch, timeout_s=3600.0, alive=lambda: alive(len(ended))):
                ended.append(outcome.job_id)
                if outcome.status is not Status.SUCCEEDED:
                    raise AlphaloopError(f"job {outcome.job_id} ended without a text", hint=f"see {worker.log}")


def _patience(worker: ChildProcess) -> Callable[[int], None]:
    """Raises when the worker is gone, or when the number it is called with stays the same for too long."""
    last, since = -1, time.monotonic()

    def check(num_done: int) -> None:
        nonlocal last, since
        if not worker.is_running:
            raise worker.failed("ended by itself")
        if num_done != last:
            last, since = num_done, time.monotonic()
        if time.monotonic() - since > _STALLED_S:
            raise AlphaloopError(f"nothing ended in {_STALLED_S:.0f} s", hint=f"see {worker.log}")

    return check
