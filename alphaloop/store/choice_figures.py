"""The figures behind a change of choice. They are kept with the change, because costs and evidence are overwritten."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Self

from sqlalchemy import Connection, select

from alphaloop.deciding.decision import Decision
from alphaloop.deciding.evidence import EvidenceSums, together
from alphaloop.deciding.goodput import Alternative
from alphaloop.store.acceptance_state import unpack
from alphaloop.store.database import of_row
from alphaloop.tables import acceptance_state
from alphaloop.tables.evidence import KEY


@dataclass(frozen=True, slots=True)
class ExpectedSpeedup:
    """What was expected of one alternative."""

    drafter: str | None
    num_draft_tokens: int
    speedup: float
    speedup_low: float
    speedup_high: float


@dataclass(frozen=True, slots=True)
class ChoiceFigures:
    """What was expected of a choice and of its best rival, and the evidence of the drafter that it is about."""

    tokens_per_round: float
    round_ms: float
    chosen: ExpectedSpeedup
    rival: ExpectedSpeedup | None
    jobs: float  #: weighted jobs; of the rival's drafter if vanilla was chosen
    trials: tuple[float, ...]
    accepts: tuple[float, ...]

    @classmethod
    def of_row(cls, row: Any) -> Self | None:
        """From a row of decisions; None where it has none."""
        if row.speedup is None:
            return None
        names = ("drafter", "num_draft_tokens", "speedup", "speedup_low", "speedup_high")
        rival = ExpectedSpeedup(*(getattr(row, f"rival_{name}") for name in names))
        chosen = ExpectedSpeedup(row.to_drafter, row.to_num_draft_tokens, *(getattr(row, name) for name in names[2:]))
        return of_row(cls, row, chosen=chosen, rival=None if row.rival_num_draft_tokens is None else rival)


def figures_of(
    connection: Connection, task: str, target_revision: str, decision: Decision, half_life: timedelta
) -> dict[str, Any]:
    """The columns of decisions that hold the figures; none if no alternatives were compared."""
    chosen = next((a for a in decision.alternatives if _is(a, decision.drafter, decision.num_draft_tokens)), None)
    if chosen is None:
        return {}
    rival = max((a for a in decision.alternatives if a is not chosen), key=lambda a: a.speedup, default=None)
    drafter = chosen.drafter or (rival.drafter if rival else None)
    seen = _evidence(connection, task, target_revision, drafter or "", decision.draft_revision, half_life)
    expected = ("speedup", "speedup_low", "speedup_high")
    return {
        **{name: getattr(chosen, name) for name in ("tokens_per_round", "round_ms", *expected)},
        **{f"rival_{n}": rival and getattr(rival, n) for n in ("drafter", "num_draft_tokens", *expected)},
        "jobs": seen.jobs if seen else 0.0,
        "trials": seen.trials if seen else (),
        "accepts": seen.accepts if seen else (),
    }


def _is(alternative: Alternative, drafter: str | None, num_draft_tokens: int) -> bool:
    return (alternative.drafter, alternative.num_draft_tokens) == (drafter, num_draft_tokens)


def _evidence(
    connection: Connection,
    task: str,
    target_revision: str,
    drafter: str,
    draft_revision: str | None,
    half_life: timedelta,
) -> EvidenceSums | None:
    """Of all keys of the task; without a revision, of the engine and revision that were used last."""
    state = acceptance_state.c
    query = select(*(state[name] for name in KEY), state.as_of, state.evidence).where(
        state.target_revision == target_revision, state.drafter == drafter, state.task == task
    )
    if draft_revision is not None:
        query = query.where(state.draft_revision == draft_revision)
    rows = connection.execute(query).all()
    if not rows:
        return None
    newest = max(rows, key=lambda row: row.as_of)
    mine = [row for row in rows if (row.engine, row.draft_revision) == (newest.engine, newest.draft_revision)]
    return together([unpack(row.evidence, row.as_of).all for row in mine], half_life)
