"""What a rule on slots is compared with: the clairvoyant of every round, and every static setting."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Final, NamedTuple, TypeAlias

import numpy as np

from alphaloop.deciding.decision import DraftSetting
from benchmarks.policy.scenario import Device, Scenario, Slower
from benchmarks.policy.slots import (
    Running,
    SlotJob,
    SlotRound,
    SlotStream,
    SlotTable,
    draw_jobs,
    draw_slot_stream,
    play_slots,
)

#: Jobs that its expectations rest on, all kinds together. No rule ever meets them.
NUM_JOBS: Final = 480
#: Beginnings of its search for the settings of a round: the best of all that are tried.
_NUM_STARTS: Final = 3
#: Plans of drafters by kind that are played to find the fastest.
_MOST_PLANS: Final = 16


class _Group(NamedTuple):
    """Running jobs that are alike to it."""

    kind: int
    drafter: str | None  #: that has read their texts


#: Groups and their numbers of jobs.
_Mix: TypeAlias = tuple[tuple[_Group, int], ...]


@dataclass(frozen=True, slots=True)
class Yield:
    """What a kind's jobs come to at one setting, a job on average."""

    num_rounds: float
    mean_offered: float  #: tokens a round
    num_tokens: float  #: after the prefill's
    num_prompt_tokens: float


@dataclass(frozen=True)
class Known:
    """The expectations of all kinds, and the device's true times."""

    scenario: Scenario
    table: SlotTable
    yields: tuple[dict[DraftSetting, Yield], ...]  #: by kind
    cells: tuple[Hashable, ...]  #: by kind, what a rule can know of it
    num_jobs: tuple[int, ...]  #: by kind, that the expectations rest on
    #: The drafter of each kind, where that is faster than choosing it by what else runs when a job starts.
    plan: tuple[str, ...] | None = None
    blind_plan: tuple[str, ...] | None = None  #: the same if producers and slow stretches are not known

    def ms_a_token(self, kind: int, setting: DraftSetting, num_running: int, slower: Slower, *, reads: bool) -> float:
        """Milliseconds of the device a token, if all that run do the same; with `reads` the drafter reads first."""
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
    cells = tuple(its[0].cell for its in of_kind)
    known = Known(scenario, table, yields, cells, tuple(map(len, of_kind)))
    # A stream that no rule meets either: their seeds begin with 1.
    stream = draw_slot_stream(scenario, device, 0)
    plan, blind_plan = (_fastest_plan(known, stream, is_blind=is_blind) for is_blind in (False, True))
    return replace(known, plan=plan, blind_plan=blind_plan)


def _fastest_plan(known: Known, stream: SlotStream, *, is_blind: bool) -> tuple[str, ...] | None:
    """A drafter chosen by what else runs at a start may be the wrong one for the job's life, and draws others along."""
    alike = list(dict.fromkeys(known.cells))
    of_kind = [alike.index(cell) if is_blind else kind for kind, cell in enumerate(known.cells)]
    num_drafters = max(of_kind) + 1
    plans: list[tuple[str, ...] | None] = [None]
    if len(known.scenario.draft_tokens) ** num_drafters <= _MOST_PLANS:
        chosen = product(known.scenario.draft_tokens, repeat=num_drafters)
        plans += [tuple(drafters[place] for place in of_kind) for drafters in chosen]

    def took_ms(plan: tuple[str, ...] | None) -> float:
        oracle = SlotOracle(replace(known, plan=plan, blind_plan=plan), is_blind=is_blind)
        return play_slots(stream, known.table, oracle).ms

    return min(plans, key=took_ms)


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
    """Mean over kinds with these numbers of jobs."""
    rounds = [its.num_rounds * num for its, num in zip(yields, num_jobs, strict=True)]
    offered = sum(its.mean_offered * num for its, num in zip(yields, rounds, strict=True))
    tokens = sum(its.num_tokens * num for its, num in zip(yields, num_jobs, strict=True))
    prompts = sum(its.num_prompt_tokens * num for its, num in zip(yields, num_jobs, strict=True))
    whole = sum(num_jobs)
    return Yield(sum(rounds) / whole, offered / sum(rounds), tokens / whole, prompts / whole)


class SlotOracle:
    """A drafter for each job at its start, then in every round the k, or vanilla, that is best for all that run.

    Sequences share passes and proposals, so what is best for one depends on the others. A round is worth what its
    tokens are worth, each at its kind's least milliseconds; the settings that run together are those with the most
    worth a millisecond, found by changing one group of alike jobs at a time, from several beginnings.
    With `is_blind` neither producers nor slow stretches are known: what a rule could know at best.
    """

    def __init__(self, known: Known, *, is_blind: bool = False) -> None:
        self._known = known.without_producers() if is_blind else known
        self._plan = known.blind_plan if is_blind else known.plan
        self._is_blind = is_blind
        self._best: dict[tuple[_Mix, Slower], tuple[DraftSetting, ...]] = {}
        self._drafter: dict[int, str | None] = {}

    def start(self, jobs: Sequence[Running], num_running: int, now_ms: float) -> None:
        """The drafter is chosen in the first round, when the stretch is known."""

    def steer(self, running: Sequence[Running], slower: Slower, now_ms: float) -> None:
        """All that run."""
        groups: dict[_Group, list[Running]] = {}
        for one in running:
            groups.setdefault(_Group(one.job.kind, self._drafter.get(one.job.number)), []).append(one)
        mix = tuple(sorted(((group, len(jobs)) for group, jobs in groups.items()), key=repr))
        # A host that slows all parts changes no comparison.
        slow = () if self._is_blind else tuple(part for part in slower if part[0] != "host")
        if (mix, slow) not in self._best:
            self._best[mix, slow] = self._search(mix, slow)
        for (group, _), setting in zip(mix, self._best[mix, slow], strict=True):
            for one in groups[group]:
                one.setting = setting
                if setting.drafter is not None:
                    self._drafter[one.job.number] = setting.drafter

    def observe(self, done: SlotRound) -> None:
        """It knows already."""

    def end(self, ended: Running, now_ms: float) -> None:
        """The same."""
        self._drafter.pop(ended.job.number, None)

    def _search(self, mix: _Mix, slower: Slower) -> tuple[DraftSetting, ...]:
        num_running, known = sum(num for _, num in mix), self._known
        able = [[s for s in known.yields[group.kind] if self._may(group, s)] for group, _ in mix]
        alone = [
            {s: known.ms_a_token(group.kind, s, num_running, slower, reads=group.drafter is None) for s in settings}
            for (group, _), settings in zip(mix, able, strict=True)
        ]
        worth = [min(its.values()) for its in alone]

        def rate(settings: Sequence[DraftSetting]) -> float:
            return self._worth_a_ms(mix, settings, worth, slower)

        starts = [[min(its, key=its.__getitem__) for its in alone]]
        starts += [[s if s in its else starts[0][i] for i, its in enumerate(able)] for s in known.yields[0]]
        starts.sort(key=rate, reverse=True)
        found = [self._climb(start, able, rate) for start in starts[:_NUM_STARTS]]
        best = max(found, key=rate)
        return tuple(best)

    def _may(self, group: _Group, setting: DraftSetting) -> bool:
        drafter = group.drafter or (self._plan[group.kind] if self._plan else None)
        return drafter is None or setting.drafter in (None, drafter)

    def _climb(
        self,
        settings: list[DraftSetting],
        able: Sequence[Sequence[DraftSetting]],
        rate: Callable[[Sequence[DraftSetting]], float],
    ) -> list[DraftSetting]:
        best = rate(settings)
        while True:
            others = [[*settings[:i], s, *settings[i + 1 :]] for i, its in enumerate(able) for s in its]
            settings_now = max(others, key=rate)
            if (reached := rate(settings_now)) <= best * (1 + 1e-9):
                return settings
            settings, best = settings_now, reached

    def _worth_a_ms(self, mix: _Mix, settings: Sequence[DraftSetting], worth: Sequence[float], slower: Slower) -> float:
        known, factors = self._known, dict(slower)
        num_running, num_offered, gained, read_ms = 0, 0.0, 0.0, 0.0
        drafting: dict[str, tuple[int, int]] = {}
        for (group, num), setting, each in zip(mix, settings, worth, strict=True):
            its = known.yields[group.kind][setting]
            num_running += num
            num_offered += num * its.mean_offered
            gained += num * each * its.num_tokens / its.num_rounds
            if setting.drafter is not None:
                before, longest = drafting.get(setting.drafter, (0, 0))
                drafting[setting.drafter] = before + num, max(longest, setting.num_draft_tokens)
                if group.drafter is None:
                    took = known.table.read_ms(setting.drafter, round(its.num_prompt_tokens))
                    read_ms += factors.get(setting.drafter, 1.0) * num * took / its.num_rounds
        draft_ms = sum(factors.get(d, 1.0) * known.table.draft_ms(d, num, k) for d, (num, k) in drafting.items())
        return gained / (known.table.pass_ms(num_running, num_offered / num_running) + draft_ms + read_ms)


class StaticSetting:
    """One setting for all jobs."""

    def __init__(self, setting: DraftSetting) -> None:
        self._setting = setting

    def start(self, jobs: Sequence[Running], num_running: int, now_ms: float) -> None:
        """The setting."""
        for one in jobs:
            one.setting = self._setting

    def steer(self, running: Sequence[Running], slower: Slower, now_ms: float) -> None:
        """It stays."""

    def observe(self, done: SlotRound) -> None:
        """Nothing is learned."""

    def end(self, ended: Running, now_ms: float) -> None:
        """Nothing is learned."""
