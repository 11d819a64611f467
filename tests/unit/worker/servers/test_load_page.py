"""How many requests a server has, from the page where its kind tells it."""

from __future__ import annotations

import json

import pytest

from alphaloop.errors import ReplyInvalid
from alphaloop.server_identity import ServerKind
from tests.fixtures.metrics_page import MetricsPage
from worker.servers.http import Endpoint
from worker.servers.load_watch import load_url, num_present_on

VLLM = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 2.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 4.0
vllm:num_requests_waiting{engine="1",model_name="m"} 0.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 4.0
vllm:generation_tokens_total{engine="0",model_name="m"} 812.0
"""
LLAMA_CPP = """\
# HELP llamacpp:requests_processing Number of requests processing.
# TYPE llamacpp:requests_processing gauge
llamacpp:requests_processing 2
# HELP llamacpp:requests_deferred Number of requests deferred.
# TYPE llamacpp:requests_deferred gauge
llamacpp:requests_deferred 5
"""
RANK = {"dp_rank": 0, "num_running_reqs": 6, "num_waiting_reqs": 1, "token_usage": 0.01}
SGLANG = json.dumps({"version": "0.5.23", "loads": [RANK, {**RANK, "dp_rank": 1, "num_running_reqs": 0}]})


def endpoint(kind: ServerKind, metrics_url: str | None = None) -> Endpoint:
    return Endpoint("http://gpu:8000/v1", kind, "m", metrics_url=metrics_url)


@pytest.mark.parametrize(
    ("kind", "page", "url", "num"),
    [
        ("vllm", VLLM, "http://gpu:8000/metrics", 9),
        ("llama_cpp", LLAMA_CPP, "http://gpu:8000/metrics", 7),
        ("sglang", SGLANG, "http://gpu:8000/v1/loads?include=core", 8),
        ("vllm", MetricsPage().text(3), "http://gpu:8000/metrics", 3),
    ],
)
def test_requests_that_run_and_that_wait_are_added_up_over_a_servers_parts(
    kind: ServerKind, page: str, url: str, num: int
) -> None:
    assert load_url(endpoint(kind)) == url
    assert num_present_on(endpoint(kind), page.encode()) == num


def test_a_page_elsewhere_is_asked_for_in_vllms_form() -> None:
    elsewhere = "http://gpu:9000/metrics"
    assert [load_url(endpoint(kind, elsewhere)) for kind in ("vllm", "openai")] == [elsewhere, elsewhere]
    assert num_present_on(endpoint("openai", elsewhere), VLLM.encode()) == 9


def test_a_server_of_an_unknown_kind_has_no_page() -> None:
    assert [load_url(endpoint(kind)) for kind in ("openai", "tensorrt_llm")] == [None, None]


@pytest.mark.parametrize(
    ("kind", "page", "found"),
    [
        ("vllm", "", "expected vllm:num_requests_running"),
        ("vllm", LLAMA_CPP, "expected vllm:num_requests_running"),
        ("vllm", 'vllm:num_requests_running{engine="0"} 1.0\n', "expected vllm:num_requests_waiting"),
        ("vllm", VLLM.replace("4.0", "NaN"), "Prometheus' form"),
        ("llama_cpp", VLLM, "expected llamacpp:requests_processing"),
        ("llama_cpp", LLAMA_CPP.replace(" 5", " five"), "Prometheus' form"),
        ("sglang", "{}", "loads"),
        ("sglang", '{"loads": []}', "at least one rank"),
        ("sglang", SGLANG.replace("6", "-6"), "num_running_reqs"),
        ("sglang", LLAMA_CPP, "reply"),
    ],
)
def test_a_page_that_does_not_tell_it_is_invalid(kind: ServerKind, page: str, found: str) -> None:
    with pytest.raises(ReplyInvalid, match=found):
        num_present_on(endpoint(kind), page.encode())
