"""The worker's decisions over a real PostgreSQL: from history at once, without asking it again, and serving on."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import NoReturn

import pytest

from alphaloop.acceptance import EvidenceKey, prompt_bucket
from alphaloop.deciding.decision import Decision, DraftSetting, Reason
from alphaloop.deciding.exploration import ExplorationBudget
from alphaloop.deciding.incumbents import IncumbentKey, Incumbents
from alphaloop.deciding.job_facts import Subject
from alphaloop.deciding.limits import PolicyLimits
from alphaloop.errors import StoreUnavailable
from alphaloop.messages import Mode, Origin, Purpose, parse_job
from alphaloop.settings import TaskSettings, WorkerSettings
from alphaloop.store.acceptance_state import AcceptanceStateStore
from alphaloop.store.budgets import BudgetStore
from alphaloop.store.costs import CostStore
from alphaloop.store.database import Database
from alphaloop.store.decisions import DecisionLog
from alphaloop.store.decode_runs import DecodeRun, ShadowRun
from alphaloop.store.drafts import DraftRegistry
from alphaloop.store.history import HistoryStore
from alphaloop.store.jobs import JobStore
from alphaloop.store.outcomes import Outcome, OutcomeStore
from tests.fakes import FakeEngine
from tests.fixtures.runs import claim_request, outcome, simulated_counts, vanilla_counts
from worker.costs.opening import open_costs
from worker.deciding.choice_log import StoredChoices
from worker.deciding.decider import Decider
from worker.deciding.evidence_cache import EvidenceCache
from worker.deciding.shared_budgets import SharedBudgets
from worker.engine import PreparedJob, Sampling
from worker.jobs.lanes import LaneKey, lane_of

pytestmark = pytest.mark.postgres

HALF_LIFE = timedelta(days=3)
NO_EXPLORATION = PolicyLimits(explore_share=0.0, control_share=0.0)
ENGINE = FakeEngine(num_slots=4)
(LOOKUP,) = ENGINE.drafters
_NUMBERS = count()


class Worker:
    """What assembly.py makes of a decider and its evidence."""

    def __init__(
        self,
        database: Database,
        limits: PolicyLimits = NO_EXPLORATION,
        *,
        accrued_every_s: float = 0.0,
        now: Callable[[], datetime] | None = None,
    ) -> None:
        self.now_s = 1000.0
        identity = ENGINE.identity
        self.evidence_cache = EvidenceCache(
            AcceptanceStateStore(database),
            DraftRegistry(database),
            target_revision=identity.target_revision,
            engine=identity.engine,
            drafters={LOOKUP.name: LOOKUP.revision},
            half_life=HALF_LIFE,
        )
        self.evidence_cache.refresh()
        self.choices = StoredChoices(DecisionLog(database), identity, "w")
        self.store = SharedBudgets(
            BudgetStore(database),
            HistoryStore(database),
            self.evidence_cache,
            identity,
            {LOOKUP.name: LOOKUP.revision},
            accrued_every_s=accrued_every_s,
            clock=lambda: self.now_s,
        )
        self.decider = Decider(
            ENGINE,
            self.evidence_cache,
            self.choices,
            self.store,
            costs=open_costs(
                WorkerSettings(calibration_samples=1), ENGINE, CostStore(database), clock=lambda: self.now_s
            ),
            limits=limits,
            now=now or (lambda: datetime.now(UTC)),
        )

    def decide(self, task: str, num_jobs: int = 2) -> Decision:
        key, jobs = asked(task, num_jobs)
        decision, *others = self.decider.decide_each(key, jobs, TaskSettings())
        assert all(other == decision for other in others)
        return decision

    def budget(self, task: str = "code", sampling_bucket: str = "greedy") -> ExplorationBudget:
        """The session's, as of its last decision."""
        budget = self.decider.session.budget(Subject(task, sampling_bucket))
        assert budget is not None
        return budget


def asked(
    task: str, num_jobs: int, *, lengths: Sequence[int] = (40,), segments: Sequence[str] = ("",)
) -> tuple[LaneKey, Sequence[PreparedJob]]:
    jobs = []
    for number in range(num_jobs):
        fields = {"body": {"prompt": "x"}, "segment": segments[number % len(segments)] or None}
        job = parse_job(json.dumps(fields).encode(), Origin("test", f"jobs.{task}", 0, number), task=task)
        token_ids = (1,) * lengths[number % len(lengths)]
        jobs.append(PreparedJob(job, token_ids, Sampling(max_tokens=100, temperature=0.0)))
    return lane_of(jobs[0].job, jobs[0].sampling), jobs


def run(
    task: str,
    rng: random.Random,
    alpha: float | None,
    *,
    at: datetime | None = None,
    num_prompt_tokens: int = 40,
    segment: str = "",
) -> DecodeRun:
    """A traffic job of this engine; without an alpha, decoded vanilla."""
    speculative = alpha is not None
    counts = simulated_counts(rng, [alpha] * 4, 20) if alpha is not None else vanilla_counts(50)
    identity = ENGINE.identity
    key = EvidenceKey(
        task,
        identity.target_revision,
        identity.engine,
        "greedy",
        prompt_bucket(num_prompt_tokens),
        segment,
        LOOKUP.name if speculative else "",
        LOOKUP.revision if speculative else "",
    )
    return DecodeRun(
        key=key,
        purpose="traffic",
        mode=Mode.SPECULATIVE if speculative else Mode.VANILLA,
        num_draft_tokens=4 if speculative else 0,
        reason="faster",
        device=identity.device,
        counts=counts,
        num_prompt_tokens=num_prompt_tokens,
        num_tokens=counts.num_tokens,
        batch_size=1,
        queue_s=0.0,
        time_to_first_token_s=0.1,
        wall_s=1.0,
        device_s=1.0,
        decoded_at=at or datetime.now(UTC),
    )


def record(database: Database, *runs: DecodeRun, by: Worker | None = None) -> list[Outcome]:
    """Recorded by that worker, or by another one."""
    ids = [f"{next(_NUMBERS)}" for _ in runs]
    JobStore(database).claim([claim_request(i) for i in ids], owner="w", lease_s=60, max_attempts=3)
    recorded = [outcome(i, run=one) for i, one in zip(ids, runs, strict=True)]
    changed = {} if by is None else {"changed": by.evidence_cache.take}
    OutcomeStore(database, half_life=HALF_LIFE, **changed).record(recorded, owner="w")
    return recorded


def test_a_new_worker_decides_its_first_batch_from_what_others_measured(database: Database, rng: random.Random) -> None:
    """Two tasks that nothing but history tells apart, and a third without any."""
    record(database, *(run("code", rng, 0.95) for _ in range(20)), *(run("chat", rng, 0.02) for _ in range(20)))
    worker = Worker(database)
    code, chat, cold = (worker.decide(task) for task in ("code", "chat", "sql"))
    assert (code.mode, code.reason) == (Mode.SPECULATIVE, Reason.FASTER)
    assert (chat.mode, chat.reason) == (Mode.VANILLA, Reason.NOT_FASTER)
    assert cold.reason is Reason.NO_HISTORY or cold.mode is Mode.SPECULATIVE


@contextmanager
def unreachable(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The database is away; the list grows with every attempt to reach it."""
    tries: list[str] = []

    def begin(database: Database) -> NoReturn:
        tries.append(database.redacted_url)
        raise StoreUnavailable("no connection")

    with monkeypatch.context() as patched:
        patched.setattr(Database, "begin", begin)
        yield tries


def test_the_next_batches_ask_the_database_nothing(
    database: Database, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(database, *(run("code", rng, 0.95) for _ in range(10)))
    worker = Worker(database)
    first = worker.decide("code")
    with unreachable(monkeypatch) as tries:
        again = [worker.decide("code") for _ in range(5)]
    assert tries == []
    assert {decision.num_draft_tokens for decision in again} == {first.num_draft_tokens}


def test_a_first_batch_without_a_database_is_asked_for_again_and_counts_once(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = datetime.now(UTC)
    worker, undisturbed = (Worker(database, PolicyLimits(), now=lambda: now) for _ in range(2))
    with unreachable(monkeypatch):
        for _ in range(3):
            with pytest.raises(StoreUnavailable):
                worker.decide("code")
    # Of a task of which as little is known: workers share the budget of one.
    assert worker.decide("code") == undisturbed.decide("chat")


def test_a_change_that_cannot_be_logged_is_logged_with_the_next_batch(
    database: Database, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(database, *(run("code", rng, 0.02) for _ in range(10)))
    worker = Worker(database)
    assert worker.decide("code").mode is Mode.VANILLA
    record(database, *(run("code", rng, 0.97) for _ in range(80)), by=worker)
    with unreachable(monkeypatch) as tries:
        changed = worker.decide("code")
    assert changed.mode is Mode.SPECULATIVE
    assert tries
    assert [change.after.mode for change in DecisionLog(database).latest("code")] == ["vanilla"]
    worker.decide("code")
    worker.decide("code")
    assert [change.after.mode for change in DecisionLog(database).latest("code")] == ["speculative", "vanilla"]


def test_own_outcomes_count_for_the_next_batch_before_any_look(database: Database, rng: random.Random) -> None:
    worker = Worker(database)
    worker.decide("code")
    record(database, *(run("code", rng, 0.02) for _ in range(20)), by=worker)
    decision = worker.decide("code")
    assert (decision.mode, decision.reason) == (Mode.VANILLA, Reason.NOT_FASTER)


def test_jobs_of_one_batch_are_decided_by_their_groups(database: Database, rng: random.Random) -> None:
    """Short prompts are drafted for well, long ones badly; in another task it is one customer against another."""
    record(database, *(run("code", rng, 0.95) for _ in range(40)))
    record(database, *(run("code", rng, 0.02, num_prompt_tokens=3000) for _ in range(40)))
    record(database, *(run("chat", rng, alpha, segment=name) for name, alpha in (("gold", 0.95), ("free", 0.02)) * 40))
    worker = Worker(database)
    for mixed in (asked("code", 4, lengths=(40, 3000)), asked("chat", 4, segments=("gold", "free"))):
        key, jobs = mixed
        decisions = worker.decider.decide_each(key, jobs, TaskSettings())
        drafts = [decision.num_draft_tokens for decision in decisions]
        assert drafts[0] == drafts[2] > drafts[1] == drafts[3]
    key, jobs = asked("code", 4)
    first, *others = worker.decider.decide_each(key, jobs, TaskSettings())
    assert others == [first] * 3


def test_segments_that_do_not_differ_are_decided_together(database: Database, rng: random.Random) -> None:
    record(database, *(run("chat", rng, 0.8, segment=name) for name in ("gold", "free") * 20))
    key, jobs = asked("chat", 4, segments=("gold", "free"))
    first, *others = Worker(database).decider.decide_each(key, jobs, TaskSettings())
    assert others == [first] * 3


def test_a_restarted_worker_goes_on_with_the_choice_that_was_logged(database: Database) -> None:
    identity, log = ENGINE.identity, DecisionLog(database)
    key = IncumbentKey.of("code", "greedy", "<=256", 2)

    def incumbents(owner: str) -> Incumbents:
        return Incumbents(StoredChoices(log, identity, owner))

    assert incumbents("w").of(key) is None
    chosen = Decision(
        Mode.SPECULATIVE, LOOKUP.name, LOOKUP.revision, 3, Reason.FASTER, "", kept=DraftSetting(LOOKUP.name, 3)
    )
    before = incumbents("w")
    before.keep(key, chosen)
    explored = Decision(Mode.VANILLA, None, None, 0, Reason.EXPLORING, "", kept=DraftSetting(LOOKUP.name, 3))
    before.keep(key, explored)
    assert before.of(key) == incumbents("w2").of(key) == DraftSetting(LOOKUP.name, 3)
    assert incumbents("w2").of(key._replace(task="chat")) is None
    assert len(log.latest("code")) == 1


def test_a_restarted_worker_knows_how_long_a_drafter_was_not_used(database: Database, rng: random.Random) -> None:
    now = datetime.now(UTC)
    runs = [run("code", rng, 0.2, at=now - timedelta(hours=30))]
    runs += [run("code", rng, None, at=now - timedelta(hours=hour)) for hour in range(3, 10)]
    record(database, *runs)
    worker = Worker(database)
    assert worker.budget("code").unseen == {LOOKUP.name: 7.0}
    assert worker.budget("chat").unseen is None
    assert worker.budget("code", "t<=1.0").unseen == {LOOKUP.name: 0.0}


def test_what_was_saved_up_outlives_a_worker_and_is_spent_once(database: Database, rng: random.Random) -> None:
    record(database, *(run("code", rng, 0.95) for _ in range(10)))
    saving = PolicyLimits(explore_share=0.05, control_share=0.0)
    first, second = Worker(database, saving), Worker(database, saving)
    for _ in range(3):
        first.decide("code")
    saved = first.budget()
    assert saved.balance == saved.accrued > 0
    assert Worker(database, saving).budget().balance == pytest.approx(saved.balance)
    # One that runs beside the first spends from the same budget; the first learns of it with its next batch.
    second.store.keep("code", "greedy", second.store.open("code", "greedy").paid(saved.balance))
    first.decide("code")
    left = first.budget()
    assert left.balance == pytest.approx(left.accrued - saved.balance)
    assert left.spent == pytest.approx(saved.balance)


def test_what_is_earned_is_written_from_time_to_time_and_what_is_spent_at_once(
    database: Database, rng: random.Random
) -> None:
    record(database, *(run("code", rng, 0.95) for _ in range(10)))
    limits = PolicyLimits(explore_share=0.05, control_share=0.0)
    worker = Worker(database, limits, accrued_every_s=5.0)

    def stored() -> ExplorationBudget:
        return Worker(database, limits).budget()

    worker.decide("code")
    first = stored().accrued
    assert first > 0
    for _ in range(3):
        worker.decide("code")
    assert stored().accrued == first
    worker.now_s += 5.0
    worker.decide("code")
    assert stored().accrued == pytest.approx(5 * first)
    worker.decide("code")
    assert stored().accrued == pytest.approx(5 * first)
    worker.store.keep("code", "greedy", worker.budget().paid(1.0))
    assert (stored().accrued, stored().spent) == pytest.approx((6 * first, 1.0))


def test_credit_is_written_when_a_worker_ends(database: Database, rng: random.Random) -> None:
    record(database, *(run("code", rng, 0.95) for _ in range(10)))
    limits = PolicyLimits(explore_share=0.05, control_share=0.0)
    worker = Worker(database, limits, accrued_every_s=5.0)
    for _ in range(3):
        worker.decide("code")
    accrued = worker.budget().accrued
    assert Worker(database, limits).budget().accrued == pytest.approx(accrued / 3)
    worker.decider.save()
    assert Worker(database, limits).budget().accrued == pytest.approx(accrued)


def test_a_cold_task_has_its_first_credit_once(database: Database) -> None:
    limits = PolicyLimits(control_share=0.0)
    num_tokens = 100.0
    credit = limits.first_jobs * num_tokens
    for _ in range(3):
        worker = Worker(database, limits)
        worker.decide("code")
        accrued = worker.budget().accrued
        assert credit < accrued < 1.5 * credit


def test_a_budget_that_cannot_be_stored_is_stored_with_the_next_batch(
    database: Database, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(database, *(run("code", rng, 0.95) for _ in range(10)))
    limits = PolicyLimits(control_share=0.0)
    worker = Worker(database, limits)
    worker.decide("code")
    with unreachable(monkeypatch) as tries:
        worker.decide("code")
    assert tries
    stored = Worker(database, limits).budget()
    assert stored.accrued < worker.budget().accrued
    worker.decide("code")
    stored = Worker(database, limits).budget()
    assert stored.accrued == pytest.approx(worker.budget().accrued)


def test_a_drafter_that_is_scored_beside_others_was_seen(database: Database, rng: random.Random) -> None:
    now = datetime.now(UTC)
    record(database, run("code", rng, 0.2, at=now - timedelta(hours=30)), run("code", rng, None))
    worker = Worker(database)
    assert worker.budget().unseen == {LOOKUP.name: 1.0}
    plain = run("code", rng, None)
    scored = run("code", rng, 0.5)
    shadow = ShadowRun(scored.key, 4, scored.counts, 40, 50, now)
    control = replace(plain, purpose=Purpose.CONTROL.value)
    worker.decider.count_scored([Outcome("c", 1, "succeeded", b"{}", "results", {}, control, (shadow,))])
    assert worker.budget().unseen == {LOOKUP.name: 1.0}, "a probe says nothing about how traffic changes"
    worker.decider.count_scored([Outcome("x", 1, "succeeded", b"{}", "results", {}, plain, (shadow,))])
    assert worker.budget().unseen == {LOOKUP.name: 0.0}
