"""An endpoint of a fleet, as the engine sees it."""

from __future__ import annotations

from dataclasses import dataclass

from alphaloop.deciding.goodput import DrafterState
from alphaloop.server_kind import ServerKind
from worker.servers.endpoint import Endpoint


@dataclass(frozen=True, slots=True)
class Server:
    """An endpoint of the fleet."""

    name: str
    endpoint: Endpoint
    drafter: DrafterState | None  #: what drafts there
    max_requests: int  #: at once
    context_length: int

    @property
    def kind(self) -> ServerKind:
        """The endpoint's."""
        return self.endpoint.kind

    @property
    def drafter_name(self) -> str | None:
        """The route: replicas of one have the same."""
        return self.drafter.name if self.drafter else None
