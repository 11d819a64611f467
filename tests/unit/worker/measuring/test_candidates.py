"""What is compared and in which order: complete, balanced, the same for the same seed."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from alphaloop.deciding.goodput import DrafterState
from alphaloop.errors import ConfigError
from alphaloop.payoff.figures import VANILLA
from worker.measuring.observing import choose_candidates, choose_drafters, divide, turns

LOOKUP = DrafterState("lookup", "1", 12)
SMALL = DrafterState("small", "2", 5)
TINY = DrafterState("tiny", "3", 1)


def test_every_drafter_gets_the_usual_lengths_that_it_can_draft() -> None:
    names = [candidate.name for candidate in choose_candidates([LOOKUP, SMALL, TINY], [])]
    assert names == ["lookup k=2", "lookup k=4", "lookup k=8", "small k=2", "small k=4", "tiny k=1"]


def test_lengths_that_were_asked_for_are_tried_once_each() -> None:
    names = [candidate.name for candidate in choose_candidates([LOOKUP, SMALL], [6, 3, 3])]
    assert names == ["lookup k=3", "lookup k=6", "small k=3"]
    with pytest.raises(ConfigError, match="at most 12, found 13"):
        choose_candidates([LOOKUP, SMALL], [4, 13])


def test_drafters_are_all_or_those_wanted() -> None:
    assert choose_drafters(["a", "b"], []) == ["a", "b"]
    assert choose_drafters(["a", "b"], ["b", "b"]) == ["b"]
    with pytest.raises(ConfigError, match="one of a, b, found 'c'"):
        choose_drafters(["a", "b"], ["c"])
    with pytest.raises(ConfigError, match="no drafter is configured"):
        choose_drafters([], [])


def test_blocks_hold_every_prompt_once_and_are_of_one_size(rng: random.Random) -> None:
    num_prompts, batch = rng.randint(1, 60), rng.randint(1, 9)
    blocks = divide(num_prompts, batch, rng)
    assert sorted(number for block in blocks for number in block) == list(range(num_prompts))
    sizes = {len(block) for block in blocks}
    assert max(sizes) <= batch
    assert max(sizes) - min(sizes) <= 1
    assert len(blocks) == -(-num_prompts // batch)


def test_every_block_is_decoded_in_every_way_and_nobody_is_always_first(seed: int) -> None:
    blocks = [(i,) for i in range(40)]
    candidates = choose_candidates([LOOKUP], [2, 4])
    order = list(turns(blocks, candidates, 3, random.Random(seed)))
    assert all(sorted(turn.candidates, key=repr) == sorted([VANILLA, *candidates], key=repr) for turn in order)
    for repeat in range(3):
        part = order[40 * repeat : 40 * (repeat + 1)]
        assert {turn.repeat for turn in part} == {repeat}
        assert sorted(turn.block for turn in part) == list(range(40))
        assert all(turn.prompts == blocks[turn.block] for turn in part)
    first = Counter(turn.candidates[0] for turn in order)
    # 120 turns, 40 expected for each of three; five standard errors.
    assert all(14 <= first[candidate] <= 66 for candidate in (VANILLA, *candidates))
    assert order == list(turns(blocks, candidates, 3, random.Random(seed)))
