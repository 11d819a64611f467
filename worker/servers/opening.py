"""From settings to the engine that sends jobs to servers: every endpoint is asked what it serves."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from alphaloop.engine_identity import EngineIdentity
from alphaloop.errors import ConfigError, ModelNotServed, ServerError
from alphaloop.settings.endpoint import EndpointSettings
from alphaloop.settings.models import ModelSettings, TargetSettings
from worker.servers.client import ServerClient
from worker.servers.endpoint import Endpoint
from worker.servers.engine import ServerEngine
from worker.servers.fleet import Fleet
from worker.servers.fleet_member import FleetEndpoint
from worker.servers.forms import ModelCard
from worker.servers.server import Server

log = logging.getLogger(__name__)

#: Where no server says how long its context is.
_UNKNOWN_CONTEXT: Final = 1 << 20
_REVISION_CHARS: Final = 12
_MOST_NAME_CHARS: Final = 200


@dataclass(frozen=True, slots=True)
class Found:
    """What an endpoint said of itself."""

    name: str
    card: ModelCard
    version: str | None


def open_server_engine(models: ModelSettings, *, num_slots: int | None = None) -> ServerEngine:
    """Ask every endpoint, and build the engine over those that answer; the others are tested again later.

    `num_slots`: most jobs at once; all that the endpoints take unless given.
    Raises ConfigError where an endpoint does not serve what the settings say, and ServerError where none answers.
    """
    found, missing = asyncio.run(_ask_all(models.endpoints))
    if not found:
        raise next(iter(missing.values()))
    identity = _identity(models.target, models.endpoints, found)
    servers = [
        _server(models, name, settings, found.get(name), identity)
        for name, settings in models.endpoints.items()
        if name in found or settings.model is not None
    ]
    fleet = Fleet(
        [
            FleetEndpoint(
                server.name,
                server.drafter.name if server.drafter else None,
                server.drafter.max_draft_tokens if server.drafter else 0,
                server.max_requests,
            )
            for server in servers
        ],
        clock=time.monotonic,
        rng=random.Random(),
    )
    for name, error in missing.items():
        log.warning("%s: %s", name, error.message, extra={"action": "endpoint_away", "endpoint": name})
        if name in {server.name for server in servers}:
            fleet.failed(name, error)
    return ServerEngine(identity, servers, fleet, num_slots=num_slots)


async def _ask_all(
    endpoints: Mapping[str, EndpointSettings],
) -> tuple[dict[str, Found], dict[str, ServerError]]:
    """What each endpoint said, and why the others did not. Raises ConfigError."""
    answers = await asyncio.gather(
        *(_ask(name, settings) for name, settings in endpoints.items()), return_exceptions=True
    )
    found: dict[str, Found] = {}
    missing: dict[str, ServerError] = {}
    for name, answer in zip(endpoints, answers, strict=True):
        if isinstance(answer, Found):
            found[name] = answer
        elif isinstance(answer, ServerError) and not isinstance(answer, ModelNotServed):
            missing[name] = answer
        elif isinstance(answer, ModelNotServed):
            raise ConfigError(f"models.endpoints.{name}.model: {answer.message}", hint=answer.hint) from answer
        else:
            raise answer
    return found, missing


async def _ask(name: str, settings: EndpointSettings) -> Found:
    async with ServerClient(Endpoint.of(settings)) as client:
        cards = await client.models()
        version = await client.version()
    wanted = [card for card in cards if settings.model in (None, card.id)]
    if len(wanted) != 1:
        listed = ", ".join(card.id for card in cards[:8]) or "none"
        raise ConfigError(
            f"models.endpoints.{name}.model: expected the name of one model, found that the server lists {listed}"
        )
    return Found(name, wanted[0], version)


def _server(
    models: ModelSettings, name: str, settings: EndpointSettings, found: Found | None, identity: EngineIdentity
) -> Server:
    model = found.card.id if found else settings.model or ""
    length = (found.card.context_length if found else None) or identity.context_length
    version = (found.version if found else None) or "unknown"
    drafter = settings.drafter and models.drafter_state(settings.drafter, f"{settings.kind}-{version}")
    return Server(name, Endpoint.of(settings, model=model), drafter or None, settings.max_requests, length)


def _identity(
    target: TargetSettings, endpoints: Mapping[str, EndpointSettings], found: Mapping[str, Found]
) -> EngineIdentity:
    """Of all endpoints together: they serve one model."""
    engines = sorted({f"{endpoints[name].kind}-{one.version or 'unknown'}" for name, one in found.items()})
    lengths = [one.card.context_length for one in found.values() if one.card.context_length is not None]
    roots = sorted({one.card.root or one.card.id for one in found.values()})
    hosts = sorted({urlsplit(endpoints[name].url).netloc for name in endpoints})
    return EngineIdentity(
        engine="+".join(engines)[:_MOST_NAME_CHARS],
        target=target.name,
        target_revision=target.revision or _hash(roots),
        dtype=target.dtype,
        device=f"servers {_hash(sorted(f'{name} {one.url}' for name, one in endpoints.items()))}",
        context_length=min(lengths, default=_UNKNOWN_CONTEXT),
        host=",".join(hosts)[:_MOST_NAME_CHARS],
    )


def _hash(parts: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:_REVISION_CHARS]
