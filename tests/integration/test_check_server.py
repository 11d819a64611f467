"""`alphaloop check-server` over a server that speaks each kind's form: what it finds, and what it prints."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from alphaloop.commands import CheckServerOrder, ServerCheck
from alphaloop.deciding.goodput import DrafterState
from alphaloop.server_identity import ServerKind
from tests.fakes import FakeEngine
from tests.fixtures import server_replies
from tests.fixtures.cli import CarriedOut
from tests.fixtures.inference_server import (
    Answer,
    Connection,
    MetricsPage,
    ServedEngine,
    listening_beside,
    stream,
    whole,
)
from tests.fixtures.server_replies import openai, streamed
from worker.servers.http import endpoint_of
from worker.servers.load import RequestKind
from worker.servers.testing import check_server

MODELS = {"object": "list", "data": [{"id": "smollm2", "max_model_len": 2048}]}


def speaking(reply: dict[str, Any], models: dict[str, Any] = MODELS, *, tells_when_stopped: bool = True) -> Answer:
    """A server that lists its models, and gives one text: whole, in events, or up to a stop string."""

    async def answer(connection: Connection) -> None:
        body = connection.asked.body
        if connection.asked.path == "/v1/models":
            await whole(models)(connection)
        elif connection.asked.method == "GET":
            await whole({"version": "0.32.0"})(connection)
        elif body["stream"]:
            await stream(streamed(reply))(connection)
        elif "stop" in body:
            text = server_replies.text_of(reply)
            told = reply if tells_when_stopped else openai()
            end = {"text": text[: text.index(body["stop"][0])], "finish_reason": "stop", "message": None}
            await whole({**told, "choices": [{**told["choices"][0], **end}]})(connection)
        else:
            await whole(reply)(connection)

    return answer


def order(server: str, kind: ServerKind | None = None, **given: Any) -> CheckServerOrder:
    return CheckServerOrder(server=server, kind=kind, **{"model": None, "api_key_env": None} | given)


def check(answer: Answer, kind: ServerKind, **given: Any) -> CarriedOut:
    with listening_beside(answer) as server:
        return CarriedOut(order(server.url, kind, **given))


def found(done: CarriedOut) -> dict[str, tuple[str, str]]:
    (data,) = done.reports
    checked = TypeAdapter(ServerCheck).validate_python(data)
    return {one.check: (one.verdict, one.sentence) for one in checked.findings}


@pytest.mark.parametrize(
    ("kind", "granularity", "verdict", "sentence"),
    [
        ("vllm", "rounds", "ok", "20 of 20 drafted tokens accepted, positions reported"),
        ("sglang", "lengths", "ok", "20 of 20 drafted tokens accepted, positions reported"),
        ("tensorrt_llm", "lengths", "ok", "20 of 20 drafted tokens accepted, positions reported"),
        (
            "llama_cpp",
            "sums",
            "warning",
            "15 of 15 drafted tokens accepted, positions not reported; started with --metrics",
        ),
        (
            "openai",
            "nothing",
            "warning",
            "the server reports nothing about drafts; a server of a known kind reports more",
        ),
    ],
)
def test_it_says_how_finely_a_server_tells(kind: ServerKind, granularity: str, verdict: str, sentence: str) -> None:
    done = check(speaking(server_replies.of(kind)), kind)
    assert done.code == 0
    assert done.reports[0]["granularity"] == granularity
    findings = found(done)
    assert findings.get("switch") == (("ok", "every request is drafted for") if kind == "vllm" else None)
    assert (findings["counts"][0], findings["counts"][1].startswith(sentence)) == (verdict, True)
    assert findings["server"] == (
        ("warning", "openai; it does not say its version, so a change of it goes unseen")
        if kind == "openai"
        else ("ok", f"{kind} 0.32.0")
    )
    assert findings["model"] == ("ok", "smollm2, 2048 tokens of context")
    assert findings["stream"] == ("ok", "the same text in 2 pieces")
    assert findings["stop"] == ("ok", "a stop string ends the text")
    assert findings["text"][1].startswith("24 tokens in ")


def test_it_says_which_options_make_vllm_tell() -> None:
    findings = found(check(speaking(openai()), "vllm"))
    assert "--per-request-spec-decode-metrics detailed" in findings["counts"][1]


@pytest.mark.parametrize(
    ("kind", "page", "verdict", "sentence"),
    [
        ("vllm", MetricsPage().text(2), "ok", "it has 2 requests now"),
        ("vllm", "", "warning", "it does not report how many requests it has: expected vllm:num_requests_running"),
        ("llama_cpp", None, "warning", "it does not report how many requests it has: "),
        ("openai", None, "warning", "it does not report how many requests it has; name its kind"),
    ],
)
def test_it_says_whether_a_server_tells_its_load(
    kind: ServerKind, page: str | None, verdict: str, sentence: str
) -> None:
    speaks = speaking(server_replies.of(kind))

    async def answer(connection: Connection) -> None:
        if connection.asked.path == "/metrics":
            refusal = whole({"error": {"code": 501, "message": "off", "type": "not_supported_error"}}, 501)
            await (refusal if page is None else whole(page.encode(), content_type="text/plain"))(connection)
        else:
            await speaks(connection)

    found_verdict, found_sentence = found(check(answer, kind))["load"]
    assert (found_verdict, found_sentence.startswith(sentence)) == (verdict, True)


@pytest.mark.parametrize(
    ("page", "verdict", "sentence"),
    [
        (MetricsPage().text(2), "ok", "it has 2 requests now; 4 of 16 places stay free for others"),
        (
            MetricsPage().text(2).replace("waiting{engine", "waiting 3.0\nother{engine"),
            "ok",
            "it has 5 requests now, 3 of them wait; 4 of 16 places stay free for others",
        ),
        (
            "",
            "warning",
            "it does not report how many requests it has: expected vllm:num_requests_running on the page of metrics, "
            "found none; with a reserve nothing is sent there until it does; start it without --disable-log-stats, and "
            "let its /metrics through",
        ),
    ],
    ids=["known", "some wait", "not known"],
)
def test_it_says_what_a_reserve_makes_of_the_load(page: str, verdict: str, sentence: str) -> None:
    speaks = speaking(server_replies.of("vllm"))

    async def answer(connection: Connection) -> None:
        metrics = whole(page.encode(), content_type="text/plain")
        await (metrics if connection.asked.path == "/metrics" else speaks)(connection)

    with listening_beside(answer) as server:
        checked = asyncio.run(check_server(endpoint_of(server.url, "vllm", reserve=0.25)))
    (load,) = (finding for finding in checked.findings if finding.check == "load")
    assert (load.verdict, load.sentence) == (verdict, sentence)


def test_it_says_what_a_stop_string_takes_away() -> None:
    findings = found(check(speaking(server_replies.vllm(), tells_when_stopped=False), "vllm"))
    assert findings["stop"] == (
        "warning",
        "the server reports nothing about the drafts of a text that a stop string ended",
    )


def test_a_server_of_two_models_needs_a_name() -> None:
    models = {"data": [{"id": "other"}, {"id": "smollm2"}]}
    done = check(speaking(openai(), models), "openai")
    assert done.error.message == "expected the name of a model, because the server lists 2"
    findings = found(check(speaking(openai(), models), "openai", model="smollm2"))
    assert findings["model"] == ("warning", "smollm2; the server does not say how long its context is")
    done = check(speaking(openai(), models), "openai", model="third")
    assert done.error.message == "expected the model 'third' at /models, found other, smollm2"


def test_a_key_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GATE_KEY", "hunter2")
    with listening_beside(speaking(openai())) as server:
        assert CarriedOut(order(server.url, "openai", api_key_env="GATE_KEY")).code == 0
        assert {asked.headers["authorization"] for asked in server.asked} == {"Bearer hunter2"}
        done = CarriedOut(order(server.url, "openai", api_key_env="NO_KEY"))
    assert (done.code, done.error.message) == (
        1,
        "expected the server's key in the environment variable NO_KEY, found none",
    )


@pytest.fixture
def configs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Writes a models.toml with one endpoint."""
    monkeypatch.setenv("ALPHALOOP_CONFIGS", str(tmp_path))

    def write(name: str, **settings: object) -> None:
        lines = [f"{one} = {json.dumps(value)}" for one, value in settings.items()]
        text = "\n".join([f"[models.endpoints.{name}]", *lines])
        (tmp_path / "models.toml").write_text(text, encoding="utf-8")

    return write


def test_an_endpoint_of_the_settings_is_asked_with_its_key(
    configs: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALPHALOOP_MODELS__ENDPOINTS__PLAIN__API_KEY", "hunter2")
    with listening_beside(speaking(openai())) as server:
        configs("plain", kind="openai", url=server.url, answer_s=30)
        done = CarriedOut(order("plain"))
        assert (done.code, done.reports[0]["kind"]) == (0, "openai")
        assert {asked.headers["authorization"] for asked in server.asked} == {"Bearer hunter2"}


def test_counters_of_an_endpoint_of_the_settings_are_read(configs: Callable[..., None]) -> None:
    page = MetricsPage(num_draft_tokens=40, accepts=[9, 5, 2, 1]).text()

    async def answer(connection: Connection) -> None:
        is_page = connection.asked.path == "/metrics"
        await (whole(page.encode(), content_type="text/plain") if is_page else speaking(openai()))(connection)

    with listening_beside(answer) as server:
        for path, expected in (
            ("metrics", ("ok", "17 of 40 drafted tokens accepted since its start")),
            ("v1/models", ("warning", "not read: expected vllm:spec_decode_num_drafts_total on the page of metrics")),
        ):
            metrics_url = server.url.removesuffix("v1") + path
            drafts = {"drafter": "ngram", "num_draft_tokens": 4, "metrics_url": metrics_url}
            configs("plain", kind="openai", url=server.url, **drafts)
            verdict, sentence = found(CarriedOut(order("plain")))["counters"]
            assert (verdict, sentence.startswith(expected[1])) == (expected[0], True)


def test_of_a_server_that_changes_k_it_says_what_is_not_known(configs: Callable[..., None]) -> None:
    with listening_beside(speaking(server_replies.tensorrt_llm())) as server:
        drafts = {"drafter": "eagle", "num_draft_tokens": 6, "varies_drafts": True}
        configs("plain", kind="tensorrt_llm", url=server.url, **drafts)
        done = CarriedOut(order("plain"))
    assert done.reports[0]["granularity"] == "reached"
    assert found(done)["counts"] == (
        "ok",
        "20 drafted tokens accepted, by position; how many were drafted is not known",
    )


FOLLOWED = "requests for 0, 1, 2, 4 draft tokens in one batch got no more, "
SAME = "greedy texts are the same beside a sampled request"
SPOILED = (
    "4 of 4 greedy texts were other ones beside a sampled request; a worker sends greedy and sampled requests in turn"
)


@pytest.mark.parametrize(
    ("shown", "is_set", "switch", "neighbour"),
    [
        ({}, True, ("ok", f"{FOLLOWED}and the same text"), ("ok", SAME)),
        ({}, False, ("ok", f"{FOLLOWED}and the same text; one endpoint with switches_drafts = true"), ("ok", SAME)),
        (
            {"obeys": False},
            True,
            ("warning", "switches_drafts is set, but it drafted for a request that asked for no drafts; "),
            ("ok", SAME),
        ),
        (
            {"least_k": 4},
            True,
            ("warning", "switches_drafts is set, but it drafted 4 tokens in a round for a request that asked for 1; "),
            ("ok", SAME),
        ),
        ({"obeys": False}, False, ("ok", "every request is drafted for"), ("ok", SAME)),
        ({"spoils_beside": RequestKind(is_sampled=True)}, True, ("ok", FOLLOWED), ("warning", SPOILED)),
        (
            {"miscounts": 1},
            True,
            ("warning", f"{FOLLOWED}but its replies report "),
            ("ok", SAME),
        ),
    ],
    ids=["follows", "not_set", "ignores", "only_none", "ignores_not_set", "spoils", "miscounts"],
)
def test_it_shows_whether_a_server_drafts_as_asked_and_what_a_sampled_neighbour_does(
    configs: Callable[..., None],
    shown: dict[str, Any],
    is_set: bool,
    switch: tuple[str, str],
    neighbour: tuple[str, str],
) -> None:
    served = ServedEngine(FakeEngine(num_slots=8), "lookup", 4, round_s=0.002, switches_drafts=True, **shown)
    with listening_beside(served) as server:
        drafts = {"drafter": "lookup", "num_draft_tokens": 4, "switches_drafts": is_set}
        configs("both", kind="vllm", url=server.url, **drafts)
        findings = found(CarriedOut(order("both")))
    for verdict, expected in ((findings["switch"], switch), (findings["neighbour"], neighbour)):
        assert (verdict[0], verdict[1].startswith(expected[1])) == (expected[0], True), verdict


@pytest.mark.parametrize("has_lookup", [True, False])
def test_it_proves_both_drafters_of_a_server(configs: Callable[..., None], has_lookup: bool) -> None:
    drafters = (DrafterState("small", "fake-1", 8), DrafterState("lookup", "fake-1", 8))
    engine = FakeEngine(num_slots=8, drafters=drafters)
    served = ServedEngine(
        engine, "small", 4, switches_drafts=True, lookup_drafter="lookup", has_lookup=has_lookup, round_s=0.002
    )
    with listening_beside(served) as server:
        drafts = {"drafter": "small", "num_draft_tokens": 4, "switches_drafts": True, "lookup_drafter": "lookup"}
        configs("both", kind="vllm", url=server.url, **drafts)
        findings = found(CarriedOut(order("both")))
    if has_lookup:
        followed = "requests for 0, 1, 2, 4, 1 (look-up), 4 (look-up) draft tokens in one batch got no more"
        assert findings["switch"] == ("ok", f"{followed}, and the same text")
        assert findings["look-up"][0] == "ok"
        assert findings["look-up"][1].endswith("drafted tokens accepted of a request that asked for look-up")
    else:
        assert findings["switch"][0] == "warning"
        assert "--additional-config '{\"alphaloop_lookup\": {}}'" in findings["switch"][1]
        assert "look-up" not in findings


def test_what_is_no_endpoint_is_named(configs: Callable[..., None]) -> None:
    configs("plain", kind="openai", url="http://127.0.0.1:9/v1")
    assert CarriedOut(order("fast")).error.message == (
        "expected an address or an endpoint of the settings (plain), found 'fast'"
    )
    assert CarriedOut(order("plain", "vllm")).error.message == (
        "expected --kind only for an address: an endpoint's is in the settings"
    )
    assert CarriedOut(order("http://127.0.0.1:9/v1")).error.message == "expected --kind for the server at an address"


def test_a_server_that_refuses_is_an_error_in_words() -> None:
    done = check(whole({"error": "Unauthorized"}, 401), "vllm")
    assert (done.code, done.error.message) == (1, "the server answered 401")
