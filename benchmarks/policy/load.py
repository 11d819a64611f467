"""What a scenario with slots adds: how many slots are open, what is slow, and producers that nobody names.

Moments are counted in output tokens of the stream, so that all rules meet the same load and the same slow stretches
at the same piece of work.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

Slower: TypeAlias = tuple[tuple[str, float], ...]


class Part(BaseModel):
    """A part of the file: frozen, and without unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Bursts(Part):
    """Traffic in bursts: the open slots are drawn anew from `slots`, after `tokens` on average (exponential)."""

    slots: tuple[Annotated[int, Field(gt=0)], ...]
    tokens: int = Field(gt=0)


class Spell(Part):
    """Stretches in which a part is slow; the factor is uniform between the two of `slower`."""

    part: Literal["host", "draft"]  #: host: every part
    slower: tuple[float, float] = (2.0, 4.0)
    every_tokens: int = Field(gt=0)  #: mean distance, exponential
    lasts_tokens: int = Field(gt=0)  #: mean length, exponential


class Hiccup(Part):
    """So many rounds of a drafter take longer, once, from the job of this number on."""

    drafter: str
    from_job: int
    num_rounds: int = 40
    slower: float = 3.0


class Slots(Part):
    """The device's slots, each refilled in the round after it fell free."""

    num_slots: int = Field(gt=0)
    bursts: Bursts | None = None
    spells: tuple[Spell, ...] = ()
    hiccup: Hiccup | None = None


@dataclass(frozen=True, slots=True)
class Stretch:
    """A piece of the stream, in output tokens, under one load and one speed."""

    num_open: int  #: slots
    slower: Slower  #: factor by part, "host" or a drafter's name; parts at their usual speed are left out


@dataclass(frozen=True, slots=True)
class Stretches:
    """All of them: `begins[i]` is the token with which stretch i begins."""

    begins: tuple[float, ...]
    of: tuple[Stretch, ...]

    def at(self, num_tokens: int) -> Stretch:
        """The one in which the stream is after so many tokens."""
        return self.of[bisect_right(self.begins, num_tokens) - 1]


def draw_stretches(slots: Slots, num_tokens: int, rng: np.random.Generator) -> Stretches:
    """For a stream of so many tokens."""
    loads = list(_loads(slots, num_tokens, rng))
    spells = [(spell.part, list(_spells(spell, num_tokens, rng))) for spell in slots.spells]
    edges = sorted({begin for begin, _ in loads} | {edge for _, its in spells for b, e, _ in its for edge in (b, e)})
    found = []
    for edge in edges:
        num_open = next(load for begin, load in reversed(loads) if begin <= edge)
        slower = tuple((part, factor) for part, its in spells for b, e, factor in its if b <= edge < e)
        found.append(Stretch(num_open, slower))
    return Stretches(tuple(edges), tuple(found))


def _loads(slots: Slots, num_tokens: int, rng: np.random.Generator) -> Iterator[tuple[float, int]]:
    if slots.bursts is None:
        yield 0.0, slots.num_slots
        return
    at = 0.0
    while at < num_tokens:
        yield at, int(rng.choice(slots.bursts.slots))
        at += rng.exponential(slots.bursts.tokens)


def _spells(spell: Spell, num_tokens: int, rng: np.random.Generator) -> Iterator[tuple[float, float, float]]:
    at = rng.exponential(spell.every_tokens)
    while at < num_tokens:
        lasts = rng.exponential(spell.lasts_tokens)
        # Factors in steps of a half: the oracle knows what is best at each.
        yield at, at + lasts, float(np.round(2 * rng.uniform(*spell.slower)) / 2)
        at += lasts + rng.exponential(spell.every_tokens)


