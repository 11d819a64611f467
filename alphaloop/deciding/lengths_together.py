"""Draft lengths of sequences that run together but were decided apart. Pure but for what is remembered.

A job is decided as if all that run did the same. Where jobs of several tasks share the rounds this is wrong: a drafter
proposes until the longest of its drafts is done, so the longest draft of one task is paid by the others too, and every
proposed token widens the pass of all. So the lengths are chosen together, while each sequence keeps its drafter:

    worth a millisecond = Σ_g n_g · w_g · tokens_g(k_g) / round
    round               = T(mean width) + Σ_drafters D(its sequences, its longest draft)

n_g sequences of group g yield tokens_g(k_g) tokens a round each. A token of g is worth w_g, the least milliseconds that
it would take if all that run did as g does: otherwise rounds would serve the tasks whose tokens are cheap. The search
begins with the lengths that were decided apart, and moves one group, or all groups of a drafter to one length, until
nothing improves.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Final, NamedTuple, TypeAlias

from alphaloop.cost import CostTable, RoundCosts
from alphaloop.deciding.decision import Decision, DraftSetting
from alphaloop.deciding.posterior import Posterior

#: Of a group: lane, setting, and whether its length may change.
_Name: TypeAlias = tuple[Hashable, DraftSetting, bool]

#: Lengths stay this long for the same groups, because posteriors and costs move in small steps.
_LAST: Final = timedelta(seconds=1)
#: A change is made only for so much more worth a millisecond.
_WORTH_IT: Final = 1.001
_MAX_HELD: Final = 1000


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


class _Held(NamedTuple):
    at: datetime
    settings: tuple[DraftSetting, ...]


class LengthsTogether:
    """Chooses lengths, and remembers them for a second. One thread owns it. `costs` is asked only for a new choice."""

    def __init__(self, costs: Callable[[], CostTable]) -> None:
        self._costs = costs
        self._held: dict[tuple[tuple[_Name, int], ...], _Held] = {}

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
        mix = tuple(num_sequences.items())
        held = self._held.get(mix)
        if held is None or not timedelta(0) <= now - held.at < _LAST:
            # Of the posteriors of a group's jobs, the one of the job that was decided last.
            latest = {name: _posterior(one.decision, name[1]) for name, one in zip(names, running, strict=True)}
            groups = [RunningGroup(name[1], num, latest[name]) for name, num in mix]
            if len(self._held) >= _MAX_HELD:
                self._held.clear()
            held = self._held[mix] = _Held(now, lengths_together(groups, self._costs()))
        by_name = dict(zip(num_sequences, held.settings, strict=True))
        return [by_name[name] for name in names]


def lengths_together(groups: Sequence[RunningGroup], costs: CostTable) -> tuple[DraftSetting, ...]:
    """The settings of the groups with the most worth a millisecond; at k = 0 a group's drafter pauses."""
    search = _Search(groups, costs)
    lengths = tuple(group.setting.num_draft_tokens for group in groups)
    best = search.rate(lengths)
    while True:
        found = max(search.neighbours(lengths), key=search.rate)
        reached = search.rate(found)
        if reached <= best * _WORTH_IT:
            return tuple(replace(group.setting, num_draft_tokens=k) for group, k in zip(groups, lengths, strict=True))
        lengths, best = found, reached


class _Search:
    def __init__(self, groups: Sequence[RunningGroup], costs: CostTable) -> None:
        self._groups, self._costs = groups, costs
        self._num_running = sum(group.num_sequences for group in groups)
        self._rounds: dict[int, RoundCosts] = {}
        self._rates: dict[tuple[int, ...], float] = {}
        self._longest = [
            group.posterior.longest_proposed(group.num_sequences) if group.posterior else () for group in groups
        ]
        self._worth = [self._least_ms(group) for group in groups]

    def neighbours(self, lengths: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """These lengths with one group moved, or all groups of a drafter at one length."""
        for i, group in enumerate(self._groups):
            for k in _able(group):
                yield (*lengths[:i], k, *lengths[i + 1 :])
        for drafter in {group.setting.drafter for group in self._groups if group.posterior}:
            its = [group.posterior is not None and group.setting.drafter == drafter for group in self._groups]
            longest = [_able(group)[-1] for group in self._groups]
            for k in range(max(itertools.compress(longest, its)) + 1):
                yield tuple(
                    min(k, most) if is_its else before
                    for is_its, most, before in zip(its, longest, lengths, strict=True)
                )

    def rate(self, lengths: tuple[int, ...]) -> float:
        """Worth a millisecond; 0 where a cost was never measured."""
        known = self._rates.get(lengths)
        if known is None:
            known = self._rates[lengths] = self._computed_rate(lengths)
        return known

    def _computed_rate(self, lengths: tuple[int, ...]) -> float:
        worth = num_proposed = 0.0
        drafting: dict[str, tuple[int, float]] = {}
        for group, each, longest_of, k in zip(self._groups, self._worth, self._longest, lengths, strict=True):
            num, drafter, posterior = group.num_sequences, group.setting.drafter, group.posterior
            worth += num * each * (posterior.tokens[k] if posterior else 1.0)
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
            least = least if ms is None else min(least, ms / group.posterior.tokens[k])
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
