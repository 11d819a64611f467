"""`alphaloop check-server`: ask an inference server for three short texts, and report what it can tell."""

from __future__ import annotations

import asyncio
import os

from pydantic import SecretStr

from alphaloop.commands.events import Report, Tell
from alphaloop.commands.orders import CheckServerOrder
from alphaloop.errors import ConfigError


def check(order: CheckServerOrder, tell: Tell) -> int:
    """Report every finding. Raises AlphaloopError where the server does not answer as its kind does."""
    try:
        from worker.servers.checking import check_server
        from worker.servers.endpoint import Endpoint, Limits
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is not installed", hint="pip install 'alphaloop[servers]'") from None
    endpoint = Endpoint(
        order.url,
        order.kind,
        order.model or "",
        _key(order.api_key_env),
        Limits(answer_s=order.timeout, silence_s=order.timeout),
    )
    tell(Report(data=asyncio.run(check_server(endpoint))))
    return 0


def _key(name: str | None) -> SecretStr | None:
    if name is None:
        return None
    if not (found := os.environ.get(name)):
        raise ConfigError(f"expected the server's key in the environment variable {name}, found none")
    return SecretStr(found)
