"""A draft token by token, for several sequences at once: each token chosen as its job chooses, from a draft's logits.

A draft may end early, at a token that ends the text or where its probability has fallen. Either follows from the tokens
that are proposed, never from one that is held back, so every exact acceptance rule stays exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from alphaloop.errors import DecodeFailed
from alphaloop.settings.models import NetworkDrafterSettings
from engine.distribution import draw_rows
from engine.drafters.draft_vocabulary import DraftTokens, likeliest
from engine.proposal import Ask, DraftDistributions, Proposal


def tried_places(settings: NetworkDrafterSettings, *, siblings: str = "") -> str:
    """What of the settings decides which places of a draft are tried, as a part of the drafter's revision.

    `siblings`: a mark of how sampled jobs get siblings, where they get any.
    """
    gate = f"-p{settings.min_probability:g}" if settings.min_probability else ""
    return f"{gate}-b{settings.num_branches}{siblings}" if settings.num_branches > 1 else gate


@dataclass(slots=True)
class DraftRow:
    """What is drafted for one sequence in a round."""

    index: int  #: of its ask
    ask: Ask
    num_wanted: int
    num_branches: int = 1
    num_read: int = 0  #: tokens of its text, beyond those that a round leaves to the next
    tokens: list[int] = field(default_factory=list)
    others: list[list[int]] = field(default_factory=list)  #: beside each token, the next likeliest ones
    q: list[tuple[Tensor, Tensor | None]] = field(default_factory=list)  #: of each token, as of its siblings
    together: list[float] = field(default_factory=list)  #: probability of its tokens through each, if it is weighed
    has_ended: bool = False  #: it has none of the tokens that may follow its own

    @property
    def depth(self) -> int:
        """Tokens of its chain, so that branches have room beside them."""
        return -(-self.num_wanted // self.num_branches)

    def wants_more(self, known: DraftTokens, min_probability: float) -> bool:
        """Whether another token is to follow."""
        if self.has_ended or len(self.tokens) >= self.depth:
            return False
        together = self.together[-1] if self.together else 1.0
        return self.ask.is_timed or not ends_draft(self.tokens[-1], together, known, min_probability)

    def weigh(self, probability: float) -> None:
        """Its last token's."""
        self.together.append(probability * (self.together[-1] if self.together else 1.0))

    def proposal(self) -> Proposal:
        """What was drafted so far; nothing, while the text is still being read."""
        if self.num_branches == 1 or not self.tokens:
            q = DraftDistributions.of_rows(self.q) if self.q else None
            return Proposal(tuple(self.tokens), q=q, together=tuple(self.together), num_read=self.num_read)
        tokens: list[int] = []
        parents: list[int] = []
        depths: list[int] = []
        room, parent = self.num_wanted - len(self.tokens), -1
        for depth, (token, others) in enumerate(zip(self.tokens, self.others, strict=True)):
            siblings = [token, *others[:room]]
            room -= len(siblings) - 1
            parents += [parent] * len(siblings)
            depths += [depth] * len(siblings)
            parent = len(tokens)
            tokens += siblings
        q = DraftDistributions.of_rows([self.q[depth] for depth in depths]) if self.q else None
        return Proposal(tuple(tokens), tuple(parents), q=q, num_read=self.num_read)


def ends_draft(token: int, together: float, known: DraftTokens, min_probability: float) -> bool:
    """Whether a draft ends with `token`; `together` is the probability of the draft up to and with it."""
    return together < min_probability or token in known.end_tokens


def choose(rows: Sequence[DraftRow], logits: Tensor, known: DraftTokens, *, is_weighing: bool) -> None:
    """Append one token to every row, chosen as its job chooses, from the draft's `logits` [rows, columns].

    A row that has none of the tokens that may follow ends. `is_weighing`: whether greedy rows need probabilities too.
    """
    plain = [n for n, row in enumerate(rows) if row.ask.choice.is_greedy and row.ask.choice.is_plain]
    if plain:
        _choose_plain(
            [rows[n] for n in plain], logits if len(plain) == len(rows) else logits[plain], known, is_weighing
        )
    others = [n for n in range(len(rows)) if n not in set(plain)]
    drawn: dict[tuple[float, int, float, float], list[tuple[DraftRow, Tensor]]] = {}
    for n, whole in zip(others, known.spread(logits[others])[:, None], strict=True):
        row, choice = rows[n], rows[n].ask.choice
        scores = choice.scores(whole, row.ask.text, [row.tokens])
        if (choice.is_barring or choice.constrained) and not bool(scores.isfinite().any()):
            row.has_ended = True  # the draft knows none of the tokens that may follow
            continue
        if not choice.is_greedy and not choice.is_reproducible:
            drawn.setdefault(choice.cut, []).append((row, scores))
            continue
        if choice.is_greedy:
            token, *beside = likeliest(scores, row.num_branches)[0].tolist()
            row.others.append(beside)
        else:
            (token,) = choice.tokens(scores, [len(row.ask.text) + len(row.tokens)])
        row.tokens.append(token)
        if is_weighing:
            p = scores.float().softmax(dim=-1) if choice.is_greedy else choice.probabilities(scores)
            row.weigh(float(p[0, token]))
    for members in drawn.values():
        scores = torch.cat([scores for _, scores in members])
        _draw_together([row for row, _ in members], scores, known.token_ids)


def _choose_plain(rows: Sequence[DraftRow], logits: Tensor, known: DraftTokens, is_weighing: bool) -> None:
    best = known.best(logits, max(row.num_branches for row in rows))
    if is_weighing:
        # Read together, because each read waits for a GPU: a float64 holds any token id exactly.
        best = torch.cat((known.best_probability(logits)[:, None].double(), best), dim=1)
    for row, numbers in zip(rows, best.tolist(), strict=True):
        if is_weighing:
            row.weigh(numbers.pop(0))
        token, *beside = map(int, numbers)
        row.tokens.append(token)
        row.others.append(beside)


def _draw_together(rows: Sequence[DraftRow], scores: Tensor, proposable: Tensor | None) -> None:
    """Draw the next token of rows whose distributions are cut alike, and keep what each was drawn from.

    Its siblings are drawn too, without replacement. `proposable`: the tokens of a head that was cut.
    """
    q, ids = rows[0].ask.choice.candidates(scores)
    if ids is None and proposable is not None:
        q, ids = q[:, proposable], proposable.expand(len(q), -1)
    left, num = q, rows[0].num_branches
    uniforms = torch.stack([row.ask.choice.uniforms(num, q.device) for row in rows])
    pairs: list[Tensor] = []
    for place in range(num):
        # Where nothing is left to be drawn any token will do: it has no probability.
        columns = draw_rows(torch.where(left.sum(dim=1, keepdim=True) > 0, left, q), uniforms[:, place, None])
        tokens = columns if ids is None else ids.gather(1, columns)
        pairs += [tokens.double(), left.gather(1, columns)]
        left = left.scatter(1, columns, 0.0)
    drawn = torch.cat(pairs, dim=1).tolist()  # together, because each read waits for a GPU
    if not all(math.isfinite(p) for of_row in drawn for p in of_row[1::2]):
        raise DecodeFailed("the draft returned logits that are not finite")
    for number, (row, of_row) in enumerate(zip(rows, drawn, strict=True)):
        token, *beside = (int(token) for token, p in zip(of_row[::2], of_row[1::2], strict=True) if p > 0)
        row.tokens.append(token)
        row.others.append(beside)
        row.q.append((q[number], None if ids is None else ids[number]))
        row.weigh(of_row[1])
