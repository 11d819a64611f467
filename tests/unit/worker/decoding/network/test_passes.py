"""Passes over slots against plain passes: chains, trees, pieces of prompts, dead rows between, sliding windows."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest
import torch
import transformers

from tests.fixtures.models import FAMILIES, NUM_TOKENS, WINDOW, Reference
from worker.decoding.network.language_model import LanguageModel
from worker.decoding.network.passes import WIDEST_SHARED, Read

References = Callable[[str], Reference]
NUM_SLOTS: Final = 6
TOLERANCE: Final = 1e-9  #: of logits of size 10, in float64


@dataclass(frozen=True, slots=True)
class Reading:
    """A read, and the text that each of its tokens ends in truth."""

    read: Read
    paths: list[list[int]]

    @property
    def wanted(self) -> list[list[int]]:
        """The texts behind which logits are wanted."""
        return self.paths[len(self.paths) - self.read.num_logits :]


def load(folder: Path) -> LanguageModel:
    return LanguageModel(transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval(), 1024)


def some_tokens(rng: random.Random, num: int) -> list[int]:
    return [rng.randrange(NUM_TOKENS) for _ in range(num)]


def some_reading(rng: random.Random, slot: int, text: list[int], *, must_be_short: bool) -> Reading:
    kind = rng.choice(("chain", "tree") if must_be_short else ("chain", "tree", "piece"))
    num = rng.randint(WIDEST_SHARED + 1, WIDEST_SHARED + 30) if kind == "piece" else rng.randint(1, 9)
    tokens = some_tokens(rng, num)
    parents = [rng.randint(-1, i - 1) for i in range(num)] if kind == "tree" else list(range(-1, num - 1))
    paths: list[list[int]] = []
    for token, parent in zip(tokens, parents, strict=True):
        paths.append([*(text if parent < 0 else paths[parent]), token])
    read = Read(slot, tokens, rng.randint(0, num), parents if kind == "tree" else None)
    return Reading(read, paths)


@torch.inference_mode()
@pytest.mark.parametrize("family", FAMILIES)
def test_any_pass_equals_plain_passes(
    tiny_models: dict[str, Path], references: References, family: str, rng: random.Random
) -> None:
    model, reference = load(tiny_models[family]), references(family)
    cache = model.new_cache(NUM_SLOTS)
    texts = {cache.acquire(): some_tokens(rng, rng.choice((1, 5, WINDOW, 40))) for _ in range(NUM_SLOTS)}
    for slot, text in texts.items():
        model.prefill(cache, slot, text)
    for _ in range(5):
        # Slots that are left out lie dead between the others.
        slots = rng.sample(sorted(texts), rng.randint(1, NUM_SLOTS))
        readings = [some_reading(rng, slot, texts[slot], must_be_short=rng.random() < 0.8) for slot in slots]
        found = model.read(cache, [one.read for one in readings])
        expected = [reference.logits(path)[-1] for one in readings for path in one.wanted]
        assert found.shape == (len(expected), NUM_TOKENS)
        if expected:
            assert float((found - torch.stack(expected)).abs().max()) < TOLERANCE
        for one in readings:
            # One path stays, of any length: so later passes look back on what was moved.
            path = rng.choice([[], *_roots_first(one.read)])
            cache.keep(one.read.slot, path)
            texts[one.read.slot] = [*texts[one.read.slot], *(one.read.token_ids[place] for place in path)]
            assert cache.lengths[one.read.slot] == len(texts[one.read.slot])


def _roots_first(read: Read) -> list[list[int]]:
    """Every path of a read, as places of its tokens."""
    paths: list[list[int]] = []
    for place in range(len(read.token_ids)):
        parent = place - 1 if read.parents is None else read.parents[place]
        paths.append([*(paths[parent] if parent >= 0 else []), place])
    return paths


@torch.inference_mode()
@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_in_pieces_equals_the_prompt_at_once(
    tiny_models: dict[str, Path], references: References, family: str, rng: random.Random
) -> None:
    model, text = load(tiny_models[family]), some_tokens(rng, 150)
    cache = model.new_cache(2)
    cache.acquire()
    slot = cache.acquire()
    begin = 0
    while begin < len(text):
        piece = text[begin : begin + rng.choice((1, 3, WIDEST_SHARED, WIDEST_SHARED + 1, 70))]
        logits = model.read(cache, [Read(slot, piece)])
        cache.lengths[slot] += len(piece)
        begin += len(piece)
    assert float((logits[0] - references(family).logits(text)[-1]).abs().max()) < TOLERANCE
