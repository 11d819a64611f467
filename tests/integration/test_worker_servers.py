"""A worker in front of inference servers: real broker, real database, real connections to servers that speak vLLM."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import text

from alphaloop.deciding.decision import Decision, Reason
from alphaloop.engine import EndpointStatus, HeldRequests, Sampling
from alphaloop.errors import EngineSick
from alphaloop.experiment.observe import Phase, Slice, Treatment
from alphaloop.inside_vllm.measuring import as_json
from alphaloop.kafka.topics import CONTROL, TOKENS
from alphaloop.measurements import DriftSubject
from alphaloop.messages import Mode, Status
from alphaloop.settings import Settings
from alphaloop.store.database import Database
from alphaloop.store.drift import DriftEventStore, EventChange, EventState
from alphaloop.store.switchback import SwitchbackStore
from alphaloop.store.workers import WorkerStore
from tests.fakes import FakeEngine
from tests.fixtures.drift import content, record_probes, register_probe_set
from tests.fixtures.inference_server import Connection, ServedEngine, engine_over, head, whole
from tests.fixtures.models import make_job
from tests.fixtures.worker import Client, RunningWorker, headers_of, running_worker, until
from tests.integration.test_worker_flow import job

pytestmark = [pytest.mark.kafka, pytest.mark.postgres]

AWAY = whole({"error": {"message": "no", "type": "InternalServerError", "code": 503}}, 503)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that is away is soon looked for again."""
    monkeypatch.setattr("worker.servers.fleet_member._FIRST_WAIT_S", 0.1)


def pair(round_s: float = 0.0, *, tells_exactly: bool = False) -> dict[str, ServedEngine]:
    """A server that drafts nothing and one that drafts with k = 4."""
    return {
        "plain": ServedEngine(FakeEngine(), round_s=round_s, tells_exactly=tells_exactly),
        "speculative": ServedEngine(FakeEngine(), "lookup", 4, round_s, tells_exactly=tells_exactly),
    }


def raise_alarm(database: Database, subject: DriftSubject) -> None:
    """As the scheduler does where the traffic of a task has fallen."""
    said = content(subject, "too_little_evidence")
    evidence = {"flagged_by": "traffic", "probes": None, "traffic": {"state": "fell"}}
    opened = EventChange(None, EventState.OPENED, replace(said, evidence=evidence), "It fell.")
    DriftEventStore(database).write([opened], datetime.now(UTC))


def attempts(database: Database) -> dict[str, tuple[int, int]]:
    """Of every job, its attempt and how often it failed."""
    rows = database.rows(text("SELECT job_id, attempt, num_failures FROM jobs"))
    return {job_id: (attempt, num_failures) for job_id, attempt, num_failures in rows}


def test_jobs_go_to_the_server_of_their_decision_and_come_back_with_its_counts(
    worker_settings: Settings, database: Database
) -> None:
    servers = pair()
    client = Client(worker_settings)
    with engine_over(servers) as engine, running_worker(worker_settings, engine) as running:
        forced = [job(number, decoding=("speculative", "vanilla")[number % 2]) for number in range(20)]
        client.send("code", [*forced, *(job(number) for number in range(20, 40))])
        by_id = {result.job_id: result for result in client.results(40)}
        sample = running.worker.metrics.registry.get_sample_value
        assert sample("alphaloop_endpoint_state", {"endpoint": "plain", "drafter": "", "state": "up"}) == 1
        assert sample("alphaloop_endpoint_limit", {"endpoint": "speculative", "drafter": "lookup"}) == 4
    assert {result.status for result in by_id.values()} == {Status.SUCCEEDED}
    for number in range(20):
        decoding = by_id[f"job-{number}"].decoding
        assert decoding.mode == (Mode.SPECULATIVE, Mode.VANILLA)[number % 2]
        assert decoding.num_draft_tokens == (4, 0)[number % 2]
        assert decoding.engine == "vllm-0.32.0"
        assert bool(sum(decoding.proposed)) == (number % 2 == 0)
    sums = "SELECT count(*), count(DISTINCT job_id), sum(num_tokens), sum(array_sum(proposed)) FROM decode_runs"
    runs, distinct, num_tokens, num_proposed = database.one(text(sums))
    assert (runs, distinct) == (40, 40)
    assert num_tokens == sum(result.usage.completion_tokens for result in by_id.values() if result.usage)
    told = [result.decoding for result in by_id.values() if result.decoding]
    assert num_proposed == sum(sum(decoding.proposed) for decoding in told)
    assert servers["plain"].num_texts >= 10
    assert servers["speculative"].num_texts >= 10


def test_what_a_server_measures_of_its_own_rounds_is_the_speedup_of_its_tasks(
    worker_settings: Settings, database: Database
) -> None:
    """Twelve blocks of a server whose rounds with drafts yield 3 tokens and take 1.5 vanilla rounds."""
    server = ServedEngine(FakeEngine(), "lookup", 4, switches_drafts=True, tells_exactly=True, round_s=0.001)
    now = datetime.now(UTC)
    server.slices = [
        as_json(measured_slice(block, phase, now)) for block in range(12) for phase in (*Phase,) if phase != "between"
    ]
    num_slices = len(server.slices)
    client = Client(worker_settings)
    with engine_over({"both": server}, control_share=0.1) as engine, running_worker(worker_settings, engine):
        client.send("code", [job(number) for number in range(num_slices)])
        client.send("code", [job(number, decoding="speculative") for number in range(100, 104)])
        client.results(num_slices + 4)
    assert not server.slices
    asked = [body.get("vllm_xargs", {}) for body in server.bodies]
    on_trial = [said for said in asked if "alphaloop_subject" in said]
    assert {(said["alphaloop_subject"], said["alphaloop_treatment"]) for said in on_trial} == {
        ("code greedy", "lookup")
    }
    assert all(said["alphaloop_control_share"] == 0.1 for said in on_trial)
    assert any(len(said.get("alphaloop_expected", ())) == 5 for said in on_trial)
    # No request is made a control of its own: it would share its rounds with requests that draft.
    reasons = "SELECT count(*) FROM decode_runs WHERE reason = 'control'"
    assert database.one(text(reasons)) == (0,)
    SwitchbackStore(database).refresh(datetime.now(UTC), {"code"})  # the worker does every ten seconds
    (speedup,) = database.one(text("SELECT speedup FROM task_speedups WHERE task = 'code'"))
    assert speedup == pytest.approx(2.0, rel=1e-6)


def measured_slice(block: int, phase: Phase, now: datetime) -> Slice:
    """64 sequence-rounds of four sequences."""
    is_control = phase is Phase.CONTROL
    begun = now - timedelta(minutes=30) + timedelta(seconds=10 * block + [*Phase].index(phase))
    part = Slice(f"{block:016x}", "code greedy", phase, Treatment("lookup", 4), begun)
    return replace(
        part,
        num_rounds=16,
        num_sequence_rounds=64,
        num_tokens=64 if is_control else 192,
        num_proposed=0 if is_control else 256,
        sequence_s=64 * (0.01 if is_control else 0.015),
        sum_running=64,
        sum_context=1600.0,
    )


def test_no_job_pays_for_an_outage_of_all_servers(worker_settings: Settings, database: Database) -> None:
    servers = pair(round_s=0.001)
    client = Client(worker_settings)
    with engine_over(servers) as engine, running_worker(worker_settings, engine) as running:
        client.send("code", [job(number) for number in range(4)])
        client.results(4)
        for server in servers.values():
            server.answer = AWAY
        client.send("code", [job(number) for number in range(4, 20)])
        until(lambda: running.worker.engine.unavailable() is not None, "no server can be sent jobs")
        for server in servers.values():
            server.answer = None
        results = client.results(20)
    assert {result.status for result in results} == {Status.SUCCEEDED}
    assert set(attempts(database).values()) == {(1, 0)}


def test_a_stream_that_is_cut_begins_again_under_another_attempt(worker_settings: Settings, database: Database) -> None:
    server = ServedEngine(FakeEngine(), round_s=0.001)

    async def cut(connection: Connection) -> None:
        server.answer = None
        event = json.dumps({"model": "fake", "choices": [{"index": 0, "text": "amber ", "finish_reason": None}]})
        data = f"data: {event}\n\n".encode()
        await connection.send(head(content_type="text/event-stream", Transfer_Encoding="chunked"))
        await connection.send(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        connection.reset()

    client = Client(worker_settings)
    with engine_over({"plain": server}) as engine, running_worker(worker_settings, engine):
        server.answer = cut
        client.send("code", [job(1, stream=True)])
        (result,) = client.results(1)
        chunks = client.read([TOKENS], lambda found: bool(found) and headers_of(found[-1])["final"] == "1")
    assert result.status is Status.SUCCEEDED
    assert result.attempt == 2
    texts: dict[str, str] = {}
    for chunk in chunks:
        (choice,) = json.loads(chunk.value or b"{}")["choices"]
        attempt = headers_of(chunk)["attempt"]
        texts[attempt] = texts.get(attempt, "") + (choice["delta"].get("content") or "")
    assert texts == {"1": "amber ", "2": result.text}


def test_a_server_that_comes_back_as_another_gets_no_jobs(worker_settings: Settings) -> None:
    servers = pair(round_s=0.001)
    other = servers["speculative"]
    client = Client(worker_settings)
    with engine_over(servers) as engine, running_worker(worker_settings, engine):
        other.answer = AWAY
        client.send("code", [job(1, decoding="speculative")])
        until(lambda: engine.endpoints()[1].state == "down", "the server is away")
        other.answer, other.version = None, "0.33.0"
        until(lambda: engine.endpoints()[1].state == "retired", "the server is known as another")
        num_texts = other.num_texts
        client.send("code", [job(number) for number in range(2, 12)])
        client.results(10)
        assert other.num_texts == num_texts
        reason = engine.endpoints()[1].reason or ""
        assert "changed from vllm-0.32.0 to vllm-0.33.0" in reason
        client.send_to(CONTROL, b'{"action": "cancel", "job_id": "job-1"}')
        client.results(11)


def test_a_worker_all_of_whose_servers_came_back_as_others_ends_and_the_next_one_takes_them_in(
    worker_settings: Settings, database: Database
) -> None:
    servers = pair(round_s=0.001)
    client = Client(worker_settings)
    with engine_over(servers) as engine:
        worker = RunningWorker(worker_settings, engine, seed=1)
        worker.start()
        for server in servers.values():
            server.answer = AWAY
        client.send("code", [job(number) for number in range(12)])
        # No request of before is under way, which the new servers could answer.
        until(lambda: {(one.state, one.num_in_flight) for one in engine.endpoints()} == {("down", 0)}, "both are away")
        for server in servers.values():
            server.answer, server.version = None, "0.33.0"
        until(lambda: worker.error is not None, "the worker ended by itself")
        with pytest.raises(EngineSick, match="no inference server is left: plain: it came back as another server"):
            worker.close()
    with engine_over(servers) as engine, running_worker(worker_settings, engine):
        results = client.results(12)
    assert {result.status for result in results} == {Status.SUCCEEDED}
    assert {result.decoding.engine for result in results if result.decoding} == {"vllm-0.33.0"}
    assert {num_failures for _, num_failures in attempts(database).values()} == {0}


def test_after_a_fall_nothing_is_drafted_until_a_probe_answers(worker_settings: Settings, database: Database) -> None:
    servers = pair(round_s=0.001)
    body = {"prompt": "amber basil cedar", "max_tokens": 8, "temperature": 0.0}
    drafts = {"purpose": "probe", "probe_drafter": "lookup", "probe_num_draft_tokens": 4}
    probe = json.dumps({"job_id": "probe", **drafts, "body": body}).encode()
    record_probes(database, [("code", probe)])
    register_probe_set(database, "code", [body], datetime.now(UTC))
    client = Client(worker_settings)

    def modes(*numbers: int) -> set[Mode]:
        client.send("code", [job(number, decoding="speculative") for number in numbers])
        found = client.results(len(sent) + len(numbers))
        sent.update(numbers)
        wanted = {f"job-{number}" for number in numbers}
        return {result.decoding.mode for result in found if result.job_id in wanted and result.decoding}

    sent: set[int] = set()
    with engine_over(servers) as engine, running_worker(worker_settings, engine):
        (drafter,) = engine.drafters
        prepared = engine.prepare(make_job("one two"), Sampling(max_tokens=8, temperature=0.0))
        assert modes(1, 2) == {Mode.SPECULATIVE}
        num_asked = servers["speculative"].num_texts
        raise_alarm(database, DriftSubject("code", "lookup", drafter.revision, engine.identity.target_revision))
        until(lambda: "lookup" in engine.unserved([prepared]), "the worker knows of the fall")
        assert engine.unserved(()) == {}, "the drafter has not ended: its probes are still planned"
        until(lambda: servers["speculative"].num_texts >= num_asked + 32, "its server is asked again who it is")
        assert modes(3, 4) == {Mode.VANILLA}
        client.send("code", [probe])
        sent.add(0)
        until(lambda: not engine.unserved([prepared]), "the probe has answered")
        assert modes(5, 6) == {Mode.SPECULATIVE}
        assert {one.state for one in engine.endpoints()} == {"up"}


def test_a_server_with_other_weights_that_was_never_away_is_found_by_a_fall(
    worker_settings: Settings, database: Database
) -> None:
    servers = pair(round_s=0.001)
    register_probe_set(database, "code", [{"prompt": "one"}], datetime.now(UTC))
    with engine_over(servers) as engine, running_worker(worker_settings, engine):
        (drafter,) = engine.drafters
        servers["speculative"].version = "0.33.0"
        raise_alarm(database, DriftSubject("code", "lookup", drafter.revision, engine.identity.target_revision))
        until(lambda: engine.endpoints()[1].state == "retired", "the server is known as another")
        assert "it is another server by now: " in (engine.endpoints()[1].reason or "")
        assert engine.endpoints()[0].state == "up"


def test_jobs_that_wait_for_an_absent_server_keep_nobody_from_the_others(
    worker_settings: Settings, database: Database
) -> None:
    """More forced jobs than the worker has slots, and probes, whose turn would end with the outage."""
    body = {"prompt": "amber basil cedar", "max_tokens": 8, "temperature": 0.0}
    drafts = {"purpose": "probe", "probe_drafter": "lookup", "probe_num_draft_tokens": 4}
    probes = [json.dumps({"job_id": f"probe-{number}", **drafts, "body": body}).encode() for number in range(3)]
    record_probes(database, [("code", probe) for probe in probes])
    servers = pair(round_s=0.001)
    client = Client(worker_settings)
    with engine_over(servers) as engine, running_worker(worker_settings, engine):
        servers["speculative"].answer = AWAY
        client.send("code", [*probes, *(job(number, decoding="speculative") for number in range(20))])
        until(lambda: len(engine.load().absent) == 23, "all of them wait for their server")
        client.send("code", [job(number) for number in range(20, 40)])
        first = client.results(20)
        assert {result.job_id for result in first} == {f"job-{number}" for number in range(20, 40)}
        servers["speculative"].answer = None
        results = client.results(43)
    assert {result.status for result in results} == {Status.SUCCEEDED}
    waited = [result.decoding for result in results if result not in first]
    assert {(one.mode, one.drafter) for one in waited if one} == {(Mode.SPECULATIVE, "lookup")}
    assert set(attempts(database).values()) == {(1, 0)}


@pytest.mark.parametrize(("reason", "waits"), [(Reason.EXPLORING, False), (Reason.PROBE, True)])
def test_only_probes_controls_and_forced_jobs_wait_for_a_full_route(reason: Reason, waits: bool) -> None:
    servers = pair()
    servers["speculative"].engine = FakeEngine(num_slots=1)
    decision = Decision(Mode.SPECULATIVE, "lookup", "vllm-0.32.0", 4, reason, "test")
    sampling = Sampling(max_tokens=8, temperature=0.0)
    with engine_over(servers) as engine:
        before = {name: server.num_texts for name, server in servers.items()}
        servers["speculative"].is_held = True  # else the first may end before the second comes
        for number in range(2):
            engine.admit(engine.prepare(make_job("one two", number), sampling), decision)
        servers["speculative"].is_held = False
        while engine.load().num_running:
            assert not engine.step().failed
        assert {name: server.num_texts - before[name] for name, server in servers.items()} == (
            {"plain": 0, "speculative": 2} if waits else {"plain": 1, "speculative": 1}
        )


def test_jobs_wait_while_others_fill_their_server_and_go_on_when_these_have_left(
    worker_settings: Settings, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four places, of which one stays free: others come, their number is not known for a while, and they leave."""
    monkeypatch.setattr("worker.servers.counters.EVERY_S", 0.02)
    monkeypatch.setattr("worker.servers.counters.SELDOM_S", 0.02)
    monkeypatch.setattr("worker.servers.load.PEAK_S", 0.5)
    monkeypatch.setattr("worker.servers.load.FRESH_S", 0.4)
    server = ServedEngine(FakeEngine(), round_s=0.001)
    client = Client(worker_settings)

    def status() -> EndpointStatus:
        return engine.endpoints()[0]

    with engine_over({"shared": server}, reserve=0.25) as engine, running_worker(worker_settings, engine) as running:
        assert engine.load().num_slots == 3
        client.send("code", [job(number) for number in range(8)])
        client.results(8)
        server.metrics.num_strangers = 3
        until(lambda: status().num_others == 3, "the others are known")
        num_texts = server.num_texts
        client.send("code", [job(number) for number in range(8, 14)])
        until(lambda: (held := status().held) is not None and held.num == 3, "the engine holds as many as it has slots")
        held = status().held
        assert held is not None
        assert held.reason == "held for others: 1 of 4 places are free, 1 stay free"
        assert (status().state, status().limit, status().num_in_flight, server.num_texts) == ("up", 0, 0, num_texts)
        assert (engine.load().num_decoding, engine.load().num_free) == (0, 0)
        sample = running.worker.metrics.registry.get_sample_value
        labels = {"endpoint": "shared", "drafter": ""}
        assert [sample(f"alphaloop_endpoint_{name}", labels) for name in ("held", "kept")] == [3, 1]
        late = (datetime.now(UTC) + timedelta(seconds=1)).isoformat()
        client.send("code", [job(14, deadline=late)])
        until(lambda: shown(database) == {"shared": held}, "the worker's row says so")
        server.metrics.num_strangers, server.metrics.is_missing = 0, True
        reason = "held: the server has not reported its load for"
        until(lambda: (held := status().held) is not None and held.reason.startswith(reason), "its load is not known")
        assert server.num_texts == num_texts
        server.metrics.is_missing = False
        by_job = {result.job_id: result for result in client.results(15)}
        assert status().held is None
    assert by_job.pop("job-14").status is Status.EXPIRED
    assert {result.status for result in by_job.values()} == {Status.SUCCEEDED}
    assert set(attempts(database).values()) == {(1, 0)}


def test_a_worker_that_ends_gives_back_what_it_holds_for_others_at_once(
    worker_settings: Settings, database: Database
) -> None:
    server = ServedEngine(FakeEngine(), round_s=0.001)
    server.metrics.num_strangers = 9
    client = Client(worker_settings)
    with engine_over({"shared": server}, reserve=0.25) as engine:
        with running_worker(worker_settings, engine):
            client.send("code", [job(number) for number in range(3)])
            until(lambda: len(engine.load().held) == 3, "all of them wait for the others to leave")
            ended = time.monotonic()
        assert time.monotonic() - ended < worker_settings.worker.drain_s / 2
    assert database.rows(text("SELECT status, num_failures, num_crashes FROM jobs WHERE status <> 'running'")) == []
    server.metrics.num_strangers = 0
    with engine_over({"shared": server}) as engine, running_worker(worker_settings, engine):
        assert {result.status for result in client.results(3)} == {Status.SUCCEEDED}


def shown(database: Database) -> Mapping[str, HeldRequests]:
    """What the worker's row says of jobs that are held."""
    (worker,) = WorkerStore(database).seen()
    assert worker.load.setup is not None
    assert worker.as_json()["held"] == {name: asdict(held) for name, held in worker.load.setup.held.items()}
    return worker.load.setup.held
