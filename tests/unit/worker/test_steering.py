"""Steering: how sequences draft by how many run, and that a control slice pauses a whole task and nobody else."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from types import MappingProxyType
from typing import Any
from uuid import uuid4

import pytest

from alphaloop.costs import CostTable
from alphaloop.deciding.decision import Decision, DraftSetting, Reason
from alphaloop.deciding.draft_lengths import LengthsTogether
from alphaloop.deciding.goodput import Alternative, DrafterState
from alphaloop.experiment.assign import RequestDesign, RequestSchedule, RoundDesign, RoundSchedule
from alphaloop.experiment.estimate import measured_speedup
from alphaloop.experiment.observe import Phase, Slice
from alphaloop.messages import Mode
from alphaloop.store.switchback import SliceRow
from tests.fakes import FakeEngine
from tests.fixtures.costs import ServingEngine
from tests.fixtures.publishing import NOW, claimed_job
from tests.fixtures.runs import block_rows, subject
from worker.running import RunningJob, RunningJobs, Stepped
from worker.steering import REFRESH_EVERY_S, RequestSteering, RoundSteering, SliceRecorder

NEWER = DrafterState("lookup-2", "look-2", 2)
DRAFTERS = (DrafterState("lookup", "look-1", 8), DrafterState("model", "model-1", 8), NEWER)
DESIGN = RoundDesign(control_share=0.2, num_control_rounds=4, num_washout_rounds=1, num_window_rounds=4)
LOOKUP = Decision(Mode.SPECULATIVE, "lookup", "look-1", 3, Reason.FASTER, "")
FORCED = replace(LOOKUP, reason=Reason.FORCED)
VANILLA = Decision(Mode.VANILLA, None, None, 0, Reason.NOT_FASTER, "")


class World:
    """An engine that runs endless jobs, as many of each task as asked for, and the rounds that it ran."""

    def __init__(
        self,
        *jobs: tuple[str, Decision],
        share: float = DESIGN.control_share,
        seed: int = 1,
        rivals: Mapping[str, DrafterState] = MappingProxyType({}),
    ) -> None:
        self.engine = FakeEngine(num_slots=8, drafters=DRAFTERS, acceptance=(0.8,), slowness=1.0)
        self.running = RunningJobs(self.engine)
        self.jobs = jobs
        design = replace(DESIGN, control_share=share)
        self.steering = RoundSteering(
            RoundSchedule(design, random.Random(seed)),
            LengthsTogether(lambda: CostTable(())),
            lambda: NOW,
            rivals=lambda: rivals,
        )
        self.slices: list[Slice] = []
        self.num_started = 0
        self.rounds: list[dict[str, set[DraftSetting]]] = []

    def turn(self) -> None:
        running = [job.decision for job in self.running.by_id().values()]
        for task, decision in self.jobs:
            if decision not in running:
                self.start(task, decision)
        self.steering.steer(self.running)
        settings: dict[str, set[DraftSetting]] = {}
        for job in self.running.by_id().values():
            settings.setdefault(f"{job.lane.task} {job.decision.reason}", set()).add(job.setting)
        self.rounds.append(settings)
        step = self.running.step().step
        # The fake tells what its parts would take; its own wall time is that of this test.
        self.slices += self.steering.observe(replace(step, wall_s=step.draft_s + step.verify_s))

    def start(self, task: str, decision: Decision, **body: Any) -> None:
        self.num_started += 1
        claimed = claimed_job(f"{self.num_started}", task=task, max_tokens=200, **body)
        self.running.start(RunningJob(claimed, decision, uuid4(), NOW, decision.setting))


def test_the_first_tokens_of_a_stream_come_without_drafts_where_its_task_says_so() -> None:
    world = World(share=0)
    world.steering = RoundSteering(
        RoundSchedule(replace(DESIGN, control_share=0), random.Random(1)),
        LengthsTogether(lambda: CostTable(())),
        lambda: NOW,
        {"sql": 6, "code": 0}.__getitem__,
    )
    for task, is_streamed in (("sql", True), ("sql", False), ("code", True)):
        world.start(task, LOOKUP, stream=is_streamed)
    streamed, *others = world.running.by_id()
    num_tokens = 0
    settings: list[dict[str, DraftSetting]] = []
    while num_tokens < 20:
        world.steering.steer(world.running)
        settings.append({name: job.setting for name, job in world.running.by_id().items()})
        step = world.running.step().step
        if num_tokens < 6:
            assert settings[-1][streamed] == DraftSetting("lookup", 0)
            assert step.tokens_by_job[streamed] <= 1
        num_tokens += step.tokens_by_job[streamed]
        world.steering.observe(step)
    assert settings[-1][streamed] == DraftSetting("lookup", 3), "then it drafts"
    assert {one[name] for one in settings for name in others} == {DraftSetting("lookup", 3)}


def test_a_control_slice_pauses_all_free_sequences_of_all_tasks_and_nobody_else() -> None:
    world = World(("code", LOOKUP), ("code", FORCED), ("sql", replace(LOOKUP, num_draft_tokens=5)))
    for _ in range(600):
        world.turn()
    paused, drafting = DraftSetting("lookup", 0), DraftSetting("lookup", 3)
    free = [settings.get("code faster", set()) for settings in world.rounds]
    assert all(len(settings) <= 1 for settings in free), "a round holds one arm of a task"
    assert {drafting} in free
    assert {paused} in free
    assert {settings for arms in world.rounds for settings in arms.get("code forced", set())} == {drafting}
    together = {
        (paused in arms["code faster"], any(setting.num_draft_tokens == 0 for setting in arms["sql faster"]))
        for arms in world.rounds
        if arms.keys() >= {"code faster", "sql faster"}
    }
    assert together == {(True, True), (False, False)}, "tasks switch together"
    share = sum({paused} == settings for settings in free) / len(free)
    assert 0.05 < share < 0.3
    assert {one.task for one in world.slices} == {"code greedy", "sql greedy"}
    assert {one.phase for one in world.slices} >= {Phase.BEFORE, Phase.CONTROL, Phase.AFTER}
    for one in world.slices:
        if one.phase is Phase.CONTROL:
            assert one.num_tokens == one.num_sequence_rounds, "vanilla: a token a round"
            assert one.num_proposed == 0


def test_in_some_blocks_a_drafter_on_trial_makes_way_for_its_rival_and_the_other_tasks_go_on() -> None:
    world = World(("code", LOOKUP), ("sql", replace(LOOKUP, drafter="model")), rivals={"lookup": NEWER})
    for _ in range(2000):
        world.turn()
    arms = {
        (settings, *(other for other in (arms.get("sql faster", set()))))
        for arms in world.rounds
        for settings in arms.get("code faster", set())
        if "sql faster" in arms
    }
    drafting, paused, rivalling = DraftSetting("lookup", 3), DraftSetting("lookup", 0), DraftSetting("lookup-2", 2)
    others = DraftSetting("model", 3)
    assert arms == {(drafting, others), (rivalling, others), (paused, DraftSetting("model", 0))}
    blocks = {one.block_id: one.against for one in world.slices if one.phase is Phase.CONTROL and "code" in one.task}
    assert set(blocks.values()) == {"", "lookup-2"}
    for one in world.slices:
        assert one.against in ("", "lookup-2") if one.phase is not Phase.BETWEEN else not one.against
        if one.phase is Phase.CONTROL and "code" in one.task:
            assert bool(one.num_proposed) == bool(one.against)


def test_the_slices_tell_the_speed_up_of_the_engine() -> None:
    world = World(("code", LOOKUP))
    for _ in range(2500):
        world.turn()
    found = measured_speedup(world.slices)
    # Expected tokens a round at α = .8 and k = 3, with the times that the fake reports for the two widths. Rounds that
    # end a text are cropped, so a little less is seen.
    tokens = 1 + 0.8 + 0.8**2 + 0.8**3
    vanilla_ms, round_ms = 10.0 + 0.1 + 0.0256, 10.0 + 0.4 + 0.0256 + 0.4
    assert 0.92 < found.speedup.mean / (tokens * vanilla_ms / round_ms) < 1.0
    assert found.speedup.high - found.speedup.low < 0.3


def test_the_slices_carry_what_the_decisions_expected_of_the_drafter_they_run_with() -> None:
    promised = replace(LOOKUP, alternatives=(Alternative("lookup", 3, 2.9, 10.0, 1.6, 1.4, 1.9),))
    other = replace(LOOKUP, alternatives=(Alternative("lookup", 3, 2.0, 10.0, 1.2, 1.0, 1.5),))
    by_load = replace(VANILLA, settings_by_running=(DraftSetting("lookup", 3),))
    world = World(("code", promised), ("code", other), ("sql", by_load))
    for _ in range(400):
        world.turn()
    by_task: dict[str, list[Slice]] = {}
    for one in (one for one in world.slices if one.phase is not Phase.CONTROL):
        by_task.setdefault(one.task, []).append(one)
    for one in by_task["code greedy"]:
        assert one.expected_sequence_s == pytest.approx(one.sequence_s + one.prompt_sequence_s)
        means = one.expected_vanilla_s, one.expected_low_s, one.expected_high_s, one.uncorrected_vanilla_s
        assert [mean / one.expected_sequence_s for mean in means] == pytest.approx([1.4, 1.2, 1.7, 1.4])
    assert all(one.expected_sequence_s == 0 for one in by_task["sql greedy"]), (
        "its decision expected nothing of a drafter"
    )


def test_without_a_control_share_nobody_is_paused() -> None:
    world = World(("code", LOOKUP), share=0.0)
    for _ in range(200):
        world.turn()
    assert all(arms == {"code faster": {DraftSetting("lookup", 3)}} for arms in world.rounds)
    assert {one.phase for one in world.steering.close()} == {Phase.BETWEEN}


def test_sequences_draft_more_as_the_engine_empties_and_stop_when_it_fills() -> None:
    settings = (DraftSetting("lookup", 6), DraftSetting("lookup", 2), DraftSetting())
    decision = replace(VANILLA, settings_by_running=settings)
    world = World(share=0.0)
    for number in range(3):
        world.start("code", decision)
        world.steering.steer(world.running)
        assert {job.setting for job in world.running.by_id().values()} == {settings[number]}
    world.running.drop(["1", "2"])
    world.steering.steer(world.running)
    assert len(world.running) == 1
    assert {job.setting for job in world.running.by_id().values()} == {settings[0]}


@pytest.mark.parametrize("decision", [FORCED, replace(LOOKUP, reason=Reason.EXPLORING), VANILLA])
def test_jobs_that_are_not_free_to_speculate_are_on_no_trial(decision: Decision) -> None:
    world = World(("code", decision), share=0.2)
    for _ in range(300):
        world.turn()
    assert world.slices == []
    assert not world.steering.close()


class RequestWorld:
    """Servers that always have six requests of these tasks, and what came of them."""

    def __init__(
        self,
        *jobs: tuple[str, Decision],
        share: float = 0.2,
        overflowing: frozenset[str] = frozenset(),
    ) -> None:
        self.engine = ServingEngine(
            lambda drafts, num: (0.01 + 0.001 * num) * (1.5 if drafts else 1.0),
            overflowing=overflowing,
            num_slots=8,
            acceptance=(0.8,),
            drafters=(DrafterState("lookup", "look-1", 3),),
        )
        self.running = RunningJobs(self.engine)
        self.jobs = jobs
        schedule = RequestSchedule(RequestDesign(control_share=share), random.Random(1))
        self.num_peers = 0  #: other workers that ask the same servers
        self.steering = RequestSteering(
            schedule,
            lambda: NOW + timedelta(seconds=self.engine.now_s),
            lambda: self.num_peers,
            lambda: self.engine.tells_load,
        )
        self.slices: list[Slice] = []
        self.stepped: list[Stepped] = []
        self.started: list[RunningJob] = []

    def start(self) -> None:
        task, decision = self.jobs[len(self.started) % len(self.jobs)]
        claimed = claimed_job(f"{len(self.started)}", task=task, max_tokens=200)
        setting = self.steering.begin(claimed.job_id, claimed.ready.lane, decision, self.running)
        job = RunningJob(claimed, decision, uuid4(), NOW, setting)
        self.started.append(job)
        self.running.start(job)

    def turn(self, num_turns: int = 1) -> None:
        for _ in range(num_turns):
            while len(self.running) < 6:
                self.start()
            self.steering.steer(self.running)
            stepped = self.running.step()
            self.stepped.append(stepped)
            self.slices += self.steering.observe(stepped.step)


def test_requests_on_trial_that_start_in_a_control_slice_are_admitted_vanilla_and_no_others() -> None:
    world = RequestWorld(("code", LOOKUP), ("sql", LOOKUP), ("code", FORCED), ("sql", VANILLA))
    world.turn(450)
    on_trial = [job for job in world.started if job.decision is LOOKUP]
    control = [job for job in on_trial if job.setting == DraftSetting()]
    assert 0.05 < len(control) / len(on_trial) < 0.5
    assert {job.lane.task for job in control} == {"code", "sql"}
    assert all(job.setting == job.decision.setting for job in world.started if job.decision is not LOOKUP)
    for job in control:
        admitted = world.engine.admitted[job.job_id]
        assert (admitted.mode, admitted.drafter, admitted.num_draft_tokens) == (Mode.VANILLA, None, 0)
        assert job.decision.reason is Reason.FASTER
    ended = {generation.job_id: generation for one in world.stepped for _, generation in one.finished}
    assert all(not ended[job.job_id].drafted for job in control if job.job_id in ended), "as it began, so it ends"
    assert {one.task for one in world.slices} == {"code greedy", "sql greedy"}


def test_nothing_is_on_trial_and_nothing_counted_while_others_ask_servers_that_do_not_tell_their_load() -> None:
    world = RequestWorld(("code", LOOKUP))
    world.turn(100)
    ended = [generation for one in world.stepped for _, generation in one.finished]
    world.num_peers, world.engine.tells_load, num_started = 1, False, len(world.started)
    world.turn(550)
    assert all(job.setting == job.decision.setting for job in world.started[num_started:]), "none is a control"
    num_counted = sum(one.num_prompt_rounds for one in (*world.slices, *world.steering.close()))
    assert 0 < num_counted <= len(ended), "what ended before the other worker came, and nothing else"


def test_requests_are_on_trial_beside_other_workers_where_servers_tell_their_load() -> None:
    world = RequestWorld(("code", LOOKUP))
    world.num_peers, world.engine.num_others = 1, 4
    world.turn(550)
    assert {job.setting for job in world.started} == {LOOKUP.setting, DraftSetting()}
    slices = [*world.slices, *world.steering.close()]
    assert {one.phase for one in slices} == set(Phase)
    assert all(13.9 < one.mean_running + one.mean_elsewhere < 14.1 for one in slices), "six of ours, eight of others"


def test_the_trial_goes_on_when_servers_tell_again(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    world = RequestWorld(("code", LOOKUP))
    world.num_peers, world.engine.tells_load = 2, False
    world.turn(100)
    world.engine.tells_load, num_started = True, len(world.started)
    world.turn(550)
    assert DraftSetting() in {job.setting for job in world.started[num_started:]}
    said = [getattr(record, "action", None) for record in caplog.records]
    assert [action for action in said if action is not None] == ["trial_paused", "trial_goes_on"]


def test_a_lone_worker_measures_at_servers_that_do_not_tell_their_load() -> None:
    world = RequestWorld(("code", LOOKUP))
    world.engine.tells_load = False
    world.turn(450)
    assert {one.phase for one in world.slices} >= {Phase.BEFORE, Phase.CONTROL, Phase.AFTER}


def test_a_slice_adds_up_what_its_requests_took() -> None:
    world = RequestWorld(("code", LOOKUP))
    world.turn(550)
    slices = [*world.slices, *world.steering.close()]
    ended = [generation for one in world.stepped for _, generation in one.finished]
    treated = [one for one in slices if one.phase is not Phase.CONTROL]
    control = [one for one in slices if one.phase is Phase.CONTROL]
    assert {one.phase for one in slices} == set(Phase)
    of_treated = [one for one in ended if one.drafted]
    assert sum(one.num_prompt_rounds for one in treated) == len(of_treated), "every treated request counts once"
    assert sum(one.num_tokens for one in treated) == sum(one.counts.num_tokens - 1 for one in of_treated)
    assert sum(one.num_sequence_rounds for one in treated) == sum(one.counts.rounds - 1 for one in of_treated)
    decode_s = [one.served.decode_s for one in of_treated if one.served]
    assert sum(one.sequence_s for one in treated) == pytest.approx(sum(s for s in decode_s if s))
    for one in control:
        assert one.num_tokens == one.num_sequence_rounds == one.num_rounds, "vanilla: a token a round"
        assert one.num_proposed == 0
        assert one.treatment.drafter == "lookup"
    assert all(5.9 < one.mean_running + one.mean_elsewhere < 6.1 for one in slices)
    keys = [(one.started_at, one.block_id, one.phase, one.treatment) for one in slices]
    assert len(set(keys)) == len(keys), "the table's key tells them apart"


def test_a_request_that_another_endpoint_took_is_not_counted() -> None:
    away = frozenset(f"{number}" for number in range(0, 120, 3))
    world = RequestWorld(("code", LOOKUP), share=0.0, overflowing=away)
    world.turn(300)
    slices = [*world.slices, *world.steering.close()]
    ended = [generation for one in world.stepped for _, generation in one.finished]
    assert sum(one.num_prompt_rounds for one in slices) == sum(bool(one.drafted) for one in ended) < len(ended)


def test_requests_that_are_dropped_or_fail_to_start_are_forgotten() -> None:
    world = RequestWorld(("code", LOOKUP))
    world.turn(30)
    world.running.drop([job.job_id for job in world.started])
    world.steering.begin("never admitted", world.started[0].lane, LOOKUP, world.running)
    world.turn(450)
    assert {one.phase for one in world.slices} >= {Phase.BEFORE, Phase.CONTROL, Phase.AFTER}


def test_rounds_that_a_server_does_not_tell_are_its_tokens() -> None:
    world = RequestWorld(("code", LOOKUP), share=0.0)
    hidden = world.engine._served
    world.engine._served = lambda one: (  # type: ignore[method-assign]
        lambda found: replace(found, served=replace(found.served, num_rounds=None, decode_s=None))
    )(hidden(one))
    world.turn(200)
    for one in world.steering.close():
        assert one.num_sequence_rounds == one.num_tokens > 0
        assert one.num_prompt_rounds == 0


NOON = datetime(2026, 3, 1, tzinfo=UTC)


class Store:
    def __init__(self) -> None:
        self.rows: list[SliceRow] = []
        self.refreshed: list[set[str]] = []

    def add(self, rows: Sequence[SliceRow]) -> None:
        self.rows += rows

    def refresh(self, now: datetime, tasks: Collection[str] | None = None) -> int:
        assert now == NOON
        self.refreshed.append(set(tasks or ()))
        return 1


def slices_of(*tasks: str) -> list[Slice]:
    rows = [row for task in tasks for row in block_rows(subject(task), NOON, 1)]
    return [replace(row.slice, task=f"{row.slice.task} greedy") for row in rows]


def recorder(store: Store, clock: Callable[[], float] = lambda: 0.0) -> SliceRecorder:
    return SliceRecorder(store, FakeEngine().identity, {"lookup": "r7"}, owner="w1", now=lambda: NOON, clock=clock)


def test_slices_are_stored_for_this_engine_and_the_drafter_that_is_loaded() -> None:
    store = Store()
    slices = slices_of("code")
    recorder(store).store(slices)
    identity = FakeEngine().identity
    assert [row.slice for row in store.rows] == [replace(one, task="code") for one in slices]
    (found,) = {row.subject for row in store.rows}
    assert (found.task, found.sampling_bucket, found.drafter, found.draft_revision) == (
        "code",
        "greedy",
        "lookup",
        "r7",
    )
    assert (found.target_revision, found.engine) == (identity.target_revision, identity.engine)
    assert (found.host, found.device) == (identity.host, identity.device)
    assert {row.owner for row in store.rows} == {"w1"}


def test_speed_ups_are_computed_at_once_and_then_at_most_every_few_seconds() -> None:
    """No task is forgotten that had slices in between."""
    store, now_s = Store(), [100.0]
    kept = recorder(store, lambda: now_s[0])
    kept.store(slices_of("code"))
    assert store.refreshed == [{"code"}]
    kept.store(slices_of("sql"))
    now_s[0] += REFRESH_EVERY_S / 2
    kept.store(slices_of("chat"))
    assert store.refreshed == [{"code"}]
    now_s[0] += REFRESH_EVERY_S / 2
    kept.store(slices_of("code"))
    assert store.refreshed == [{"code"}, {"sql", "chat", "code"}]
    now_s[0] += REFRESH_EVERY_S
    kept.store([])
    assert len(store.refreshed) == 2
