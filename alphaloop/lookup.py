"""Look-up without an engine: what followed earlier occurrences of a text's last tokens. Standard library only.

    SearchedText.propose → SuffixIndex: where the last tokens stood before, in the text; and the same in EarlierTexts
                         → grow: the tokens worth proposing, and how many, by a Rule

Occurrences are found through chains, as Deflate finds its matches (RFC 1951, §4). A text suffix automaton answers the
same question in fewer steps when a match is rare and long, but costs some 20 times the memory and time a token in
Python, and every token of every prompt pays for it.

The estimate is SuffixDecoding's (Oliaro et al., arXiv 2411.04975, §4): a token's probability is the share of the
occurrences that agree with the draft so far, times its parent's. Two things differ. An occurrence counts by the length
of its match, and "something new" counts too: thus a lone short match is not certain, and drafts grow with the match
without a rule of their own for it.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Final, NamedTuple, Protocol

#: Occurrences looked at, the latest first: a comma occurs everywhere, and the older places rarely say more.
MAX_OCCURRENCES: Final = 32
#: Tokens of the shortest match that counts.
MIN_NGRAM: Final = 1
#: Tokens of the longest match; a longer one counts no more.
MAX_NGRAM: Final = 16
#: Most bytes of a task's remembered results.
MAX_REMEMBERED_BYTES: Final = 16 << 20
#: An occurrence weighs 2 ** its length: of two continuations the one after the longer match wins, unless the other
#: occurred that much more often. Whole powers of two below 2 ** 33 add up exactly, in any order.
_BASE: Final = 2.0
#: What "something new" weighs: a lone match of 2 tokens is right with probability 1/2, one of 5 with 8/9.
NOVELTY: Final = 4.0

_Weighed = tuple[tuple[int, ...], float]
#: Most that a remembered token takes: itself (4), its link (8), and its n-gram's entry in a hash table, with its key
#: and its place, where no other token of the memory shares it; and the moment in which that table grows.
BYTES_PER_TOKEN: Final = 240
#: Ends each result and equals no token: neither a match nor a continuation crosses it.
_END: Final = -1


class EarlierTexts(Protocol):
    """Texts of others that a text may be looked up in too."""

    def continuations(self, suffix: Sequence[int], num_tokens: int) -> Sequence[tuple[float, list[int]]]:
        """The match length of each occurrence of the end of `suffix`, and up to `num_tokens` tokens after it.

        What shall weigh more or less than a match in the text itself has another length than its own.
        """


class SharedTexts(EarlierTexts, Protocol):
    """Earlier texts to which other jobs add theirs meanwhile."""

    def frozen(self) -> EarlierTexts:
        """The same texts, without what is added from now on."""


#: What a job of this task and segment may search, with the shortest and the longest match in tokens; None: nothing.
ViewOf = Callable[[str, str, int, int], SharedTexts | None]


@dataclass(frozen=True, slots=True)
class SearchedText:
    """One text and its index."""

    text: Sequence[int]  #: prompt and output, the owner's own sequence, which grows
    index: SuffixIndex
    earlier: EarlierTexts | None  #: None: this task's results are not remembered
    predicted: EarlierTexts | None = None  #: what came with its job

    def continuations(self, num_tokens: int) -> list[tuple[float, Sequence[int]]]:
        """The match length of each occurrence, and `num_tokens` tokens after it: its own first, then earlier results'.

        Where a match lies so close to the end that the text runs out, the text is taken to be periodic.
        """
        text, end = self.text, len(self.text)
        self.index.advance(end - 1)
        occurrences: list[tuple[float, Sequence[int]]] = []
        for length, place in self.index.matches(text):
            following = tuple(text[place : place + num_tokens])
            if len(following) < num_tokens:
                following = (following * (num_tokens // (end - place) + 1))[:num_tokens]
            occurrences.append((length, following))
        for others in (self.predicted, self.earlier):
            if others is not None:
                occurrences += others.continuations(text, num_tokens)
        return occurrences

    def propose(self, num_tokens: int, rule: Rule) -> Continuations:
        """What is likely to follow the text as it stands, at most `num_tokens` tokens."""
        if num_tokens < 1:
            return Continuations([], None, [])
        return grow(self.continuations(num_tokens), num_tokens, rule)


class EarlierResults:
    """The latest results of one task in this process, all in one index."""

    def __init__(self, min_ngram: int, max_ngram: int, max_bytes: int) -> None:
        self._tokens = array("i")
        self._lengths: deque[int] = deque()
        self._max_tokens = max_bytes // BYTES_PER_TOKEN
        self._index = SuffixIndex(self._tokens, min_ngram, max_ngram)

    def __len__(self) -> int:
        """Tokens held."""
        return len(self._tokens)

    def remember(self, token_ids: Sequence[int]) -> None:
        """Take in a result and let go of the oldest ones whose room it needs. One beyond the limit itself is let be."""
        num_tokens = len(token_ids) + 1
        if not token_ids or num_tokens > self._max_tokens:
            return
        while len(self._tokens) + num_tokens > self._max_tokens:
            oldest = self._lengths.popleft()
            self._index.drop(oldest)
            del self._tokens[:oldest]
        self._tokens.extend(token_ids)
        self._tokens.append(_END)
        self._lengths.append(num_tokens)
        self._index.advance(len(self._tokens), is_apart=True)

    def continuations(self, suffix: Sequence[int], num_tokens: int) -> list[tuple[int, list[int]]]:
        """The match length of each occurrence of the end of `suffix`, and up to `num_tokens` tokens after it."""
        occurrences = []
        for length, place in self._index.matches(suffix):
            following = self._tokens[place : place + num_tokens].tolist()
            if _END in following:
                following = following[: following.index(_END)]
            if following:
                occurrences.append((length, following))
        return occurrences


@dataclass(frozen=True, slots=True)
class Rule:
    """When a continuation is still worth its place in the pass. Part of the drafter's revision."""

    min_probability: float  #: of a token and all before it being accepted
    num_branches: int  #: most tokens proposed to follow one token


class Continuations(NamedTuple):
    """The likeliest ones, a tree."""

    tokens: list[int]
    parents: list[int] | None  #: None for a chain
    together: list[float]  #: probability of each token and all before it


def grow(occurrences: Iterable[tuple[float, Sequence[int]]], num_tokens: int, rule: Rule) -> Continuations:
    """The likeliest continuations, at most `num_tokens` tokens.

    `occurrences` holds each one's match length and the tokens after it. A tree's tokens come likeliest first, and
    so do siblings. Equally likely ones come in the order of `occurrences`.
    """
    weights: dict[tuple[int, ...], float] = {}
    for length, following in occurrences:
        key = tuple(following)
        weights[key] = weights.get(key, 0.0) + _BASE**length
    if rule.num_branches == 1:
        return _chain(list(weights.items()), num_tokens, rule.min_probability)
    return _tree(list(weights.items()), num_tokens, rule)


def _chain(agreeing: list[_Weighed], num_tokens: int, min_probability: float) -> Continuations:
    tokens: list[int] = []
    together: list[float] = []
    probability = 1.0
    for depth in range(num_tokens):
        if len(agreeing) == 1:  # nothing to choose from
            following, weight = agreeing[0]
            if depth == len(following):
                break
            token, total = following[depth], weight
        else:
            by_token = _weights(agreeing, depth)
            if not by_token:
                break
            token = max(by_token, key=by_token.__getitem__)
            weight, total = by_token[token], sum(by_token.values())
            agreeing = _with(agreeing, depth, token)
        probability *= weight / (total + NOVELTY)
        if probability < min_probability:
            break
        tokens.append(token)
        together.append(probability)
    return Continuations(tokens, None, together)


def _tree(agreeing: list[_Weighed], num_tokens: int, rule: Rule) -> Continuations:
    tokens: list[int] = []
    parents: list[int] = []
    together: list[float] = []
    # (-probability, order of entry, token, parent, depth, occurrences that agree with the parent)
    ends: list[tuple[float, int, int, int, int, list[_Weighed]]] = []
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
        together.append(probability)
    is_chain = all(of == place - 1 for place, of in enumerate(parents))
    return Continuations(tokens, None if is_chain else parents, together)


def _weights(agreeing: list[_Weighed], depth: int) -> dict[int, float]:
    """What each next token weighs."""
    by_token: dict[int, float] = {}
    for following, weight in agreeing:
        if depth < len(following):
            by_token[following[depth]] = by_token.get(following[depth], 0.0) + weight
    return by_token


def _with(agreeing: list[_Weighed], depth: int, token: int) -> list[_Weighed]:
    if len(agreeing) == 1:
        return agreeing
    return [entry for entry in agreeing if depth < len(entry[0]) and entry[0][depth] == token]


class SuffixIndex:
    """Finds earlier occurrences in tokens that are only ever appended to, or dropped at the front.

    Each token costs one dictionary entry and one link, whatever the length of the matches; nothing is scanned again.
    Two n-grams with one hash share a chain: what is found is always compared.
    """

    def __init__(self, tokens: Sequence[int], min_ngram: int, max_ngram: int) -> None:
        self._tokens = tokens
        self._min_ngram = min_ngram
        self._max_ngram = max_ngram
        self._num_dropped = 0
        # Ends of n-grams, counted from the first token that ever was: the latest one, and for each the one before it.
        self._latest: dict[int, int] = {}
        self._before = array("q")

    def advance(self, end: int, *, is_apart: bool = False) -> None:
        """Enter the tokens up to `end`, and every n-gram among those that this call enters or that goes on into them.

        A text that searches itself leaves its last token out: nothing follows it. `is_apart`: as a text of its
        own, so no n-gram begins in the tokens before it.
        """
        tokens, n, latest = self._tokens, self._min_ngram, self._latest
        before, dropped = self._before, self._num_dropped
        begin = len(before)
        first = begin if is_apart else 0
        for place in range(begin, end):
            if place + 1 - n < first:
                before.append(-1)
                continue
            key = hash(tuple(tokens[place + 1 - n : place + 1]))
            before.append(latest.get(key, -1))
            latest[key] = place + dropped

    def drop(self, num_tokens: int) -> None:
        """Forget the first `num_tokens`, whole texts of their own; the owner removes them from the tokens next."""
        tokens, n, latest = self._tokens, self._min_ngram, self._latest
        for place in range(n - 1, num_tokens):
            key = hash(tuple(tokens[place + 1 - n : place + 1]))
            if latest.get(key) == place + self._num_dropped:
                del latest[key]
        del self._before[:num_tokens]
        self._num_dropped += num_tokens

    def matches(self, suffix: Sequence[int]) -> list[tuple[int, int]]:
        """Earlier occurrences of the end of `suffix`, latest first: (length, index of the token right after it).

        Lengths count up to the longest n-gram; a place that does not agree over the shortest one is no occurrence.
        """
        n, longest = self._min_ngram, min(self._max_ngram, len(suffix))
        occurrences: list[tuple[int, int]] = []
        if n > longest:
            return occurrences
        tokens, before, dropped = self._tokens, self._before, self._num_dropped
        whole = suffix[-longest:]
        wanted = whole[::-1]
        # As the tokens are held, so that the longest matches, of which a text that repeats itself has many, cost one
        # comparison.
        whole = array(tokens.typecode, whole) if isinstance(tokens, array) else whole
        place = self._latest.get(hash(tuple(wanted[n - 1 :: -1])), -1) - dropped
        for _ in range(MAX_OCCURRENCES):
            if place < 0:
                break
            length, following = 0, place + 1
            first = following - longest
            if first >= 0 and tokens[first] == wanted[-1] and tokens[first:following] == whole:
                length = longest
            else:
                for token in wanted:
                    if length > place or tokens[place - length] != token:
                        break
                    length += 1
            if length >= n:
                occurrences.append((length, following))
            place = before[place] - dropped
        return occurrences
