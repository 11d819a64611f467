from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from alphaloop.acceptance import Interval
from alphaloop.experiment.estimate import (
    ComparedBlock,
    Verdict,
    collapsed,
    compared_blocks,
    measured_speedup,
    time_ratios,
)
from alphaloop.experiment.observe import Phase, Slice, Stratum, Treatment

_PHASES = (Phase.BETWEEN, Phase.BEFORE, Phase.CONTROL, Phase.AFTER)


def one_slice(
    block: int,
    phase: Phase,
    *,
    round_s: float,
    tokens_per_round: float = 1.0,
    proposed_per_round: float = 0.0,
    running: int = 4,
    num_rounds: int = 16,
) -> Slice:
    num = num_rounds * running
    return Slice(
        block_id=f"{block:04d}",
        task="sql",
        phase=phase,
        treatment=Treatment("draft", 3),
        started_at=datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=10 * block + _PHASES.index(phase)),
        num_rounds=num_rounds,
        num_sequence_rounds=num,
        num_tokens=round(num * tokens_per_round),
        num_proposed=round(num * proposed_per_round),
        sequence_s=num * round_s,
        sum_running=num_rounds * running,
        sum_context=num_rounds * 100.0,
    )


def cycle(
    block: int,
    *,
    tokens: float,
    cost: float,
    running: int = 4,
    host: Callable[[Phase], float] = lambda _: 1.0,
    num_between: int = 320,
) -> list[Slice]:
    """A block and the rounds before it: treatment rounds yield `tokens` and take `cost` vanilla rounds."""
    return [
        one_slice(
            block,
            phase,
            round_s=0.01 * host(phase) * (1.0 if phase is Phase.CONTROL else cost),
            tokens_per_round=1.0 if phase is Phase.CONTROL else tokens,
            running=running,
            num_rounds=num_between if phase is Phase.BETWEEN else 16,
        )
        for phase in _PHASES
    ]


def cycles(blocks: range, **given: Any) -> list[Slice]:
    return [one for block in blocks for one in cycle(block, **given)]


def speedup_of(slices: list[Slice]) -> Interval:
    return measured_speedup(slices).speedup


@pytest.mark.parametrize(("tokens", "cost"), [(1.0, 1.0), (2.5, 1.5), (1.5, 2.0), (3.0, 1.25)])
def test_without_noise_the_ratio_is_exact(tokens: float, cost: float) -> None:
    found = measured_speedup(cycles(range(20), tokens=tokens, cost=cost))
    assert found.speedup.mean == pytest.approx(tokens / cost, rel=1e-9)
    assert found.speedup.high - found.speedup.low < 1e-6
    assert found.num_blocks == 20
    assert found.num_control_rounds == 320


def test_a_host_that_is_slow_for_whole_blocks_changes_nothing() -> None:
    slow = [one for i in range(20) for one in cycle(i, tokens=2.0, cost=1.25, host=lambda _, i=i: 1.0 + i % 3)]
    assert speedup_of(slow).mean == pytest.approx(1.6, rel=1e-9)


def test_a_host_that_becomes_slower_at_a_constant_rate_changes_nothing() -> None:
    rate = {Phase.BETWEEN: 1.0, Phase.BEFORE: 1.0, Phase.CONTROL: 1.1, Phase.AFTER: 1.21}
    # The rounds between are faster here than those of blocks; only the ratio within blocks counts.
    slower = cycles(range(20), tokens=2.0, cost=1.25, host=rate.__getitem__)
    assert speedup_of(slower).mean == pytest.approx(1.6, rel=1e-9)


def test_strata_weigh_by_the_time_that_the_treatment_spent_in_them() -> None:
    # Alone, drafting is twice as fast; among sixteen it is 0.8 times as fast, and three quarters of the time is there.
    alone = cycles(range(20), tokens=2.5, cost=1.25, running=1, num_between=1600)
    among = cycles(range(20, 40), tokens=2.0, cost=2.5, running=16, num_between=100)
    seconds = {1: 1.25 * (1600 + 32), 16: 16 * 2.5 * (100 + 32)}
    expected = (2.0 * seconds[1] + 0.8 * seconds[16]) / sum(seconds.values())
    assert speedup_of([*alone, *among]).mean == pytest.approx(expected, rel=1e-6)


def test_disturbed_blocks_barely_move_it() -> None:
    rng = random.Random(1)

    def with_disturbed(num_disturbed: int) -> list[Slice]:
        found = []
        for i in range(40):
            factor = 4.0 if i < num_disturbed else 1.0
            found += cycle(
                i,
                tokens=2.0,
                cost=1.25,
                host=lambda phase, f=factor: (f if phase is Phase.CONTROL else 1.0) * rng.lognormvariate(0, 0.02),
            )
        return found

    quiet, disturbed = speedup_of(with_disturbed(0)), speedup_of(with_disturbed(2))
    assert disturbed.mean == pytest.approx(quiet.mean, rel=0.015)  # a mean of logarithms would move by 7 %


def test_reading_prompts_counts_the_same_in_both_arms() -> None:
    slices = []
    for i in range(20):
        between, *block = cycle(i, tokens=2.0, cost=1.25)
        # 80 sequence-rounds with a prompt: each decodes as long as the others and reads for 0.02 s.
        between = replace(
            between,
            num_prompt_rounds=20,
            sum_running=between.sum_running + 80,
            sum_context=between.sum_context + 2000.0,
            num_prompt_sequence_rounds=80,
            num_prompt_tokens=160,
            prompt_sequence_s=80 * (0.0125 + 0.02),
        )
        slices += [between, *block]
    rounds = 4 * (320 + 32) + 80
    expected = (rounds * 2.0 * 0.01 + 80 * 0.02) / (rounds * 0.0125 + 80 * 0.02)
    assert speedup_of(slices).mean == pytest.approx(expected, rel=1e-9)


def test_windows_with_unusual_proposals_are_set_right() -> None:
    # A proposed token costs 0.1 vanilla rounds. All rounds propose 2 on average, the windows near control 0 or 3.
    slices = []
    for i in range(40):
        near = 3.0 if i % 2 else 0.0
        slices += [
            one_slice(i, Phase.BETWEEN, round_s=0.012, tokens_per_round=1.8, proposed_per_round=2.025, num_rounds=1280),
            one_slice(i, Phase.CONTROL, round_s=0.01),
            *(
                one_slice(i, phase, round_s=0.01 * (1 + 0.1 * near), tokens_per_round=1.8, proposed_per_round=near)
                for phase in (Phase.BEFORE, Phase.AFTER)
            ),
        ]
    num_between, num_near = 1280, 32
    proposed = (2.025 * num_between + 1.5 * num_near) / (num_between + num_near)
    assert speedup_of(slices).mean == pytest.approx(1.8 / (1 + 0.1 * proposed), rel=1e-3)


def test_a_load_that_changes_inside_a_block_is_set_right() -> None:
    # Twice as many sequences take 1.3 times as long, in both arms: most blocks begin at a high load that falls.
    slices: list[Slice] = []
    rng = random.Random(5)
    for block in range(24):
        loads = [16, 16, 8, 8] if block % 3 else [8, 8, 16, 16]
        for phase, running in zip(_PHASES, loads, strict=True):
            vanilla_s = 0.01 * 1.3 ** math.log2(running) * math.exp(rng.gauss(0, 0.002))
            cost, tokens = (1.0, 1.0) if phase is Phase.CONTROL else (1.5, 2.0)
            slices.append(one_slice(block, phase, round_s=cost * vanilla_s, tokens_per_round=tokens, running=running))
    found = speedup_of(slices)
    assert found.low <= 2 / 1.5 <= found.high
    assert found.mean == pytest.approx(2 / 1.5, rel=0.005)


def test_a_block_counts_by_the_sequences_that_run() -> None:
    # Blocks come as often at 4 as at 7 sequences, which are one stratum; seven have 7/11 of the sequences.
    slices = cycles(range(40), tokens=2.0, cost=1.2, running=4)
    slices += cycles(range(40, 80), tokens=2.0, cost=1.6, running=7)
    assert speedup_of(slices).mean == pytest.approx(
        2 / math.exp((4 * math.log(1.2) + 7 * math.log(1.6)) / 11), rel=1e-3
    )


def test_few_blocks_give_no_verdict() -> None:
    found = measured_speedup(cycles(range(7), tokens=3.0, cost=1.0))
    assert found.speedup is None
    assert found.verdict is Verdict.NO_VERDICT_YET
    assert found.num_blocks == 7
    assert measured_speedup([]).verdict is Verdict.NO_VERDICT_YET


@pytest.mark.parametrize(
    ("tokens", "noise", "verdict"),
    [
        (1.5, 0.02, Verdict.FASTER),
        (0.75, 0.02, Verdict.SLOWER),
        (1.0, 0.01, Verdict.NO_DIFFERENCE),
        (1.0, 0.5, Verdict.NO_VERDICT_YET),
    ],
)
def test_the_verdict_follows_the_interval(tokens: float, noise: float, verdict: Verdict) -> None:
    rng = random.Random(2)
    slices = cycles(range(40), tokens=tokens, cost=1.0, host=lambda _: rng.lognormvariate(0, noise))
    assert measured_speedup(slices).verdict is verdict


def test_a_block_that_ended_early_is_not_compared() -> None:
    slices = cycles(range(10), tokens=2.0, cost=1.0)
    without = [one for one in slices if one.block_id != "0003" or one.phase is not Phase.AFTER]
    assert len(compared_blocks(without)) == 9
    short = [
        replace(one, num_rounds=7) if one.block_id == "0003" and one.phase is Phase.AFTER else one for one in slices
    ]
    assert len(compared_blocks(short)) == 9


def test_thin_strata_join_their_neighbours() -> None:
    blocks = compared_blocks(
        [
            one
            for i, running in enumerate([1] * 10 + [2] * 3 + [4] * 9 + [8] * 2)
            for one in cycle(i, tokens=2.0, cost=1.0, running=running)
        ]
    )
    groups = collapsed(blocks, [Stratum(5, 0)], least_blocks=8)
    assert groups == {Stratum(0, 0): 0, Stratum(1, 0): 1, Stratum(2, 0): 1, Stratum(3, 0): 1, Stratum(5, 0): 1}


def test_the_interval_covers_as_often_as_it_says() -> None:
    rng = random.Random(3)
    num_covered = 0
    for _ in range(200):
        slices = []
        for i in range(24):
            tokens, minute = 2.0 + rng.gauss(0, 0.1), rng.choice((1.0, 1.0, 1.0, 3.0))

            def host(_: Phase, minute: float = minute) -> float:
                hiccup = 4.0 if rng.random() < 0.02 else 1.0
                return minute * hiccup * rng.lognormvariate(0, 0.03)

            slices += cycle(i, tokens=tokens, cost=1.25, host=host, num_between=320)
        found = speedup_of(slices)
        num_covered += found.low <= 1.6 <= found.high
    # 95 % of 200 are 190; three standard deviations are 9.
    assert math.isclose(num_covered, 190, abs_tol=9)


def test_one_block_of_another_load_does_not_run_away_with_the_fit() -> None:
    """Two slopes of one odd block: a simulated burst, whose fit ended at a ratio of 0."""
    round_s = {Phase.BEFORE: (0.239, 0.233, 0.232, 0.242, 0.249, 0.274, 0.254, 0.289)}
    round_s[Phase.AFTER] = (0.227, 0.259, 0.228, 0.221, 0.242, 0.269, 0.266, 0.36)
    proposed = {Phase.BEFORE: (0.112,) * 7 + (-0.638,), Phase.AFTER: (0.112,) * 7 + (-0.43,)}
    load = {Phase.BEFORE: -0.765, Phase.AFTER: -0.571}

    def window(block: int, phase: Phase) -> Slice:
        of_log = round_s[phase][block]
        one = one_slice(block, phase, round_s=0.01 * math.exp(of_log), proposed_per_round=4 + proposed[phase][block])
        if block < 7:
            return replace(one, sum_running=64)
        return replace(one, sum_running=round(430 * math.exp(load[phase])))

    blocks = []
    for block in range(8):
        control = one_slice(block, Phase.CONTROL, round_s=0.01)
        control = replace(control, sum_running=64 if block < 7 else 430)
        blocks.append(ComparedBlock(window(block, Phase.BEFORE), control, window(block, Phase.AFTER)))
    found = time_ratios(blocks, [0] * 8, [4.0])
    assert found.ratio[0] == pytest.approx(math.exp(0.25), rel=0.05)
    assert abs(found.influence).max() < 1
