"""Tells the database every few seconds what this worker is doing, for `alphaloop status` and `alphaloop job`.

One row a worker, however many jobs and tokens: nothing is written for a job or a token. `Watch` is the other direction:
it reads what other processes changed, at once on a notice, and from time to time without one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from alphaloop.deciding.snapshot import SessionFacts
from alphaloop.engine import AsksServers, Engine, HeldRequests, Step
from alphaloop.errors import StoreError, StoreUnavailable
from alphaloop.server_identity import EngineIdentity
from alphaloop.store.database import Listener
from alphaloop.store.workers import Capabilities, WorkerLoad, WorkerSetup, WorkerStore
from worker.background import BackgroundThread, Write
from worker.claims import LeaseKeeper

if TYPE_CHECKING:
    from worker.foundation import Foundation

log = logging.getLogger(__name__)

EVERY_S: Final = 2.0


@dataclass(eq=False)
class Presence:
    """Counts the tokens of running jobs, and has them written now and then. The loop's thread owns it.

    `write` takes what is to be written in the background; `num_held` is the number of claims. `sampling_defaults`: what
    the model suggests for sampling, in words.
    """

    store: WorkerStore
    write: Write
    identity: EngineIdentity
    _: KW_ONLY
    owner: str
    sampling_defaults: str = ""
    num_held: Callable[[], int]
    setup: Callable[[], WorkerSetup]
    clock: Callable[[], float]

    def __post_init__(self) -> None:
        self._tokens: dict[str, int] = {}
        self._num_tokens = 0  #: of all jobs, since the last word
        self._said_at: float | None = None
        self.num_peers = 0  #: other workers that ask the same inference servers, when it was last said

    def enter(self, *, num_slots: int) -> None:
        """Say that the worker begins to take jobs. Waits for the database.

        Raises ConfigError where workers serve another target; another revision of the same one is only logged.
        """
        if revisions := self.store.enter(self._load(num_slots, 0, None)):
            log.warning(
                "this worker serves %s in revision %s, others in %s: acceptance is counted apart",
                self.identity.target,
                self.identity.target_revision,
                ", ".join(revisions),
                extra={"action": "other_revision", "target_revision": self.identity.target_revision},
            )

    def started(self, job_id: str) -> None:
        """A job is decoded from its start."""
        self._tokens[job_id] = 0

    def stepped(self, step: Step) -> None:
        """Count what a step of the engine brought."""
        for job_id, num in step.tokens_by_job.items():
            self._tokens[job_id] = self._tokens.get(job_id, 0) + num
            self._num_tokens += num

    def say_when_due(self, running: Callable[[], list[str]], *, num_slots: int, num_waiting: Callable[[], int]) -> None:
        """Have the load written if it was not for a while. `running` are the jobs in the engine."""
        now = self.clock()
        since_s = None if self._said_at is None else now - self._said_at
        if since_s is not None and since_s < EVERY_S:
            return
        self._tokens = {job_id: self._tokens.get(job_id, 0) for job_id in running()}
        load = self._load(num_slots, num_waiting(), self._num_tokens / since_s if since_s else None)
        self._num_tokens, self._said_at = 0, now
        self.write("the worker's load", partial(self._say, load))

    def _load(self, num_slots: int, num_waiting: int, tokens_per_s: float | None) -> WorkerLoad:
        return WorkerLoad(
            owner=self.owner,
            device=self.identity.device,
            target=self.identity.target,
            num_slots=num_slots,
            num_waiting=num_waiting,
            num_held=self.num_held(),
            tokens=dict(self._tokens),  # a copy, because another thread writes it
            tokens_per_s=tokens_per_s,
            sampling_defaults=self.sampling_defaults,
            setup=self.setup(),
        )

    def _say(self, load: WorkerLoad) -> None:
        num_peers = self.store.say(load)
        self.num_peers = num_peers if self.identity.has_shared_device else 0

    def leave(self) -> None:
        """Have the row deleted."""
        self.write("the worker's end", partial(self.store.leave, self.owner))


def open_presence(
    base: Foundation,
    leases: LeaseKeeper,
    facts: SessionFacts,
    default_model: Callable[[], str | None],
) -> Presence:
    """What reports this worker to the database; `default_model` is asked each time, because the file may change."""
    engine, claim_check = base.engine, base.settings.claim_check
    can = Capabilities(
        engine.identity.context_length,
        base.settings.worker.max_job_bytes,
        tuple(sorted(engine.features)),
        (claim_check.url, *claim_check.read_urls) if claim_check.url else (),
    )
    return Presence(
        WorkerStore(base.database),
        base.background.put,
        engine.identity,
        owner=base.owner,
        sampling_defaults=engine.sampling_defaults.sentence(),
        num_held=lambda: leases.num_held,
        setup=lambda: WorkerSetup(
            facts, tuple(engine.drafters), engine.unserved(()), default_model(), can, held=_held(engine)
        ),
        clock=time.monotonic,
    )


def _held(engine: Engine) -> dict[str, HeldRequests]:
    endpoints = engine.endpoints() if isinstance(engine, AsksServers) else ()
    return {endpoint.name: endpoint.held for endpoint in endpoints if endpoint.held is not None}


#: How soon the thread notices that it has to end, and its pause while the database is away.
_SLICE_S: Final = 0.5


class Watch:
    """Calls `refresh` from its `thread`: when a notice comes, and every `every_s` at the latest.

    Without notices (the listening connection is lost and cannot be made anew) it continues every `every_s`. A call
    that fails is logged and repeated; the cache keeps its contents meanwhile.
    """

    def __init__(self, notices: Listener, refresh: Callable[[], None], *, every_s: float) -> None:
        self._notices = notices
        self._refresh = refresh
        self._every_s = every_s
        self._is_deaf = False
        self._due = time.monotonic() + every_s
        self.thread = BackgroundThread("watch", self._turn, at_end=notices.close)

    def _turn(self) -> None:
        if not self._has_notice(max(0.0, min(self._due - time.monotonic(), _SLICE_S))) and time.monotonic() < self._due:
            return
        try:
            self._refresh()
        except StoreError as error:
            log.warning("changes not read: %s", error.message, extra={"action": "refresh_failed"})
        self._due = time.monotonic() + self._every_s

    def _has_notice(self, wait_s: float) -> bool:
        """Whether a notice came within `wait_s`."""
        try:
            has_notice = self._notices.wait(wait_s)
        except StoreUnavailable as error:
            if not self._is_deaf:
                log.warning("no notices of changes: %s", error.message, extra={"action": "notices_lost"})
            self._is_deaf = True
            time.sleep(wait_s)
            return False
        if self._is_deaf:
            log.info("notices of changes come again", extra={"action": "notices_back"})
        self._is_deaf = False
        return has_notice
