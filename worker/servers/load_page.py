"""Where a server tells how many requests it has now, and how that is read.

SGLang is asked at `/v1/loads`, which needs no option: its gauges for Prometheus are renewed every 40 rounds, and before
July 2026 not for up to 30 s after the last request. Versions of 2025 have no such page.
"""

from __future__ import annotations

from typing import Final

from alphaloop.errors import ReplyInvalid
from worker.servers.endpoint import Endpoint
from worker.servers.forms import Count, Form, read_form
from worker.servers.prometheus_page import values

MAX_BYTES: Final = 8 << 20  #: of a page
_VLLM: Final = ("vllm:num_requests_running", "vllm:num_requests_waiting")
_LLAMA: Final = ("llamacpp:requests_processing", "llamacpp:requests_deferred")


class _RankLoad(Form):
    """Of one of SGLang's data-parallel ranks."""

    num_running_reqs: Count
    num_waiting_reqs: Count


class _Loads(Form):
    """SGLang's `/v1/loads`."""

    loads: tuple[_RankLoad, ...]


def load_url(endpoint: Endpoint) -> str | None:
    """The address of the page; None of a server that has none."""
    match endpoint.kind:
        case "vllm":
            return endpoint.metrics_url or f"{endpoint.root}/metrics"
        case "sglang":
            return f"{endpoint.root}/v1/loads?include=core"
        case "llama_cpp":
            return f"{endpoint.root}/metrics"
        case _:
            return endpoint.metrics_url  # in vLLM's form, as its counters are


def num_present(endpoint: Endpoint, content: bytes) -> int:
    """Requests that run or wait there, whoever sent them. Raises ReplyInvalid."""
    if endpoint.kind == "sglang":
        loads = read_form(_Loads, content).loads
        if not loads:
            raise ReplyInvalid("expected the load of at least one rank, found none")
        return sum(one.num_running_reqs + one.num_waiting_reqs for one in loads)
    names = _LLAMA if endpoint.kind == "llama_cpp" else _VLLM
    found = values(content.decode(errors="replace"), names, hint="is the server of the kind that was named?")
    return sum(value for its in found.values() for value in its.values())
