"""What may follow a constrained text, and drafts of it.

The target's distribution of a constrained job is the model's own, cut to the tokens that the grammar allows and
renormalised, before anything is chosen from it. So is the drafter's, before it draws: a drawn token that the grammar
then refused could not be cut without a bias (docs/derivations/exactness.md). A draft that follows from the text alone
is cut before its first refused token.

A token is *forced* where the mask has no other. The library says so of the bytes that must follow: of the tokens that
begin with them its masks allow the one that the tokenizer writes there. Forced tokens become text without a pass and
without a trial; the next pass reads them. Bytes that must follow although their tokens are not settled yet are drafted,
by the proposer GRAMMAR.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Final

import numpy as np
import torch
from llguidance import LLMatcher
from numpy.typing import NDArray
from torch import Tensor

from alphaloop.errors import GrammarConflict
from alphaloop.messages import Constraint
from engine.grammars import Grammars
from engine.proposal import FORCED, Proposal

#: The proposer of tokens that follow from the grammar but are not the only ones allowed.
GRAMMAR: Final = "grammar"

#: Tokens after the text.
Tokens = tuple[int, ...]
Words = NDArray[np.uint32]


class ConstrainedText:
    """One text under its constraint: a matcher that has read what was put out, and masks after the text and drafts.

    A greedy text asks about the likeliest token alone, which is less work than a mask, and for a mask only where that
    is refused. What is drawn needs all masks; those that `begin_masks` began are computed on other threads, and
    whatever is asked meanwhile waits for them.
    """

    def __init__(self, grammars: Grammars, matcher: LLMatcher) -> None:
        self._grammars = grammars
        self._matcher = matcher
        #: Drafts that the matcher has read after the text.
        self._drafts: Tokens = ()
        self._masks: dict[Tokens, Words] = {}
        self._computing: Future[None] | None = None
        #: Drafts after which the grammar and the job's other fields leave no token.
        self._dead: set[Tokens] = set()
        #: Whether forced tokens become text without a pass. Not where more than the grammar decides on a token.
        self.takes_forced = grammars.takes_forced

    @classmethod
    def of(cls, grammars: Grammars, constraint: Constraint) -> ConstrainedText:
        """A text without a token yet. Raises InvalidField for a constraint that cannot be compiled."""
        return cls(grammars, grammars.compiled(constraint))

    def beginning(self) -> ConstrainedText:
        """The same constraint with no token taken."""
        matcher = self._settled().deep_copy()
        matcher.reset()
        text = ConstrainedText(self._grammars, matcher)
        text.takes_forced = self.takes_forced
        return text

    @property
    def is_complete(self) -> bool:
        """Whether the text matches, and nothing more can be written."""
        matcher = self._settled()
        return matcher.is_stopped() and not matcher.is_error()

    @property
    def may_end(self) -> bool:
        """Whether the text matches as it stands. Not after a grammar became too complex: its masks hold ends."""
        matcher = self._settled()
        return matcher.is_accepting() and not matcher.is_error()

    @property
    def forced_token(self) -> int | None:
        """The only token that may follow; None where there are several, or the end."""
        forced = self._settled().compute_ff_tokens() if self.takes_forced else ()
        return forced[0] if forced else None

    def take(self, token: int) -> None:
        """The text goes on with `token`. Raises GrammarConflict where the grammar has become too complex to go on."""
        matcher = self._settled()
        self._masks.clear()
        self._dead.clear()
        if token not in self._grammars.end_tokens and not matcher.consume_token(token):
            raise self.conflict()

    def take_beginning(self, most: int) -> list[int]:
        """Take the tokens that every text begins with, at most `most`, and never the whole text."""
        tokens: list[int] = []
        while len(tokens) < most and (token := self.forced_token) is not None:
            self.take(token)
            if self.is_complete:
                self._matcher.rollback(1)
                break
            tokens.append(token)
        return tokens

    def conflict(self) -> GrammarConflict:
        """The error of a text that cannot go on, or that has to go on where the grammar ends."""
        if self._settled().is_error():
            return GrammarConflict("expected a grammar within the limits of a step, found one that became too complex")
        return GrammarConflict()

    def is_dead_after(self, drafts: Tokens) -> bool:
        """Whether no token can follow there, as the last choice there has shown."""
        return drafts in self._dead

    # What may follow

    def begin_masks(self, paths: Iterable[Tokens]) -> list[tuple[LLMatcher, Tokens]]:
        """The matchers, and what each has to read, whose masks are those of `paths` that are not known yet."""
        missing = {path for path in map(self._before_end, paths) if path not in self._masks}
        inner = {path[:-1] for path in missing if path}
        leaves = sorted(missing - inner)
        matcher = self._settled()
        return [(matcher if len(leaves) == 1 else matcher.deep_copy(), leaf) for leaf in leaves]

    def await_masks(self, computing: Future[None], masks: Iterable[tuple[Tokens, Words]]) -> None:
        """`masks` are right when `computing` has ended."""
        self._computing = computing
        self._masks |= masks

    def restrict(self, scores: Tensor, paths: Sequence[Tokens]) -> None:
        """Put -inf into `scores` [rows, columns] for what may not follow the text and each of `paths`."""
        refused = np.stack([self._bits(~self._mask(path)) for path in paths])
        scores.masked_fill_(torch.from_numpy(refused).to(scores.device), -torch.inf)

    def bury(self, scores: Tensor, paths: Sequence[Tokens]) -> None:
        """Remember where the target's restricted `scores` leave no token, so that the text ends in a conflict there.

        Such a row is made even, in place, so that it can be computed with.
        """
        for row in torch.isneginf(scores.amax(dim=-1)).nonzero().flatten().tolist():
            self._dead.add(tuple(paths[row]))
            scores[row] = 0.0

    def best(self, unrestricted: Sequence[int], scores: Tensor, paths: Sequence[Tokens]) -> list[int]:
        """The likeliest token that may follow each of `paths`. A path comes after its own beginnings.

        `unrestricted` are the likeliest of `scores` [rows, columns]. They stay where a draft before them is not the
        likeliest itself: no text goes on there.
        """
        best = list(unrestricted)
        chosen: dict[Tokens, int] = {}
        for row, path in enumerate(paths):
            if path and (chosen.get(path[:-1]) != path[-1] or path[-1] in self._grammars.end_tokens):
                continue
            if not self._allows(path, best[row]):
                cut = scores[row : row + 1].to(torch.promote_types(scores.dtype, torch.float32), copy=True)
                self.restrict(cut, [path])
                self.bury(cut, [path])
                best[row] = int(cut.argmax())
            chosen[path] = best[row]
        return best

    def _allows(self, path: Tokens, token: int) -> bool:
        """What the mask after `path` says of a token, without the mask."""
        forced = self._after(path).compute_ff_tokens()
        return self._permits(token, forced[0] if forced else None)

    def _permits(self, token: int, only: int | None) -> bool:
        """Whether `token` may stand where the matcher is; `only`: the token that is forced there."""
        if token in self._grammars.end_tokens:
            return self._matcher.is_accepting()
        # The library takes any tokens for the bytes that must follow; its masks allow one.
        return token == only if only is not None else self._matcher.validate_tokens([token]) == 1

    def _mask(self, path: Tokens) -> Words:
        path = self._before_end(path)
        self._await()
        if path not in self._masks:
            self._masks[path] = self._computed(path)
        return self._masks[path]

    def _computed(self, path: Tokens) -> Words:
        return np.frombuffer(self._after(path).compute_bitmask(), dtype=np.uint32)

    def _after(self, path: Tokens) -> LLMatcher:
        """The matcher after the text and the drafts of `path`, which the masks allow."""
        self._await()
        if path != self._drafts:
            pairs = enumerate(zip(path, self._drafts, strict=False))
            num_alike = next((n for n, (token, draft) in pairs if token != draft), min(len(path), len(self._drafts)))
            self._matcher.rollback(len(self._drafts) - num_alike)
            self._matcher.consume_tokens(list(path[num_alike:]))
            self._drafts = path
        return self._matcher

    def _bits(self, words: Words) -> NDArray[np.bool_]:
        return np.unpackbits(words.view(np.uint8), bitorder="little")[: self._grammars.num_columns].view(np.bool_)

    def _before_end(self, path: Sequence[int]) -> Tokens:
        # Nothing follows the end of a text: any mask will do.
        return tuple(path[:-1] if path and path[-1] in self._grammars.end_tokens else path)

    def _settled(self) -> LLMatcher:
        """The matcher after the text."""
        return self._after(())

    def _await(self) -> None:
        if self._computing is not None:
            self._computing.result()
            self._computing = None

    # What a drafter says

    def fit(self, proposal: Proposal, most: int, drafter: str) -> Proposal:
        """The `proposal` of `drafter` as the grammar has it, with at most `most` tokens.

        Cut before the first refused token, which never happens to a drawn draft; of a tree every refused token goes,
        with what hangs on it. A chain with room left goes on with what the grammar says must follow.
        """
        matcher = self._settled()
        if matcher.is_error():
            return replace(proposal, tokens=(), parents=None, q=None, together=(), proposers=())
        if proposal.parents is not None:
            return self._fit_tree(proposal, drafter)
        return self._fit_chain(proposal, most, drafter)

    def _fit_chain(self, proposal: Proposal, most: int, drafter: str) -> Proposal:
        drafted = self._read(proposal.tokens[:most])
        tokens, num_drafted = drafted, len(drafted)
        if not self._has_end(tokens):
            tokens += self._read_forced(most - len(tokens))
        num_own = len(tokens)
        if not self._has_end(tokens):
            tokens += self._read(self._must_follow()[: most - len(tokens)])
        self._matcher.rollback(len(tokens) - self._has_end(tokens))
        q, proposers = proposal.q, proposal.proposers or (drafter,) * len(proposal.tokens)
        if q is not None:
            q = q[:num_drafted].followed_by([token for token, _ in tokens[num_drafted:]])
        return replace(
            proposal,
            tokens=tuple(token for token, _ in tokens),
            q=q,
            together=proposal.together[:num_drafted],
            proposers=_named(
                [
                    FORCED if is_forced else GRAMMAR if place >= num_own else proposers[place]
                    for place, (_, is_forced) in enumerate(tokens)
                ],
                drafter,
            ),
        )

    def _read(self, tokens: Sequence[int]) -> list[tuple[int, bool]]:
        """Those up to the first that is refused or ends the text, which the matcher reads, and which are forced."""
        read: list[tuple[int, bool]] = []
        for token in tokens:
            only = self.forced_token
            if token in self._grammars.end_tokens:
                return [*read, (token, False)] if self._matcher.is_accepting() else read
            if only not in (None, token) or not self._matcher.try_consume_tokens([token]):
                break
            read.append((token, only is not None))
        return read

    def _read_forced(self, most: int) -> list[tuple[int, bool]]:
        forced: list[tuple[int, bool]] = []
        while len(forced) < most and (token := self.forced_token) is not None:
            forced += self._read([token])
        return forced

    def _has_end(self, tokens: Sequence[tuple[int, bool]]) -> bool:
        return bool(tokens) and tokens[-1][0] in self._grammars.end_tokens

    def _must_follow(self) -> list[int]:
        """Tokens of the bytes that must follow, where other tokens could write them too."""
        follows = self._matcher.compute_ff_bytes() if self.takes_forced else b""
        return self._grammars.tokens.tokenize_bytes(follows) if follows else []

    def _fit_tree(self, proposal: Proposal, drafter: str) -> Proposal:
        kept: dict[int, int] = {-1: -1}
        tokens, parents, proposers = list[int](), list[int](), list[str]()
        own_proposers = proposal.proposers or (drafter,) * len(proposal.tokens)
        matcher, paths = self._matcher, proposal.paths
        for index, (token, parent) in enumerate(zip(proposal.tokens, proposal.parents or (), strict=True)):
            before = paths[parent + 1]
            if parent not in kept or (before and before[-1] in self._grammars.end_tokens):
                continue
            matcher.consume_tokens(list(before))
            only = self.forced_token
            is_allowed = self._permits(token, only)
            matcher.rollback(len(before))
            if is_allowed:
                kept[index] = len(tokens)
                tokens.append(token)
                parents.append(kept[parent])
                proposers.append(FORCED if only is not None else own_proposers[index])
        if not tokens:
            return replace(proposal, tokens=(), parents=None, q=None, proposers=())
        return replace(proposal, tokens=tuple(tokens), parents=tuple(parents), proposers=_named(proposers, drafter))


def _named(proposers: Sequence[str], drafter: str) -> tuple[str, ...]:
    """Nothing, where all are the drafter's own."""
    return tuple(proposers) if any(name != drafter for name in proposers) else ()


def compute_masks(grammars: Grammars, wanted: Sequence[tuple[ConstrainedText, Sequence[Tokens]]]) -> None:
    """Begin to compute the masks after each text and its drafts on the library's threads."""
    to_compute = [(text, text.begin_masks(paths)) for text, paths in wanted]
    num_rows = sum(1 + len(leaf) for _, chains in to_compute for _, leaf in chains)
    if not num_rows:
        return
    masks = np.full((num_rows, -(-grammars.tokens.vocab_size // 32)), 0xFFFFFFFF, dtype=np.uint32)
    chains: list[tuple[LLMatcher, int, list[int]]] = []
    rows_of: list[tuple[ConstrainedText, dict[Tokens, Words]]] = []
    begin = 0
    for text, of_text in to_compute:
        rows: dict[Tokens, Words] = {}
        for matcher, leaf in of_text:
            chains.append((matcher, begin, list(leaf)))
            rows |= {leaf[:num]: masks[begin + num] for num in range(len(leaf) + 1)}
            begin += 1 + len(leaf)
        rows_of.append((text, rows))
    row_bytes = masks.shape[1] * masks.itemsize

    def compute() -> None:
        where = (masks.ctypes.data, row_bytes, num_rows)
        if bare := [(matcher, row) for matcher, row, leaf in chains if not leaf]:
            grammars.executor.unsafe_compute_mask_ptr(bare, *where)
        if drafted := [chain for chain in chains if chain[2]]:
            grammars.executor.unsafe_compute_mask_ptr_with_draft_token(drafted, *where)

    computing = grammars.thread.submit(compute)
    for text, rows in rows_of:
        text.await_masks(computing, rows.items())
