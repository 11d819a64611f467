"""An endpoint of a fleet, as the engine sees it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from alphaloop.deciding.goodput import DrafterState
from alphaloop.server_kind import ServerKind
from worker.servers.endpoint import Endpoint
from worker.servers.fleet_member import FleetEndpoint


@dataclass(frozen=True, slots=True)
class Server:
    """An endpoint of the fleet."""

    name: str
    endpoint: Endpoint
    drafter: DrafterState | None  #: what drafts there
    max_requests: int  #: at once
    context_length: int
    switches_drafts: bool = False  #: whether it drafts as each request asks, so many tokens or none

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


def drafters_of(servers: Sequence[Server], obeys: Callable[[str], bool]) -> tuple[DrafterState, ...]:
    """What drafts at the servers, each once; of one length where any of its servers does not draft as requests ask."""
    found: dict[str, DrafterState] = {}
    for server in servers:
        if (drafter := server.drafter) is not None:
            found.setdefault(drafter.name, drafter)
            if not obeys(server.name):
                found[drafter.name] = replace(drafter, least_draft_tokens=drafter.max_draft_tokens)
    return tuple(found.values())
