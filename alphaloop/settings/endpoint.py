"""The settings of inference servers, `[models.endpoints.<name>]` of configs/models.toml."""

from __future__ import annotations

from typing import Annotated, Final, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, SecretStr, field_validator, model_validator

from alphaloop.messages.job import TaskName
from alphaloop.server_identity import ServerKind
from alphaloop.settings.section import Section

EXAMPLE: Final = "http://localhost:8000/v1"


def refuse_address(url: str) -> str:
    """The address as it is. Raises ValueError, which never quotes it, because it may hold a password."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise ValueError("expected the address of a server, found none that can be read") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise ValueError(f"expected http:// or https:// and a host, as in {EXAMPLE}")
    if parts.username is not None or parts.password is not None:
        raise ValueError("expected no name or password in the address: the key has a setting of its own")
    if parts.query or parts.fragment:
        raise ValueError(f"expected nothing behind the path, as in {EXAMPLE}")
    return url


def refuse_key(key: str | None) -> None:
    """Raise ValueError for a key that no HTTP header can hold."""
    if key is not None and not (key.isascii() and key.isprintable() and key and key.strip() == key):
        raise ValueError("expected printable ASCII without spaces around it, found something else")


def _sendable(key: SecretStr) -> SecretStr:
    refuse_key(key.get_secret_value())
    return key


class EndpointSettings(Section):
    """An inference server: jobs are sent there where `models.target.engine` is "server"."""

    kind: ServerKind  #: what the server is; openai for any other with OpenAI's interface
    url: Annotated[str, AfterValidator(refuse_address)]  #: as OpenAI's clients take it; without a path /v1 is added
    model: str | None = Field(None, min_length=1)  #: unset: the server's only one
    api_key: Annotated[SecretStr, AfterValidator(_sendable)] | None = None  #: best from the environment
    drafter: TaskName | None = None  #: a name for what drafts there; unset: nothing does. Replicas have the same
    num_draft_tokens: int | None = Field(None, ge=1, le=64)  #: k with which the server was started; with a drafter only
    metrics_url: Annotated[str, AfterValidator(refuse_address)] | None = (
        None  #: a vLLM's page for Prometheus, as in http://host:8000/metrics: counts come from there alone
    )
    switches_drafts: bool = False  #: vLLM with alphaloop's look-up drafts as each request asks: so many tokens, or none
    max_requests: int = Field(16, ge=1, le=1024)  #: most requests at once
    answer_s: float = Field(600.0, gt=0)  #: from a request to the first byte of its reply: a queue lies between
    silence_s: float = Field(60.0, gt=0)  #: between two pieces of a reply that has begun

    @field_validator("kind", mode="before")
    @classmethod
    def _refuse_an_engine_inside(cls, given: object) -> object:
        if given == "vllm_in_process":
            raise ValueError(
                "expected the kind of a server, because the worker starts no vLLM inside itself; start `vllm serve` on "
                f'this machine and name it with kind = "vllm" and url = "{EXAMPLE}"'
            )
        return given

    @model_validator(mode="after")
    def _drafts_with_a_k(self) -> Self:
        if (self.drafter is None) != (self.num_draft_tokens is None):
            raise ValueError("expected drafter and num_draft_tokens together: a server drafts with the k of its start")
        if self.metrics_url is not None and self.drafter is None:
            raise ValueError("expected metrics_url with a drafter only: there is nothing to count where nothing drafts")
        if self.switches_drafts and (self.kind != "vllm" or self.drafter is None):
            raise ValueError(
                'expected switches_drafts only with kind = "vllm" and a drafter: elsewhere all requests draft alike'
            )
        if self.switches_drafts and self.metrics_url is not None:
            raise ValueError(
                "expected switches_drafts without metrics_url: counters mix requests with drafts and without"
            )
        return self
