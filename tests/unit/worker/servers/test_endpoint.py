"""An endpoint's address, key and limits."""

from __future__ import annotations

import pytest
from pydantic import SecretStr

from alphaloop.errors import ConfigError
from alphaloop.settings import EndpointSettings
from worker.servers.http import Endpoint, Limits


@pytest.mark.parametrize(
    ("url", "api", "root"),
    [
        ("http://gpu:8000", "http://gpu:8000/v1", "http://gpu:8000"),
        ("http://gpu:8000/", "http://gpu:8000/v1", "http://gpu:8000"),
        ("https://gpu/v1/", "https://gpu/v1", "https://gpu"),
        ("https://gate/team/v1", "https://gate/team/v1", "https://gate/team"),
    ],
)
def test_the_address_is_taken_as_openai_clients_take_it(url: str, api: str, root: str) -> None:
    endpoint = Endpoint(url, "vllm", "m")
    assert (endpoint.api, endpoint.root) == (api, root)


@pytest.mark.parametrize(
    "url",
    [
        "gpu:8000",
        "ftp://gpu",
        "http://",
        "http://[gpu",
        "http://gpu:x",
        "http://me:hunter2@gpu",
        "http://gpu?key=hunter2",
    ],
)
def test_an_address_that_cannot_be_is_refused_without_quoting_it(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Endpoint(url, "vllm", "m")
    assert str(caught.value).startswith("url: expected")
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("key", ["", " a", "a\r\nHost: other", "ключ"])
def test_a_key_that_no_header_can_hold_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match="api_key: expected printable ASCII"):
        Endpoint("http://gpu", "vllm", "m", SecretStr(key))


def test_the_key_is_never_shown() -> None:
    assert "hunter2" not in repr(Endpoint("http://gpu", "vllm", "m", SecretStr("hunter2")))


def test_settings_become_an_endpoint() -> None:
    settings = EndpointSettings(kind="sglang", url="http://gpu", api_key=SecretStr("k"), connect_s=1, answer_s=2)
    endpoint = Endpoint.of(settings)
    assert endpoint == Endpoint("http://gpu", "sglang", "", SecretStr("k"), Limits(1, 2, 60))
    assert Endpoint.of(settings, model="m").model == "m"


def test_limits_are_above_zero() -> None:
    with pytest.raises(ConfigError, match="answer_s: expected a number above 0, found 0"):
        Limits(answer_s=0)
