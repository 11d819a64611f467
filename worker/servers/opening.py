"""From settings to the engine that sends jobs to endpoints: every one is asked what it serves, or started here."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import random
import socket
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Final
from urllib.parse import urlsplit

from alphaloop.engine_identity import SERVERS, EngineIdentity
from alphaloop.errors import AlphaloopError, ConfigError, EngineSick, ModelNotServed, ServerError
from alphaloop.server_identity import ServerIdentity
from alphaloop.settings.endpoint import EndpointSettings
from alphaloop.settings.in_process import InProcessSettings
from alphaloop.settings.models import AnyEndpointSettings, ModelSettings
from alphaloop.store.workers import ServerIdentityStore
from worker.servers.client import ServerClient
from worker.servers.connecting import AnyEndpoint, identity_of
from worker.servers.endpoint import Endpoint
from worker.servers.engine import ServerEngine
from worker.servers.fleet import Fleet
from worker.servers.in_process.client import Start, VllmClient
from worker.servers.in_process.library import start_vllm
from worker.servers.lives import NamedServers, name_servers, name_unstored
from worker.servers.loop_thread import LoopThread
from worker.servers.server import Server
from worker.servers.switching import why_not

log = logging.getLogger(__name__)

#: Where no server says how long its context is.
_UNKNOWN_CONTEXT: Final = 1 << 20
_HASH_CHARS: Final = 12
_MOST_NAME_CHARS: Final = 200


def open_server_engine(
    models: ModelSettings,
    *,
    identities: ServerIdentityStore | None = None,
    num_slots: int | None = None,
    start: Start = start_vllm,
) -> ServerEngine:
    """Ask every endpoint what it is, and build the engine over those that answer; the others are tested again later.

    `identities` has what endpoints were in earlier lives; without it every life is the first. `num_slots`: most jobs at
    once; all that the endpoints take unless given. `start` starts vLLM in this process. Raises ConfigError where an
    endpoint does not serve what the settings say, or another model than the others, ServerError where none answers,
    EngineSick where vLLM does not start here, and StoreError.
    """
    endpoints = {name: _endpoint(name, settings, start) for name, settings in models.endpoints.items()}
    thread = LoopThread("servers")
    try:
        most = {name: settings.max_requests for name, settings in models.endpoints.items()}
        found, missing = thread.wait_for(_ask_all(endpoints, most))
        if not found:
            raise next(iter(missing.values()))
        named = name_unstored(found) if identities is None else name_servers(found, identities)
        models = _without_disobedient(models, thread.wait_for(_why_not_switching(models, found)))
        identity = _identity(models, named, endpoints)
        servers = [
            _server(models, name, endpoints[name], found.get(name), identity)
            for name, settings in models.endpoints.items()
            if name in found or settings.model is not None
        ]
        fleet = Fleet([server.as_fleet_endpoint() for server in servers], clock=time.monotonic, rng=random.Random())
        for name, error in missing.items():
            log.warning("%s: %s", name, error.message, extra={"action": "endpoint_away", "endpoint": name})
            if name in {server.name for server in servers}:
                fleet.failed(name, error)
        return ServerEngine(identity, servers, fleet, known=found, num_slots=num_slots, thread=thread)
    except BaseException:
        thread.wait_for(_close(endpoints))
        thread.close()
        raise


def _endpoint(name: str, settings: AnyEndpointSettings, start: Start) -> AnyEndpoint:
    if isinstance(settings, InProcessSettings):
        return VllmClient(name, settings, start=start)
    return Endpoint.of(settings)


async def _ask_all(
    endpoints: Mapping[str, AnyEndpoint], max_requests: Mapping[str, int]
) -> tuple[dict[str, ServerIdentity], dict[str, ServerError]]:
    """What each endpoint said, and why the others did not. Raises ConfigError and EngineSick.

    Servers are asked first, because a mistake shows there at once. vLLM here starts one engine after the other: each
    measures which memory is free.
    """
    servers = {name: one for name, one in endpoints.items() if not isinstance(one, VllmClient)}
    asked = (identity_of(one, max_requests=max_requests[name]) for name, one in servers.items())
    answers = await asyncio.gather(*asked, return_exceptions=True)
    found: dict[str, ServerIdentity] = {}
    missing: dict[str, ServerError] = {}
    for name, answer in zip(servers, answers, strict=True):
        if isinstance(answer, ServerIdentity):
            found[name] = answer
        elif isinstance(answer, ConfigError | ModelNotServed):
            raise ConfigError(f"models.endpoints.{name}.model: {answer.message}", hint=answer.hint) from answer
        elif isinstance(answer, ServerError):
            missing[name] = answer
        else:
            raise answer
    for name, one in endpoints.items():
        if isinstance(one, VllmClient):
            found[name] = await _start(name, one)
    return {name: found[name] for name in endpoints if name in found}, missing


async def _start(name: str, vllm: VllmClient) -> ServerIdentity:
    try:
        await vllm.start()
        return await vllm.identity()
    except ConfigError as error:
        raise ConfigError(f"models.endpoints.{name}: {error.message}", hint=error.hint) from error
    except ServerError as error:
        raise EngineSick(f"models.endpoints.{name}: {error.message}", hint=error.hint) from error


async def _close(endpoints: Mapping[str, AnyEndpoint]) -> None:
    """End what was started here."""
    for one in endpoints.values():
        if isinstance(one, VllmClient):
            await one.__aexit__(None, None, None)


async def _why_not_switching(models: ModelSettings, found: Mapping[str, ServerIdentity]) -> dict[str, str]:
    """Of the endpoints that shall switch drafts and answer: why one cannot, in words."""
    asked = {
        name: settings
        for name, settings in models.endpoints.items()
        if isinstance(settings, EndpointSettings) and settings.switches_drafts and name in found
    }
    answers = await asyncio.gather(*(_why_not(settings, found[name].model) for name, settings in asked.items()))
    return {name: told for name, told in zip(asked, answers, strict=True) if told is not None}


async def _why_not(settings: EndpointSettings, model: str) -> str | None:
    try:
        async with ServerClient(Endpoint.of(settings, model=model)) as client:
            return await why_not(client)
    except AlphaloopError as error:
        return f"it could not be asked: {error.message}"


def _without_disobedient(models: ModelSettings, told: Mapping[str, str]) -> ModelSettings:
    """The settings with these endpoints as servers that draft for every request."""
    for name, why in told.items():
        hint = "all its requests are drafted for; start the worker again when this is mended"
        log.error("endpoint %s cannot switch drafts: %s; %s", name, why, hint, extra=_extra(name))
    endpoints = {
        name: settings.model_copy(update={"switches_drafts": False}) if name in told else settings
        for name, settings in models.endpoints.items()
    }
    return models.model_copy(update={"endpoints": endpoints})


def _extra(name: str) -> dict[str, str]:
    return {"action": "drafts_not_switched", "endpoint": name}


def _server(
    models: ModelSettings, name: str, endpoint: AnyEndpoint, found: ServerIdentity | None, identity: EngineIdentity
) -> Server:
    settings = models.endpoints[name]
    if isinstance(endpoint, Endpoint) and found is not None:
        endpoint = replace(endpoint, model=found.model)
    length = (found.context_length if found else None) or identity.context_length
    server = found.server if found else settings.kind
    # What is counted in another way is evidence of another kind, and has another name.
    is_counted = settings.metrics_url is not None
    drafter = settings.drafter and models.drafter_state(
        settings.drafter, f"{server}-counters" if is_counted else server
    )
    return Server(name, endpoint, drafter or None, settings.max_requests, length, settings.switches_drafts)


def _identity(models: ModelSettings, named: NamedServers, endpoints: Mapping[str, AnyEndpoint]) -> EngineIdentity:
    """Of all endpoints together: they serve one model."""
    target = models.target
    hosts = {
        socket.gethostname() if isinstance(one, VllmClient) else urlsplit(one.url).netloc for one in endpoints.values()
    }
    addresses = "\n".join(sorted(f"{name} {_address(one)}" for name, one in endpoints.items()))
    kind = SERVERS if any(isinstance(one, Endpoint) for one in endpoints.values()) else "vllm inside "
    return EngineIdentity(
        engine=named.engine[:_MOST_NAME_CHARS],
        target=target.name,
        target_revision=target.revision or named.target_revision,
        dtype=target.dtype,
        device=f"{kind}{hashlib.sha256(addresses.encode()).hexdigest()[:_HASH_CHARS]}",
        context_length=named.context_length or _UNKNOWN_CONTEXT,
        host=",".join(sorted(hosts))[:_MOST_NAME_CHARS],
    )


def _address(endpoint: AnyEndpoint) -> str:
    """Where its costs were measured: an address, or a device here and how vLLM uses it."""
    if isinstance(endpoint, Endpoint):
        return endpoint.url
    return f"{endpoint.device} {json.dumps(endpoint.settings.engine_args(), sort_keys=True, default=str)}"
