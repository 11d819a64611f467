"""From a real engine through Postgres to the watch: a lost token is an incident, rounding is none."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from alphaloop.store.database import Database
from alphaloop.store.drift import IncidentKind, IncidentStore
from alphaloop.store.probes import ProbeRun, ProbeStore
from engine.own import TransformersEngine
from scheduler.probing import Watched, compare_new
from tests.fakes import FakeEngine
from tests.fixtures.inference_server import ServedEngine, engine_over
from tests.fixtures.models import VANILLA, Reference, decode_one, lookup_decision
from tests.fixtures.publishing import delivery, validation
from tests.integration.test_scored_probes import carry_out
from tests.stories.faults import Dropped, Faults, inject
from worker.claims import ClaimedJob
from worker.servers.load import RequestKind

pytestmark = pytest.mark.postgres

NOW = datetime.now(UTC).replace(microsecond=0)
HOUR = timedelta(hours=1)
#: Look-up hits and misses in what the tiny model says to these.
TELLING = ("cd one", "cd ab", "ab one", "one ab one", "ab cd ab")
PROMPTS = ("ab one two ab one two ab", "cd cd ab cd cd ab cd", "one two one two one")


def compared(database: Database, now: datetime) -> Watched:
    return compare_new(ProbeStore(database), IncidentStore(database), now)


def probe(database: Database, engine: Any, at: datetime) -> None:
    """Every prompt decoded vanilla and with look-up, as the scheduler records it and a worker does."""
    for position, prompt in enumerate(PROMPTS):
        for purpose, decision in (("control", VANILLA), ("probe", lookup_decision(3))):
            job_id = f"{purpose}-{at:%H%M%S}-{position}"
            drafter, k = ("lookup", 3) if purpose == "probe" else (None, None)
            run = ProbeRun(
                job_id, "measure", at, "code", "v", position, f"p-{position}", purpose, drafter, k, b"digest"
            )
            carry_out(database, engine, run, decision, purpose=purpose, prompt=prompt, max_tokens=24, temperature=0.0)


def test_a_dropped_token_opens_an_incident_that_a_right_run_closes(
    database: Database, tiny_engine: Callable[..., TransformersEngine]
) -> None:
    engine, dropping = tiny_engine("llama"), tiny_engine("llama")
    inject(dropping, Faults(seed=1, dropped=Dropped(task="code", sound=0)))
    probe(database, engine, NOW - 3 * HOUR)
    assert compared(database, NOW - 2 * HOUR) == Watched(num_pairs=3, num_equal=3)
    assert compared(database, NOW - 2 * HOUR) == Watched(), "each pair is compared once"

    probe(database, dropping, NOW - 2 * HOUR)
    found = compared(database, NOW - HOUR)
    assert (found.num_pairs, found.num_equal, found.num_near_ties) == (3, 0, 0)
    incidents = {one.found.kind: one.found for one in IncidentStore(database).open_incidents()}
    assert {IncidentKind.WRONG_TEXT, IncidentKind.WRONG_COUNTS} <= incidents.keys()
    wrong = incidents[IncidentKind.WRONG_TEXT]
    assert (wrong.task, wrong.drafter, len(wrong.job_ids)) == ("code", "lookup", 3)
    assert found.num_opened == len(incidents)

    probe(database, engine, NOW - HOUR)
    assert compared(database, NOW) == Watched(3, 3, 0, 0, len(incidents))
    assert IncidentStore(database).open_incidents() == []
    closed = IncidentStore(database).closed_since(NOW - HOUR)
    assert {one.found.kind: one.found for one in closed} == incidents
    assert {(one.opened_at, one.closed_at) for one in closed} == {(NOW - HOUR, NOW)}
    assert IncidentStore(database).closed_since(NOW) == []


def test_the_second_choices_are_the_target_s(
    tiny_engine: Callable[..., TransformersEngine], references: Callable[[str], Reference]
) -> None:
    engine = tiny_engine("llama")
    num_accepted = 0
    for number, prompt in enumerate(TELLING):
        given: dict[str, Any] = {"purpose": "probe", "prompt": prompt, "max_tokens": 24, "temperature": 0.0}
        claimed = ClaimedJob(validation(engine).read(delivery(f"probe-{number}", **given)), 1, 0)  # type: ignore[arg-type]
        plain, drafted = (
            decode_one(engine, claimed.ready.prepared, VANILLA),
            decode_one(engine, claimed.ready.prepared, lookup_decision(3)),
        )
        num_accepted += drafted.counts.num_accepted
        assert len(plain.second_choices) == len(plain.token_ids)
        for one, other in zip(plain.second_choices, drafted.second_choices, strict=True):
            assert one.token_id == other.token_id
            assert one.gap == pytest.approx(other.gap, abs=1e-5)
            assert one.gap > 0
    assert num_accepted > 0, "rounds of several tokens are among them"
    read = claimed.ready.prepared.token_ids
    top = references("llama").logits([*read, *plain.token_ids[:3]])[-1].topk(2)
    assert (int(top.indices[0]), int(top.indices[1])) == (plain.token_ids[3], plain.second_choices[3].token_id)
    assert float(top.values[0] - top.values[1]) == pytest.approx(plain.second_choices[3].gap, abs=1e-5)


@pytest.mark.parametrize("spoils", [True, False])
def test_a_server_that_spoils_greedy_texts_beside_sampled_ones_is_an_incident(database: Database, spoils: bool) -> None:
    server, drafting = (
        ServedEngine(FakeEngine(), drafter, k, round_s=0.01) for drafter, k in ((None, 0), ("lookup", 3))
    )
    with engine_over({"plain": server, "drafting": drafting}) as engine:
        drafting.bodies.clear()
        drafting.spoils_beside = RequestKind(
            is_sampled=spoils
        )  # since its start, with which the worker would keep both apart
        for position in range(8):
            for purpose in ("control", "probe"):
                drafter, k = ("lookup", 3) if purpose == "probe" else (None, None)
                run = ProbeRun(
                    *(f"{purpose}-code-{position}", "measure", NOW - HOUR, "code", "v", position, f"p-{position}"),
                    *(purpose, drafter, k, b"digest"),
                )
                given = {"prompt": f"one two {position}", "max_tokens": 24, "temperature": 0.0}
                carry_out(database, engine, run, lookup_decision(3) if drafter else VANILLA, purpose=purpose, **given)
    sampled = [body for body in drafting.bodies if body["temperature"] > 0]
    assert 0 < len(sampled) < 8, "a share of the probes has a sampled neighbour"
    assert not [body for body in server.bodies if body["temperature"] > 0], "controls have none"
    found = compared(database, NOW)
    assert (found.num_pairs, found.num_equal) == (8, 8 - spoils * len(sampled))
    incidents = [one.found for one in IncidentStore(database).open_incidents()]
    assert [one.kind for one in incidents] == [IncidentKind.WRONG_TEXT] * spoils
    for one in incidents:
        assert one.sentence.startswith(
            "What lookup decodes beside a sampled request for a probe of code is another text"
        )
        assert (len(one.job_ids), one.evidence["is_beside_sampled"]) == (len(sampled), True)
