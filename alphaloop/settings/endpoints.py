"""The settings of one inference server: `[models.endpoints.NAME]`."""

from __future__ import annotations

import math
from typing import Annotated, Final, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, SecretStr, model_validator

from alphaloop.messages.job import TaskName
from alphaloop.server_identity import ServerKind
from alphaloop.settings.section import Section

EXAMPLE: Final = "http://localhost:8000/v1"
#: Kinds of servers that report how many requests they have, without another address.
REPORTS_LOAD: Final[tuple[ServerKind, ...]] = ("vllm", "sglang", "llama_cpp")
_ROUNDING: Final = 1e-9


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
        raise ValueError(f"expected nothing after the path, as in {EXAMPLE}")
    return url


def _sendable(secret: SecretStr) -> SecretStr:
    """The key as it is. Raises ValueError for one that no HTTP header can hold."""
    key = secret.get_secret_value()
    if not (key.isascii() and key.isprintable() and key and key.strip() == key):
        raise ValueError("expected printable ASCII without spaces around it, found something else")
    return secret


class EndpointSettings(Section):
    """An inference server: jobs are sent there where `models.target.engine` is "server"."""

    kind: ServerKind  #: what the server is; openai for any other with OpenAI's interface
    url: Annotated[str, AfterValidator(refuse_address)]  #: as OpenAI's clients take it; without a path /v1 is added
    model: str | None = Field(None, min_length=1)  #: unset: the server's only one
    api_key: Annotated[SecretStr, AfterValidator(_sendable)] | None = None  #: best from the environment
    drafter: TaskName | None = None  #: a name for what drafts there; unset: nothing does. Replicas have the same
    num_draft_tokens: int | None = Field(None, ge=1, le=64)  #: k with which the server was started; with a drafter only
    lookup_drafter: TaskName | None = (
        None  #: with switches_drafts: a name for alphaloop's look-up, which drafts there beside the drafter, by request
    )
    varies_drafts: bool = (
        False  #: SGLang's --speculative-adaptive, TensorRT-LLM's draft_len_schedule: k changes, up to num_draft_tokens
    )
    metrics_url: Annotated[str, AfterValidator(refuse_address)] | None = (
        None  #: the page for Prometheus of vLLM or llama.cpp, as in http://host:8000/metrics: evidence is its counters
    )
    switches_drafts: bool = (
        False  #: vLLM with alphaloop's scheduler class drafts as each request asks: at most its number, or none
    )
    max_requests: int = Field(16, ge=1, le=1024)  #: most requests at once; with a reserve, of all clients together
    reserve: float = Field(
        0.0, ge=0.0, lt=1.0
    )  #: share of max_requests that stays free for other clients, whose load the server has to report
    answer_s: float = Field(600.0, gt=0)  #: from a request to the first byte of its reply: a queue lies between

    @property
    def api(self) -> str:
        """The address before /completions."""
        stripped = self.url.rstrip("/")
        return stripped if urlsplit(stripped).path else f"{stripped}/v1"

    @property
    def root(self) -> str:
        """The address before /version, /props and other paths outside of OpenAI's form."""
        return self.api.removesuffix("/v1")

    @property
    def drafters(self) -> tuple[str, ...]:
        """The names of what drafts there; the first is the server's own, which drafts where a request asks for none."""
        return tuple(name for name in (self.drafter, self.lookup_drafter) if name is not None)

    @property
    def num_kept(self) -> int:
        """Places of `max_requests` that stay free for other clients: at least the reserve."""
        return math.ceil(self.reserve * self.max_requests - _ROUNDING)

    @property
    def counted(self) -> Literal["", "counters", "reached", "sums"]:
        """How its drafts are counted, where that is not round by round: evidence of another kind has another name.

        By the server's counters; by the positions that rounds reached, because their k is not known; by sums of each
        request, whose spread over the positions is estimated.
        """
        if self.metrics_url is not None and self.drafter is not None:
            return "counters"
        if self.varies_drafts:
            return "reached"
        return "sums" if self.kind == "llama_cpp" else ""

    @property
    def has_own_metrics(self) -> bool:
        """Whether the page of metrics, if there is one, is the server's own and may see its key."""
        return self.metrics_url is None or urlsplit(self.metrics_url)[:2] == urlsplit(self.url)[:2]

    @model_validator(mode="after")
    def _drafts_with_a_k(self) -> Self:
        if (self.drafter is None) != (self.num_draft_tokens is None):
            raise ValueError("expected drafter and num_draft_tokens together: a server drafts with the k of its start")
        if self.metrics_url is not None and self.drafter is None and not self.reserve:
            raise ValueError(
                "expected metrics_url with a drafter or a reserve only: there is nothing to count where nothing drafts"
            )
        if self.switches_drafts and (self.kind != "vllm" or self.drafter is None):
            raise ValueError(
                'expected switches_drafts only with kind = "vllm" and a drafter: elsewhere all requests draft alike'
            )
        if self.lookup_drafter is not None and (not self.switches_drafts or self.lookup_drafter == self.drafter):
            raise ValueError(
                "expected lookup_drafter only with switches_drafts = true and another name than the drafter's: a "
                "request asks for either"
            )
        if self.varies_drafts and (self.kind not in ("sglang", "tensorrt_llm") or self.drafter is None):
            raise ValueError(
                'expected varies_drafts only with kind = "sglang" or "tensorrt_llm" and a drafter: no other server '
                "changes k by itself"
            )
        if self.varies_drafts and self.metrics_url is not None:
            raise ValueError("expected varies_drafts without metrics_url: counters are read for one k")
        if self.switches_drafts and self.metrics_url is not None:
            raise ValueError(
                "expected switches_drafts without metrics_url: counters mix requests with drafts and without"
            )
        return self

    @model_validator(mode="after")
    def _reserve_of_known_loads(self) -> Self:
        if not self.reserve:
            return self
        if self.metrics_url is None and self.kind not in REPORTS_LOAD:
            raise ValueError(
                f"expected reserve only with a kind of {', '.join(REPORTS_LOAD)}, or with metrics_url: no page is "
                f"known on which a server of kind {self.kind} reports how many requests it has"
            )
        if self.num_kept >= self.max_requests:
            raise ValueError(
                f"expected a reserve that leaves a place, found {self.reserve:g} of max_requests = "
                f"{self.max_requests}: the share is rounded up to whole places"
            )
        return self
