"""The clairvoyant of a scenario with slots: it knows producers, true costs and slow stretches, but not the luck."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from alphaloop.deciding.decision import DraftSetting
from benchmarks.policy.load import Slower
from benchmarks.policy.scenario import Device, Scenario
from benchmarks.policy.slot_device import Running, SlotRound, SlotTable
from benchmarks.policy.slot_jobs import SlotJob, draw_jobs

#: Jobs that its expectations rest on, all kinds together. No rule ever meets them.
NUM_JOBS: Final = 480


@dataclass(frozen=True, slots=True)
class Yield:
    """What a kind's jobs come to at one setting, a job on average."""

    num_rounds: float
    mean_offered: float  #: tokens a round
    num_tokens: float  #: behind the prefill's
    num_prompt_tokens: float


@dataclass(frozen=True)
class Known:
    """The expectations of all kinds, and the device's true times."""

    scenario: Scenario
    table: SlotTable
    yields: tuple[dict[DraftSetting, Yield], ...]  #: by kind
    cells: tuple[Hashable, ...]  #: by kind, what a rule can know of it
    num_jobs: tuple[int, ...]  #: by kind, that the expectations rest on

    def ms_a_token(self, kind: int, setting: DraftSetting, num_running: int, slower: Slower, *, reads: bool) -> float:
        """Milliseconds of the device a token, if all that run do the same; `reads`: the drafter has the text to read."""
        its, factors = self.yields[kind][setting], dict(slower)
        ms = self.table.pass_ms(num_running, its.mean_offered)
        read_ms = 0.0
        if setting.drafter is not None:
            factor = factors.get(setting.drafter, 1.0)
            ms += factor * self.table.draft_ms(setting.drafter, num_running, setting.num_draft_tokens)
            read_ms = factor * self.table.read_ms(setting.drafter, round(its.num_prompt_tokens)) if reads else 0.0
        return (ms / num_running * its.num_rounds + read_ms) / its.num_tokens


    def without_producers(self) -> Known:
        """What is known if the producer of a job is not: kinds of one cell have the cell's mean."""
        found = []
        for cell in self.cells:
            alike = [kind for kind, other in enumerate(self.cells) if other == cell]
            shares = [self.num_jobs[kind] for kind in alike]
            found.append({s: _mean([self.yields[kind][s] for kind in alike], shares) for s in self.yields[0]})
        return replace(self, yields=tuple(found))


def know_slots(scenario: Scenario, device: Device, *, num_jobs: int = NUM_JOBS) -> Known:
    """Expectations from jobs that no rule ever meets."""
    assert scenario.slots is not None
    jobs = draw_jobs(scenario, num_jobs, np.random.default_rng([0, 1, *scenario.name.encode()]))
    kinds = range(max(job.kind for job in jobs) + 1)
    of_kind = [[job for job in jobs if job.kind == kind] or list(jobs) for kind in kinds]
    settings = [DraftSetting(*action) for action in scenario.actions]
    yields = tuple({setting: _yield_of(its, setting) for setting in settings} for its in of_kind)
    table = SlotTable(device, scenario.slots.num_slots, scenario.draft_tokens)
    cells = tuple(its[0].cell if scenario.replayed is None else its[0].cell.task for its in of_kind)
    return Known(scenario, table, yields, cells, tuple(map(len, of_kind)))


def _yield_of(jobs: Sequence[SlotJob], setting: DraftSetting) -> Yield:
    num_tokens = sum(job.needed - 1 for job in jobs)
    prompts = sum(job.cell.prompt_tokens for job in jobs) / len(jobs)
    if setting.drafter is None:
        return Yield(num_tokens / len(jobs), 0.0, num_tokens / len(jobs), prompts)
    num_rounds = num_offered = 0
    for job in jobs:
        offered = np.minimum(job.offered[setting.drafter], setting.num_draft_tokens)
        out = np.cumsum(np.minimum(job.accepted[setting.drafter], offered) + 1)
        rounds = int(np.searchsorted(out, job.needed - 1)) + 1
        num_rounds += rounds
        num_offered += int(offered[:rounds].sum())
    return Yield(num_rounds / len(jobs), num_offered / num_rounds, num_tokens / len(jobs), prompts)


def _mean(yields: Sequence[Yield], num_jobs: Sequence[int]) -> Yield:
    """Of kinds with so many jobs each."""
    rounds = [its.num_rounds * num for its, num in zip(yields, num_jobs, strict=True)]
    offered = sum(its.mean_offered * num for its, num in zip(yields, rounds, strict=True))
    tokens = sum(its.num_tokens * num for its, num in zip(yields, num_jobs, strict=True))
    prompts = sum(its.num_prompt_tokens * num for its, num in zip(yields, num_jobs, strict=True))
    whole = sum(num_jobs)
    return Yield(sum(rounds) / whole, offered / sum(rounds), tokens / whole, prompts / whole)


class SlotOracle:
    """A drafter for each job at its start, then in every round the k, or vanilla, that takes least in expectation.

    With `is_blind` neither producers nor slow stretches are known: what a rule could know at best.
    """

    def __init__(self, known: Known, *, is_blind: bool = False) -> None:
        self._known = known.without_producers() if is_blind else known
        self._is_blind = is_blind
        self._best: dict[tuple[int, int, Slower, str | None], DraftSetting] = {}
        self._drafter: dict[int, str | None] = {}

    def start(self, jobs: Sequence[Running], num_running: int, now_ms: float) -> None:
        """The drafter is chosen in the first round, when the stretch is known."""

    def steer(self, running: Sequence[Running], slower: Slower, now_ms: float) -> None:
        """All that run."""
        slower = () if self._is_blind else slower
        for one in running:
            number = one.job.number
            chosen = self._drafter.get(number)
            one.setting = self._best_of(one.job.kind, len(running), slower, chosen)
            if chosen is None and one.setting.drafter is not None:
                self._drafter[number] = one.setting.drafter

    def observe(self, done: SlotRound) -> None:
        """It knows already."""

    def end(self, ended: Running, now_ms: float) -> None:
        """The same."""
        self._drafter.pop(ended.job.number, None)

    def _best_of(self, kind: int, num_running: int, slower: Slower, chosen: str | None) -> DraftSetting:
        key = kind, num_running, slower, chosen
        if key not in self._best:
            able = [s for s in self._known.yields[kind] if chosen is None or s.drafter in (None, chosen)]
            self._best[key] = min(
                able,
                key=lambda s: self._known.ms_a_token(kind, s, num_running, slower, reads=chosen is None),
            )
        return self._best[key]
