"""One server that drafts as each request asks, so many tokens or none: two routes at one endpoint, real connections."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import pytest

from alphaloop.deciding.decision import Decision, Reason
from alphaloop.deciding.goodput import DrafterState
from alphaloop.engine import Generation, Sampling, Served
from alphaloop.messages import Mode, Purpose
from tests.fakes import FakeEngine
from tests.fixtures.inference_server import ServedEngine, engine_over
from tests.fixtures.models import finish, make_job
from worker.servers.engine import ServerEngine
from worker.servers.load import RequestKind

ASKED = "alphaloop_num_draft_tokens"


def switching(*, obeys: bool = True, num_slots: int = 4, round_s: float = 0.0) -> ServedEngine:
    """A server with look-up, k = 4, whose settings say that it switches drafts."""
    return ServedEngine(FakeEngine(num_slots=num_slots), "lookup", 4, round_s, switches_drafts=True, obeys=obeys)


def admit(
    engine: ServerEngine,
    number: int,
    drafter: str | None,
    reason: Reason,
    purpose: str = "traffic",
    k: int = 4,
    temperature: float = 0.0,
    model: str | None = None,
) -> None:
    mode = Mode.SPECULATIVE if drafter else Mode.VANILLA
    decision = Decision(mode, drafter, "vllm-0.32.0" if drafter else None, k if drafter else 0, reason, "test")
    job = make_job(f"write text number {number}", number).model_copy(update={"purpose": Purpose(purpose)})
    job = job.model_copy(update={"body": job.body.model_copy(update={"model": model})})
    engine.admit(engine.prepare(job, Sampling(24, temperature, seed=0)), decision)


def served(generations: dict[str, Generation]) -> list[Served]:
    return [one.served for _, one in sorted(generations.items()) if one.served]


def asked(server: ServedEngine) -> Sequence[object]:
    """What each request for a text asked for; None: nothing."""
    wanted = (body for body in server.bodies if body["temperature"] == 0)  # not a probe's sampled neighbour
    return [body.get("vllm_xargs", {}).get(ASKED) for body in wanted]


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
    if purpose == "traffic":
        assert {"alphaloop_task": "code", ASKED: 0, "alphaloop_reports": 1} in [
            body.get("vllm_xargs") for body in server.bodies
        ]
    fixed = ServedEngine(FakeEngine(), "lookup", 4)
    with engine_over({"both": switching(), "fixed": fixed}) as engine:
        least, num = engine.drafters[0].least_draft_tokens, engine.drafters[0].num_endpoints
    assert (least, num) == (4, 2), "a drafter that one endpoint has at one length has it everywhere"


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


def with_two_drafters(**shown: object) -> ServedEngine:
    """A server with a draft model and look-up, k = 4, which accepts what look-up drafts less often."""
    drafters = (DrafterState("small", "fake-1", 8), DrafterState("lookup", "fake-1", 8))
    engine = FakeEngine(num_slots=6, drafters=drafters)
    return ServedEngine(engine, "small", 4, switches_drafts=True, lookup_drafter="lookup", **shown)  # type: ignore[arg-type]


@pytest.mark.parametrize("purpose", ["traffic", "probe"])
def test_one_server_drafts_with_look_up_or_its_own_drafter_as_each_decision_says(purpose: str) -> None:
    server = with_two_drafters()
    with engine_over({"both": server}) as engine:
        assert {drafter.name: drafter.max_draft_tokens for drafter in engine.drafters} == {"small": 4, "lookup": 4}
        server.bodies.clear()
        wanted = [("lookup", 2), (None, 0), ("small", 3), ("lookup", 4), ("small", 4)]
        for number, (drafter, k) in enumerate(wanted):
            admit(engine, number, drafter, Reason.PROBE, purpose, k=k)
        found = finish(engine)
    assert sorted(((one.drafter, one.num_draft_tokens) for one in served(found)), key=str) == sorted(wanted, key=str)
    for generation in found.values():
        assert generation.served is not None
        assert generation.is_counted
        decoded_with = generation.served.drafter, generation.served.num_draft_tokens
        counted = [(each.drafter, each.num_draft_tokens) for each in generation.drafted]
        assert counted == ([decoded_with] if decoded_with[0] else [])
    said = [body.get("vllm_xargs", {}) for body in server.bodies if body["temperature"] == 0]
    assert [(each.get("alphaloop_drafter"), each.get(ASKED)) for each in said] == [
        ("lookup", 2),
        (None, 0),
        (None, 3),
        ("lookup", 4),
        (None, None),
    ]


def test_a_server_without_the_look_up_of_its_settings_is_found_before_any_job(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR), engine_over({"both": with_two_drafters(has_lookup=False)}) as engine:
        assert [drafter.name for drafter in engine.drafters] == ["small"]
    assert "it drafted nothing for a text that repeats itself and asked for look-up" in caplog.text


@pytest.mark.parametrize("purpose", ["traffic", "probe"])
def test_look_up_that_is_not_given_any_more_is_recorded_as_what_drafted(purpose: str) -> None:
    server = with_two_drafters()
    with engine_over({"both": server}) as engine:
        server.obeys = False
        admit(engine, 0, "lookup", Reason.FASTER, purpose, k=2)
        admit(engine, 1, "lookup", Reason.FASTER, purpose, k=2)
        found = finish(engine)
        assert not engine.endpoints()[0].is_obeying
    assert [(one.drafter, one.num_draft_tokens) for one in served(found)] == [("small", 4)] * 2


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


def test_a_server_that_ignores_the_field_is_found_before_any_job(caplog: pytest.LogCaptureFixture) -> None:
    """Where no endpoint is vanilla a forced job is decoded and recorded as it was."""
    server = switching(obeys=False)
    with caplog.at_level(logging.ERROR), engine_over({"both": server, "plain": ServedEngine(FakeEngine())}) as engine:
        assert engine.drafters[0].num_vanilla_endpoints == 1, "the plain one alone"
        server.bodies.clear()
        for number in range(4):
            admit(engine, number, None, Reason.FORCED)
        found = finish(engine)
    assert "endpoint both cannot switch drafts: it drafted for a request that asked for no drafts" in caplog.text
    assert [one.endpoint for one in served(found)] == ["plain"] * 4
    assert not server.bodies
    with engine_over({"both": switching(obeys=False)}) as engine:
        admit(engine, 1, None, Reason.FORCED)
        (one,) = served(finish(engine))
    assert (one.drafter, one.num_draft_tokens, one.num_proposed > 0) == ("lookup", 4, True)


@pytest.mark.parametrize(
    ("drafter", "reason", "k", "asks", "told"),
    [
        (None, Reason.CONTROL, 0, 0, "it drafted for a request that asked for no drafts"),
        ("lookup", Reason.FASTER, 2, 2, "it drafted 4 tokens in a round for a request that asked for 2"),
    ],
    ids=["none", "fewer"],
)
def test_a_server_that_obeys_no_more_switches_nothing_until_it_comes_back(
    caplog: pytest.LogCaptureFixture, drafter: str | None, reason: Reason, k: int, asks: int, told: str
) -> None:
    server = switching()
    with caplog.at_level(logging.ERROR), engine_over({"both": server}) as engine:
        server.obeys = False
        server.bodies.clear()
        found = []
        for number in range(3):
            admit(engine, number, drafter, reason, k=k)
            found += served(finish(engine))
        assert engine.drafters[0].least_draft_tokens == 4
        assert not engine.endpoints()[0].is_obeying
        assert [(one.drafter, one.num_draft_tokens) for one in found] == [("lookup", 4)] * 3, (
            "what decoded it is recorded"
        )
        assert asked(server) == [asks, None, None], "the first one shows it"
        assert f"endpoint both: {told}" in caplog.text
        server.obeys, server.answer = True, _gone
        admit(engine, 3, None, Reason.CONTROL)
        while engine.endpoints()[0].state != "down":
            engine.step()
        server.answer = None
        (one,) = served(finish(engine))
        assert engine.endpoints()[0].is_obeying
        assert engine.drafters[0].least_draft_tokens == 1
    assert one.drafter is None


@pytest.mark.parametrize("spoils", [True, False])
@pytest.mark.parametrize("drafts", [True, False])
@pytest.mark.parametrize(
    ("other", "fields", "shown"),
    [
        (RequestKind(is_sampled=True), {"temperature": 1.0}, "a sampled request; this worker sends it greedy and"),
        (RequestKind(is_adapted=True), {"model": "sql"}, "a request of sql; this worker sends it requests with and"),
    ],
)
def test_requests_never_meet_where_texts_are_other_ones_beside_such_a_neighbour(
    caplog: pytest.LogCaptureFixture, other: RequestKind, fields: dict[str, Any], shown: str, drafts: bool, spoils: bool
) -> None:
    server = switching(round_s=0.002) if drafts else ServedEngine(FakeEngine(num_slots=4), round_s=0.002)
    server.adapters = ("sql",)
    drafter = "lookup" if drafts else None
    if spoils:
        server.spoils_beside = other
    with caplog.at_level(logging.ERROR), engine_over({"both": server}) as engine:
        server.bodies.clear()
        server.is_held = True
        for number in range(4):
            admit(engine, number, drafter, Reason.FASTER, **(fields if number % 2 else {}))
        while server.engine.load().num_running < (1 if spoils else 4):
            engine.step()
        server.is_held = False
        found = finish(engine)
    texts = {job_id: text.token_ids for job_id, text in found.items()}
    kinds = [(body["temperature"] > 0) or body["model"] == "sql" for body in server.bodies]
    assert kinds == [False, True, False, True], "in their order"
    with engine_over({"plain": ServedEngine(FakeEngine())}) as engine:
        for number in (0, 2):
            admit(engine, number, None, Reason.CONTROL)
        alone = {job_id: text.token_ids for job_id, text in finish(engine).items()}
    assert {job_id: texts[job_id] for job_id in alone} == alone
    actions = [record.__dict__.get("action") for record in caplog.records]
    assert actions == ["greedy_texts_spoiled"] * spoils
    if spoils:
        assert f"endpoint both: 4 of 4 greedy texts were other ones beside {shown}" in caplog.text


def test_a_server_that_comes_back_is_tested_again_for_what_a_sampled_neighbour_does() -> None:
    server = switching(round_s=0.002)
    with engine_over({"both": server}) as engine:
        server.answer, server.spoils_beside = _gone, RequestKind(is_sampled=True)
        admit(engine, 0, "lookup", Reason.FASTER)
        while engine.endpoints()[0].state != "down":
            engine.step()
        server.answer = None
        finish(engine)
        while engine.endpoints()[0].limit < 2:  # it starts slowly
            engine.step()
        server.is_held = True
        for number, temperature in ((1, 0.0), (2, 1.0)):
            admit(engine, number, "lookup", Reason.FASTER, temperature=temperature)
        while not server.engine.load().num_running:
            engine.step()
        (status,) = engine.endpoints()
        assert status.num_in_flight == 1, "the sampled one waits"
        server.is_held = False
        assert len(finish(engine)) == 2


def test_both_routes_have_the_places_of_one_server() -> None:
    server = switching(num_slots=2, round_s=0.002)
    with engine_over({"both": server}) as engine:
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
    assert len(found) == 2
    beside = [one.num_beside for one in served(found)]
    assert (min(beside) > 1.0, max(beside) > 1.5) == (True, True), "each had the other one beside it"


async def _gone(connection: object) -> None:
    raise ConnectionError
