"""Ratios of a workload's settings: what is the machine's noise, and what the choices are worth."""

from __future__ import annotations

import random

import pytest

from benchmarks.workload.contest import ADAPTIVE, Played, compare, timed_once


def everything(_: Played) -> bool:
    return True


def turn(setting: str, block: int, seconds: float, choice: str = "", deciding_s: float = 0.0) -> Played:
    return Played(setting, block, "mixed", "code", 100, seconds, choice or setting, "forced", deciding_s)


def test_the_same_work_says_only_what_deciding_costs(seed: int) -> None:
    rng = random.Random(seed)
    played = []
    for block in range(30):
        played += [turn("draft:3", block, rng.uniform(8, 12)), turn("vanilla", block, rng.uniform(11, 15))]
        played.append(turn(ADAPTIVE, block, rng.uniform(8, 12) + 0.1, "draft:3", 0.1))
    once = timed_once(played)
    assert [one.num_tokens for one in once] == [one.num_tokens for one in played]
    found = compare(once, everything, against="draft:3")
    theirs = sum(one.seconds for one in once if one.setting == "draft:3")
    assert found.ratio == pytest.approx(theirs / (theirs + 3.0))
    assert found.high - found.low < 0.001
    noisy = compare(played, everything, against="draft:3")
    assert noisy.high - noisy.low > 0.02


def test_other_work_keeps_its_own_time() -> None:
    played = [turn("draft:3", 0, 8.0), turn("vanilla", 0, 12.0), turn(ADAPTIVE, 0, 9.0, "gated:8", 0.5)]
    assert timed_once(played) == played
    assert compare(timed_once(played), everything).ratio == pytest.approx(8 / 9)


def test_the_same_setting_in_another_block_is_other_work() -> None:
    played = [turn("vanilla", 0, 12.0), turn(ADAPTIVE, 0, 10.0, "vanilla"), turn("vanilla", 1, 20.0)]
    assert [one.seconds for one in timed_once(played)] == [11.0, 11.0, 20.0]
