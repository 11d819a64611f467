"""One server that drafts as each request asks, so many tokens or none: two routes at one endpoint, real connections."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest

from alphaloop.deciding.policy import Decision, Reason
from alphaloop.messages import Mode, Purpose
from tests.fakes import FakeEngine
from tests.fixtures.inference_server import ServedEngine, engine_over
from tests.fixtures.models import make_job
from worker.engine import Generation, Sampling, Served
from worker.servers.engine import ServerEngine

ASKED = "alphaloop_num_draft_tokens"


def switching(*, obeys: bool = True, num_slots: int = 4, round_s: float = 0.0) -> ServedEngine:
    """A server with look-up, k = 4, whose settings say that it switches drafts."""
    return ServedEngine(FakeEngine(num_slots=num_slots), "lookup", 4, round_s, switches_drafts=True, obeys=obeys)


def admit(
    engine: ServerEngine, number: int, drafter: str | None, reason: Reason, purpose: str = "traffic", k: int = 4
) -> None:
    mode = Mode.SPECULATIVE if drafter else Mode.VANILLA
    decision = Decision(mode, drafter, "vllm-0.32.0" if drafter else None, k if drafter else 0, reason, "test")
    job = make_job(f"write text number {number}", number).model_copy(update={"purpose": Purpose(purpose)})
    engine.admit(engine.prepare(job, Sampling(24, 0.0)), decision)


def finish(engine: ServerEngine) -> dict[str, Generation]:
    found: dict[str, Generation] = {}
    while engine.load().num_running:
        step = engine.step()
        assert not step.failed
        found |= {one.job_id: one for one in step.finished}
    return found


def served(generations: dict[str, Generation]) -> list[Served]:
    return [one.served for _, one in sorted(generations.items()) if one.served]


def asked(server: ServedEngine) -> Sequence[object]:
    """What each request for a text asked for; None: nothing."""
    return [body.get("vllm_xargs", {}).get(ASKED) for body in server.bodies]


@pytest.mark.parametrize("purpose", ["traffic", "control"])
def test_one_server_decodes_vanilla_and_speculatively_side_by_side(purpose: str) -> None:
    server = switching()
    with engine_over({"both": server}) as engine:
        assert engine.drafters[0].num_endpoints == engine.drafters[0].num_vanilla_endpoints == 1
        server.bodies.clear()
        for number in range(4):
            admit(engine, number, "lookup" if number % 2 else None, Reason.CONTROL, purpose)
        found = finish(engine)
        (status,) = engine.endpoints()
    assert [one.drafter for one in served(found)] == [None, "lookup", None, "lookup"]
    assert [bool(one.num_proposed) for one in served(found)] == [False, True, False, True]
    assert [one.num_draft_tokens for one in served(found)] == [0, 4, 0, 4]
    assert all(one.is_counted for one in found.values())
    assert sorted(asked(server), key=str) == [0, 0, None, None]
    assert (status.num_in_flight, status.num_undrafted, status.is_obeying) == (0, 0, True)


@pytest.mark.parametrize("purpose", ["traffic", "probe"])
def test_each_request_has_the_k_of_its_decision(purpose: str) -> None:
    server = switching()
    with engine_over({"both": server}) as engine:
        assert (engine.drafters[0].least_draft_tokens, engine.drafters[0].max_draft_tokens) == (1, 4)
        server.bodies.clear()
        for number in range(4):
            admit(engine, number, "lookup", Reason.PROBE, purpose, k=number + 1)
        found = finish(engine)
    assert sorted(asked(server), key=str) == [1, 2, 3, None], "4 is the k of its start"
    assert [one.num_draft_tokens for one in served(found)] == [1, 2, 3, 4]
    for k, (_, generation) in enumerate(sorted(found.items()), start=1):
        (drafted,) = generation.drafted
        assert drafted.num_draft_tokens == len(generation.counts.proposed) == k
        assert generation.is_counted


def test_a_text_with_longer_rounds_than_it_asked_for_ends_the_choice_of_k(caplog: pytest.LogCaptureFixture) -> None:
    server = switching()
    with caplog.at_level(logging.ERROR), engine_over({"both": server}) as engine:
        server.obeys = False
        server.bodies.clear()
        found = []
        for number in range(3):
            admit(engine, number, "lookup", Reason.FASTER, k=2)
            found += served(finish(engine))
        assert engine.drafters[0].least_draft_tokens == 4
        (status,) = engine.endpoints()
    assert [one.num_draft_tokens for one in found] == [4, 4, 4], "what decoded it is recorded"
    assert asked(server) == [2, None, None], "the first one shows it"
    assert "endpoint both: it drafted 4 tokens in a round for a request that asked for 2" in caplog.text
    assert not status.is_obeying


def test_requests_in_flight_when_the_choice_ends_are_recorded_as_what_decoded_them() -> None:
    server = switching()
    with engine_over({"both": server}) as engine:
        server.bodies.clear()
        server.is_held = True
        admit(engine, 0, "lookup", Reason.FASTER, k=1)
        while not server.engine.load().num_running:
            engine.step()
        server.obeys = False
        admit(engine, 1, "lookup", Reason.FASTER, k=2)
        while server.engine.load().num_running < 2:
            engine.step()
        server.is_held = False
        found = finish(engine)
        assert engine.drafters[0].least_draft_tokens == 4
    assert asked(server) == [1, 2]
    assert [one.num_draft_tokens for one in served(found)] == [1, 4]


def test_a_drafter_that_one_endpoint_has_at_one_length_has_it_everywhere() -> None:
    fixed = ServedEngine(FakeEngine(), "lookup", 4)
    with engine_over({"both": switching(), "fixed": fixed}) as engine:
        assert (engine.drafters[0].least_draft_tokens, engine.drafters[0].num_endpoints) == (4, 2)


def test_the_request_says_task_and_drafts_together() -> None:
    server = switching()
    with engine_over({"both": server}) as engine:
        server.bodies.clear()
        admit(engine, 1, None, Reason.NOT_FASTER)
        finish(engine)
    assert [body["vllm_xargs"] for body in server.bodies] == [{"alphaloop_task": "code", ASKED: 0}]


def test_a_server_that_ignores_the_field_is_found_before_any_job(caplog: pytest.LogCaptureFixture) -> None:
    server = switching(obeys=False)
    with caplog.at_level(logging.ERROR), engine_over({"both": server, "plain": ServedEngine(FakeEngine())}) as engine:
        assert engine.drafters[0].num_vanilla_endpoints == 1, "the plain one alone"
        server.bodies.clear()
        for number in range(4):
            admit(engine, number, None, Reason.FORCED)
        found = finish(engine)
    assert "endpoint both cannot switch drafts: it drafted for a request that asked for no drafts" in caplog.text
    assert {one.endpoint for one in served(found)} == {"plain"}
    assert not server.bodies


def test_where_no_endpoint_is_vanilla_a_forced_job_is_decoded_and_recorded_as_it_was() -> None:
    with engine_over({"both": switching(obeys=False)}) as engine:
        admit(engine, 1, None, Reason.FORCED)
        (one,) = served(finish(engine))
    assert (one.drafter, one.num_draft_tokens, one.num_proposed > 0) == ("lookup", 4, True)


def test_a_server_that_obeys_no_more_is_no_vanilla_route_any_more(caplog: pytest.LogCaptureFixture) -> None:
    server = switching()
    with caplog.at_level(logging.ERROR), engine_over({"both": server}) as engine:
        server.obeys = False
        server.bodies.clear()
        found = []
        for number in range(3):
            admit(engine, number, None, Reason.CONTROL)
            found += served(finish(engine))
        (status,) = engine.endpoints()
    assert [one.drafter for one in found] == ["lookup"] * 3, "what decoded it is recorded"
    assert asked(server) == [0, None, None], "the first one shows it"
    assert "endpoint both: it drafted for a request that asked for no drafts" in caplog.text
    assert not status.is_obeying


def test_a_server_that_comes_back_is_looked_at_again() -> None:
    server = switching()
    with engine_over({"both": server}) as engine:
        server.obeys = False
        admit(engine, 1, None, Reason.CONTROL)
        finish(engine)
        assert not engine.endpoints()[0].is_obeying
        assert engine.drafters[0].least_draft_tokens == 4
        server.obeys, server.answer = True, _gone
        admit(engine, 2, None, Reason.CONTROL)
        while engine.endpoints()[0].state != "down":
            engine.step()
        server.answer = None
        (one,) = served(finish(engine))
        assert engine.endpoints()[0].is_obeying
        assert engine.drafters[0].least_draft_tokens == 1
    assert one.drafter is None


def test_both_routes_have_the_places_of_one_server() -> None:
    server = switching(num_slots=2, round_s=0.002)
    with engine_over({"both": server}, num_slots=8) as engine:
        server.is_held = True
        for number in range(2):
            admit(engine, number, "lookup" if number else None, Reason.FORCED)
        assert not engine.load().num_free
        while server.engine.load().num_running < 2:
            engine.step()
        (status,) = engine.endpoints()
        assert (status.num_in_flight, status.num_undrafted, status.limit) == (2, 1, 2)
        server.is_held = False
        found = finish(engine)
    beside = [one.num_beside for one in served(found)]
    assert (min(beside) > 1.0, max(beside) > 1.5) == (True, True), "each had the other one beside it"


async def _gone(connection: object) -> None:
    raise ConnectionError
