"""What the engine asks of one endpoint: a server behind an address, or vLLM inside this process."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self

from alphaloop.messages import Job
from worker.engine import Sampling
from worker.servers.reading import Reply


class EndpointClient(Protocol):
    """An asynchronous context manager; every method raises errors of alphaloop's tree only."""

    async def __aenter__(self) -> Self:
        """Open what requests need."""

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it; requests under way are cut."""

    @property
    def must_stream(self) -> bool:
        """Whether only a stream tells when the first token came, and loses nothing that a whole reply tells."""

    @property
    def sick(self) -> str | None:
        """Why nothing will ever decode here again in this process, in words; None of what may come back."""

    async def complete(
        self,
        job: Job,
        sampling: Sampling,
        *,
        on_text: Callable[[str], None] | None = None,
        num_draft_tokens: int | None = None,
    ) -> Reply:
        """The text of a job. With `on_text` it is streamed, and each piece of text handed over as it comes.

        `num_draft_tokens`: most tokens of a draft, where the endpoint follows a request in that; None: as it was
        started.

        Raises PromptTooLong, InvalidField, or a ServerError. Cancelling it ends the request.
        """

    async def room_behind(self, job: Job) -> int | None:
        """Tokens that the context leaves behind the job's prompt; None where that is not told.

        Raises what `complete` raises.
        """

    async def revive(self) -> None:
        """Start again what has ended, if that is for this process to do. Raises ServerUnavailable."""
