"""The simulator over the same night: the same arrivals, lengths and death, on a device with the measured costs.

A round of the device takes what a token of a sequence took in the night at that load, whatever it went to: the target's
pass, drafts, prompts. What a task's tokens took longer than all tasks' becomes tokens of its jobs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from alphaloop.capacity.curve import DecodedJobs, LoadCurve, arrivals_of
from alphaloop.deciding.decision import Decision
from benchmarks.jobs import forced
from benchmarks.policy.scenario import Device, Surface
from benchmarks.policy.slots import SlotTable
from benchmarks.week.capacity import as_recorded
from benchmarks.week.night.ledger import STAGES, Ended, Said
from benchmarks.week.play import Outage, Play
from benchmarks.week.promises import Promising
from benchmarks.week.world import DAY_S, DRAFTER, MOST_DRAFT_TOKENS, NUM_SLOTS, Week, WeekJob
from worker.admission import LaneKey

CONTESTANTS: Final = ("slack", "arrival", "earliest deadline", "least slack")


class AsMeasured:
    """Decides nothing: drafts are in the measured costs."""

    def decide(self, jobs: Sequence[WeekJob], num_running: int, now_s: float) -> Sequence[Decision]:
        """Vanilla rounds."""
        return [forced()] * len(jobs)

    def ended(self, job: WeekJob, k: int, now_s: float) -> None:
        """Learn nothing."""


def week_of(night: Sequence[Ended], seed: int) -> Week:
    """The night as the simulator's week; jobs that ended without a text get the length of another of their task."""
    decoded = [job.decoded for job in night if job.decoded is not None]
    curve = LoadCurve.of_jobs(decoded)
    token_s, by_task = _token_s(decoded, curve), defaultdict[str, list[int]](list)
    for of in decoded:
        by_task[of.task].append(of.num_tokens)
    overall_s = sum(token_s[of.task] * of.num_tokens for of in decoded) / sum(of.num_tokens for of in decoded)
    rng = np.random.default_rng(seed)
    jobs: list[WeekJob] = []
    for job in sorted(night, key=lambda job: job.at_s):
        task = job.stream.task
        num_tokens = job.decoded.num_tokens if job.decoded else int(rng.choice(by_task[task]))
        num_scaled = max(1, round(num_tokens * token_s[task] / overall_s))
        lane = LaneKey(task, "greedy", "auto", "traffic", "", 0)
        args = len(jobs), job.stream, job.at_s, job.deadline_s, num_scaled, job.stream.alpha, lane, job.batch_id
        jobs.append(WeekJob(*args))
    table = _device(curve, overall_s)
    slots = SlotTable(table, NUM_SLOTS, {DRAFTER: MOST_DRAFT_TOKENS})
    length_s = max(job.at_s for job in jobs)
    offered_s = sum(job.num_tokens for job in jobs) * slots.pass_ms(NUM_SLOTS, 0) / NUM_SLOTS / 1000
    return Week(tuple(jobs), slots, table, length_s / DAY_S, offered_s / max(1e-9, length_s))


def _token_s(decoded: Sequence[DecodedJobs], curve: LoadCurve) -> Mapping[str, float]:
    """Seconds a token of a sequence alone, by task."""
    alone_s, num_tokens = defaultdict[str, float](float), defaultdict[str, int](int)
    for of in decoded:
        alone_s[of.task] += arrivals_of(of, curve).alone_s
        num_tokens[of.task] += of.num_tokens
    return {task: seconds / num_tokens[task] for task, seconds in alone_s.items()}


def _device(curve: LoadCurve, token_s: float) -> Device:
    """Rounds of one token. A draft takes time and brings nothing, because the jobs' α is 0."""
    rounds = {load: (1000 * token_s * curve.at(load),) for load in range(1, NUM_SLOTS + 1)}
    draft = Surface(widths=(1,), by_batch={1: (1.0,)})
    return Device(target=Surface(widths=(1,), by_batch=rounds), drafters={DRAFTER: draft})


def simulated(week: Week, outage: Outage, seed: int) -> tuple[dict[str, list[Ended]], list[Said]]:
    """What became of the jobs by contestant, and what production's promises would have said."""
    promising = Promising(week.jobs, seed)
    by_contestant: dict[str, list[Ended]] = {}
    for name in CONTESTANTS:
        observer = promising if name == "slack" else None
        playing = Play(week, name, num_workers=1, seed=seed, observer=observer, outage=outage, decisions=AsMeasured())
        played = playing.run()
        decoded = {each.job.number: as_recorded(each) for each in played.decoded}
        by_contestant[name] = [
            Ended(job.stream, job.batch_id, job.at_s, job.deadline_s, job.ended_s, decoded.get(job.number))
            for job in played.jobs
        ]
    return by_contestant, _said(promising)


def _said(promising: Promising) -> list[Said]:
    return [
        Said(batch.id, stage, of.at_s, of.at_s + of.low_s, of.at_s + of.high_s, batch.ended_s)
        for batch in promising.batches.values()
        for stage in STAGES
        if (of := batch.promises.get(str(stage))) is not None and of.outlook.why is None
    ]
