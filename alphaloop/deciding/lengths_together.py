"""Draft lengths of sequences that run together but were decided apart.

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

import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Final, NamedTuple, TypeAlias

from alphaloop.cost import CostTable, RoundCosts
from alphaloop.deciding.decision import Decision, DraftSetting
from alphaloop.deciding.posterior import Posterior

#: Of a group: lane, setting, and whether its length may change.
_Name: TypeAlias = tuple[Hashable, DraftSetting, bool]

#: Lengths, and the costs that they rest on, are at most so old: posteriors and costs move in small steps.
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
            # Of the posteriors of a group's jobs, the one of the job that started last.
            latest = {name: _posterior(one.decision, name[1]) for name, one in zip(names, running, strict=True)}
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
    search = _Search(groups, costs)
    for _ in range(_MOST_SWEEPS):
        before = search.best
        for i in range(len(groups)):
            search.climb(i)
        for drafter in {group.setting.drafter for group in groups if group.posterior}:
            search.try_one_length(drafter)
        if search.best <= before * _LEAST_GAIN:
            break
    return tuple(replace(group.setting, num_draft_tokens=k) for group, k in zip(groups, search.lengths, strict=True))


class _Search:
    def __init__(self, groups: Sequence[RunningGroup], costs: CostTable) -> None:
        self._groups, self._costs = groups, costs
        self._num_running = sum(group.num_sequences for group in groups)
        self._rounds: dict[int, RoundCosts] = {}
        self._longest = [
            group.posterior.longest_proposed(group.num_sequences) if group.posterior else () for group in groups
        ]
        self._worth = [self._least_ms(group) for group in groups]
        self.lengths = [group.setting.num_draft_tokens for group in groups]
        self.best = self._rate(self.lengths)

    def climb(self, i: int) -> None:
        """Make the drafts of one group longer or shorter, as long as that gains."""
        able = _able(self._groups[i])
        for step in (1, -1):
            while self.lengths[i] + step in able:
                if not self._keep_if_better([*self.lengths[:i], self.lengths[i] + step, *self.lengths[i + 1 :]]):
                    break

    def try_one_length(self, drafter: str | None) -> None:
        """Give all groups of a drafter one length, if that gains."""
        its = [group.posterior is not None and group.setting.drafter == drafter for group in self._groups]
        longest = [_able(group)[-1] for group in self._groups]
        for k in range(max(itertools.compress(longest, its)) + 1):
            rows = zip(its, longest, self.lengths, strict=True)
            self._keep_if_better([min(k, most) if is_its else now for is_its, most, now in rows])

    def _keep_if_better(self, lengths: list[int]) -> bool:
        rate = self._rate(lengths)
        is_better = rate > self.best
        if is_better:
            self.lengths, self.best = lengths, rate
        return is_better

    def _rate(self, lengths: Sequence[int]) -> float:
        """Worth a millisecond; 0 where a cost was never measured."""
        worth = num_proposed = 0.0
        drafting: dict[str, tuple[int, float]] = {}
        for group, each, longest_of, k in zip(self._groups, self._worth, self._longest, lengths, strict=True):
            num, drafter, posterior = group.num_sequences, group.setting.drafter, group.posterior
            worth += num * each * (posterior.corrected_tokens[k] if posterior else 1.0)
            if drafter is None or not k:
                continue
            # Of a fixed setting it is not known how much is proposed: as much as it asks for.
            num_proposed += num * (posterior.proposed[k] if posterior else k)
            others, longest = drafting.get(drafter, (0, 0.0))
            drafting[drafter] = others + num, max(longest, longest_of[k] if posterior else k)
        ms = self._at(self._num_running).part_ms(None, 1 + num_proposed / self._num_running)
        for drafter, (num, longest) in drafting.items():
            draft_ms = self._at(num).part_ms(drafter, 1 + longest)
            ms = None if ms is None or draft_ms is None else ms + draft_ms
        return worth / ms if ms else 0.0

    def _least_ms(self, group: RunningGroup) -> float:
        here, drafter = self._at(self._num_running), group.setting.drafter
        least = here.part_ms(None, 1) or 0.0
        if drafter is None or group.posterior is None:
            return least
        longest = group.posterior.longest_proposed(self._num_running)
        for k in _able(group)[1:]:
            ms = here.round_ms(drafter, k, group.posterior.proposed, longest[k])
            least = least if ms is None else min(least, ms / group.posterior.corrected_tokens[k])
        return least

    def _at(self, num_running: int) -> RoundCosts:
        if num_running not in self._rounds:
            self._rounds[num_running] = self._costs.rounds(num_running)
        return self._rounds[num_running]


def _posterior(decision: Decision, setting: DraftSetting) -> Posterior | None:
    """Of the setting's drafter, where the draft length may change."""
    if decision.posteriors is None or setting.drafter is None or not setting.num_draft_tokens:
        return None
    return decision.posteriors.get(setting.drafter)


def _able(group: RunningGroup) -> range:
    """Lengths that the group may have."""
    k = group.setting.num_draft_tokens
    return range(group.posterior.max_draft_tokens + 1) if group.posterior else range(k, k + 1)
