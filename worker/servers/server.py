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
    switches_drafts: bool = False  #: whether it drafts for one request and not for the next, as each of them asks

    @property
    def kind(self) -> ServerKind:
        """The endpoint's."""
        return self.endpoint.kind

    @property
    def drafter_name(self) -> str | None:
        """The route: replicas of one have the same."""
        return self.drafter.name if self.drafter else None

    @property
    def routes(self) -> tuple[str | None, ...]:
        """Drafters that a request may have here; None: vanilla."""
        return (self.drafter_name, None) if self.switches_drafts else (self.drafter_name,)

    def as_fleet_endpoint(self) -> FleetEndpoint:
        """As the fleet routes to it."""
        k = self.drafter.max_draft_tokens if self.drafter else 0
        return FleetEndpoint(self.name, self.drafter_name, k, self.max_requests, self.switches_drafts)
