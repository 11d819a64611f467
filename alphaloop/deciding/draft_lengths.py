"""k by what runs: how a job drafts while more, fewer or other sequences run than when it was decided. Pure.

Jobs join and leave at every round, and longer drafts pay in a pass that fewer sequences share. So a vanilla job may
start to draft when other jobs end, and a drafting job may stop when others join. A job uses at most one drafter,
because a second drafter would have to read the job's text again.

The best setting is searched at powers of two. It replaces the decision's own setting only where the expected goodput
grows by `MIN_SPEEDUP`, and between two powers only as far as it is not slower than the decision's own setting.

Draft lengths of sequences that run together but were decided apart.

A job is decided as if all that run did the same. Where jobs of several tasks share the rounds this is wrong: a drafter
proposes until the longest of its drafts is done, so the longest draft of one task is paid by the others too, and every
proposed token widens the pass of all. So the lengths are chosen together, while each sequence keeps its drafter:

    worth a millisecond = Σ_g n_g · w_g · tokens_g(k_g) / round
    round               = T(mean width) + Σ_drafters D(its sequences, its longest draft)

n_g sequences of group g yield tokens_g(k_g) tokens a round each. A token of g is worth w_g, the least milliseconds that
it would take if all that run did as g does: otherwise rounds would serve the tasks whose tokens are cheap. The search
begins with the lengths that were decided apart. It climbs group by group, and tries one length for all groups of a
drafter, because the time of the longest draft falls only if all of them are shorter.
"""

from __future__ import annotations

import functools
import itertools
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Final, NamedTuple, TypeAlias

from alphaloop.costs import CostTable
from alphaloop.deciding.decision import Decision, DecisionContext, DraftSetting, Reason
from alphaloop.deciding.goodput import MIN_SPEEDUP, DrafterState, JobSize, climbed, shared_round_ms, token_ms
from alphaloop.deciding.job_facts import Aim
from alphaloop.deciding.posterior import Posterior

#: Reasons of decisions that compared speeds. All others keep one setting.
COMPARED: Final = frozenset({Reason.FASTER, Reason.NOT_FASTER, Reason.UNCERTAIN, Reason.NO_HISTORY})


def settings_by_running(
    decision: Decision,
    posteriors: Mapping[str, Posterior],
    drafters: Sequence[DrafterState],
    costs: CostTable,
    context: DecisionContext,
    num_slots: int,
) -> tuple[DraftSetting, ...]:
    """The setting while 1, 2 … `num_slots` sequences run; empty where `decision` keeps one setting.

    `drafters` are those that may serve these jobs.
    """
    is_free = decision.reason in COMPARED and decision.alternatives and context.objective.aim is Aim.THROUGHPUT
    if num_slots < 1 or not is_free or costs.is_of_servers:  # a request on a server stays as it began
        return ()
    search = _SearchByRunning(decision.setting, posteriors, drafters, costs, context.size)
    expected = min(context.num_running, num_slots)
    settings = [decision.setting] * num_slots
    if decision.drafter is not None:
        candidate = next((d for d in drafters if d.name == decision.drafter), None)
    else:
        candidate = _first_to_gain(search, decision, drafters, expected)
    if candidate is None:
        return ()
    k = _start(decision, candidate.name)
    for first, last in _ranges(num_slots, expected):
        best, gain = search.best(candidate, last, k)
        k = best.num_draft_tokens or k
        if best == decision.setting or gain < MIN_SPEEDUP:
            continue
        begin = search.first_not_slower(best, first, last)
        settings[begin - 1 : last] = [best] * (last - begin + 1)
    return () if settings.count(decision.setting) == num_slots else tuple(settings)


def _ranges(num_slots: int, expected: int) -> Iterator[tuple[int, int]]:
    """(first, last) of the numbers of running sequences that are searched together, downwards from `num_slots`.

    A range ends at a power of two, or at `num_slots`. `expected`, and what is below it in its range, is left out.
    """
    last = num_slots
    while last >= 1:
        first = (1 << (last - 1).bit_length() - 1) + 1 if last > 1 else 1
        if first <= expected < last:
            yield expected + 1, last
        elif not first <= expected <= last:
            yield first, last
        last = first - 1


def _start(decision: Decision, drafter: str) -> int:
    """The drafter's best k at the expected number running: where the search at another number begins."""
    if decision.drafter == drafter:
        return decision.num_draft_tokens
    return next((a.num_draft_tokens for a in decision.alternatives if a.drafter == drafter), 1)


def _first_to_gain(
    search: _SearchByRunning, decision: Decision, drafters: Sequence[DrafterState], expected: int
) -> DrafterState | None:
    """The drafter that becomes faster than vanilla first as fewer than `expected` sequences run."""
    best_k = {drafter.name: _start(decision, drafter.name) for drafter in drafters}
    for _, last in _ranges(expected, expected):
        gains: dict[str, float] = {}
        for drafter in drafters:
            best, gain = search.best(drafter, last, best_k[drafter.name])
            best_k[drafter.name] = best.num_draft_tokens or best_k[drafter.name]
            if best.drafter is not None and gain >= MIN_SPEEDUP:
                gains[drafter.name] = gain
        if gains:
            return max(drafters, key=lambda drafter: gains.get(drafter.name, 0.0))
    return None


class _SearchByRunning:
    """Milliseconds a token of each sequence, by setting and number of running sequences.

    The chosen drafter has read its prompts. A drafter that takes over from vanilla reads a text first; on average half
    of the text's tokens are left then.
    """

    def __init__(
        self,
        chosen: DraftSetting,
        posteriors: Mapping[str, Posterior],
        drafters: Sequence[DrafterState],
        costs: CostTable,
        size: JobSize | None,
    ) -> None:
        self._chosen, self._posteriors, self._costs, self._size = chosen, posteriors, costs, size
        self._drafters = {drafter.name: drafter for drafter in drafters}
        self._ms_of = functools.cache(self._computed_ms)
        self._longest = functools.cache(lambda name, num_running: posteriors[name].longest_proposed(num_running))

    def best(self, drafter: DrafterState, num_running: int, k: int) -> tuple[DraftSetting, float]:
        """The faster of vanilla and the drafter's best k, climbed to from `k`; and its gain over the chosen setting."""

        def worth(k: int) -> float:
            return -self._ms_of(drafter.name, k, num_running)

        longest = min(drafter.max_draft_tokens, self._posteriors[drafter.name].max_draft_tokens)
        k = min(k, longest)
        k, least = climbed(k, worth(k), range(1, longest + 1), worth)
        best, ms = DraftSetting(drafter.name, k), -least
        if (vanilla_ms := self._ms_of(None, 0, num_running)) <= ms:
            best, ms = DraftSetting(), vanilla_ms
        return best, self._chosen_ms(num_running) / ms

    def first_not_slower(self, setting: DraftSetting, first: int, last: int) -> int:
        """The least number from which on, up to `last`, the setting is not slower than the chosen one.

        The setting is faster at `last`. Times are close to linear between two measured batch sizes, so their ratio
        crosses 1 once at most.
        """

        def is_faster_or_equal(num_running: int) -> bool:
            ms = self._ms_of(setting.drafter, setting.num_draft_tokens, num_running)
            return ms <= self._chosen_ms(num_running)

        return first + bisect_left(range(first, last), True, key=is_faster_or_equal)

    def _chosen_ms(self, num_running: int) -> float:
        return self._ms_of(self._chosen.drafter, self._chosen.num_draft_tokens, num_running)

    def _computed_ms(self, drafter: str | None, k: int, num_running: int) -> float:
        rounds = self._costs.rounds(num_running, self._size.context if self._size else None)
        if drafter is None:
            vanilla_ms = rounds.part_ms(None, 1)
            return math.inf if vanilla_ms is None else vanilla_ms
        longest = self._longest(drafter, num_running)
        ms = token_ms(rounds, drafter, k, self._posteriors[drafter], longest)
        if self._size is not None and self._chosen.drafter is None:
            read_ms = self._drafters[drafter].reading_ms(self._costs, self._size.context)
            ms += num_running * read_ms / max(self._size.num_tokens / 2, 1.0)
        return ms


#: Settings are computed for lengths that are rounded to powers of this step.
_LENGTH_STEP: Final = 1.25
#: Real rounds correct the costs in small steps. The settings are computed anew after this time at the latest.
_COSTS_LAST: Final = timedelta(seconds=1)
_MAX_TABLES: Final = 1000


class _Table(NamedTuple):
    """Settings by running sequences, and what they were computed from."""

    posteriors: tuple[Posterior, ...]
    costs: CostTable
    at: datetime | None
    settings: tuple[DraftSetting, ...]

    def serves(self, posteriors: tuple[Posterior, ...], costs: CostTable, now: datetime | None) -> bool:
        """Whether the settings are still up to date."""
        is_recent = self.at is not None and now is not None and timedelta(0) <= now - self.at < _COSTS_LAST
        is_same = all(old is new for old, new in zip(self.posteriors, posteriors, strict=True))
        return is_same and (costs is self.costs or is_recent)


class SettingsTables:
    """The tables of one session, whose engine can run `num_slots` sequences; with 0 there are none."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._tables: dict[tuple[object, ...], _Table] = {}

    def completed(
        self,
        decision: Decision,
        posteriors: Mapping[str, Posterior],
        able: Sequence[DrafterState],
        costs: CostTable,
        context: DecisionContext,
    ) -> Decision:
        """A decision about one group, with its settings by running sequences where speeds were compared."""
        if not self._num_slots or decision.reason not in COMPARED:
            return decision
        rounded = replace(
            context,
            expected_tokens=_rounded(context.expected_tokens),
            prompt_tokens=None if context.prompt_tokens is None else _rounded(context.prompt_tokens),
        )
        names = tuple(drafter.name for drafter in able)
        name = (decision.setting, decision.reason, context.objective.aim, context.num_running, rounded.size, names)
        known = tuple(posteriors[drafter] for drafter in names)
        table = self._tables.get(name)
        if table is None or not table.serves(known, costs, context.now):
            if len(self._tables) >= _MAX_TABLES:
                self._tables.clear()
            settings = settings_by_running(decision, posteriors, able, costs, rounded, self._num_slots)
            table = self._tables[name] = _Table(known, costs, context.now, settings)
        return replace(decision, settings_by_running=table.settings) if table.settings else decision


def _rounded(num_tokens: float) -> float:
    return _LENGTH_STEP ** round(math.log(max(num_tokens, 1.0), _LENGTH_STEP))


#: A group's lane, setting, and whether its length may change.
_Name: TypeAlias = tuple[Hashable, DraftSetting, bool]

#: Most age of lengths and of the costs that they rest on: posteriors and costs move in small steps.
_LAST: Final = timedelta(seconds=1)
#: Lengths are chosen anew when a larger share of the sequences has started or ended.
_SAME_MIX: Final = 1 / 8
#: The search ends with a sweep over all groups that gains less.
_LEAST_GAIN: Final = 1.001
_MOST_SWEEPS: Final = 8


class RunningSequence(NamedTuple):
    """A running sequence. Those with the same `lane` resemble each other."""

    lane: Hashable
    decision: Decision


@dataclass(frozen=True, slots=True)
class RunningGroup:
    """Running sequences that draft alike."""

    setting: DraftSetting  #: as if all that run did the same
    num_sequences: int
    posterior: Posterior | None  #: of the setting's drafter; None: the setting is fixed


class _Choice(NamedTuple):
    at: datetime
    num_sequences: Mapping[_Name, int]
    settings: Mapping[_Name, DraftSetting]

    def serves(self, num_sequences: Mapping[_Name, int], now: datetime) -> bool:
        """Whether about the same sequences run, and not for long."""
        names = self.num_sequences.keys() | num_sequences.keys()
        num_changed = sum(abs(self.num_sequences.get(name, 0) - num_sequences.get(name, 0)) for name in names)
        is_recent = timedelta(0) <= now - self.at < _LAST
        return is_recent and num_changed <= _SAME_MIX * sum(num_sequences.values())


class LengthsTogether:
    """Chooses lengths and remembers the last choice. One thread owns it. `costs` is asked once a second at most."""

    def __init__(self, costs: Callable[[], CostTable]) -> None:
        self._costs = costs
        self._table: tuple[datetime, CostTable] | None = None
        self._choice: _Choice | None = None

    def settings(self, running: Sequence[RunningSequence], now: datetime) -> list[DraftSetting]:
        """How each of the sequences drafts in the next round; they are all that run."""
        apart = [decision.setting_while(len(running)) for _, decision in running]
        if not any(setting.num_draft_tokens for setting in apart):
            return apart
        names = [
            (lane, setting, _posterior(decision, setting) is not None)
            for (lane, decision), setting in zip(running, apart, strict=True)
        ]
        num_sequences = Counter(names)
        if len(num_sequences) < 2:
            return apart
        if self._choice is None or not self._choice.serves(num_sequences, now):
            # A group has the posterior of the job that started last.
            latest = {name: _posterior(decision, name[1]) for name, (_, decision) in zip(names, running, strict=True)}
            groups = [RunningGroup(name[1], num, latest[name]) for name, num in num_sequences.items()]
            chosen = lengths_together(groups, self._costs_at(now))
            self._choice = _Choice(now, num_sequences, dict(zip(num_sequences, chosen, strict=True)))
        return [self._choice.settings.get(name, name[1]) for name in names]

    def _costs_at(self, now: datetime) -> CostTable:
        if self._table is None or not timedelta(0) <= now - self._table[0] < _LAST:
            self._table = now, self._costs()
        return self._table[1]


def lengths_together(groups: Sequence[RunningGroup], costs: CostTable) -> tuple[DraftSetting, ...]:
    """The settings of the groups with the most worth a millisecond; at k = 0 a group's drafter pauses."""
    search = _SearchTogether(groups, costs)
    for _ in range(_MOST_SWEEPS):
        before = search.best
        for i in range(len(groups)):
            search.climb(i)
        for drafter in dict.fromkeys(group.setting.drafter for group in groups if group.posterior):
            search.try_one_length(drafter)
        if search.best <= before * _LEAST_GAIN:
            break
    return tuple(replace(group.setting, num_draft_tokens=k) for group, k in zip(groups, search.lengths, strict=True))


class _SearchTogether:
    def __init__(self, groups: Sequence[RunningGroup], costs: CostTable) -> None:
        self._groups, self._costs = groups, costs
        self._num_running = sum(group.num_sequences for group in groups)
        self._all_rounds = costs.rounds(self._num_running)
        self._longest = [
            group.posterior.longest_proposed(group.num_sequences) if group.posterior else () for group in groups
        ]
        self._worth = [self._least_ms(group) for group in groups]
        self.lengths = [group.setting.num_draft_tokens for group in groups]
        self.best = self._rate(self.lengths)

    def climb(self, i: int) -> None:
        """Make the drafts of one group longer or shorter, as long as that gains."""
        before, after = self.lengths[:i], self.lengths[i + 1 :]
        k, self.best = climbed(
            self.lengths[i], self.best, _able(self._groups[i]), lambda k: self._rate([*before, k, *after])
        )
        self.lengths = [*before, k, *after]

    def try_one_length(self, drafter: str | None) -> None:
        """Give all groups of a drafter one length, if that gains."""
        uses_it = [group.posterior is not None and group.setting.drafter == drafter for group in self._groups]
        longest = [_able(group)[-1] for group in self._groups]
        for k in range(max(itertools.compress(longest, uses_it)) + 1):
            rows = zip(uses_it, longest, self.lengths, strict=True)
            lengths = [min(k, most) if is_free else now for is_free, most, now in rows]
            if (rate := self._rate(lengths)) > self.best:
                self.lengths, self.best = lengths, rate

    def _rate(self, lengths: Sequence[int]) -> float:
        """Worth a millisecond; 0 where a cost was never measured."""
        worth = num_proposed = 0.0
        drafting: dict[str, tuple[int, float]] = {}
        for group, each, longest_of, k in zip(self._groups, self._worth, self._longest, lengths, strict=True):
            num, drafter, posterior = group.num_sequences, group.setting.drafter, group.posterior
            worth += num * each * (posterior.corrected_tokens[k] if posterior else 1.0)
            if drafter is None or not k:
                continue
            # How much a fixed setting proposes is not known: as much as it asks for.
            num_proposed += num * (posterior.proposed[k] if posterior else k)
            others, longest = drafting.get(drafter, (0, 0.0))
            drafting[drafter] = others + num, max(longest, longest_of[k] if posterior else k)
        ms = shared_round_ms(self._all_rounds, num_proposed / self._num_running, drafting, self._costs.rounds)
        return worth / ms if ms else 0.0

    def _least_ms(self, group: RunningGroup) -> float:
        rounds, drafter, posterior = self._all_rounds, group.setting.drafter, group.posterior
        vanilla_ms = rounds.part_ms(None, 1) or 0.0
        if drafter is None or posterior is None:
            return vanilla_ms
        longest = posterior.longest_proposed(self._num_running)
        return min([vanilla_ms, *(token_ms(rounds, drafter, k, posterior, longest) for k in _able(group)[1:])])


def _posterior(decision: Decision, setting: DraftSetting) -> Posterior | None:
    """The posterior of the setting's drafter, where the draft length may change."""
    if decision.posteriors is None or setting.drafter is None or not setting.num_draft_tokens:
        return None
    return decision.posteriors.get(setting.drafter)


def _able(group: RunningGroup) -> range:
    """Lengths that the group may have."""
    k = group.setting.num_draft_tokens
    return range(group.posterior.max_draft_tokens + 1) if group.posterior else range(k, k + 1)
