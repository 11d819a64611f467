"""Draft lengths of sequences that run together but were decided apart."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial

from hypothesis import given
from hypothesis import strategies as st

from alphaloop.costs import CostPoint, CostTable
from alphaloop.deciding.decision import Decision, DraftSetting
from alphaloop.deciding.draft_lengths import LengthsTogether, RunningGroup, RunningSequence, lengths_together
from alphaloop.deciding.goodput import DrafterState
from alphaloop.deciding.policy import decide
from tests.fixtures import deciding
from tests.fixtures.deciding import context_of

NOW = datetime(2026, 11, 1, tzinfo=UTC)
DRAFT = DrafterState("draft", "r1", 7)
MEASURED = (1, 2, 4, 8)


def costs(per_position_ms: float = 0.9, draft_ms: float = 3.5) -> CostTable:
    points = [CostPoint(None, b, w, 20 + 2 * b + per_position_ms * b * (w - 1), 5) for b in MEASURED for w in (1, 8)]
    points += [CostPoint("draft", b, w, (draft_ms + 0.2 * b) * (w - 1), 5) for b in MEASURED for w in (2, 8)]
    return CostTable(points)


inferred = partial(deciding.inferred, k=7, jobs=100.0, sd=0.01)


def decided(alpha: float, table: CostTable) -> Decision:
    return decide({"draft": inferred(alpha)}, [DRAFT], table, context_of(4, 1, 200.0))


def worth_a_ms(alphas: tuple[float, ...], lengths: tuple[int, ...], table: CostTable, each: int) -> float:
    """Written out from the formula, for groups of `each` sequences that all use the draft model."""
    num_running, worth = each * len(alphas), 0.0

    def ms(proposed: float, num_drafting: int, longest: int) -> float:
        drafting = table.part_ms("draft", num_drafting, longest + 1) if longest else 0.0
        return (table.part_ms(None, num_running, 1 + proposed) or math.inf) + (drafting or 0.0)

    for alpha, k in zip(alphas, lengths, strict=True):
        tokens = inferred(alpha).tokens
        least = min(ms(n, num_running if n else 0, n) / tokens[n] for n in range(8))
        worth += each * least * tokens[k]
    num_drafting = each * sum(k > 0 for k in lengths)
    return worth / ms(sum(lengths) / len(lengths), num_drafting, max(lengths))


def test_the_longest_draft_is_paid_by_all_so_lengths_move_together() -> None:
    table = costs()
    good, poor = decided(0.86, table), decided(0.5, table)
    assert (good.num_draft_tokens, poor.num_draft_tokens) == (4, 1)
    running = [RunningSequence(name, one) for name, one in (("a", good), ("a", good), ("b", poor), ("b", poor))]
    settings = LengthsTogether(lambda: table).settings(running, NOW)
    found = settings[0].num_draft_tokens, settings[2].num_draft_tokens
    assert {setting.drafter for setting in settings} == {"draft"}
    best = max(itertools.product(range(8), repeat=2), key=lambda ks: worth_a_ms((0.86, 0.5), ks, table, 2))
    assert found == best
    assert 4 > found[0] >= found[1] > 1


@given(
    alphas=st.tuples(st.floats(0.05, 0.95), st.floats(0.05, 0.95)),
    per_position_ms=st.floats(0.0, 6.0),
    draft_ms=st.floats(0.01, 8.0),
    apart=st.tuples(st.integers(1, 7), st.integers(1, 7)),
)
def test_together_is_never_worse_than_apart(
    alphas: tuple[float, float], per_position_ms: float, draft_ms: float, apart: tuple[int, int]
) -> None:
    table = costs(per_position_ms, draft_ms)
    groups = [
        RunningGroup(DraftSetting("draft", k), 2, inferred(alpha)) for alpha, k in zip(alphas, apart, strict=True)
    ]
    first, second = (setting.num_draft_tokens for setting in lengths_together(groups, table))
    assert worth_a_ms(alphas, (first, second), table, 2) >= worth_a_ms(alphas, apart, table, 2) * (1 - 1e-9)


def test_a_choice_stays_for_a_second() -> None:
    table, num_asked = costs(), 0

    def asked() -> CostTable:
        nonlocal num_asked
        num_asked += 1
        return table

    lengths = LengthsTogether(asked)
    running = [RunningSequence("a", decided(0.86, table)), RunningSequence("b", decided(0.5, table))]
    later = [one._replace(decision=replace(one.decision, explanation="of the next job")) for one in running]
    for after_s, expected in ((0.0, 1), (0.5, 1), (1.5, 2)):
        assert len(lengths.settings(later if after_s else running, NOW + timedelta(seconds=after_s))) == 2
        assert num_asked == expected
