"""The first two sentences of `alphaloop explain`: what is done and why, what it brings and how sure that is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from alphaloop.acceptance import Interval
from alphaloop.deciding.decision import Decision, Reason
from alphaloop.deciding.goodput import Alternative
from alphaloop.experiment.figures import TaskSpeedup
from alphaloop.explaining.explanation import Explanation
from alphaloop.explaining.wording import opening
from alphaloop.messages import Mode
from tests.fixtures.reports import AT
from tests.fixtures.runs import task_speedup


def explained(decision: Decision, measured: TaskSpeedup | None = None) -> Explanation:
    parts = {
        "decision": decision,
        "request": SimpleNamespace(task="code", is_now=True),
        "recorded": None,
        "own_speedup": measured,
    }
    return cast(Explanation, SimpleNamespace(**parts))


def lookup(speedup: float, low: float, high: float) -> Alternative:
    return Alternative("lookup", 7, 2.0, 40.0, speedup, low, high)


def speculative(reason: Reason, *ways: Alternative) -> Decision:
    return Decision(Mode.SPECULATIVE, "lookup", "r", 7, reason, "", ways)


def test_a_measured_gain_is_said_with_its_bounds() -> None:
    measured = task_speedup(Interval(1.62, 1.55, 1.70), AT)
    done, brought = opening(explained(speculative(Reason.FASTER, lookup(1.3, 1.1, 1.5)), measured))
    assert done.startswith(
        "The next job of code is decoded speculatively: lookup proposes up to 7 tokens a round, because"
    )
    assert "Measured in the last day, this was 1.62 times as fast as vanilla" in brought
    assert "between 1.55 and 1.70" in brought
    assert "expected" not in brought, "what was measured stands alone"


def test_an_expectation_is_never_called_a_gain_that_was_shown() -> None:
    _, brought = opening(explained(speculative(Reason.FASTER, lookup(2.26, 0.88, 5.77))))
    assert "expected to be 2.26 times" in brought
    assert "so it may also be slower), and not shown yet" in brought
    _, sure = opening(explained(speculative(Reason.FASTER, lookup(1.3, 1.1, 1.5))))
    assert "slower" not in sure
    assert "not shown yet" in sure


@pytest.mark.parametrize("reason", list(Reason))
def test_every_reason_makes_a_sentence_in_both_modes(reason: Reason) -> None:
    plain: dict[str, Any] = {"reason": reason, "explanation": ""}
    for decision in (Decision(Mode.VANILLA, None, None, 0, **plain), speculative(reason)):
        for sentence in opening(explained(decision)):
            assert sentence.endswith(".")
            assert "_" not in sentence
            assert "None" not in sentence


def test_vanilla_names_the_best_other_way() -> None:
    decision = Decision(Mode.VANILLA, None, None, 0, Reason.NOT_FASTER, "", (lookup(1.0, 0.6, 1.6),))
    done, brought = opening(explained(decision))
    assert "one token at a time, because no drafter is expected to make it faster" in done
    assert "lookup with k=7, is expected to be 1.00 times as fast" in brought
