"""Giving claims back: what is not given back in time counts as a crash of this worker, so it is tried for a while."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Protocol

from worker.retry import Retry

#: How long a worker that ends waits for a database that is away. The leases of its jobs run out later.
RELEASE_S: Final = 5.0


class ReleaseStore(Protocol):
    """What is needed of alphaloop.store.jobs.JobStore."""

    def release(self, attempts: Mapping[str, int], *, owner: str) -> set[str]: ...


class PatientRelease:
    """Releases claims, and waits a while for a database that is away, also in a hurry."""

    def __init__(self, store: ReleaseStore, retry: Retry) -> None:
        self._store = store
        self._retry = retry

    def release(self, attempts: Mapping[str, int], *, owner: str) -> set[str]:
        """Give back these claims (job_id to attempt); returns the jobs that were held. Raises StoreError."""
        return self._retry.for_a_while("release", lambda: self._store.release(attempts, owner=owner), RELEASE_S)
