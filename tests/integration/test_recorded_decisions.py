"""Hundreds of decisions of a whole worker, each taken again from its snapshot in the database."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final
from uuid import UUID

import pytest
from sqlalchemy import select

from alphaloop.cli.replay import Window, replay_history, rules_of
from alphaloop.deciding.decision import Decision, Reason
from alphaloop.deciding.goodput import DrafterState
from alphaloop.engine import Step
from alphaloop.experiment.observe import Expected
from alphaloop.settings import Settings, overridden
from alphaloop.store.database import Database
from alphaloop.store.decision_inputs import DraftRegistry, DraftStatus
from alphaloop.store.decisions import SnapshotStore, StoredSnapshot
from alphaloop.store.job_counts import DecodeRun
from alphaloop.store.outcomes import OutcomeStore
from alphaloop.store.switchback import SwitchbackStore
from alphaloop.tables import decode_runs
from tests.fakes import FakeEngine
from tests.fixtures.cli import Cli
from tests.fixtures.drift import record_probes
from tests.fixtures.runs import block_rows, claim, decode_run, outcome, simulated_counts, subject
from tests.fixtures.worker import Client, RunningWorker, changed, until

pytestmark = [pytest.mark.kafka, pytest.mark.postgres, pytest.mark.slow, pytest.mark.timeout(600)]

NUM_DECISIONS: Final = 500
CHUNK: Final = 96
MAX_JOBS: Final = 200 * CHUNK
LOOKUP: Final = DrafterState("lookup", "r1", 6, offers=(0.7, 0.9), through=(0.4,))
DRAFT: Final = DrafterState("draft", "r1", 4, cache_bytes_per_token=100)


class MixedEngine(FakeEngine):
    """Acceptance differs by segment, prompt and drafter and changes on the way; the host has slow spells."""

    def __init__(self, seed: int) -> None:
        super().__init__(num_slots=8, drafters=(LOOKUP, DRAFT), slowness=1.0)
        self.num_finished = 0
        self._rng = random.Random(seed)

    def step(self) -> Step:
        """A round as slow as the host is now."""
        is_slow = self.num_steps // 150 % 4 == 3
        self._slowness = (3.0 if is_slow else 1.0) * self._rng.uniform(0.9, 1.1)
        step = super().step()
        self.num_finished += len(step.finished)
        return step

    def _round(self, sequence: Any) -> int:
        prepared = sequence.prepared
        alpha = {"gold": 0.9, "free": 0.1}.get(prepared.job.segment, 0.6)
        if len(prepared.token_ids) > 256:
            alpha *= 0.3
        if sequence.drafter is DRAFT:
            alpha = min(0.95, alpha + 0.2)
        if self.num_steps > 600:
            alpha = 1.0 - alpha
        self._acceptance = (alpha,)
        return super()._round(sequence)


def job(rng: random.Random, number: int) -> tuple[str, bytes]:
    """A job of one of five tasks; some are forced, probes, controls, in a hurry, or sampled."""
    task = rng.choice(["code", "sql", "chat", "math", "legal"])
    value: dict[str, Any] = {"job_id": f"{number}", "prompt": f"text number {number}", "max_tokens": rng.randint(8, 64)}
    if task == "code":
        value["segment"] = rng.choice(["gold", "free"])
    if task == "sql":
        value["prompt"] = " ".join(["word"] * rng.choice([40, 400]))
    if task == "chat":
        value |= {"temperature": rng.choice([0.4, 0.9]), "seed": number}
    if task == "math" and rng.random() < 0.5:
        value["deadline"] = (datetime.now(UTC) + timedelta(minutes=rng.randint(5, 50))).isoformat()
    kind = rng.random()
    if kind < 0.02:
        value |= {"purpose": "probe", "probe_drafter": "draft", "probe_num_draft_tokens": 3}
    elif kind < 0.04:
        value["purpose"] = "control"
    elif kind < 0.08:
        value["decoding"] = rng.choice(["vanilla", "speculative"])
    return task, json.dumps(value).encode()


@contextmanager
def deciding(settings: Settings, seed: int, decided: dict[UUID, tuple[Decision, ...]]) -> Iterator[RunningWorker]:
    """A worker whose decisions are kept as they are taken."""
    worker = RunningWorker(settings, MixedEngine(seed), seed=seed)
    decider = worker.worker.decider
    decide_each = decider.decide_each

    def kept(*args: Any, decision_id: UUID, **kwargs: Any) -> tuple[Decision, ...]:
        decided[decision_id] = decide_each(*args, decision_id=decision_id, **kwargs)
        return decided[decision_id]

    decider.decide_each = kept  # type: ignore[method-assign]
    worker.start()
    try:
        yield worker
    finally:
        worker.close()


def another_worker(database: Database, rng: random.Random, number: int, like: MixedEngine | FakeEngine) -> None:
    """Jobs that another worker recorded, under keys that the first one uses too."""
    runs: list[DecodeRun] = []
    for task in ("code", "sql", "chat"):
        counts = simulated_counts(rng, [0.5] * 4, 12)
        run = decode_run(counts, task=task, revision="r1", at=datetime.now(UTC), prompt_bucket="<=256")
        identity = like.identity
        key = replace(run.key, target_revision=identity.target_revision, engine=identity.engine)
        runs.append(replace(run, key=key))
    ids = [f"other-{number}-{run.key.task}" for run in runs]
    claim(database, *ids, owner="other")
    recorded = [outcome(i, run=run) for i, run in zip(ids, runs, strict=True)]
    OutcomeStore(database).record(recorded, owner="other")
    measure_expectations(database, rng, like)


def measure_expectations(database: Database, rng: random.Random, like: MixedEngine | FakeEngine) -> None:
    """A colleague on such a device closes pairs: what it expected was too good, now more and now less."""
    slices, now, identity = SwitchbackStore(database), datetime.now(UTC), like.identity
    for task in ("code", "sql"):
        of = replace(
            subject(task, host="another host"),
            target_revision=identity.target_revision,
            engine=identity.engine,
            device=identity.device,
        )
        speedup = rng.uniform(1.8, 2.6)
        expected = Expected(speedup, 0.9 * speedup, 1.1 * speedup, speedup, 0.05)
        slices.add(block_rows(of, now - timedelta(seconds=10), 8, expected=expected, owner="other"))
    assert slices.refresh(now, ["code", "sql"]) >= 2


@pytest.fixture
def settings(worker_settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Explores, measures by switchback, and looks for other workers' evidence all the time."""
    monkeypatch.setattr("worker.assembly.EVIDENCE_POLL_S", 0.05)
    return changed(worker_settings, worker={"batch_size": 8})


def run_until(
    settings: Settings, database: Database, rng: random.Random, num_decisions: int, *, restarts: int
) -> dict[UUID, tuple[Decision, ...]]:
    """Decisions of a mixed run, by their ids; the worker is restarted on the way.

    A fast machine decides less often than a slow one, so the run goes on until it holds all that is hard to take again.
    """
    client, registry = Client(settings), DraftRegistry(database)
    decided: dict[UUID, tuple[Decision, ...]] = {}
    num_sent = 0
    for part in range(1, restarts + 2):
        num_before = num_sent
        with deciding(settings, part, decided) as worker:
            engine = worker.worker.engine
            assert isinstance(engine, MixedEngine)
            while len(decided) < num_decisions * part / (restarts + 1) or (
                part > restarts and num_sent < MAX_JOBS and missing_in(snapshots_of(database), decided)
            ):
                by_task: dict[str, list[bytes]] = {}
                for _ in range(CHUNK):
                    task, value = job(rng, num_sent)
                    by_task.setdefault(task, []).append(value)
                    num_sent += 1
                record_probes(database, [(task, value) for task, values in by_task.items() for value in values])
                for task, values in by_task.items():
                    client.send(task, values)
                another_worker(database, rng, num_sent, engine)
                until(lambda: engine.num_finished == num_sent - num_before, "all jobs are decoded")  # noqa: B023
                until(lambda: not worker.worker.num_unpublished, "their results are published")
                is_stale = num_sent // CHUNK % 4 == 0
                status = DraftStatus.STALE if is_stale else DraftStatus.ACTIVE
                registry.set_status("draft", "r1", engine.identity.target_revision, status, "a test")
    return decided


def test_five_hundred_decisions_are_taken_again_from_their_snapshots(
    settings: Settings, database: Database, rng: random.Random, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    decided = run_until(settings, database, rng, NUM_DECISIONS, restarts=1)
    past = snapshots_of(database)
    assert len(past) == len(decided) >= NUM_DECISIONS
    assert {stored.snapshot.decision_id for stored in past} == decided.keys()
    whole = [stored for stored in past if stored.snapshot.is_whole]
    assert len(whole) > 0.95 * len(past)
    others = []
    for snapshot in (stored.snapshot for stored in whole):
        again = snapshot.decide()
        taken = {one.setting for one in decided[snapshot.decision_id]}
        assert {one.setting for one in snapshot.decisions} == taken
        if not snapshot.is_reproduced(again):
            others.append(snapshot)
    # Figures have five digits, and costs of a drafter that several groups share lie between loads.
    assert len(others) <= 0.01 * len(whole), "near ties"
    assert not missing_in(past, decided)
    monkeypatch.setenv("DATABASE_URL", settings.postgres.url.get_secret_value())
    assert_replayed(database, settings, past)
    assert_explained(cli, database, whole, decided, rng)


def assert_replayed(database: Database, settings: Settings, past: Sequence[StoredSnapshot]) -> None:
    """Replay reproduces the decisions of its window, and decides otherwise where other settings say so."""
    window = Window(past[0].snapshot.decided_at, datetime.now(UTC), None)
    same = replay_history(database, rules_of(settings, settings), window, seed=1, tell=lambda days, jobs: None)
    assert same.num_recorded == len(past)
    assert same.num_reproduced >= 0.95 * len(past)
    reasons = {one.reason for stored in past for one in stored.snapshot.decisions}
    assert reasons & {Reason.EXPLORING, Reason.UNCERTAIN} <= same.reasons.keys()
    thrifty = overridden(settings, ["policy.explore_share=0.0", "models.drafters.lookup.max_draft_tokens=2"])
    other = replay_history(database, rules_of(settings, thrifty), window, seed=1, tell=lambda days, jobs: None)
    assert other.num_reproduced == same.num_reproduced
    assert Reason.EXPLORING not in other.reasons
    assert all(would.num_draft_tokens <= 4 for task in other.tasks.values() for _, would in task.settings)


def assert_explained(
    cli: Cli,
    database: Database,
    past: Sequence[StoredSnapshot],
    decided: Mapping[UUID, Sequence[Decision]],
    rng: random.Random,
) -> None:
    """By its moment and by one of its jobs, a decision is explained as it was taken."""
    rows = database.rows(select(decode_runs.c.decode_batch_id, decode_runs.c.job_id))
    job_of = {row.decode_batch_id: row.job_id for row in rows}
    for one in rng.sample([stored.snapshot for stored in past if stored.snapshot.decision_id in job_of], 4):
        task, bucket, name = one.subject.task, one.subject.sampling_bucket, one.decision_id
        by_moment = cli("explain", task, "--sampling", bucket, "--at", one.decided_at.isoformat(), "--json").json
        by_job = cli("explain", "--job", job_of[name], "--json").json
        for found in (by_moment, by_job):
            assert found["recorded"]["decision_id"] == str(name)
            assert (found["decision"]["drafter"], found["decision"]["num_draft_tokens"]) in {
                (its.drafter, its.num_draft_tokens) for its in decided[name]
            }
    assert "from its snapshot" in " ".join(cli("explain", "code", "--at", "0m").out.split())
    assert cli("explain", "--job", "nonesuch").code == 1
    assert cli("explain").code == cli("explain", "code", "--job", "1").code == 2


def snapshots_of(database: Database) -> list[StoredSnapshot]:
    """The snapshots of the last hour."""
    now = datetime.now(UTC)
    return [stored for stored, _ in SnapshotStore(database).between(now - timedelta(hours=1), now)]


def missing_in(past: Sequence[StoredSnapshot], decided: Mapping[UUID, Sequence[Decision]]) -> list[str]:
    """What makes decisions hard to take again, and the run does not hold yet."""
    taken = list(decided.values())
    reasons = {one.reason for decisions in taken for one in decisions}
    snapshots = [stored.snapshot for stored in past]
    errors = {its.error for one in snapshots for group in one.groups for its in group.posteriors.values()}
    wanted = {
        "every reason": {Reason.EXPLORING, Reason.FASTER, Reason.FORCED, Reason.PROBE, Reason.CONTROL} <= reasons,
        "two workers": len({stored.facts.owner for stored in past}) == 2,
        "a stale draft": any(one.is_stale for its in snapshots for one in its.drafters),
        "several groups": sum(len(its.groups) > 1 for its in snapshots) > 10,
        "split batches": sum(its.is_split for its in snapshots) > 10,
        "settings by load": sum(any(one.settings_by_running for one in decisions) for decisions in taken) > 20,
        "several settings": sum(len({one.setting for one in decisions}) > 1 for decisions in taken) > 5,
        "expectations that moved": len(errors) > 5,
        "expectations that missed": min((error.bias for error in errors), default=0.0) < -0.02,
    }
    return [name for name, is_held in wanted.items() if not is_held]
