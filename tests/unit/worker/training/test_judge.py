"""A candidate is better where it needs fewer rounds for the same texts, by more than their spread."""

from __future__ import annotations

import random

import pytest

from engine.training.rivals import RivalRounds
from worker.training.judge import verdict_of


def text(parent: int, candidate: int, task: str = "code") -> RivalRounds:
    return RivalRounds(task, 60, parent, candidate)


def test_the_ratio_is_of_tokens_a_round_and_paired_by_text() -> None:
    # Texts differ by a factor of ten, each by the same ratio: paired, nothing is uncertain.
    verdict = verdict_of([text(6, 5), text(60, 50), text(30, 25, "sql")])
    assert verdict.total.parent == pytest.approx(180 / 96)
    assert verdict.total.candidate == pytest.approx(180 / 80)
    assert verdict.total.ratio == pytest.approx(1.2)
    assert verdict.total.low == pytest.approx(1.2)
    assert verdict.is_better
    assert list(verdict.by_task) == ["code", "sql"]
    assert verdict.by_task["sql"].low is None
    assert not verdict.by_task["sql"].is_better
    assert "better in code" in verdict.sentence()
    assert verdict.figures()["by_task"]["code"]["ratio"] == pytest.approx(1.2)


def test_a_candidate_that_is_better_in_one_task_alone_is_tried() -> None:
    worse = [text(20 + i, 40 + i, "chat") for i in range(20)]
    assert not verdict_of(worse).is_better
    assert verdict_of([*worse, *(text(30 + i, 20 + i) for i in range(6))]).is_better


def test_the_parent_itself_is_nowhere_better() -> None:
    same = [text(rounds, rounds) for rounds in (20, 30, 45)]
    assert not verdict_of(same).is_better
    assert verdict_of([text(30, 20)]).is_better is False  # one text says nothing of others


def test_the_interval_holds_the_ratio_as_often_as_it_says() -> None:
    rng, num_held, num_runs = random.Random(5), 0, 1000
    for _ in range(num_runs):
        lengths = [rng.randint(20, 60) for _ in range(25)]
        rounds = [text(length, round(length / 1.1 + rng.gauss(0, 4))) for length in lengths]
        total = verdict_of(rounds).total
        assert total.low is not None
        assert total.high is not None
        num_held += total.low <= 1.1 <= total.high
    assert 0.93 <= num_held / num_runs <= 0.97
