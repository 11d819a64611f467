"""Renews the leases of claimed jobs, from a thread of its own: decoding may take longer than a lease."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Final, Protocol

from alphaloop.errors import StoreError
from alphaloop.liveness import Pulse

log = logging.getLogger(__name__)

#: Cancellations without a notice, and leases to renew, are found after so long.
_CHECK_EVERY_S: Final = 1.0


class LeaseStore(Protocol):
    """What is needed of alphaloop.store.jobs.JobStore."""

    def renew(self, attempts: Mapping[str, int], *, owner: str, lease_s: float) -> set[str]: ...
    def cancelled(self, job_ids: Collection[str]) -> set[str]: ...


class LeaseKeeper:
    """Renews each held claim when half of its lease is over, and knows which of the held jobs are cancelled.

    So a job that ends within half a lease is never renewed, and no row is written more than twice a lease.

    A cancellation arrives from the reader of `control` (`cancel`) or by a notice of another worker's reader
    (`check_cancelled`). If both are missed, it is found within a second.

    A claim that could not be renewed in time is lost: the attempt number fences it, so its outcome, if it still comes,
    is dropped by the store. Losing it is therefore only logged.

    While `may_renew` says no, claims are left to run out, so that another worker takes the jobs.
    """

    def __init__(
        self,
        store: LeaseStore,
        *,
        owner: str,
        lease_s: float,
        may_renew: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clock`: seconds, from any start."""
        self._store = store
        self._owner = owner
        self._lease_s = lease_s
        self._may_renew = may_renew
        self._clock = clock
        self._held: dict[str, int] = {}
        self._renewed_at: dict[str, float] = {}
        self._cancelled: set[str] = set()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self.pulse = Pulse("the thread leases")
        self._thread = threading.Thread(target=self.pulse.around(self._run), name="leases", daemon=True)

    def start(self) -> None:
        """Begin to renew."""
        self._thread.start()

    def hold(self, attempts: Mapping[str, int]) -> None:
        """Renew these claims from now on; job_id to attempt. They were made just now."""
        with self._lock:
            self._held.update(attempts)
            self._renewed_at.update(dict.fromkeys(attempts, self._clock()))

    def let_go(self, job_ids: Iterable[str]) -> None:
        """Renew these no longer."""
        with self._lock:
            for job_id in job_ids:
                self._held.pop(job_id, None)
                self._renewed_at.pop(job_id, None)
                self._cancelled.discard(job_id)

    def held(self) -> dict[str, int]:
        """Every claim of this worker, job_id to attempt, as far as it knows."""
        with self._lock:
            return dict(self._held)

    def holds(self, job_id: str) -> bool:
        """Whether this worker has the claim, as far as it knows."""
        return job_id in self._held

    @property
    def num_held(self) -> int:
        """Claims of this worker whose outcome is not recorded."""
        return len(self._held)

    def cancelled(self) -> frozenset[str] | set[str]:
        """Held jobs whose cancellation was asked for."""
        if not self._cancelled:
            return frozenset()
        with self._lock:
            return set(self._cancelled)

    def cancel(self, job_id: str) -> None:
        """A cancellation was written down; nothing happens here if the job is not held."""
        with self._lock:
            if job_id in self._held:
                self._cancelled.add(job_id)

    def check_cancelled(self) -> None:
        """Ask the database which held jobs are cancelled. Raises StoreError."""
        with self._lock:
            held = set(self._held)
        if not held:
            return
        cancelled = self._store.cancelled(held)
        with self._lock:
            self._cancelled |= cancelled & self._held.keys()

    def renew_due(self) -> None:
        """Renew the claims of which half of the lease is over.

        StoreError is logged: the next renewal, or the fencing token, will tell.
        """
        began = self._clock()
        with self._lock:
            due = {
                job_id: attempt
                for job_id, attempt in self._held.items()
                if began - self._renewed_at[job_id] >= self._lease_s / 2
            }
        if not due or not self._may_renew():
            return
        try:
            still = self._store.renew(due, owner=self._owner, lease_s=self._lease_s)
        except StoreError as error:
            log.warning("leases not renewed: %s", error.message, extra={"action": "lease_renewal_failed"})
            return
        with self._lock:
            # A job that ended meanwhile cannot be renewed.
            asked = due.keys() & self._held.keys()
            self._renewed_at.update(dict.fromkeys(asked, began))
        if lost := asked - still:
            log.warning("%d leases lost", len(lost), extra={"action": "lease_lost"})

    @property
    def has_died(self) -> bool:
        """Whether the thread ended without being told to."""
        return self._thread.ident is not None and not self._thread.is_alive() and not self._stop.is_set()

    def close(self) -> None:
        """End the thread."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(self._lease_s)

    def _run(self) -> None:
        while not self._stop.wait(min(self._lease_s / 8, _CHECK_EVERY_S)):
            self.pulse.beat()
            self.renew_due()
            try:
                self.check_cancelled()
            except StoreError as error:
                log.warning("cancellations not read: %s", error.message, extra={"action": "cancellations_not_read"})
