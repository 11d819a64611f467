"""From settings to the engine that sends jobs to servers: every endpoint is asked what it serves."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
import time
from collections.abc import Mapping
from typing import Final
from urllib.parse import urlsplit

from alphaloop.engine_identity import EngineIdentity
from alphaloop.errors import ConfigError, ModelNotServed, ServerError
from alphaloop.server_identity import ServerIdentity
from alphaloop.settings.endpoint import EndpointSettings
from alphaloop.settings.models import ModelSettings
from alphaloop.store.server_identities import ServerIdentityStore
from worker.servers.endpoint import Endpoint
from worker.servers.engine import ServerEngine
from worker.servers.fleet import Fleet
from worker.servers.identity import ask_identity
from worker.servers.lives import NamedServers, name_servers, name_unstored
from worker.servers.server import Server

log = logging.getLogger(__name__)

#: Where no server says how long its context is.
_UNKNOWN_CONTEXT: Final = 1 << 20
_HASH_CHARS: Final = 12
_MOST_NAME_CHARS: Final = 200


def open_server_engine(
    models: ModelSettings, *, identities: ServerIdentityStore | None = None, num_slots: int | None = None
) -> ServerEngine:
    """Ask every endpoint what it is, and build the engine over those that answer; the others are tested again later.

    `identities` has what endpoints were in earlier lives; without it every life is the first. `num_slots`: most jobs at
    once; all that the endpoints take unless given. Raises ConfigError where an endpoint does not serve what the
    settings say, or another model than the others, ServerError where none answers, and StoreError.
    """
    found, missing = asyncio.run(_ask_all(models.endpoints))
    if not found:
        raise next(iter(missing.values()))
    named = name_unstored(found) if identities is None else name_servers(found, identities)
    identity = _identity(models, named)
    servers = [
        _server(models, name, settings, found.get(name), identity)
        for name, settings in models.endpoints.items()
        if name in found or settings.model is not None
    ]
    fleet = Fleet([server.as_fleet_endpoint() for server in servers], clock=time.monotonic, rng=random.Random())
    for name, error in missing.items():
        log.warning("%s: %s", name, error.message, extra={"action": "endpoint_away", "endpoint": name})
        if name in {server.name for server in servers}:
            fleet.failed(name, error)
    return ServerEngine(identity, servers, fleet, known=found, num_slots=num_slots)


async def _ask_all(
    endpoints: Mapping[str, EndpointSettings],
) -> tuple[dict[str, ServerIdentity], dict[str, ServerError]]:
    """What each endpoint said, and why the others did not. Raises ConfigError."""
    asked = (ask_identity(Endpoint.of(one), max_requests=one.max_requests) for one in endpoints.values())
    answers = await asyncio.gather(*asked, return_exceptions=True)
    found: dict[str, ServerIdentity] = {}
    missing: dict[str, ServerError] = {}
    for name, answer in zip(endpoints, answers, strict=True):
        if isinstance(answer, ServerIdentity):
            found[name] = answer
        elif isinstance(answer, ConfigError | ModelNotServed):
            raise ConfigError(f"models.endpoints.{name}.model: {answer.message}", hint=answer.hint) from answer
        elif isinstance(answer, ServerError):
            missing[name] = answer
        else:
            raise answer
    return found, missing


def _server(
    models: ModelSettings, name: str, settings: EndpointSettings, found: ServerIdentity | None, identity: EngineIdentity
) -> Server:
    model = found.model if found else settings.model or ""
    length = (found.context_length if found else None) or identity.context_length
    server = found.server if found else settings.kind
    # What is counted in another way is evidence of another kind, and has another name.
    revision = server if settings.metrics_url is None else f"{server}-counters"
    drafter = settings.drafter and models.drafter_state(settings.drafter, revision)
    return Server(name, Endpoint.of(settings, model=model), drafter or None, settings.max_requests, length)


def _identity(models: ModelSettings, named: NamedServers) -> EngineIdentity:
    """Of all endpoints together: they serve one model."""
    target, endpoints = models.target, models.endpoints
    hosts = sorted({urlsplit(one.url).netloc for one in endpoints.values()})
    addresses = "\n".join(sorted(f"{name} {one.url}" for name, one in endpoints.items()))
    return EngineIdentity(
        engine=named.engine[:_MOST_NAME_CHARS],
        target=target.name,
        target_revision=target.revision or named.target_revision,
        dtype=target.dtype,
        device=f"servers {hashlib.sha256(addresses.encode()).hexdigest()[:_HASH_CHARS]}",
        context_length=named.context_length or _UNKNOWN_CONTEXT,
        host=",".join(hosts)[:_MOST_NAME_CHARS],
    )
