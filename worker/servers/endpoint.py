"""Where a server is, and how much of it is waited for and read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from pydantic import SecretStr

from alphaloop.errors import ConfigError
from alphaloop.server_kind import ServerKind


@dataclass(frozen=True, slots=True)
class Limits:
    """What a client allows a server."""

    connect_s: float = 10.0
    answer_s: float = 600.0  #: from the request to the first byte of its reply: a queue and the prompt lie between
    silence_s: float = 60.0  #: between two pieces of a reply that has begun
    max_reply_bytes: int = 64 << 20  #: of a whole reply, streamed or not
    max_event_bytes: int = 8 << 20  #: of one event of a stream
    max_connections: int = 1024

    def __post_init__(self) -> None:
        for name in Limits.__slots__:
            if not (found := getattr(self, name)) > 0:
                raise ConfigError(f"{name}: expected a number above 0, found {found}")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One server and the model that it is asked for."""

    url: str  #: as OpenAI's clients take it, http://host:8000/v1; without a path /v1 is added
    kind: ServerKind
    model: str
    api_key: SecretStr | None = None
    limits: Limits = Limits()

    def __post_init__(self) -> None:
        _refuse_address(self.url)
        key = self.api_key.get_secret_value() if self.api_key is not None else "none"
        if not (key.isascii() and key.isprintable() and key.strip() == key and key):
            raise ConfigError("api_key: expected printable ASCII without spaces around it, found something else")

    @property
    def api(self) -> str:
        """The address before /completions."""
        stripped = self.url.rstrip("/")
        return stripped if urlsplit(stripped).path else f"{stripped}/v1"

    @property
    def root(self) -> str:
        """The address before /version, /props and other paths outside of OpenAI's form."""
        return self.api.removesuffix("/v1")


_EXAMPLE: Final = "for example http://localhost:8000/v1"


def _refuse_address(url: str) -> None:
    """Raise ConfigError without quoting what may hold a password."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise ConfigError("url: expected the address of a server, found none that can be read", hint=_EXAMPLE) from None
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise ConfigError(f"url: expected http:// or https:// and a host, found {parts.scheme!r}", hint=_EXAMPLE)
    if parts.username is not None or parts.password is not None:
        raise ConfigError("url: expected no name or password in it", hint="give the key apart from the address")
    if parts.query or parts.fragment:
        raise ConfigError("url: expected nothing behind the path", hint=_EXAMPLE)
