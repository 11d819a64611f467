"""A smaller model with the target's vocabulary drafts, all sequences together, in slots of its own.

Leviathan et al. 2023, Chen et al. 2023. A sequence's slot holds the text as far as the draft has read it and the drafts
it read behind it; of those, the ones that became text stay. So a round begins by reading one or two tokens, and every
further draft is a pass of width 1 for all sequences that still want one.

A draft may end early, at a token that ends the text or where its probability has fallen. Either follows from the tokens
that are proposed, never from one that is held back, so every exact acceptance rule stays exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from alphaloop.deciding.goodput import DrafterState
from alphaloop.errors import DecodeFailed
from worker.decoding.drafters.draft_rows import Held, Row
from worker.decoding.drafters.draft_tokens import DraftTokens, likeliest
from worker.decoding.drafters.excerpt import excerpt
from worker.decoding.network.passes import Read
from worker.decoding.prefixes import copy_beginnings
from worker.decoding.proposal import NOTHING, Ask, Proposal
from worker.decoding.shared_weights import SharedWeightDrafter
from worker.decoding.verification.chain import draw_rows
from worker.engine import Sampling

if TYPE_CHECKING:
    from worker.decoding.network.language_model import LanguageModel

#: Tokens of one text that a pass reads at most.
CHUNK: Final = 512
#: Tokens that a round leaves for the next one to read: the last draft, where all were accepted, and the target's own.
_USUALLY_READ: Final = 2


class DraftModelDrafter:
    """`worker.decoding.proposal.Drafter` over a language model. `state.revision` is that of its weights and dtype."""

    def __init__(
        self,
        state: DrafterState,
        model: LanguageModel,
        tokens: DraftTokens,
        *,
        num_slots: int,
        context_length: int,
        min_probability: float = 0.0,
        num_branches: int = 1,
        shared_weights: Sequence[SharedWeightDrafter] = (),
    ) -> None:
        self.state = state
        self.model = model
        self._tokens = tokens
        self.context_length = context_length  #: tokens that it can hold of a text; behind them it proposes nothing
        self.min_probability = min_probability
        self.shared_weights = tuple(shared_weights)  #: drafters with the same model, for which its rounds count too
        # Probabilities are needed for a gate, its own or that of a shared-weight drafter.
        self._is_weighing = min_probability > 0 or any(one.min_probability for one in shared_weights)
        self.num_branches = num_branches  #: tokens beside each other at most; 1: a chain
        self._cache = model.new_cache(num_slots)
        self._held: dict[str, Held] = {}

    @property
    def bytes_per_token(self) -> int:
        """Keys and values of one token of a text."""
        return self.model.kv_shape.bytes_per_token

    @property
    def device(self) -> torch.device:
        """Where it computes, and where the distributions of its proposals lie."""
        return self.model.device

    @property
    def num_cache_bytes(self) -> int:
        """Memory that its keys and values hold now."""
        return self._cache.num_bytes

    def open(self, job_id: str, text: Sequence[int], sampling: Sampling, task: str) -> None:
        """Take a slot for a sequence; its text is read at its next proposal."""
        self._held[job_id] = Held(self._cache.acquire(), excerpt(text, self.state.max_prompt_tokens))

    def close(self, job_id: str) -> None:
        """A sequence has ended; without any left the cache gives its memory back."""
        if (held := self._held.pop(job_id, None)) is not None:
            self._cache.release(held.slot)

    def clear(self) -> None:
        """Forget every sequence, and drop the memory."""
        self._held = {}
        self._cache.clear()

    @torch.inference_mode()
    def propose(self, asks: Sequence[Ask]) -> list[Proposal]:
        """A chain for each ask, with branches beside it for a greedy one where so configured.

        It is shorter behind a token that ends the text, and where the draft's context ends. Nothing is proposed for a
        text with a token that the draft has no embedding for: on a GPU, reading it would end the process.
        Where a pass fails, what was read before it stays counted, and the next call goes on from there.
        """
        proposals = [NOTHING] * len(asks)
        asking = [row for index, ask in enumerate(asks) if (row := self._row(index, ask))]
        rows, logits = self._read_texts(asking)
        while rows:
            self._draft(rows, logits)
            rows = [row for row in rows if self._wants_more(row)]
            logits = self._read_drafts(rows)
        for row in asking:
            proposals[row.index] = row.proposal()
        return proposals

    def ends_draft(self, token: int, together: float) -> bool:
        """Whether a draft ends behind `token`; `together` is the probability of the draft up to and with it."""
        return together < self.min_probability or token in self._tokens.end_tokens

    @torch.inference_mode()
    def choices(self, prompt: Sequence[int], output: Sequence[int]) -> list[tuple[int, float]]:
        """Its greedy choice, and the choice's probability, where each token of `output` stands: one pass over the text.

        The prompt is read as when the draft decodes: of a long one an excerpt. Where its context ends, the choices end.
        Raises DecodeFailed for a text with a token that it has no embedding for.
        """
        whole = list(prompt)
        text = excerpt(whole, self.state.max_prompt_tokens)
        first = len(text) - 1
        whole += output[:-1]
        read = text[: self.context_length]
        if (highest := max(read)) >= self.model.num_rows:
            raise DecodeFailed(f"expected tokens below {self.model.num_rows}, the rows of the draft, found {highest}")
        slot = self._cache.acquire()
        found: list[tuple[int, float]] = []
        try:
            for begin in range(0, len(read), CHUNK):
                tokens = read[begin : begin + CHUNK]
                num_wanted = min(len(tokens), begin + len(tokens) - first)
                logits = self._read([Read(slot, tokens, num_logits=max(num_wanted, 1))])
                if num_wanted > 0:
                    best = self._tokens.best(logits, 1)[:, 0].tolist()
                    found += zip(best, self._tokens.best_probability(logits).tolist(), strict=True)
        finally:
            self._cache.release(slot)
        return found

    def num_left(self, num_prompt: int, num_output: int) -> int:
        """Tokens that it can still draft behind a text of so many tokens, of a long prompt behind an excerpt."""
        return self._num_left(int(self.state.num_read(num_prompt)) + num_output)

    def _num_left(self, num_held: int) -> int:
        # The last draft is never read, so the context has room for one more than it has positions.
        return self.context_length + 1 - num_held

    def _row(self, index: int, ask: Ask) -> Row | None:
        held = self._held[ask.job_id]
        if not held.is_below(self.model.num_rows):
            return None
        num_wanted = min(ask.num_tokens, self.state.max_draft_tokens, self._num_left(len(held.text)))
        num_branches = self.num_branches if ask.choice.is_greedy else 1
        return Row(index, ask, held, num_wanted, num_branches) if num_wanted > 0 else None

    def _read_texts(self, rows: list[Row]) -> tuple[list[Row], Tensor]:
        """Read what the slots lack of their texts: the rows that have all of it, and the logits behind them.

        One chunk each, so that no text waits for a long prompt. If all are behind, chunks follow until one is read.
        """
        for row in rows:
            row.held.keep()
            self._cache.lengths[row.held.slot] = row.held.num_text
        self._cache.close_gaps(self._held.values())
        helds = [row.held for row in rows]
        copy_beginnings(self._cache, [held for held in helds if not held.num_text], helds)
        for held in helds:
            held.num_text = self._cache.lengths[held.slot]
        ready: list[int] = []
        logits = torch.empty(0)
        while rows and not ready:
            reads = [Read(row.held.slot, _next_tokens(row.held)) for row in rows]
            logits = self._read(reads)
            for row, read in zip(rows, reads, strict=True):
                row.held.num_text += len(read.token_ids)
                if len(read.token_ids) > _USUALLY_READ:
                    row.num_read += len(read.token_ids)
            ready = [number for number, row in enumerate(rows) if row.held.num_text == len(row.held.text)]
        return [rows[number] for number in ready], logits if len(ready) == len(rows) else logits[ready]

    def _read_drafts(self, rows: list[Row]) -> Tensor:
        logits = self._read([Read(row.held.slot, row.tokens[-1:]) for row in rows])
        for row in rows:
            row.held.drafts.append(row.tokens[-1])
        return logits

    def _read(self, reads: Sequence[Read]) -> Tensor:
        if not reads:
            return torch.empty(0)  # no row wants another draft
        logits: Tensor = self.model.read(self._cache, reads)
        for read in reads:
            self._cache.lengths[read.slot] += len(read.token_ids)
        return logits

    def _wants_more(self, row: Row) -> bool:
        if len(row.tokens) >= row.depth:
            return False
        return row.ask.is_timed or not self.ends_draft(row.tokens[-1], row.together[-1] if row.together else 1.0)

    def _draft(self, rows: Sequence[Row], logits: Tensor) -> None:
        """Append one token to every row, chosen as its job chooses, from `logits` [rows, columns]."""
        plain = [n for n, row in enumerate(rows) if row.ask.choice.is_greedy and row.ask.choice.is_plain]
        if plain:
            self._draft_plain([rows[n] for n in plain], logits if len(plain) == len(rows) else logits[plain])
        others = [n for n in range(len(rows)) if n not in set(plain)]
        drawn: dict[tuple[float, int, float, float], list[tuple[Row, Tensor]]] = {}
        for n, whole in zip(others, self._tokens.spread(logits[others])[:, None], strict=True):
            row, choice = rows[n], rows[n].ask.choice
            scores = choice.scores_behind(whole, row.ask.text, [row.tokens])
            if not choice.is_greedy and not choice.is_reproducible:
                drawn.setdefault(choice.cut, []).append((row, scores))
                continue
            if choice.is_greedy:
                token, *beside = likeliest(scores, row.num_branches)[0].tolist()
                row.others.append(beside)
            else:
                token = int(choice.tokens(scores, [len(row.ask.text) + len(row.tokens)]))
            row.tokens.append(token)
            if self._is_weighing:
                p = scores.float().softmax(dim=-1) if choice.is_greedy else choice.probabilities(scores)
                row.weigh(float(p[0, token]))
        for members in drawn.values():
            _draw_together([row for row, _ in members], torch.cat([scores for _, scores in members]))

    def _draft_plain(self, rows: Sequence[Row], logits: Tensor) -> None:
        found = self._tokens.best(logits, self.num_branches)
        if self._is_weighing:
            # Read together, because each read waits for a GPU: a float64 holds any token id exactly.
            found = torch.cat((self._tokens.best_probability(logits)[:, None].double(), found), dim=1)
        for row, numbers in zip(rows, found.tolist(), strict=True):
            if self._is_weighing:
                row.weigh(numbers.pop(0))
            token, *beside = map(int, numbers)
            row.tokens.append(token)
            row.others.append(beside)


def _next_tokens(held: Held) -> list[int]:
    return list(held.text[held.num_text : held.num_text + CHUNK])


def _draw_together(rows: Sequence[Row], scores: Tensor) -> None:
    """Draw the next token of rows whose distributions are cut alike, and keep what each was drawn from."""
    q = rows[0].ask.choice.probabilities(scores)
    uniforms = torch.cat([row.ask.choice.uniforms(1, q.device) for row in rows])
    tokens = draw_rows(q, uniforms)
    of_tokens = q.gather(1, tokens[:, None]).squeeze(1)
    drawn = torch.stack((tokens.double(), of_tokens), dim=1).tolist()  # together, because each read waits for a GPU
    if not all(math.isfinite(p) for _, p in drawn):
        raise DecodeFailed("the draft returned logits that are not finite")
    for row, own, (token, p) in zip(rows, q, drawn, strict=True):
        row.tokens.append(int(token))
        row.q.append(own)
        row.weigh(p)
