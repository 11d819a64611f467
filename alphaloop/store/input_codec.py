"""Inputs of decisions as JSON and back: bit by bit the same, because Python writes a float with all its digits.

Times are whole microseconds since 1970, as exact as the database's. Short arrays instead of objects keep rows small.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from alphaloop.acceptance import EvidenceKey
from alphaloop.cost import CostKind, CostPoint
from alphaloop.cost_doubt import LogEstimate
from alphaloop.cost_state import CostBasis, CostState, Deviation
from alphaloop.deciding.decision_inputs import SessionFacts
from alphaloop.deciding.expectation_error import ExpectationError
from alphaloop.deciding.exploration import ExplorationBudget
from alphaloop.deciding.goodput import DrafterState
from alphaloop.deciding.limits import PolicyLimits
from alphaloop.deciding.origins import PairOrigin, PosteriorOrigin, SplitOrigin

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)


def microseconds(at: datetime) -> int:
    """Since 1970."""
    return (at - _EPOCH) // _MICROSECOND


def moment(at: int) -> datetime:
    """From `microseconds`."""
    return _EPOCH + at * _MICROSECOND


def session_content(facts: SessionFacts, drafters: Sequence[DrafterState]) -> dict[str, Any]:
    """Of kind session."""
    return {
        **{name: getattr(facts, name) for name in ("owner", "host", "device", "engine", "target_revision")},
        "num_slots": facts.num_slots,
        "half_life_us": facts.half_life // _MICROSECOND,
        "limits": asdict(facts.limits),
        "drafters": [asdict(drafter) for drafter in drafters],
    }


def read_session(content: Mapping[str, Any]) -> tuple[SessionFacts, tuple[DrafterState, ...]]:
    """From `session_content`."""
    facts = SessionFacts(
        owner=content["owner"],
        host=content["host"],
        device=content["device"],
        engine=content["engine"],
        target_revision=content["target_revision"],
        num_slots=content["num_slots"],
        half_life=content["half_life_us"] * _MICROSECOND,
        limits=PolicyLimits(**content["limits"]),
    )
    return facts, tuple(_drafter(one) for one in content["drafters"])


def _drafter(content: Mapping[str, Any]) -> DrafterState:
    tuples = {name: tuple(content[name]) for name in ("offers", "through")}
    return DrafterState(**{**content, **tuples})


def basis_content(state: CostState) -> dict[str, Any]:
    """Of kind cost_basis: what was measured, and the deviations of one state, to which others are compared."""
    return {
        "points": [[getattr(point, name) for name in CostPoint.__slots__] for point in state.basis.points],
        "timed": dict(state.basis.timed),
        "deviations": state.deviations,
    }


def read_basis(content: Mapping[str, Any]) -> CostState:
    """From `basis_content`, without levels."""
    points = (dict(zip(CostPoint.__slots__, values, strict=True)) for values in content["points"])
    basis = CostBasis(tuple(CostPoint(**{**one, "kind": CostKind(one["kind"])}) for one in points), content["timed"])
    return CostState(basis, {}, tuple(Deviation(*values) for values in content["deviations"]))


def costs_content(state: CostState, base: CostState, number: int) -> dict[str, Any]:
    """Of kind costs: the state as it differs from `base`, whose basis is stored under `number`."""
    pairs = enumerate(zip(state.deviations, base.deviations, strict=True))
    return {
        "basis": number,
        "levels": [[part, its.mean, its.variance] for part, its in state.levels.items()],
        "moved": [[index, *its] for index, (its, before) in pairs if its != before],
    }


def read_costs(content: Mapping[str, Any], base: CostState) -> CostState:
    """From `costs_content`."""
    deviations = list(base.deviations)
    for index, *values in content["moved"]:
        deviations[index] = Deviation(*values)
    levels = {part: LogEstimate(mean, variance) for part, mean, variance in content["levels"]}
    return CostState(base.basis, levels, tuple(deviations))


def pair_content(origin: PairOrigin) -> dict[str, Any]:
    """Of kind pair."""
    return {"drafter": origin.drafter, "at": microseconds(origin.at), "positions": _gaps(origin.positions)}


def read_pair(content: Mapping[str, Any]) -> PairOrigin:
    """From `pair_content`."""
    return PairOrigin(content["drafter"], moment(content["at"]), _positions(content["positions"]))


def posterior_content(origin: PosteriorOrigin, pair: int) -> dict[str, Any]:
    """Of kind posterior; `pair` is the number of its pair."""
    return {
        "key": [getattr(origin.key, name) for name in EvidenceKey.__slots__],
        "at": microseconds(origin.at),
        "positions": _gaps(origin.positions),
        "pair": pair,
        "error": list(origin.error),
    }


def read_posterior(content: Mapping[str, Any], pair: PairOrigin) -> PosteriorOrigin:
    """From `posterior_content`."""
    at, positions = moment(content["at"]), _positions(content["positions"])
    return PosteriorOrigin(EvidenceKey(*content["key"]), at, positions, pair, ExpectationError(*content["error"]))


def split_content(origin: SplitOrigin) -> dict[str, Any]:
    """Of kind split."""
    positions = _gaps(origin.positions)
    return {
        "task": origin.task,
        "drafter": origin.drafter,
        "at": microseconds(origin.at),
        "positions": positions,
    }


def read_split(content: Mapping[str, Any]) -> SplitOrigin:
    """From `split_content`."""
    at, positions = moment(content["at"]), _positions(content["positions"])
    return SplitOrigin(content["task"], content["drafter"], at, positions)


def budget_content(budget: ExplorationBudget | None) -> list[Any] | None:
    """An exploration budget as an array."""
    if budget is None:
        return None
    unseen = None if budget.unseen is None else dict(budget.unseen)
    decided_at = None if budget.decided_at is None else microseconds(budget.decided_at)
    return [budget.balance, budget.accrued, budget.spent, unseen, dict(budget.unseen_s), decided_at]


def read_budget(content: Sequence[Any] | None) -> ExplorationBudget | None:
    """From `budget_content`."""
    if content is None:
        return None
    balance, accrued, spent, unseen, unseen_s, decided_at = content
    return ExplorationBudget(
        balance, accrued, spent, unseen, unseen_s, None if decided_at is None else moment(decided_at)
    )


def _gaps(positions: Sequence[int]) -> list[int]:
    """The first position and then differences, which have fewer digits."""
    return [after - before for before, after in zip((0, *positions), positions, strict=False)]


def _positions(gaps: Sequence[int]) -> tuple[int, ...]:
    found, position = [], 0
    for gap in gaps:
        position += gap
        found.append(position)
    return tuple(found)
