"""Steering: how sequences draft by how many run, and that a control slice pauses a whole task and nobody else."""

from __future__ import annotations

import random
from dataclasses import replace
from uuid import uuid4

import pytest

from alphaloop.cost import CostTable
from alphaloop.deciding.draft_lengths import LengthsTogether
from alphaloop.deciding.goodput import Alternative, DrafterState
from alphaloop.deciding.policy import Decision, DraftSetting, Reason
from alphaloop.messages import Mode
from alphaloop.switchback.block import SwitchbackDesign
from alphaloop.switchback.schedule import SwitchbackSchedule
from alphaloop.switchback.slices import Phase, Slice
from alphaloop.switchback.speedup import measured_speedup
from tests.fakes import FakeEngine
from tests.fixtures.claimed import NOW, claimed_job
from worker.jobs.round_steering import RoundSteering
from worker.jobs.running import RunningJob, RunningJobs
from worker.jobs.steering import TaskSlice

DRAFTERS = (DrafterState("lookup", "look-1", 8), DrafterState("model", "model-1", 8))
DESIGN = SwitchbackDesign(control_share=0.2, num_control_rounds=4, num_washout_rounds=1, num_window_rounds=4)
LOOKUP = Decision(Mode.SPECULATIVE, "lookup", "look-1", 3, Reason.FASTER, "")
FORCED = replace(LOOKUP, reason=Reason.FORCED)
VANILLA = Decision(Mode.VANILLA, None, None, 0, Reason.NOT_FASTER, "")


class World:
    """An engine that runs endless jobs, as many of each task as asked for, and the rounds that it ran."""

    def __init__(self, *jobs: tuple[str, Decision], share: float = DESIGN.control_share, seed: int = 1) -> None:
        self.engine = FakeEngine(num_slots=8, drafters=DRAFTERS, acceptance=(0.8,), slowness=1.0)
        self.running = RunningJobs(self.engine)
        self.jobs = jobs
        design = replace(DESIGN, control_share=share)
        self.steering = RoundSteering(
            SwitchbackSchedule(design, random.Random(seed)), LengthsTogether(lambda: CostTable(())), lambda: NOW
        )
        self.slices: list[TaskSlice] = []
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
        assert step is not None
        # The fake tells what its parts would take; its own wall time is that of this test.
        self.slices += self.steering.observe(replace(step, wall_s=step.draft_s + step.verify_s))

    def start(self, task: str, decision: Decision) -> None:
        self.num_started += 1
        claimed = claimed_job(f"{self.num_started}", task=task, max_tokens=200)
        self.running.start(RunningJob(claimed, decision, uuid4(), NOW, decision.setting))


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
    assert {one.slice.task for one in world.slices} == {"code", "sql"}
    assert {one.sampling_bucket for one in world.slices} == {"greedy"}
    assert {one.slice.phase for one in world.slices} >= {Phase.BEFORE, Phase.CONTROL, Phase.AFTER}
    for one in world.slices:
        if one.slice.phase is Phase.CONTROL:
            assert one.slice.num_tokens == one.slice.num_sequence_rounds, "vanilla: a token a round"
            assert one.slice.num_proposed == 0


def test_the_slices_tell_the_speed_up_of_the_engine() -> None:
    world = World(("code", LOOKUP))
    for _ in range(4000):
        world.turn()
    found = measured_speedup([one.slice for one in world.slices])
    assert found.decoding is not None
    # Expected tokens a round at α = .8 and k = 3, with the times that the fake reports for the two widths. Rounds that
    # end a text are cropped, so a little less is seen.
    tokens = 1 + 0.8 + 0.8**2 + 0.8**3
    vanilla_ms, round_ms = 10.0 + 0.1 + 0.0256, 10.0 + 0.4 + 0.0256 + 0.4
    assert 0.92 < found.decoding.mean / (tokens * vanilla_ms / round_ms) < 1.0
    assert found.decoding.high - found.decoding.low < 0.3


def test_the_slices_carry_what_the_decisions_expected_of_the_drafter_they_run_with() -> None:
    promised = replace(LOOKUP, alternatives=(Alternative("lookup", 3, 2.9, 10.0, 1.6, 1.4, 1.9),))
    other = replace(LOOKUP, alternatives=(Alternative("lookup", 3, 2.0, 10.0, 1.2, 1.0, 1.5),))
    by_load = replace(VANILLA, settings_by_running=(DraftSetting("lookup", 3),))
    world = World(("code", promised), ("code", other), ("sql", by_load))
    for _ in range(400):
        world.turn()
    by_task: dict[str, list[Slice]] = {}
    for one in (one.slice for one in world.slices if one.slice.phase is not Phase.CONTROL):
        by_task.setdefault(one.task, []).append(one)
    for one in by_task["code"]:
        assert one.expected_sequence_s == pytest.approx(one.sequence_s + one.prompt_sequence_s)
        means = one.expected_vanilla_s, one.expected_low_s, one.expected_high_s, one.uncorrected_vanilla_s
        assert [mean / one.expected_sequence_s for mean in means] == pytest.approx([1.4, 1.2, 1.7, 1.4])
    assert all(one.expected_sequence_s == 0 for one in by_task["sql"]), "its decision expected nothing of a drafter"


def test_without_a_control_share_nobody_is_paused() -> None:
    world = World(("code", LOOKUP), share=0.0)
    for _ in range(200):
        world.turn()
    assert all(arms == {"code faster": {DraftSetting("lookup", 3)}} for arms in world.rounds)
    assert {one.slice.phase for one in world.steering.close()} == {Phase.BETWEEN}


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
    assert world.steering.close() == []
