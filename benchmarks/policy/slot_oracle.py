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
    NUM_MOMENTS,
    Running,
    SlotJob,
    SlotRound,
    SlotStream,
    SlotTable,
    SlotTrace,
    by_lane,
    draw_jobs,
    draw_slot_stream,
    play_slots,
)
from benchmarks.policy.stream import Floats, Ints

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
    cells = tuple(its[0].cell if scenario.replayed is None else its[0].cell.task for its in of_kind)
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
    """Of kinds with so many jobs each."""
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


@dataclass(frozen=True, slots=True)
class _JobRounds:
    """The rounds of all jobs at one setting, job after job."""

    num_rounds: Ints  #: [jobs]
    offered: Ints  #: [rounds of all jobs]
    tokens: Ints  #: [rounds of all jobs], put out

    @property
    def first(self) -> Ints:
        """[jobs], the place of a job's first round."""
        return np.cumsum(self.num_rounds) - self.num_rounds


@dataclass(frozen=True, slots=True)
class _Starts:
    """In which of the device's rounds the jobs start."""

    rounds: Ints  #: [jobs]
    order: Ints  #: numbers of the jobs as they stand side by side in their first round


def play_static(stream: SlotStream, table: SlotTable, setting: DraftSetting) -> SlotTrace:
    """All of the stream at one setting."""
    its = _job_rounds(stream, setting)
    starts = _play_starts(stream, its)
    within = np.arange(len(its.tokens)) - np.repeat(its.first, its.num_rounds)
    at = np.repeat(starts.rounds, its.num_rounds) + within
    num_running, num_new = np.bincount(at), np.bincount(starts.rounds, minlength=int(at.max()) + 1)
    tokens_after = np.cumsum(np.bincount(at, its.tokens) + num_new)
    tokens_before = np.concatenate([[0], tokens_after[:-1]])

    host, slower = _slowness(stream, tokens_before, setting.drafter)
    ms = host * table.passes_ms(num_running, np.bincount(at, its.offered) / num_running)
    read_ms = host * _reading_ms(stream, table, None, starts, np.arange(len(stream.jobs)), len(ms))
    if setting.drafter is not None:
        is_slow = slower * _hiccup(stream, setting.drafter, np.cumsum(num_new))
        ms += host * (is_slow * table.drafts_ms(setting.drafter, num_running, setting.num_draft_tokens))
    ms += read_ms
    if setting.drafter is not None:
        ms += host * _reading_ms(stream, table, setting.drafter, starts, starts.order, len(ms), slower)

    times = np.cumsum(ms)
    moments = np.interp(
        np.linspace(0, tokens_after[-1], NUM_MOMENTS + 1)[1:], np.append(0, tokens_after), np.append(0, times)
    )
    job_of = np.repeat(np.arange(len(stream.jobs)), its.num_rounds)
    job_ms = np.asarray(np.bincount(job_of, (ms / num_running)[at]), dtype=np.float64)
    nothing = np.zeros(len(stream.jobs))
    return SlotTrace(float(times[-1]), moments, job_ms, nothing, nothing)


def _job_rounds(stream: SlotStream, setting: DraftSetting) -> _JobRounds:
    drawn = stream.drawn(setting.drafter)
    offered = np.minimum(drawn.offered, setting.num_draft_tokens)
    tokens = np.minimum(drawn.accepted, offered) + 1
    out = np.cumsum(tokens)
    # A job is over in the round in which its last token comes out; the rounds drawn behind are not played.
    wanted = drawn.num_rounds + (out - tokens)[drawn.first]
    last = np.searchsorted(out, wanted)
    tokens[last] -= out[last] - wanted
    num_rounds = last + 1 - drawn.first
    is_played = np.arange(len(out)) - np.repeat(drawn.first, drawn.num_rounds) < np.repeat(num_rounds, drawn.num_rounds)
    return _JobRounds(num_rounds, offered[is_played], tokens[is_played])


def _play_starts(stream: SlotStream, its: _JobRounds) -> _Starts:
    """A slot that falls free is refilled in the next round, while as many slots as that are open."""
    lengths, first = its.num_rounds.tolist(), its.first.tolist()
    tokens_at = np.zeros(len(its.tokens) + 1, np.int64)
    ends_at = [0] * (len(its.tokens) + 1)
    rounds: list[int] = []
    order: list[int] = []
    num_running = num_tokens = now = 0
    while len(rounds) < len(lengths):
        num_running -= ends_at[now]
        num_free = stream.stretches.at(num_tokens).num_open - num_running
        new = range(len(rounds), min(len(rounds) + max(num_free, 0), len(lengths)))
        for number in new:
            end = now + lengths[number]
            tokens_at[now:end] += its.tokens[first[number] : first[number] + lengths[number]]
            ends_at[end] += 1
            rounds.append(now)
        order += [job.number for jobs in by_lane([stream.jobs[n] for n in new]) for job in jobs]
        num_running += len(new)
        num_tokens += int(tokens_at[now]) + len(new)
        now += 1
    return _Starts(np.array(rounds), np.array(order))


def _slowness(stream: SlotStream, tokens_before: Ints, drafter: str | None) -> tuple[Floats, Floats]:
    """By round: the factor of all times, noise included, and the drafter's own."""
    stretches = stream.stretches
    host, own = (
        np.array([dict(stretch.slower).get(part or "", 1.0) for stretch in stretches.of]) for part in ("host", drafter)
    )
    which = np.searchsorted(stretches.begins, tokens_before, side="right") - 1
    noise = np.resize(stream.noise, len(tokens_before))
    return host[which] * noise, own[which]


def _hiccup(stream: SlotStream, drafter: str, num_started: Ints) -> Floats:
    """By round: the factor of the drafter in the scenario's hiccup, else 1."""
    found = np.ones(len(num_started))
    hiccup = stream.scenario.slots.hiccup if stream.scenario.slots else None
    if hiccup is not None and hiccup.drafter == drafter:
        found[np.flatnonzero(num_started > hiccup.from_job)[: hiccup.num_rounds]] = hiccup.slower
    return found


def _reading_ms(
    stream: SlotStream,
    table: SlotTable,
    part: str | None,
    starts: _Starts,
    order: Ints,
    num_rounds: int,
    slower: Floats | float = 1.0,
) -> Floats:
    """By round: reading the prompts of jobs that start."""
    at = starts.rounds[order]
    ms = np.array([table.read_ms(part, stream.jobs[number].cell.prompt_tokens) for number in order.tolist()])
    factors = slower if isinstance(slower, float) else slower[at]
    return np.asarray(np.bincount(at, factors * ms, num_rounds), dtype=np.float64)
