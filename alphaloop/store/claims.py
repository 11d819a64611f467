"""What is asked of a claim, and what its answer says. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from sqlalchemy import Row

#: The status of a job without an outcome.
RUNNING: Final = "running"


class ClaimState(StrEnum):
    """What a claim found."""

    CLAIMED = "claimed"  #: decode it
    ENDED = "ended"  #: the outcome is recorded: publish it again
    CONFLICT = "conflict"  #: known with another payload
    HELD = "held"  #: another worker has it: ask again when its lease is over
    SUSPECT = "suspect"  #: a worker died with it: not claimed beside others, ask for it alone
    CANCELLED = "cancelled"  #: claimed, to record that it was cancelled
    EXHAUSTED = "exhausted"  #: claimed, to record that it failed because too many workers died with it


#: States in which the caller holds the claim and owes an outcome.
CLAIMS: Final = frozenset({ClaimState.CLAIMED, ClaimState.CANCELLED, ClaimState.EXHAUSTED})


class ClaimRequest(NamedTuple):
    """A job that arrived. A tuple, because every job has one, and a frozen dataclass takes three times as long."""

    job_id: str
    payload_sha256: bytes
    task: str
    segment: str
    custom_id: str | None
    batch_id: str | None
    purpose: str


class Claim(NamedTuple):
    """The answer to one request. `outcome` is the recorded Result, byte for byte, when the job ended.

    `headers` are those that the job's message handed on to that result. `num_crashes` and `num_failures` are known of
    jobs that are claimed, and of suspects.
    """

    job_id: str
    state: ClaimState
    attempt: int
    outcome: bytes | None = None
    headers: Mapping[str, str] = MappingProxyType({})
    held_for_s: float | None = None
    num_crashes: int = 0  #: claims that ended without an outcome and were not given back
    num_failures: int = 0  #: times that the job itself failed and was to be tried again


def claimed(
    job_id: str,
    attempt: int,
    num_crashes: int,
    num_failures: int,
    is_cancelled: bool,
    is_suspect: bool,
    *,
    max_attempts: int,
) -> Claim:
    """The answer to a request whose job was claimed, or left to be claimed alone."""
    # Any job that the worker of the first crash held may have caused that one.
    state = ClaimState.CLAIMED if num_crashes <= max_attempts else ClaimState.EXHAUSTED
    if is_cancelled:
        state = ClaimState.CANCELLED
    if is_suspect:
        state = ClaimState.SUSPECT
    return Claim(job_id, state, attempt, num_crashes=num_crashes, num_failures=num_failures)


def unclaimed(request: ClaimRequest, row: Row[Any] | None) -> Claim:
    """The answer to a request whose job could not be claimed; `row` is what is known of the job."""
    if row is None:  # retention deleted it after the claim had found it
        return Claim(request.job_id, ClaimState.HELD, 0, held_for_s=0.0)
    if row.payload_sha256 != request.payload_sha256:
        return Claim(request.job_id, ClaimState.CONFLICT, row.attempt)
    if row.status != RUNNING:
        return Claim(
            request.job_id, ClaimState.ENDED, row.attempt, outcome=row.outcome.encode(), headers=row.headers or {}
        )
    return Claim(request.job_id, ClaimState.HELD, row.attempt, held_for_s=max(0.0, float(row.lease_s)))
