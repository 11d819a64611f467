"""A job that is sent to servers, and what becomes of it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TypeAlias

from worker.engine import FailedRequest, Generation, PreparedJob, TokenDelta


@dataclass(slots=True, eq=False)
class Request:
    """One job, from its admission to its end. The event loop's thread owns it."""

    prepared: PreparedJob
    drafter: str | None  #: as decided; None: vanilla
    is_bound: bool  #: whether no other route may take it: a probe, a control, an arm of an experiment
    admitted_at: float  #: by the engine's clock, seconds
    num_draft_tokens: int | None = None  #: as decided; None: as the endpoint was started
    barred: frozenset[str] = frozenset()  #: endpoints that cannot follow its settings
    max_tokens: int = 0  #: of the text; lowered where the server's context leaves less
    num_deltas: int = 0  #: pieces of text that are out
    avoid: frozenset[str] = frozenset()  #: endpoints on which it failed
    must_be_alone: bool = False  #: nothing else may run where it runs, because servers died with it
    task: asyncio.Task[None] | None = None
    is_begun: bool = False  #: whether `task` has taken its first step
    is_dropped: bool = False

    @property
    def is_choosy(self) -> bool:
        """Whether there are endpoints that may not take it, however much room they have."""
        return self.is_bound or bool(self.barred)

    @property
    def job_id(self) -> str:
        """The job's."""
        return self.prepared.job.job_id


@dataclass(frozen=True, slots=True)
class Finished:
    """The text is whole."""

    request: Request
    generation: Generation


@dataclass(frozen=True, slots=True)
class Streamed:
    """A piece of text came."""

    request: Request
    delta: TokenDelta


@dataclass(frozen=True, slots=True)
class Failed:
    """The job failed while the servers are well."""

    request: Request
    failure: FailedRequest


@dataclass(frozen=True, slots=True)
class Interrupted:
    """The server went away when a part of the text was out."""

    request: Request


@dataclass(frozen=True, slots=True)
class InLine:
    """Requests that wait for endpoints while others, which may not take them, may have room; by job_id."""

    waiting: frozenset[str] = frozenset()
    absent: frozenset[str] = frozenset()  #: those of them whose endpoints are all away


Event: TypeAlias = Finished | Streamed | Failed | Interrupted
