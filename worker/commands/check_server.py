"""`alphaloop check-server`: ask an inference server for three short texts, and report what it can tell."""

from __future__ import annotations
from alphaloop.commands import CheckServerOrder
from alphaloop.commands import ReportEvent
from alphaloop.commands import Tell
from alphaloop.errors import ConfigError
from alphaloop.settings import EndpointSettings
from alphaloop.settings import Settings
from pydantic import SecretStr
from worker.servers.http import Endpoint
import asyncio
import os


def check(order: CheckServerOrder, settings: Settings, tell: Tell) -> int:
    """Report every finding. Raises AlphaloopError where the server does not answer as its kind does."""
    endpoint = _endpoint(order, settings)
    try:
        from worker.servers.testing import check_server
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is not installed", hint="pip install 'alphaloop[servers]'") from None
    tell(ReportEvent(data=asyncio.run(check_server(endpoint))))
    return 0


def _endpoint(order: CheckServerOrder, settings: Settings) -> Endpoint:
    if "://" in order.server:
        if order.kind is None:
            raise ConfigError("expected --kind for the server at an address")
        return Endpoint(order.server, order.kind, order.model or "", _key(order.api_key_env))
    for name, given in (("--kind", order.kind), ("--api-key-env", order.api_key_env)):
        if given is not None:
            raise ConfigError(f"expected {name} only for an address: an endpoint's is in the settings")
    endpoints = settings.models.endpoints
    if order.server not in endpoints:
        raise ConfigError(
            f"expected an address or an endpoint of the settings ({', '.join(sorted(endpoints)) or 'there are none'}), "
            f"found {order.server!r}",
            hint="endpoints are tables of configs/models.toml: [models.endpoints.NAME]",
        )
    settings_of_it = endpoints[order.server]
    if not isinstance(settings_of_it, EndpointSettings):
        raise ConfigError(
            f"expected an endpoint with an address, found vLLM inside a worker: {order.server}",
            hint="`alphaloop calibrate` starts it, and the worker's log says what came up",
        )
    return Endpoint.of(settings_of_it, model=order.model)


def _key(name: str | None) -> SecretStr | None:
    if name is None:
        return None
    if not (found := os.environ.get(name)):
        raise ConfigError(f"expected the server's key in the environment variable {name}, found none")
    return SecretStr(found)
