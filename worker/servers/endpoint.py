"""Where a server is, and how much of it is waited for and read."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from pydantic import SecretStr

from alphaloop.errors import ConfigError
from alphaloop.server_kind import ServerKind
from alphaloop.settings.endpoint import EndpointSettings, refuse_address, refuse_key


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
    num_draft_tokens: int | None = None  #: k with which it was started; None: nothing drafts, or nobody said
    metrics_url: str | None = None  #: of a server whose counters are read, because it tells nothing of a request
    switches_drafts: bool = False  #: whether the settings say that a request may ask it not to draft

    def __post_init__(self) -> None:
        field = "url"
        try:
            refuse_address(self.url)
            field = "api_key"
            refuse_key(self.api_key.get_secret_value() if self.api_key is not None else None)
        except ValueError as error:
            raise ConfigError(f"{field}: {error}") from None

    @classmethod
    def of(cls, settings: EndpointSettings, *, model: str | None = None) -> Endpoint:
        """The endpoint that the settings describe; an empty model is the server's only one."""
        limits = Limits(settings.connect_s, settings.answer_s, settings.silence_s)
        return cls(
            settings.url,
            settings.kind,
            model or settings.model or "",
            settings.api_key,
            limits,
            settings.num_draft_tokens,
            settings.metrics_url,
            settings.switches_drafts,
        )

    @property
    def has_own_metrics(self) -> bool:
        """Whether the page of metrics, if there is one, is the server's own and may see its key."""
        return self.metrics_url is None or _origin(self.metrics_url) == _origin(self.url)

    @property
    def api(self) -> str:
        """The address before /completions."""
        stripped = self.url.rstrip("/")
        return stripped if urlsplit(stripped).path else f"{stripped}/v1"

    @property
    def root(self) -> str:
        """The address before /version, /props and other paths outside of OpenAI's form."""
        return self.api.removesuffix("/v1")


def _origin(url: str) -> tuple[str, str]:
    parts = urlsplit(url)
    return parts.scheme, parts.netloc
