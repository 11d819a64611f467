"""A server's identity: asked over a real connection, kept in a real database, named as evidence calls it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import text

from alphaloop.errors import ConfigError, RequestRefused
from alphaloop.server_identity import ServerIdentity, ServerKind, differs
from alphaloop.store.database import Database
from alphaloop.store.workers import ServerIdentityStore
from scheduler.probe_history import ProbeSetup, differences
from tests.fixtures.inference_server import Answer, Asked, Connection, listening, whole
from worker.servers.http import endpoint_of
from worker.servers.identity import PROMPTS, ask_identity, name_servers

MODELS = {"data": [{"id": "smollm2", "root": "/models/smollm2", "max_model_len": 2048}]}
TOP = [{" a": -0.3, " b": -2.5}, {" c": -0.1}]
OF_VLLM = {"tokens": [" a", " c"], "token_logprobs": [-0.3, -0.1], "top_logprobs": TOP}
OF_LLAMA = {
    "content": [
        {**ranked[0], "top_logprobs": ranked}
        for ranked in ([{"token": t, "logprob": p} for t, p in top.items()] for top in TOP)
    ]
}
USAGE = {"prompt_tokens": 5, "completion_tokens": 2}


def serving(logprobs: dict[str, Any] | None, *, refuses: bool = False) -> Answer:
    """A server that lists its model, and goes on with every prompt alike."""

    async def answer(connection: Connection) -> None:
        body = connection.asked.body
        if connection.asked.path == "/v1/models":
            await whole(MODELS)(connection)
        elif connection.asked.method == "GET":
            await whole({"version": "0.32.0"})(connection)
        elif refuses and "logprobs" in body:
            await whole({"error": {"message": "no logprobs", "type": "invalid_request_error"}}, 400)(connection)
        else:
            said = {"index": 0, "text": " a c", "finish_reason": "length", "logprobs": logprobs}
            await whole({"model": "smollm2", "choices": [said], "usage": USAGE})(connection)

    return answer


def ask(answer: Answer, kind: ServerKind = "vllm", model: str | None = None) -> tuple[ServerIdentity, list[Asked]]:
    async def run() -> tuple[ServerIdentity, list[Asked]]:
        async with listening(answer) as server:
            return await ask_identity(endpoint_of(server.url, kind, model)), server.asked

    return asyncio.run(run())


@pytest.mark.parametrize(("logprobs", "kind"), [(OF_VLLM, "vllm"), (OF_LLAMA, "llama_cpp")])
def test_names_and_answers_are_asked_in_the_words_of_each_kind(logprobs: dict[str, Any], kind: ServerKind) -> None:
    found, asked = ask(serving(logprobs), kind)
    assert (found.server, found.model, found.root) == (f"{kind}-0.32.0", "smollm2", "/models/smollm2")
    assert found.context_length == 2048
    assert [one.likeliest for one in found.answers] == [{" a": -0.3, " b": -2.5}] * len(PROMPTS)
    assert found.scatter == 0
    bodies = [one.body for one in asked if one.method == "POST"]
    assert [body["prompt"] for body in bodies[: len(PROMPTS)]] == list(PROMPTS)
    assert {(body["temperature"], body["max_tokens"], body["logprobs"]) for body in bodies} == {(0.0, 2, 5)}
    assert len(bodies) == 2 * len(PROMPTS)


@pytest.mark.parametrize("refuses", [True, False])
def test_a_server_that_refuses_or_ignores_probabilities_is_known_by_its_texts(refuses: bool) -> None:
    found, asked = ask(serving(None, refuses=refuses), "openai", "smollm2")
    assert len([one for one in asked if one.body.get("logprobs")]) == 1, "it is not asked for them again"
    assert [(one.text, one.likeliest) for one in found.answers] == [(" a c", {})] * len(PROMPTS)
    assert found.server == "openai"


def test_a_server_that_refuses_the_prompt_itself_says_so() -> None:
    async def refuse(connection: Connection) -> None:
        listed = connection.asked.path == "/v1/models"
        await (whole(MODELS) if listed else whole({"error": {"message": "no"}}, 400))(connection)

    with pytest.raises(RequestRefused):
        ask(refuse, "openai")


def test_no_more_is_asked_at_once_than_the_endpoint_takes_and_a_busy_server_is_waited_for() -> None:
    """Its limit on silence is shorter than its answers take."""
    at_once, num_prompts, most, now = serving(OF_VLLM), 0, 0, 0
    are_three = asyncio.Event()

    async def slow(connection: Connection) -> None:
        nonlocal num_prompts, most, now
        now += 1
        most = max(most, now)
        if now == 3:
            are_three.set()
        if connection.asked.method == "POST":
            num_prompts += 1
            if num_prompts > len(PROMPTS):  # asked together
                await are_three.wait()
            await asyncio.sleep(0.01)  # as long as a slow server takes
        now -= 1
        await at_once(connection)

    async def run() -> ServerIdentity:
        async with listening(slow) as server:
            endpoint = endpoint_of(server.url, "vllm", answer_s=0.005, max_requests=3)
            return await ask_identity(endpoint)

    assert len(asyncio.run(run()).answers) == len(PROMPTS)
    assert most == 3


FOUND = ask(serving(OF_VLLM))[0]


def answering(by: float) -> ServerIdentity:
    """The server, with probabilities that moved."""
    answers = (replace(one, likeliest={t: v + by for t, v in one.likeliest.items()}) for one in FOUND.answers)
    return replace(FOUND, answers=tuple(answers))


@pytest.mark.postgres
@pytest.mark.roles("alphaloop_worker")
class TestLives:
    def test_a_restart_of_the_same_server_keeps_its_names(self, database: Database) -> None:
        store = ServerIdentityStore(database)
        first = name_servers({"plain": FOUND}, store)
        again = name_servers({"plain": FOUND, "ngram": answering(0.001)}, store)
        assert (again.target_revision, again.engine) == (first.target_revision, "vllm-0.32.0")
        assert again.changed == {}
        assert again.context_length == 2048
        assert len(store.known()) == 2

    @pytest.mark.parametrize(
        ("after", "what"),
        [
            (answering(-0.4), ("target",)),
            (replace(FOUND, model="qwen", root="/models/qwen"), ("target",)),
            (answering(0.04), ("engine",)),
            (replace(FOUND, server="vllm-0.33.0"), ("engine",)),
        ],
    )
    def test_another_life_is_told_by_what_the_report_names_as_cause(
        self, database: Database, after: ServerIdentity, what: tuple[str, ...]
    ) -> None:
        store = ServerIdentityStore(database)
        was = name_servers({"plain": FOUND}, store)
        now = name_servers({"plain": after}, store)
        setups = [ProbeSetup(one.target_revision, "r1", one.engine) for one in (was, now)]
        assert differences(*setups) == what
        assert now.changed == {"plain": differs(FOUND, after)}
        (newest, oldest) = store.known()
        assert (newest.changed, oldest.changed) == (now.changed["plain"], None)
        assert store.changed_since(oldest.first_seen_at) == [newest]
        assert store.changed_since(newest.first_seen_at) == []
        assert newest.identity == after
        back = name_servers({"plain": FOUND}, store)
        assert (back.target_revision, back.engine) == (was.target_revision, was.engine), "its history is its own again"
        assert len(store.known()) == 3

    def test_two_endpoints_with_two_models_are_refused(self, database: Database) -> None:
        store = ServerIdentityStore(database)
        with pytest.raises(ConfigError, match=r"models\.endpoints\.ngram: expected the model of plain") as refused:
            name_servers({"plain": FOUND, "ngram": answering(-0.4)}, store)
        assert "a worker of its own" in str(refused.value.hint)
        assert store.known() == []

    def test_two_endpoints_that_calculate_otherwise_are_one_model_and_two_engines(
        self, database: Database, caplog: pytest.LogCaptureFixture
    ) -> None:
        found = {"plain": FOUND, "ngram": replace(answering(0.05), server="vllm-0.33.0")}
        named = name_servers(found, ServerIdentityStore(database))
        assert named.engine == "vllm-0.32.0+vllm-0.33.0"
        assert "texts of one job may differ at near-ties" in caplog.text

    def test_its_life_goes_on_while_it_is_seen(self, database: Database) -> None:
        store = ServerIdentityStore(database)
        name_servers({"plain": FOUND}, store)
        database.change(text("UPDATE server_identities SET last_seen_at = last_seen_at - interval '1 hour'"))
        name_servers({"plain": FOUND}, store)
        (life,) = store.known()
        assert life.last_seen_at >= life.first_seen_at
