"""From what followed earlier occurrences to the tokens worth proposing, and how many of them.

The estimate is SuffixDecoding's (Oliaro et al., arXiv 2411.04975, §4): a token's probability is the share of the
occurrences that agree with the draft so far, times its parent's. Two things differ. An occurrence counts by the length
of its match, and "something new" counts too: thus a lone short match is not certain, and drafts grow with the match
without a rule of their own for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Final

#: An occurrence weighs 2 ** its length: of two continuations the one behind the longer match wins, unless the other
#: occurred that much more often. Powers of two below 2 ** 33 add up exactly, in any order.
BASE: Final = 2.0
#: What "something new" weighs: a lone match of 2 tokens is right with probability 1/2, one of 5 with 8/9.
NOVELTY: Final = 4.0

Weighed = tuple[tuple[int, ...], float]


@dataclass(frozen=True, slots=True)
class Rule:
    """When a continuation is still worth its place in the pass. Part of the drafter's revision."""

    min_probability: float  #: of a token and all before it being accepted
    num_branches: int  #: most tokens proposed to follow one token


def grow(found: Iterable[tuple[int, Sequence[int]]], num_tokens: int, rule: Rule) -> tuple[list[int], list[int] | None]:
    """The likeliest continuations, at most `num_tokens` tokens: (tokens, parents); parents are None for a chain.

    `found` holds each occurrence's match length and the tokens behind it. A tree's tokens come likeliest first, and
    so do siblings. Equally likely ones come in the order in which they were found.
    """
    weights: dict[tuple[int, ...], float] = {}
    for length, behind in found:
        key = tuple(behind)
        weights[key] = weights.get(key, 0.0) + BASE**length
    if rule.num_branches == 1:
        return _chain(list(weights.items()), num_tokens, rule.min_probability), None
    return _tree(list(weights.items()), num_tokens, rule)


def _chain(agreeing: list[Weighed], num_tokens: int, min_probability: float) -> list[int]:
    tokens: list[int] = []
    probability = 1.0
    for depth in range(num_tokens):
        by_token = _weights(agreeing, depth)
        if not by_token:
            break
        token = max(by_token, key=by_token.__getitem__)
        probability *= by_token[token] / (sum(by_token.values()) + NOVELTY)
        if probability < min_probability:
            break
        tokens.append(token)
        agreeing = _with(agreeing, depth, token)
    return tokens


def _tree(agreeing: list[Weighed], num_tokens: int, rule: Rule) -> tuple[list[int], list[int] | None]:
    tokens: list[int] = []
    parents: list[int] = []
    # (-probability, order of entry, token, parent, depth, occurrences that agree with the parent)
    ends: list[tuple[float, int, int, int, int, list[Weighed]]] = []
    num_entered = 0
    parent, depth, probability = -1, 0, 1.0
    while len(tokens) < num_tokens:
        by_token = _weights(agreeing, depth)
        total = sum(by_token.values()) + NOVELTY
        for token in sorted(by_token, key=by_token.__getitem__, reverse=True)[: rule.num_branches]:
            share = probability * (by_token[token] / total)
            if share >= rule.min_probability:
                heappush(ends, (-share, num_entered, token, parent, depth, agreeing))
                num_entered += 1
        if not ends:
            break
        score, _, token, of, depth, agreeing = heappop(ends)
        agreeing = _with(agreeing, depth, token)
        parent, depth, probability = len(tokens), depth + 1, -score
        tokens.append(token)
        parents.append(of)
    is_chain = all(of == place - 1 for place, of in enumerate(parents))
    return tokens, None if is_chain else parents


def _weights(agreeing: list[Weighed], depth: int) -> dict[int, float]:
    """What each next token weighs."""
    by_token: dict[int, float] = {}
    for behind, weight in agreeing:
        if depth < len(behind):
            by_token[behind[depth]] = by_token.get(behind[depth], 0.0) + weight
    return by_token


def _with(agreeing: list[Weighed], depth: int, token: int) -> list[Weighed]:
    if len(agreeing) == 1:
        return agreeing
    return [entry for entry in agreeing if depth < len(entry[0]) and entry[0][depth] == token]
