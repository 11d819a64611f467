"""A device with slots, round by round, as a worker drives it: a slot that falls free is refilled in the next round.

A round's pass costs what the table says for the sequences that run and the mean width of what they proposed. Every
drafter proposes for its own sequences together, as long as the longest of them wants. A prompt is read in the round
with which its job begins, and a drafter reads a text before its first proposal for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from benchmarks.policy.load import Hiccup
from benchmarks.policy.slot_jobs import SlotJob, SlotStream
from benchmarks.policy.slot_round import Running, SlotRound, SlotRule
from benchmarks.policy.slot_table import SlotTable
from benchmarks.policy.stream import Floats

#: Moments, evenly spaced in tokens, at which the time so far is kept.
NUM_MOMENTS: Final = 120


@dataclass(frozen=True)
class SlotTrace:
    """What a rule did."""

    ms: float  #: the device's time
    moments: Floats  #: [NUM_MOMENTS], time when so many tokens were out
    job_ms: Floats  #: [jobs], share of the device's time
    budget_ms: Floats  #: [jobs], of it, exploring or in control rounds
    budget_tokens: Floats  #: [jobs], put out meanwhile


def play_slots(
    stream: SlotStream, table: SlotTable, rule: SlotRule, *, is_control: _IsControl | None = None
) -> SlotTrace:
    """The rule decides all of the stream. `is_control` tells which running jobs a round spent on control."""
    return _Play(stream, table, rule, is_control or (lambda: frozenset())).run()


def by_lane(jobs: Sequence[SlotJob]) -> list[list[SlotJob]]:
    """Jobs that start in one round, by task and sampling bucket: each lane is decided together."""
    lanes: dict[tuple[str, str], list[SlotJob]] = {}
    for job in jobs:
        lanes.setdefault((job.cell.task, job.cell.sampling), []).append(job)
    return list(lanes.values())


_IsControl = Callable[[], frozenset[int]]


class _Play:
    def __init__(self, stream: SlotStream, table: SlotTable, rule: SlotRule, is_control: _IsControl) -> None:
        self._stream, self._table, self._rule, self._is_control = stream, table, rule, is_control
        self._ms, self._num_rounds, self._num_tokens, self._next = 0.0, 0, 0, 0
        self._running: list[Running] = []
        self._noise = stream.noise
        slots = stream.scenario.slots
        assert slots is not None
        self._hiccup: Hiccup | None = slots.hiccup
        self._hiccup_left = slots.hiccup.num_rounds if slots.hiccup else 0
        num_jobs = len(stream.jobs)
        # Lists: a single number is added to them faster than to arrays.
        self._job_ms, self._budget_ms, self._budget_tokens = ([0.0] * num_jobs for _ in range(3))
        self._times: list[tuple[int, float]] = [(0, 0.0)]

    def run(self) -> SlotTrace:
        while self._next < len(self._stream.jobs) or self._running:
            self._round()
        tokens, times = np.array(self._times).T
        moments = np.interp(np.linspace(0, tokens[-1], NUM_MOMENTS + 1)[1:], tokens, times)
        return SlotTrace(
            self._ms, moments, np.array(self._job_ms), np.array(self._budget_ms), np.array(self._budget_tokens)
        )

    def _round(self) -> None:
        stretch = self._stream.stretches.at(self._num_tokens)
        new = self._admit(stretch.num_open)
        running, table = self._running, self._table
        self._rule.steer(running, stretch.slower, self._ms)
        slower = dict(stretch.slower) if stretch.slower else {}
        host = slower.pop("host", 1.0) * self._noise[self._num_rounds % len(self._noise)]
        offered, accepted = self._luck(running)
        drafts = self._drafts(running, slower)
        num_running = len(running)
        draft_ms = host * sum(drafts.values())
        pass_ms = host * table.pass_ms(num_running, sum(offered) / num_running)
        read_ms, draft_read_ms, num_read, num_draft_read = self._read(running, new, host, slower)
        ms = pass_ms + draft_ms + read_ms + draft_read_ms
        tokens = [a + 1 if a < one.left else one.left for a, one in zip(accepted, running, strict=True)]

        def vanilla_ms(places: Sequence[int]) -> float:
            left = [i for i in range(num_running) if i not in places]
            mean = sum(offered[i] for i in left) / num_running
            others = self._drafts([running[i] for i in left], slower, is_counted=False)
            return host * (table.pass_ms(num_running, mean) + sum(others.values()))

        done = SlotRound(
            self._ms,
            ms,
            draft_ms,
            read_ms,
            draft_read_ms,
            num_read,
            num_draft_read,
            tuple(running),
            offered,
            accepted,
            tokens,
            frozenset(drafts),
            vanilla_ms,
        )
        self._charge(done)
        self._rule.observe(done)
        self._ms += ms
        self._num_rounds += 1
        self._num_tokens += sum(tokens) + len(new)  # a prompt yields the first token
        self._times.append((self._num_tokens, self._ms))
        self._end(tokens)

    def _admit(self, num_open: int) -> list[Running]:
        if len(self._running) >= num_open:
            return []
        new: list[Running] = []
        while len(self._running) + len(new) < num_open and self._next < len(self._stream.jobs):
            job = self._stream.jobs[self._next]
            self._next += 1
            new.append(Running(job, left=job.needed - 1))
        by_number = {one.job.number: one for one in new}
        for lane in by_lane([one.job for one in new]):
            jobs = [by_number[job.number] for job in lane]
            self._rule.start(jobs, len(self._running) + len(jobs), self._ms)
            self._running += jobs
        return new

    def _luck(self, running: Sequence[Running]) -> tuple[list[int], list[int]]:
        offered, accepted = [], []
        for one in running:
            setting = one.setting
            if setting.num_draft_tokens and setting.drafter is not None:
                offers = one.job.offered[setting.drafter][one.num_rounds]
                accepts = one.job.accepted[setting.drafter][one.num_rounds]
                offers = offers if offers < setting.num_draft_tokens else setting.num_draft_tokens
                offered.append(offers)
                accepted.append(accepts if accepts < offers else offers)
            else:
                offered.append(0)
                accepted.append(0)
        return offered, accepted

    def _drafts(
        self, running: Sequence[Running], slower: Mapping[str, float], *, is_counted: bool = True
    ) -> dict[str, float]:
        """Milliseconds of each drafter that proposes."""
        number: dict[str, int] = {}
        longest: dict[str, int] = {}
        for one in running:
            drafter, k = one.setting.drafter, one.setting.num_draft_tokens
            if drafter is not None and k:
                number[drafter] = number.get(drafter, 0) + 1
                if k > longest.get(drafter, 0):
                    longest[drafter] = k
        hiccup = self._hiccup
        is_hit = hiccup is not None and self._hiccup_left > 0 and self._next > hiccup.from_job
        found = {}
        for drafter, k in longest.items():
            factor = slower.get(drafter, 1.0)
            if is_hit and hiccup is not None and drafter == hiccup.drafter:
                factor *= hiccup.slower
                self._hiccup_left -= is_counted
            found[drafter] = factor * self._table.draft_ms(drafter, number[drafter], k)
        return found

    def _read(
        self, running: Sequence[Running], new: Sequence[Running], host: float, slower: Mapping[str, float]
    ) -> tuple[float, float, int, int]:
        """Milliseconds that the target and drafters read for; tokens that they read."""
        ms, draft_ms, num_read, num_draft_read = 0.0, 0.0, 0, 0
        for one in new:
            num_read += one.job.cell.prompt_tokens
            ms += self._table.read_ms(None, one.job.cell.prompt_tokens)
        for one in running:
            drafter = one.setting.drafter
            if drafter is not None and drafter not in one.has_read and one.setting.num_draft_tokens:
                one.has_read.add(drafter)
                num_tokens = one.job.cell.prompt_tokens + one.job.needed - 1 - one.left
                took = self._table.read_ms(drafter, num_tokens)
                draft_ms += slower.get(drafter, 1.0) * took
                num_draft_read += num_tokens if took else 0
        return host * ms, host * draft_ms, num_read, num_draft_read

    def _charge(self, done: SlotRound) -> None:
        share, control = done.ms / len(done.running), self._is_control()
        for one, num_tokens in zip(done.running, done.num_tokens, strict=True):
            number = one.job.number
            self._job_ms[number] += share
            if one.is_budget or (control and number in control):
                self._budget_ms[number] += share
                self._budget_tokens[number] += num_tokens

    def _end(self, tokens: Sequence[int]) -> None:
        has_ended = False
        for one, num_tokens in zip(self._running, tokens, strict=True):
            one.left -= num_tokens
            one.num_rounds += 1
            has_ended = has_ended or one.left <= 0
        if has_ended:
            ended = [one for one in self._running if one.left <= 0]
            self._running = [one for one in self._running if one.left > 0]
            for one in ended:
                self._rule.end(one, self._ms)
