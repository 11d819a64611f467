"""Steering of whole requests: an arm holds from a request's start to its end."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from uuid import uuid4

import pytest

from alphaloop.deciding.goodput import DrafterState
from alphaloop.deciding.policy import Decision, DraftSetting, Reason
from alphaloop.messages import Mode
from alphaloop.switchback.request_block import RequestDesign
from alphaloop.switchback.request_schedule import RequestSchedule
from alphaloop.switchback.slices import Phase
from tests.fixtures.claimed import NOW, claimed_job
from tests.fixtures.served_requests import ServingEngine
from worker.engine import Generation
from worker.running import RunningJob, RunningJobs, Stepped
from worker.steering import RequestSteering, TaskSlice

LOOKUP = Decision(Mode.SPECULATIVE, "lookup", "look-1", 3, Reason.FASTER, "")
VANILLA = Decision(Mode.VANILLA, None, None, 0, Reason.NOT_FASTER, "")


class World:
    """Servers that always have six requests of these tasks, and what came of them."""

    def __init__(
        self,
        *jobs: tuple[str, Decision],
        share: float = 0.2,
        law: Callable[[bool, int], float] = lambda drafts, num: (0.01 + 0.001 * num) * (1.5 if drafts else 1.0),
        overflowing: frozenset[str] = frozenset(),
    ) -> None:
        self.engine = ServingEngine(
            law,
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
        self.slices: list[TaskSlice] = []
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
            assert stepped.step is not None
            self.stepped.append(stepped)
            self.slices += self.steering.observe(stepped.step)


def test_requests_on_trial_that_start_in_a_control_slice_are_admitted_vanilla_and_no_others() -> None:
    forced = replace(LOOKUP, reason=Reason.FORCED)
    world = World(("code", LOOKUP), ("sql", LOOKUP), ("code", forced), ("sql", VANILLA))
    world.turn(700)
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
    assert {one.slice.task for one in world.slices} == {"code", "sql"}
    assert {one.sampling_bucket for one in world.slices} == {"greedy"}


def num_counted(world: World) -> int:
    """Requests that are in a slice, at the end."""
    return sum(one.slice.num_prompt_rounds for one in (*world.slices, *world.steering.close()))


def test_nothing_is_on_trial_and_nothing_counted_while_others_ask_servers_that_do_not_tell_their_load() -> None:
    world = World(("code", LOOKUP))
    world.turn(100)
    ended = [generation for one in world.stepped for _, generation in one.finished]
    world.num_peers, world.engine.tells_load, num_started = 1, False, len(world.started)
    world.turn(900)
    assert all(job.setting == job.decision.setting for job in world.started[num_started:]), "none is a control"
    assert 0 < num_counted(world) <= len(ended), "what ended before the other worker came, and nothing else"


def test_requests_are_on_trial_beside_other_workers_where_servers_tell_their_load() -> None:
    world = World(("code", LOOKUP))
    world.num_peers, world.engine.num_others = 1, 4
    world.turn(900)
    assert {job.setting for job in world.started} == {LOOKUP.setting, DraftSetting()}
    slices = [one.slice for one in (*world.slices, *world.steering.close())]
    assert {one.phase for one in slices} == set(Phase)
    assert all(13.9 < one.mean_running + one.mean_elsewhere < 14.1 for one in slices), "six of ours, eight of others"


def test_the_trial_goes_on_when_servers_tell_again(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    world = World(("code", LOOKUP))
    world.num_peers, world.engine.tells_load = 2, False
    world.turn(100)
    world.engine.tells_load, num_started = True, len(world.started)
    world.turn(900)
    assert DraftSetting() in {job.setting for job in world.started[num_started:]}
    said = [getattr(record, "action", None) for record in caplog.records]
    assert [action for action in said if action is not None] == ["trial_paused", "trial_goes_on"]


def test_a_lone_worker_measures_at_servers_that_do_not_tell_their_load() -> None:
    world = World(("code", LOOKUP))
    world.engine.tells_load = False
    world.turn(700)
    assert {one.slice.phase for one in world.slices} >= {Phase.BEFORE, Phase.CONTROL, Phase.AFTER}


def test_a_slice_adds_up_what_its_requests_took() -> None:
    world = World(("code", LOOKUP))
    world.turn(900)
    slices = [one.slice for one in (*world.slices, *world.steering.close())]
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
    world = World(("code", LOOKUP), share=0.0, overflowing=away)
    world.turn(300)
    slices = [one.slice for one in (*world.slices, *world.steering.close())]
    ended = [generation for one in world.stepped for _, generation in one.finished]
    assert sum(one.num_prompt_rounds for one in slices) == sum(bool(one.drafted) for one in ended) < len(ended)


def test_a_request_that_had_another_draft_length_than_its_arm_is_not_counted() -> None:
    """An endpoint that does not follow requests drafts as it was started."""
    world = World(("code", LOOKUP), share=0.0)
    told = world.engine._served
    asked: list[int] = []

    def served(generation: Generation) -> Generation:
        found = told(generation)
        assert found.served is not None
        asked.append(2 + len(asked) % 2)
        return replace(found, served=replace(found.served, num_draft_tokens=asked[-1]))

    world.engine._served = served  # type: ignore[method-assign]
    world.turn(200)
    slices = [one.slice for one in (*world.slices, *world.steering.close())]
    assert sum(one.num_prompt_rounds for one in slices) == asked.count(3) > 0
    assert {one.treatment.num_draft_tokens for one in slices} == {3}


def test_requests_that_are_dropped_or_fail_to_start_are_forgotten() -> None:
    world = World(("code", LOOKUP))
    world.turn(30)
    world.running.drop([job.job_id for job in world.started])
    world.steering.begin("never admitted", world.started[0].lane, LOOKUP, world.running)
    world.turn(700)
    assert {one.slice.phase for one in world.slices} >= {Phase.BEFORE, Phase.CONTROL, Phase.AFTER}


def test_without_a_control_share_nothing_is_admitted_vanilla() -> None:
    world = World(("code", LOOKUP), share=0.0)
    world.turn(200)
    assert all(job.setting == LOOKUP.setting for job in world.started)
    assert {one.slice.phase for one in world.steering.close()} == {Phase.BETWEEN}


def test_rounds_that_a_server_does_not_tell_are_its_tokens() -> None:
    world = World(("code", LOOKUP), share=0.0)
    hidden = world.engine._served
    world.engine._served = lambda one: (  # type: ignore[method-assign]
        lambda found: replace(found, served=replace(found.served, num_rounds=None, decode_s=None))
    )(hidden(one))
    world.turn(200)
    for one in world.steering.close():
        assert one.slice.num_sequence_rounds == one.slice.num_tokens > 0
        assert one.slice.num_prompt_rounds == 0
