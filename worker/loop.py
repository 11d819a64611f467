"""The worker, top to bottom: what happens to a job between Kafka and Kafka."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from alphaloop.errors import BrokerError, EngineSick, StoreError
from alphaloop.liveness import beat
from worker.absent_jobs import AbsentJobs
from worker.components import Components
from worker.ended_jobs import EndedJobs
from worker.ending import Ending
from worker.jobs.running import RunningJobs, Stepped
from worker.jobs.steering import TaskSlice
from worker.lanes import LaneKey
from worker.moved_jobs import MovedJobs
from worker.poison import Blame
from worker.starting import Starting

_IDLE_WAIT_S: Final = 0.2


@dataclass(frozen=True, slots=True)
class Turn:
    """What one turn of the loop did."""

    num_started: int = 0
    num_ended: int = 0
    num_running: int = 0


class Worker:
    """One GPU process. Neighbours with threads of their own feed it, record what ended and publish the results."""

    def __init__(self, components: Components) -> None:
        self._c = components
        self._running = RunningJobs(components.engine)
        self._blame = Blame(
            components.engine,
            self._running,
            components.retries,
            gone=components.feed.ended,
            now=components.now,
        )
        self._moved = MovedJobs(components, self._running)
        self._absent = AbsentJobs(components, self._running)
        self._ended = EndedJobs(components, self._blame)
        self._starting = Starting(components, self._running, self._ended, self._learn)
        self.ending = Ending(components, self._running)

    @property
    def num_waiting(self) -> int:
        """Jobs taken from Kafka and not yet decoding."""
        return self._c.feed.num_waiting + self._running.num_to_run_alone

    def run(self) -> None:
        """Turn until told to stop; then decode running jobs to their end and give back all others.

        Raises EngineSick after every job was given back, none of them counted as tried.
        """
        self._c.start()
        try:
            while not self._c.stop.is_set():
                self.run_once()
            self.ending.drain(lambda: self.run_once(0.0))
        except EngineSick as error:
            self.ending.give_up(error.message)
            raise
        except (StoreError, BrokerError):
            self.ending.release_all()
            raise
        except BaseException:
            # A running job may have caused this, so its claim is left to count as a crash; a job that never started
            # did not.
            self.ending.release(self._c.feed.ready.take_all())
            raise
        finally:
            self.ending.save()

    def run_once(self, timeout_s: float = _IDLE_WAIT_S) -> Turn:
        """One turn. With nothing to decode it waits up to `timeout_s` for a job.

        1. learn     outcomes that were recorded meanwhile are evidence for the next decision
        2. give back jobs whose partition goes to another worker
        3. drop      running jobs whose cancellation came or whose deadline passed
        4. set aside jobs whose servers are all away, so that nobody waits for their end
        5. tell      every two seconds, what this worker decodes and holds
        6. start     claimed jobs that fit, decided lane by lane
        7. costs     what rounds and requests took is fitted, and stored when it is time: no job waits for it here
        8. steer     drafter and k of each sequence in this round: by load, and by the switchback experiment
        9. step      one round of the engine
        10. hand over what ended, and streamed text

        Before the loop, `JobFeed` takes messages, validates, orders and claims them. After the loop, `Recorder` commits
        outcomes, and `Publisher` publishes them and finishes their deliveries. After a crash Kafka delivers unfinished
        messages again: a recorded outcome is then published again, and any other job is decoded again.
        """
        beat()
        self._c.check()
        self._blame.check()
        self._learn()
        self._moved.give_back()
        num_ended = self._drop_unwanted()
        self._absent.set_aside()
        self._c.presence.say_when_due(
            lambda: list(self._running.by_id()),
            num_slots=self._c.engine.load().num_slots,
            num_waiting=lambda: self.num_waiting,
        )
        num_started = self._starting.start(0.0 if len(self._running) else timeout_s)
        self._c.costs.refresh()
        self._c.costs.save_when_due()
        if not len(self._running):
            return Turn(num_started, num_ended)
        self._c.steering.steer(self._running)
        stepped = self._running.step()
        num_ended += self._hand_over(stepped)
        return Turn(num_started, num_ended, len(self._running))

    def _learn(self) -> None:
        recorded = self._c.recorder.take_recorded()
        if recorded:
            self._c.decider.count_scored(recorded)

    def _drop_unwanted(self) -> int:
        """End the jobs that nobody waits for any more, without a text; returns how many."""
        asked = self._c.leases.cancelled()
        dropped = self._running.drop(asked) if asked else []
        self._ended.cancelled(dropped)
        overdue = self._running.drop(self._running.overdue(self._c.now()))
        self._ended.expired(overdue)
        return len(dropped) + len(overdue)

    def _hand_over(self, stepped: Stepped) -> int:
        """Hand over the step's outcomes, texts, times and slices; returns how many jobs ended."""
        if (step := stepped.step) is not None:
            self._c.metrics.stepped(step)
            self._c.presence.stepped(step)
            self._c.costs.observe(step)
            self._keep(self._c.steering.observe(step))
            self._charge(stepped.lanes, step.wall_s)
            self._stream(stepped)
        else:
            self._keep(self._c.steering.close())
        self._starting.again(stepped.interrupted)
        return self._ended.decoded(stepped)

    def _keep(self, slices: Sequence[TaskSlice]) -> None:
        if slices:
            self._c.background.put("switchback slices", partial(self._c.store_slices, slices))

    def _charge(self, lanes: Sequence[LaneKey], wall_s: float) -> None:
        share_s = wall_s / len(lanes) if lanes else 0.0
        num_by_task = Counter(lane.task for lane in lanes)
        self._c.feed.charge({task: number * share_s for task, number in num_by_task.items()})

    def _stream(self, stepped: Stepped) -> None:
        gone = [*(job for job, _ in (*stepped.finished, *stepped.refused)), *stepped.interrupted]
        ended = {job.job_id: job for job in gone}
        for delta in stepped.step.deltas if stepped.step else ():
            job = ended.get(delta.job_id) or self._running.by_id()[delta.job_id]
            if stream := job.claimed.stream:
                created, model = int(job.started_at.timestamp()), self._c.engine.identity.target
                self._c.publishing.put(stream.add(delta.text, created=created, model=model))
