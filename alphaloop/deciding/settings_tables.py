"""Settings by running sequences, computed once for each version of the posteriors and of the costs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Final, NamedTuple

from alphaloop.cost import CostTable
from alphaloop.deciding.decision import Decision, DecisionContext, DraftSetting
from alphaloop.deciding.goodput import DrafterState
from alphaloop.deciding.limits import PolicyLimits
from alphaloop.deciding.posterior import Posterior
from alphaloop.deciding.settings_by_running import COMPARED, settings_by_running

#: Settings are computed for lengths that are rounded to steps of so much.
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
        is_same = all(one is other for one, other in zip(self.posteriors, posteriors, strict=True))
        return is_same and (costs is self.costs or is_recent)


class SettingsTables:
    """The tables of one session, whose engine can run `num_slots` sequences; with 0 there are none."""

    def __init__(self, limits: PolicyLimits, num_slots: int) -> None:
        self._limits, self._num_slots = limits, num_slots
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
        found = tuple(posteriors[drafter] for drafter in names)
        table = self._tables.get(name)
        if table is None or not table.serves(found, costs, context.now):
            if len(self._tables) >= _MAX_TABLES:
                self._tables.clear()
            settings = settings_by_running(decision, posteriors, able, costs, rounded, self._limits, self._num_slots)
            table = self._tables[name] = _Table(found, costs, context.now, settings)
        return replace(decision, settings_by_running=table.settings) if table.settings else decision


def _rounded(num_tokens: float) -> float:
    return _LENGTH_STEP ** round(math.log(max(num_tokens, 1.0), _LENGTH_STEP))
