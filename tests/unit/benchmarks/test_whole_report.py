"""Rounds of the benchmark of the whole: orders, paired ratios, bars, checks."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from benchmarks.whole.lineup import BASELINE, CONTESTANTS, ENGINE, ENGINE_VANILLA, VLLM, WORKER, Played, draw_order
from benchmarks.whole.near_ties import Difference
from benchmarks.whole.report import Round, SlotsReport, met


def played(name: str, tokens_per_s: float, **fields: object) -> Played:
    return Played(name, 10.0, round(10 * tokens_per_s), **fields)  # type: ignore[arg-type]


def report(*rounds: Round) -> SlotsReport:
    return SlotsReport(8, 100, rounds)


def test_every_order_in_which_the_engine_follows_the_worker_is_drawn() -> None:
    rng = random.Random(5)
    orders = Counter(tuple(draw_order(CONTESTANTS, rng)) for _ in range(6000))
    assert len(orders) == 60, "half of 120"
    assert all(order.index(WORKER) < order.index(ENGINE) for order in orders)
    assert min(orders.values()) > 50
    assert max(orders.values()) < 150


def test_ratios_are_taken_within_a_round() -> None:
    fast, slow = (Round((played(WORKER, 96 * x), played(ENGINE, 100 * x), played(VLLM, 60 * x))) for x in (1, 0.5))
    found = {one.other: one for one in report(fast, slow).paired()}
    assert found[ENGINE].ratios == pytest.approx([0.96, 0.96])
    assert found[ENGINE].is_met
    assert found[VLLM].ratio.median == pytest.approx(1.6)
    assert found[ENGINE].ratio.low is None, "two rounds bound nothing"


def test_a_missed_bar_is_told_and_vanilla_has_none() -> None:
    found = met([report(Round((played(WORKER, 90, occupied=0.9), played(ENGINE, 100), played(ENGINE_VANILLA, 50))))])
    assert found == {"8 slots: worker / engine >= 0.95": False, "8 slots: occupied >= 0.95": False}


def test_a_text_that_no_near_tie_explains_is_unsound() -> None:
    both = (played(WORKER, 90), played(ENGINE, 100))
    tied = report(Round(both, (Difference("job-1", 3, 0.1),)))
    wrong = report(Round(both, (Difference("job-1", 3, 0.1), Difference("job-2", 3, None))))
    assert tied.is_sound()
    assert not wrong.is_sound()
    texts = wrong.as_json()["texts"]
    assert (texts["compared"], texts["identical"], texts["near_ties"], texts["unexplained"]) == (100, 98, 1, 1)


def test_faults_of_both_workers_are_added_up() -> None:
    fine, bad = {"missing": 0, "several": 0}, {"missing": 0, "several": 2}
    rounds = [Round((played(WORKER, 90, faults=bad), played(BASELINE, 80, faults=fine))) for _ in range(2)]
    assert report(*rounds).faults() == {"worker: several": 4}
    assert not report(*rounds).is_sound()
