"""The simulator steers as worker/steering.py does: the same settings in every round of the same jobs."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import cast

from alphaloop.deciding.decision import Decision, DraftSetting
from alphaloop.deciding.draft_lengths import LengthsTogether
from alphaloop.experiment.assign import RoundDesign, RoundSchedule
from benchmarks.policy.ours_on_slots import OursOnSlots, step_of
from benchmarks.policy.play import BEGINNING
from benchmarks.policy.scenario import Bursts, Slots, Slower, read_scenarios
from benchmarks.policy.slots import Running, SlotRound, SlotTable, draw_slot_stream, play_slots
from tests.fixtures.simulated import lane
from worker.admission import LaneKey
from worker.running import RunningJob, RunningJobs
from worker.steering import RoundSteering


@dataclass
class WorkersJob:
    """What the worker's steering looks at."""

    job_id: str
    lane: LaneKey
    decision: Decision
    setting: DraftSetting
    is_streamed: bool = False


class BesideAWorker(OursOnSlots):
    """Asks a worker's steering about every round too, to which it is the RunningJobs."""

    def watch(self, seed: int) -> None:
        self.now_ms, self.num_rounds, self.num_paused = 0.0, 0, 0
        self.jobs: dict[str, WorkersJob] = {}
        schedule = RoundSchedule(RoundDesign(), random.Random(seed))
        self.worker = RoundSteering(
            schedule,
            LengthsTogether(lambda: self._costs.table),
            lambda: BEGINNING + timedelta(milliseconds=self.now_ms),
        )

    def steer(self, running: Sequence[Running], slower: Slower, now_ms: float) -> None:
        super().steer(running, slower, now_ms)
        self.now_ms = now_ms
        for one in running:
            cell, job_id = one.job.cell, str(one.job.number)
            decision = self.decision_of(one)
            job = WorkersJob(job_id, lane(cell.task, bucket=cell.sampling), decision, decision.setting)
            self.jobs.setdefault(job_id, job)
        kept = {str(one.job.number) for one in running}
        self.jobs = {job_id: job for job_id, job in self.jobs.items() if job_id in kept}
        self.worker.steer(cast(RunningJobs, self))
        assert [one.setting for one in running] == [self.jobs[str(one.job.number)].setting for one in running]
        self.num_rounds += 1
        self.num_paused += any(one.setting.drafter and not one.setting.num_draft_tokens for one in running)

    def by_id(self) -> dict[str, WorkersJob]:
        return self.jobs

    def redraft(self, setting_of: Callable[[RunningJob], DraftSetting]) -> None:
        for job in self.jobs.values():
            job.setting = setting_of(cast(RunningJob, job))

    def observe(self, done: SlotRound) -> None:
        super().observe(done)
        self.worker.observe(step_of(done))


def test_settings_of_every_round_are_the_workers(seed: int) -> None:
    read = read_scenarios()
    slots = Slots(num_slots=8, bursts=Bursts(slots=(1, 4, 8), tokens=400))
    scenario = read.named("bursts").model_copy(update={"slots": slots})
    scenario = scenario.model_copy(update={"phases": (scenario.phases[0].model_copy(update={"jobs": 250}),)})
    device = read.devices[scenario.device]
    rule = BesideAWorker(scenario, device.points(), seed)
    rule.watch(seed)
    table = SlotTable(device, 8, scenario.draft_tokens)
    play_slots(draw_slot_stream(scenario, device, seed), table, rule)
    assert rule.num_rounds > 500
    assert rule.num_paused > 0
