"""`[console]`: the web page that a scheduler serves."""

from __future__ import annotations

import ipaddress
from typing import Annotated, Final, Self
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, StringConstraints, model_validator
from pydantic_core import PydanticCustomError

from alphaloop.settings.section import Section

PublicUrl = Annotated[str, StringConstraints(pattern=r"^https?://[^\s/]+$", max_length=500)]
_LOOPBACK_NAMES: Final = ("127.0.0.1", "localhost", "[::1]")


class ConsoleSettings(Section):
    """The web page that a scheduler serves. Without a password it only shows figures."""

    is_on: bool = True
    http_host: str = "127.0.0.1"  #: another address than the machine's own needs a password
    http_port: int = Field(9466, ge=0, le=65535)  #: 0 picks a free one
    public_url: PublicUrl | None = (
        None  #: what people type where it is not http_host and http_port, such as https://alphaloop.example.org
    )
    username: str = Field("alphaloop", min_length=1, max_length=200)  #: of the one login, where password is set
    password: SecretStr | None = None  #: then every page asks for it, and shows texts and carries out actions
    database_url: SecretStr | None = (
        None  #: another login than postgres.url, whose rights are the scheduler's: it may not read texts
    )
    max_batch_mb: int = Field(100, ge=1, le=1000)  #: largest batch file that is taken

    @property
    def hosts(self) -> tuple[str, ...] | None:
        """Names by which a browser may ask, so that no other site can point its own name here; None: any name."""
        if self.public_url is None and self._is_wildcard:
            return None
        public = urlsplit(self.public_url).hostname if self.public_url else None
        named = [f"[{host}]" if ":" in host else host for host in (self.http_host, public) if host]
        return tuple(dict.fromkeys((*_LOOPBACK_NAMES, *named)))

    @property
    def is_https(self) -> bool:
        """Whether people reach it over TLS."""
        return self.public_url is not None and self.public_url.startswith("https:")

    @property
    def _is_wildcard(self) -> bool:
        return self.http_host in ("0.0.0.0", "::", "")  # noqa: S104 - compared, not bound

    @property
    def _is_loopback(self) -> bool:
        if self.http_host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.http_host).is_loopback
        except ValueError:
            return False

    @model_validator(mode="after")
    def _reached_by_others_needs_a_password(self) -> Self:
        if self.is_on and self.password is None and not self._is_loopback:
            raise PydanticCustomError(
                "password",
                "Expected a password, because other machines reach {host}; set console.password",
                {"host": self.http_host or "every address"},
            )
        return self
