"""An endpoint of a fleet, as the engine sees it."""

from __future__ import annotations

from dataclasses import dataclass

from alphaloop.deciding.goodput import DrafterState
from alphaloop.server_kind import ServerKind
from worker.servers.connecting import AnyEndpoint
from worker.servers.fleet_member import FleetEndpoint


@dataclass(frozen=True, slots=True)
class Server:
    """An endpoint of the fleet."""

    name: str
    endpoint: AnyEndpoint
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

    def as_fleet_endpoint(self) -> FleetEndpoint:
        """As the fleet routes to it."""
        k = self.drafter.max_draft_tokens if self.drafter else 0
        return FleetEndpoint(self.name, self.drafter_name, k, self.max_requests)
