"""Small heads that draft from the state after the target's last norm: they read no text and keep no cache.

Medusa (Cai et al. 2024, arXiv 2401.10774): head i guesses the token i places after the pending one from the state
alone. Sequential heads, after Hydra (Ankner et al. 2024, arXiv 2402.05109) and ReDrafter (Zhang et al. 2024, arXiv
2403.09919): one small network takes the state and the embedding of the next token to the state after that token, and
is applied again to what it drafts, so each guess knows those before it.

A round begins with the state at the last position that the target has read. The tokens after it are known (the pending
one; under a constraint also forced ones), and are gone through first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from alphaloop.deciding.goodput import DrafterState
from alphaloop.errors import UnsupportedModel
from engine.drafters.draft_rows import DraftRow, choose
from engine.drafters.draft_vocabulary import DraftTokens
from engine.drafters.head_files import HeadFacts, refuse_left, take
from engine.network.fused import operations_for
from engine.network.operations import Linear
from engine.proposal import NOTHING, Ask, Drafter, Proposal
from engine.states import FINAL


class DraftingHeads(Protocol):
    """What drafts, over the states of several sequences."""

    num_heads: int | None  #: places after the pending token; None: any number
    token_ids: Tensor | None  #: [columns of the logits]: their tokens; None: column i is token i
    num_columns: int

    def after(self, x: Tensor, tokens: Sequence[int]) -> Tensor:
        """States [rows, hidden] after one more token of each row."""

    def logits(self, x: Tensor, place: int) -> Tensor:
        """[rows, columns]: for the token `place` places after the pending one, from 0."""


class SequentialHeads:
    """s' = s + W₂ silu(W₁ [norm(s); norm(e)]) with e the token's embedding; logits = H s'."""

    num_heads: int | None = None

    def __init__(self, tensors: dict[str, Tensor], embeddings: Tensor) -> None:
        """Takes the tensors. Raises UnsupportedModel."""
        hidden = embeddings.shape[1]
        inner = take(tensors, "inner.weight")
        outer = take(tensors, "outer.weight", (hidden, len(inner)))
        head = take(tensors, "lm_head.weight")
        self.token_ids = take(tensors, "token_ids", (len(head),)) if "token_ids" in tensors else None
        refuse_left(tensors)
        if tuple(inner.shape)[1:] != (2 * hidden,) or tuple(head.shape)[1:] != (hidden,):
            raise UnsupportedModel(f"expected heads for states of {hidden} numbers, found {list(inner.shape)}")
        operations = operations_for(embeddings)
        self._inner, self._outer = operations.linear(inner, None), operations.linear(outer, None)
        self._head = operations.linear(head, None)
        self.num_columns = self._head.num_outputs
        self._embeddings = embeddings

    def after(self, x: Tensor, tokens: Sequence[int]) -> Tensor:
        """As the class says."""
        embedded = self._embeddings[torch.tensor(tokens, dtype=torch.long, device=x.device)]
        return self._outer(functional.silu(self._inner(normed_inputs(x, embedded))), x)

    def logits(self, x: Tensor, place: int) -> Tensor:
        """The same head at every place."""
        return self._head(x)


def normed_inputs(x: Tensor, embedded: Tensor) -> Tensor:
    """[rows, 2 * hidden]: both by their root mean square, side by side."""
    shape = x.shape[-1:]
    return torch.cat((functional.rms_norm(x, shape), functional.rms_norm(embedded, shape)), dim=-1)


class MedusaHeads:
    """Each head: residual blocks x + silu(W x + b), then logits by a head of its own or by one that all share."""

    def __init__(self, facts: HeadFacts, tensors: dict[str, Tensor], hidden_size: int) -> None:
        """Takes the tensors, named as vLLM's or as FasterDecoding's. Raises UnsupportedModel.

        A bias is used wherever the file has one: FasterDecoding's heads have biases that their config does not name.
        """
        tensors = {_plain_name(name): tensor for name, tensor in tensors.items()}
        num_heads = facts.num_heads or len({name.split(".")[1] for name in tensors if name.startswith("blocks.")})
        self.num_heads: int | None = num_heads
        self.token_ids = tensors.pop("token_map", None)
        if not num_heads:
            raise UnsupportedModel(f"{facts.source}: expected at least one head of Medusa")
        shared = tensors.pop("lm_head.weight", None)
        if shared is None and facts.config.get("original_lm_head"):
            shared = take(tensors, "lm_heads.0.weight")
        operations = operations_for(next(iter(tensors.values())))
        self._blocks: list[list[Linear]] = []
        self._heads: list[Linear] = []
        for head in range(num_heads):
            blocks: list[Linear] = []
            while f"blocks.{head}.layers.{len(blocks)}.weight" in tensors:
                name = f"blocks.{head}.layers.{len(blocks)}"
                weight = take(tensors, f"{name}.weight", (hidden_size, hidden_size))
                blocks.append(operations.linear(weight, tensors.pop(f"{name}.bias", None)))
            own = take(tensors, f"lm_heads.{head}.weight") if shared is None else shared
            named = facts.config.get("medusa_num_layers") or facts.config.get("num_hidden_layers") or len(blocks)
            if len(blocks) != named:
                raise UnsupportedModel(f"expected {named} blocks in head {head}, found {len(blocks)}")
            if self.token_ids is not None and len(own) > len(self.token_ids):
                own = own[self.token_ids]
            self._blocks.append(blocks)
            if shared is None or not self._heads:
                self._heads.append(operations.linear(own.contiguous(), None))
        refuse_left(tensors)
        self.num_columns = self._heads[0].num_outputs

    def after(self, x: Tensor, tokens: Sequence[int]) -> Tensor:
        """The same state: the heads do not look at what is drafted."""
        return x

    def logits(self, x: Tensor, place: int) -> Tensor:
        """By the head of that place."""
        for block in self._blocks[place]:
            x = x + functional.silu(block(x))
        return self._heads[min(place, len(self._heads) - 1)](x)


def _plain_name(name: str) -> str:
    """As vLLM names a tensor. FasterDecoding: `0.0.linear.weight` is a block of head 0, `0.1.weight` its last layer."""
    for prefix in ("medusa_heads.", "medusa_head."):
        name = name.removeprefix(prefix)
    parts = name.split(".")
    if parts[0].isdigit() and parts[2:3] == ["linear"]:
        return f"blocks.{parts[0]}.layers.{parts[1]}.{parts[3]}"
    if parts[0].isdigit():
        return f"lm_heads.{parts[0]}.{parts[-1]}"
    return name


@dataclass(slots=True)
class _Row(DraftRow):
    _: KW_ONLY
    x: Tensor  #: [1, hidden]: the state at the last position that was read, then after what is known
    known: Sequence[int]  #: tokens of the text after that state

    @property
    def place(self) -> int:
        """Place of the next token to be drafted, from 0 after the pending one as the state sees it."""
        return len(self.known) - 1 + len(self.tokens)


@dataclass(eq=False)
class HeadsDrafter(Drafter):
    """Drafts with heads. Nothing is proposed for a text without a state yet."""

    state: DrafterState
    heads: DraftingHeads
    tokens: DraftTokens
    _: KW_ONLY
    hidden_size: int
    dtype: torch.dtype
    heads_device: torch.device
    min_probability: float = 0.0
    num_branches: int = 1  #: tokens beside each other at most; 1: a chain

    taps = (FINAL,)

    @torch.inference_mode()
    def propose(self, asks: Sequence[Ask]) -> list[Proposal]:
        """A chain for each ask, with branches beside it for a greedy one where so configured."""
        proposals = [NOTHING] * len(asks)
        asking = [row for index, ask in enumerate(asks) if (row := self._row(index, ask)) is not None]
        for row in asking:
            for token in row.known[:-1]:
                row.x = self.heads.after(row.x, [token])
        rows, last = asking, [row.known[-1] for row in asking]
        x = torch.cat([row.x for row in rows]) if rows else torch.empty(0)
        while rows:
            x = self.heads.after(x, last)
            choose(rows, self._logits(rows, x), self.tokens, is_weighing=self.min_probability > 0)
            going = [number for number, row in enumerate(rows) if self._wants_more(row)]
            x = x if len(going) == len(rows) else x[going]
            rows = [rows[number] for number in going]
            last = [row.tokens[-1] for row in rows]
        for row in asking:
            proposals[row.index] = row.proposal()
        return proposals

    def _logits(self, rows: Sequence[_Row], x: Tensor) -> Tensor:
        places = {row.place for row in rows}
        if len(places) == 1:
            return self.heads.logits(x, places.pop())
        return torch.cat([self.heads.logits(x[number : number + 1], row.place) for number, row in enumerate(rows)])

    def _wants_more(self, row: _Row) -> bool:
        if self.heads.num_heads is not None and row.place >= self.heads.num_heads:
            return False
        return row.wants_more(self.tokens, self.min_probability)

    def _row(self, index: int, ask: Ask) -> _Row | None:
        states = ask.states
        if states is not None and FINAL in states.by_tap:
            x, end = states.by_tap[FINAL].to(self.heads_device), states.end
        elif ask.is_timed:
            x, end = torch.zeros((1, self.hidden_size), dtype=self.dtype, device=self.heads_device), len(ask.text) - 1
        else:
            return None
        known = ask.text[end:]
        num_wanted = min(ask.num_tokens, self.state.max_draft_tokens)
        if not known or num_wanted < 1 or (self.heads.num_heads is not None and len(known) > self.heads.num_heads):
            return None
        num_branches = self.num_branches if ask.choice.is_greedy else 1
        return _Row(index, ask, num_wanted, num_branches, x=x, known=known)
