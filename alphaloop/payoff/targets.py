"""Two targets on the same prompts: which of them is faster, and which texts differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from alphaloop.payoff.figures import PromptBlock, RatioBounds, median_bounds, total_bounds
from alphaloop.server_identity import EngineIdentity


@dataclass(frozen=True, slots=True)
class MeasuredTarget:
    """One of them, decoding without drafts."""

    source: str
    identity: EngineIdentity
    tokens_per_s: float  #: of all prompts and their texts together, prefill included
    output_tokens: float  #: of a text, the median


@dataclass(frozen=True, slots=True)
class TextDifference:
    """A prompt to which the two gave different texts."""

    where: str  #: file and line
    num_equal_characters: int  #: with which both texts begin
    num_characters: tuple[int, int]  #: of both texts


@dataclass(frozen=True, slots=True)
class TargetsReport:
    """What a comparison found. Ratios are the second's tokens a second over the first's."""

    targets: tuple[MeasuredTarget, MeasuredTarget]
    ratio: RatioBounds  #: of all tokens over all seconds
    median: RatioBounds  #: of `ratios`
    ratios: tuple[float, ...]  #: of each batch of prompts
    num_prompts: int
    batch: int
    num_repeats: int
    seed: int
    num_turns: int  #: batches that both decoded
    num_turns_planned: int
    num_compared: int  #: texts; sampled ones without a seed differ by chance and are not
    differences: tuple[TextDifference, ...]
    notes: tuple[str, ...]
    is_interrupted: bool


def ratios_of(
    first: Sequence[PromptBlock], second: Sequence[PromptBlock]
) -> tuple[RatioBounds, RatioBounds, tuple[float, ...]]:
    """Over all tokens, the median, and block by block; block i of both holds the same prompts."""
    ratios = [ours.tokens_per_s / theirs.tokens_per_s for ours, theirs in zip(second, first, strict=True)]
    return total_bounds(second, first), median_bounds(ratios), tuple(ratios)


def difference_of(where: str, first: str, second: str) -> TextDifference | None:
    """Where the texts part; None if they are equal."""
    if first == second:
        return None
    shorter = min(len(first), len(second))
    place = next((i for i in range(shorter) if first[i] != second[i]), shorter)
    return TextDifference(where, place, (len(first), len(second)))
