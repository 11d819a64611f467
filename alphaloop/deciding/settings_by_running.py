"""How a job drafts while more or fewer sequences run than were expected when it was decided. Pure.

Jobs join and leave at every round, and longer drafts pay in a pass that fewer sequences share. So a vanilla job may
start to draft when other jobs end, and a drafting job may stop when others join. A job uses at most one drafter,
because a second drafter would have to read the job's text again.

The best setting is searched at powers of two. It replaces the decision's own setting only where the expected goodput
grows by `min_speedup`, and between two powers only as far as it is not slower than the decision's own setting.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from alphaloop.cost import CostTable, RoundCosts
from alphaloop.deciding.decision import Decision, DecisionContext, DraftSetting, Reason
from alphaloop.deciding.goodput import DrafterState, JobSize, expected_round_ms
from alphaloop.deciding.limits import PolicyLimits
from alphaloop.deciding.objective import Aim
from alphaloop.deciding.posterior import Posterior

#: Reasons of decisions that compared speeds. All others keep one setting.
COMPARED: Final = frozenset({Reason.FASTER, Reason.NOT_FASTER, Reason.UNCERTAIN, Reason.NO_HISTORY})
_VANILLA: Final = DraftSetting()


def settings_by_running(
    decision: Decision,
    posteriors: Mapping[str, Posterior],
    drafters: Sequence[DrafterState],
    costs: CostTable,
    context: DecisionContext,
    limits: PolicyLimits,
    num_slots: int,
) -> tuple[DraftSetting, ...]:
    """The setting while 1, 2 … `num_slots` sequences run; empty where `decision` keeps one setting.

    `drafters` are those that may serve these jobs.
    """
    is_free = decision.reason in COMPARED and decision.alternatives and context.objective.aim is Aim.THROUGHPUT
    if num_slots < 1 or not is_free or costs.is_of_servers:  # a request on a server stays as it began
        return ()
    search = _Search(decision.setting, posteriors, costs, context.size)
    expected = min(context.num_running, num_slots)
    settings = [decision.setting] * num_slots
    if decision.drafter is not None:
        candidate = next((d for d in drafters if d.name == decision.drafter), None)
    else:
        candidate = _first_to_gain(search, decision, drafters, expected, limits.min_speedup)
    if candidate is None:
        return ()
    k = _start(decision, candidate.name)
    for first, last in _ranges(num_slots, expected):
        best, gain = search.best(candidate, last, k)
        k = best.num_draft_tokens or k
        if best == decision.setting or gain < limits.min_speedup:
            continue
        begin = search.first_not_slower(best, candidate, first, last)
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
    search: _Search, decision: Decision, drafters: Sequence[DrafterState], expected: int, min_speedup: float
) -> DrafterState | None:
    """The drafter that becomes faster than vanilla first as fewer than `expected` sequences run."""
    best_k = {drafter.name: _start(decision, drafter.name) for drafter in drafters}
    for _, last in _ranges(expected, expected):
        found: tuple[float, DrafterState] | None = None
        for drafter in drafters:
            best, gain = search.best(drafter, last, best_k[drafter.name])
            best_k[drafter.name] = best.num_draft_tokens or best_k[drafter.name]
            if best.drafter is not None and gain >= min_speedup and (found is None or gain > found[0]):
                found = gain, drafter
        if found:
            return found[1]
    return None


class _Search:
    """Milliseconds a token of each sequence, by setting and number of running sequences.

    The chosen drafter has read its prompts. A drafter that takes over from vanilla reads a text first; on average half
    of the text's tokens are left then.
    """

    def __init__(
        self, chosen: DraftSetting, posteriors: Mapping[str, Posterior], costs: CostTable, size: JobSize | None
    ) -> None:
        self._chosen, self._posteriors, self._costs, self._size = chosen, posteriors, costs, size
        self._rounds: dict[int, RoundCosts] = {}
        self._longest: dict[tuple[str, int], tuple[float, ...]] = {}
        self._ms: dict[tuple[DraftSetting, int], float] = {}
        self._read_ms: dict[str, float] = {}

    def best(self, drafter: DrafterState, num_running: int, k: int) -> tuple[DraftSetting, float]:
        """The faster of vanilla and the drafter's best k, climbed to from `k`; and its gain over the chosen setting."""
        posterior = self._posteriors[drafter.name]
        longest = min(drafter.max_draft_tokens, posterior.max_draft_tokens)
        best = DraftSetting(drafter.name, min(k, longest))
        ms = self._ms_of(best, num_running, drafter)
        for step in (1, -1):
            while 1 <= best.num_draft_tokens + step <= longest:
                other = DraftSetting(drafter.name, best.num_draft_tokens + step)
                if (its := self._ms_of(other, num_running, drafter)) >= ms:
                    break
                best, ms = other, its
        if (vanilla := self._ms_of(_VANILLA, num_running, drafter)) <= ms:
            best, ms = _VANILLA, vanilla
        return best, self._ms_of(self._chosen, num_running, drafter) / ms

    def first_not_slower(self, setting: DraftSetting, drafter: DrafterState, first: int, last: int) -> int:
        """The least number from which on, up to `last`, the setting is not slower than the chosen one.

        The setting is faster at `last`. Times are close to linear between two measured batch sizes, so their ratio
        crosses 1 once at most.
        """

        def is_slower(num_running: int) -> bool:
            return self._ms_of(setting, num_running, drafter) > self._ms_of(self._chosen, num_running, drafter)

        if not is_slower(first):
            return first
        while last - first > 1:
            middle = (first + last) // 2
            first, last = (middle, last) if is_slower(middle) else (first, middle)
        return last

    def _ms_of(self, setting: DraftSetting, num_running: int, drafter: DrafterState) -> float:
        known = self._ms.get((setting, num_running))
        if known is None:
            known = self._ms[setting, num_running] = self._computed_ms(setting, num_running, drafter)
        return known

    def _computed_ms(self, setting: DraftSetting, num_running: int, drafter: DrafterState) -> float:
        here = self._rounds.get(num_running)
        if here is None:
            context = self._size.context if self._size else None
            here = self._rounds[num_running] = self._costs.rounds(num_running, context)
        if setting.drafter is None:
            ms = here.part_ms(None, 1)
            return math.inf if ms is None else ms
        posterior, k = self._posteriors[drafter.name], setting.num_draft_tokens
        longest = self._longest.get((drafter.name, num_running))
        if longest is None:
            longest = self._longest[drafter.name, num_running] = posterior.longest_proposed(num_running)
        ms = expected_round_ms(here, drafter.name, posterior, k, longest[k])
        if ms is None:
            return math.inf
        ms /= posterior.corrected_tokens[k]
        if self._size is not None and self._chosen.drafter is None:
            if drafter.name not in self._read_ms:
                self._read_ms[drafter.name] = drafter.reading_ms(self._costs, self._size.context)
            ms += num_running * self._read_ms[drafter.name] / max(self._size.num_tokens / 2, 1.0)
        return ms
