"""Sampled stacks and the stages they belong to."""

from __future__ import annotations

import threading

import pytest

from benchmarks.pipeline.sampling import Sampler
from benchmarks.pipeline.stages import OTHER, STAGES, WAITING, stage_of

DRIVER = ["psycopg.connection:Connection.wait", "sqlalchemy.engine.base:Connection.execute"]
LOOP = ["worker.loop:Worker.run_once", "worker.loop:Worker.run", "__main__:main"]


@pytest.mark.parametrize(
    ("ours", "stage"),
    [
        (["alphaloop.store.jobs:JobStore.claim", "worker.claiming:Claiming.claim"], "claim"),
        (["alphaloop.store.jobs:lock_held", "alphaloop.store.outcomes:OutcomeStore.record"], "record"),
        (["alphaloop.store.decode_runs:insert_runs", "alphaloop.store.outcomes:OutcomeStore.record"], "record"),
        (["alphaloop.store.database:Database.begin", "alphaloop.store.outbox:Outbox.delete"], "finish"),
        (["alphaloop.kafka.producer:Producer.flush", "worker.publish:Publisher.emit"], "publish"),
        (["alphaloop.messages.codec:parse_job", "worker.validation:Validation.read"], "intake"),
        (["alphaloop.messages.result:Result.encode", "worker.recording:succeeded"], "record"),
        (["alphaloop.deciding.policy:decide", "worker.deciding:Decider.decide_each"], "decide"),
        (["benchmarks.pipeline.instant_engine:InstantEngine.step", "worker.batch:BatchDecoding._run"], "decode"),
        (["worker.metrics:WorkerMetrics.recorded"], "metrics"),
        (["worker.intake:Intake._turn", "worker.intake:Intake._run"], "intake"),
    ],
)
def test_the_innermost_frame_of_ours_that_tells_a_stage_names_it(ours: list[str], stage: str) -> None:
    assert stage in STAGES
    assert stage_of([*DRIVER, *ours, *LOOP], is_running=True) == stage
    # Waiting for a server within a stage belongs to the stage.
    assert stage_of([*DRIVER, *ours, *LOOP], is_running=False) == stage


@pytest.mark.parametrize(
    "stack",
    [
        ["threading:Condition.wait", "worker.intake:Intake.take", *LOOP],
        ["queue:Queue.get", "worker.recording:Recorder.run"],
        ["alphaloop.kafka.consumer:Consumer.poll", "worker.intake:Intake._turn"],
        [*DRIVER, "alphaloop.store.database:Listener.wait", "worker.watch:Watch._run"],
    ],
)
def test_a_thread_without_work_waits_and_one_that_runs_does_not(stack: list[str]) -> None:
    assert stage_of(stack, is_running=False) == WAITING
    assert stage_of(stack, is_running=True) != WAITING


def test_frames_of_others_tell_no_stage() -> None:
    assert stage_of(["json.encoder:JSONEncoder.encode", "recorder:record"], is_running=True) == OTHER
    assert stage_of([], is_running=False) == OTHER


def test_a_busy_thread_is_found_where_it_is_busy() -> None:
    enough, busy, num_looks = threading.Event(), threading.Event(), 0

    def is_wanted() -> bool:
        nonlocal num_looks
        num_looks += 1
        if num_looks == 20:
            enough.set()
        return True

    def spin() -> None:
        busy.set()
        while not enough.is_set():
            sum(range(100))

    others = [thread.name for thread in threading.enumerate()]  # libraries of earlier tests have threads as well
    thread = threading.Thread(target=spin, name="spinning")
    sampler = Sampler(is_wanted, every_s=0.001, left_out=others)
    thread.start()
    busy.wait()
    sampler.start()
    thread.join()
    sampler.close()
    sampled = sampler.sampled
    assert sampled.num_samples >= 18
    # Other tests of the session may have left threads of libraries behind.
    assert "spinning" in {name for name, _ in sampled.wall_s}
    label = f"{__name__}:{spin.__qualname__}"
    assert 0 < sampled.cumulative_cpu_s[label] <= sampled.seconds * 1.5
    assert label in sampled.as_json(num_functions=5)["cumulative_cpu_s"]
