"""How an endpoint is reached: over HTTP, or inside this process."""

from __future__ import annotations

from typing import TypeAlias

from alphaloop.server_identity import ServerIdentity
from worker.servers.client import ServerClient
from worker.servers.endpoint import Endpoint
from worker.servers.endpoint_client import EndpointClient
from worker.servers.identity import ask_identity
from worker.servers.in_process.client import VllmClient

#: A server at an address, or vLLM in this process, which is there once only and so is its own client.
AnyEndpoint: TypeAlias = Endpoint | VllmClient


def client_of(endpoint: AnyEndpoint, *, context_length: int | None = None) -> EndpointClient:
    """The client to send its jobs with. `context_length` is what the endpoint is known to have."""
    return endpoint if isinstance(endpoint, VllmClient) else ServerClient(endpoint, context_length=context_length)


async def identity_of(endpoint: AnyEndpoint, *, max_requests: int) -> ServerIdentity:
    """What it is and how it answers, asked with at most `max_requests` at once. Raises ConfigError, ServerError."""
    if isinstance(endpoint, VllmClient):
        return await endpoint.identity()
    return await ask_identity(endpoint, max_requests=max_requests)
