"""EAGLE-3: one decoder layer drafts from the target's states of three layers (Li et al. 2025, arXiv 2503.01840).

The layer reads pairs: the state of a position and the embedding of the token that follows there. The text's states are
the target's, three layers side by side through one linear layer; the drafts' states are its own outputs. Its keys and
values lie in slots, one position a pair; those that it wrote while drafting are written anew once the target's
states of the accepted tokens are there, as in vLLM.

States exist only of positions that the target read while the sequence had this drafter. Positions whose keys and values
were copied from another slot, or that were read before, have none: there the drafter reads from the first position with
a state on, so its text is an excerpt and it guesses worse, never the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field, replace
from typing import Any, Final

import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

from alphaloop.deciding.goodput import DrafterState
from alphaloop.engine import Sampling
from alphaloop.errors import UnsupportedModel
from engine.drafters.draft_rows import DraftRow, choose
from engine.drafters.draft_vocabulary import DraftTokens
from engine.drafters.head_files import HeadFacts, refuse_left, take
from engine.network.fused import Layer, Norm, operations_for, rotations
from engine.network.kv_layout import KvShape
from engine.network.operations import ACTIVATIONS
from engine.network.passes import Read, plan_pass
from engine.network.slots import SlotCache
from engine.proposal import NOTHING, Ask, Drafter, Proposal

#: Pairs of one text that a pass reads at most.
CHUNK: Final = 512
#: Pairs that a round leaves for the next one to read: those of the accepted tokens, and of the target's own.
_USUALLY_READ: Final = 8
_KIND: Final = "full_attention"


class Eagle3Network:
    """The layer with its head, over slots of its own."""

    def __init__(
        self, facts: HeadFacts, tensors: dict[str, Tensor], embeddings: Tensor, *, num_taps: int, num_positions: int
    ) -> None:
        """Takes the tensors. `embeddings`: the target's, for files without any. Raises UnsupportedModel."""
        tensors = {_plain_name(name): tensor for name, tensor in tensors.items()}
        config = _layer_config(facts)
        hidden = config.hidden_size
        self.dtype, self.device, self.num_positions = embeddings.dtype, embeddings.device, num_positions
        self.hidden_size = hidden
        target_size = facts.hidden_size or hidden
        operations = self._operations = operations_for(embeddings)
        self._fc = operations.linear(take(tensors, "fc.weight", (hidden, num_taps * target_size)), None)
        self._embeddings = tensors.pop("embed_tokens.weight", embeddings)
        self.num_rows = len(self._embeddings)  #: tokens that can be read
        head = take(tensors, "lm_head.weight")
        self._head = operations.linear(head, None)
        tensors.pop("t2d", None)  # says the same as d2t
        offsets = tensors.pop("d2t", None)
        # Offsets: draft token i is token i + d2t[i] of the target.
        self.token_ids = None if offsets is None else offsets.long() + torch.arange(len(head), device=self.device)
        self.num_columns = len(head)
        if tuple(self._embeddings.shape)[1:] != (hidden,) or (offsets is not None and len(offsets) != len(head)):
            raise UnsupportedModel(f"{facts.source}: expected embeddings of {hidden} numbers, and a d2t as the head")
        layer = _layer(config, tensors, self.dtype, self.device)
        self._layer = Layer(layer, _KIND, config.hidden_act, operations)
        self._state_norm = Norm(_norm(config, take(tensors, "hidden_norm.weight", (hidden,))), operations)
        self._norm = Norm(_norm(config, take(tensors, "norm.weight", (hidden,))), operations)
        refuse_left(tensors)
        self._is_normed_first = facts.norm_before_residual
        rotary = LlamaRotaryEmbedding(config).to(self.device)
        self._rotations = {_KIND: rotations(rotary, self._embeddings, num_positions)}
        shape = replace(KvShape.of(config, self.dtype), num_layers=1)
        self.kv_shape = replace(shape, is_paired=operations.holds_pairs(shape.head_dim))

    def new_cache(self, num_slots: int) -> SlotCache:
        """An empty cache."""
        return SlotCache(self.kv_shape, num_slots, self.device, most_positions=self.num_positions)

    def mixed(self, states: Tensor) -> Tensor:
        """[positions, taps * hidden] of the target → [positions, hidden] as the layer reads them."""
        return self._fc(states.to(self.device, self.dtype))

    def read(self, cache: SlotCache, reads: Sequence[Read], states: Tensor) -> tuple[Tensor, Tensor]:
        """One pass: logits [reads, columns] and states [reads, hidden] after the last token of each read.

        `states` [tokens, hidden]: in the order of `reads`. Lengths do not change.
        """
        plan = plan_pass(cache, reads, None)
        firsts = {placed.slot: placed.first for group in plan.groups for placed in group.placed}
        order = [firsts[read.slot] + column for read in reads for column in range(len(read.token_ids))]
        x = torch.empty_like(states).index_copy_(0, torch.tensor(order, device=self.device), states)
        layer = self._layer
        normed = self._state_norm(x)
        x = normed if self._is_normed_first else x
        embedded = layer.before_attention(self._embeddings.index_select(0, plan.token_ids))
        attention = self._operations.attention(plan, self._rotations, None)
        seen = attention(layer.qkv(torch.cat((embedded, normed), dim=-1)), cache.layers[0], layer.heads)
        if plan.wanted is not None:
            x, seen = x.index_select(0, plan.wanted), seen.index_select(0, plan.wanted)
        x = layer.out(seen, x)
        x = layer.down(self._operations.gate(layer.gate_up(layer.before_mlp(x)), layer.activation), x)
        return self._head(self._norm(x)), x


def _plain_name(name: str) -> str:
    """As vLLM's and `speculators`' files agree on it."""
    return name.removeprefix("model.").removeprefix("midlayer.").removeprefix("layers.0.")


def _layer_config(facts: HeadFacts) -> LlamaConfig:
    fields = {name: value for name, value in facts.layers.items() if name not in ("architectures", "model_type")}
    config = LlamaConfig(**fields)
    if facts.layers.get("model_type", "llama") != "llama" or config.hidden_act not in ACTIVATIONS:
        raise UnsupportedModel(
            f"{facts.source}: expected a layer of a Llama, found {facts.layers.get('model_type')}, {config.hidden_act}"
        )
    return config


def _layer(config: LlamaConfig, tensors: dict[str, Tensor], dtype: torch.dtype, device: torch.device) -> Any:
    """transformers' layer, whose projections read a token's embedding and its state side by side."""
    with torch.device("meta"):
        layer: Any = LlamaDecoderLayer(config, 0)
        attention = layer.self_attn
        for name in ("q_proj", "k_proj", "v_proj"):
            narrow = getattr(attention, name)
            wide = torch.nn.Linear(2 * config.hidden_size, narrow.out_features, bias=narrow.bias is not None)
            setattr(attention, name, wide)
    state = {name: take(tensors, name, tuple(weight.shape)) for name, weight in layer.state_dict().items()}
    layer.load_state_dict(state, assign=True)
    return layer.to(device, dtype).eval()


def _norm(config: LlamaConfig, weight: Tensor) -> Any:
    module = LlamaRMSNorm(len(weight), eps=config.rms_norm_eps)
    module.weight = torch.nn.Parameter(weight, requires_grad=False)
    return module


@dataclass(slots=True, eq=False)
class _Held:
    """What one sequence's slot holds: pairs from position `begin` on, `num_read` of them with the target's states."""

    slot: int
    begin: int = 0
    num_read: int = 0
    fresh: list[Tensor] = field(default_factory=list)  #: states [positions, hidden] that are still to be read

    @property
    def num_fresh(self) -> int:
        """Positions of `fresh`."""
        return sum(len(piece) for piece in self.fresh)

    @property
    def end(self) -> int:
        """The first position without a state."""
        return self.begin + self.num_read + self.num_fresh

    def take(self, first: int, states: Tensor) -> None:
        """States from position `first` on; what was read goes on, or is forgotten where others lie between."""
        if not self.begin <= first <= self.end:
            self.fresh, self.num_read = [], 0
        if not self.fresh and not self.num_read:
            self.begin = first
        self.fresh.append(states[self.end - first :])

    def piece(self) -> Tensor:
        """Take out the next states to be read, CHUNK at most."""
        states = torch.cat(self.fresh)
        self.fresh = [states[CHUNK:]] if len(states) > CHUNK else []
        return states[:CHUNK]


@dataclass(slots=True)
class _Row(DraftRow):
    _: KW_ONLY
    held: _Held


@dataclass(eq=False)
class Eagle3Drafter(Drafter):
    """Drafts with an EAGLE-3 network."""

    state: DrafterState
    network: Eagle3Network
    tokens: DraftTokens
    taps: tuple[int, ...]
    _: KW_ONLY
    num_slots: InitVar[int]
    min_probability: float = 0.0
    num_branches: int = 1  #: tokens beside each other at most; 1: a chain

    def __post_init__(self, num_slots: int) -> None:
        self.device, self.longest_text = self.network.device, self.network.num_positions
        self.bytes_per_token = self.network.kv_shape.bytes_per_token
        self._cache = self.network.new_cache(num_slots)
        self._held: dict[str, _Held] = {}

    @property
    def num_cache_bytes(self) -> int:
        """Memory that its keys and values hold now."""
        return self._cache.num_bytes

    def open(self, job_id: str, text: Sequence[int], sampling: Sampling, task: str, segment: str = "") -> None:
        """Take a slot for a sequence."""
        self._held[job_id] = _Held(self._cache.acquire())

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

        Nothing for a text whose states are still being read, or whose last tokens have none: under a constraint, those
        that were forced after the target's own.
        """
        proposals = [NOTHING] * len(asks)
        asking = [row for index, ask in enumerate(asks) if (row := self._row(index, ask)) is not None]
        rows, logits, x = self._read_texts(asking)
        while rows:
            choose(rows, logits, self.tokens, is_weighing=self.min_probability > 0)
            going = [number for number, row in enumerate(rows) if row.wants_more(self.tokens, self.min_probability)]
            if not going:
                break
            rows = [rows[number] for number in going]
            reads = [Read(row.held.slot, row.tokens[-1:]) for row in rows]
            logits, x = self._read(reads, x if len(going) == len(x) else x[going])
        for row in asking:
            proposals[row.index] = row.proposal()
        return proposals

    def _row(self, index: int, ask: Ask) -> _Row | None:
        held, network = self._held[ask.job_id], self.network
        if ask.states is not None and self.taps[0] in ask.states.by_tap:
            held.take(ask.states.first, network.mixed(ask.states.of(self.taps)))
        elif ask.is_timed and (num := len(ask.text) - 1 - held.end) > 0:
            held.take(held.end, torch.zeros((num, network.hidden_size), dtype=network.dtype, device=network.device))
        num_pairs = held.num_read + held.num_fresh
        room = network.num_positions - num_pairs
        num_wanted = min(ask.num_tokens, self.state.max_draft_tokens, room + 1)
        if num_wanted < 1 or not held.fresh or held.end != len(ask.text) - 1:
            return None
        if max(ask.text[held.begin + held.num_read + 1 :]) >= network.num_rows:
            return None  # on a GPU, reading it would end the process
        return _Row(index, ask, num_wanted, self.num_branches if ask.choice.is_greedy else 1, held=held)

    def _read_texts(self, rows: list[_Row]) -> tuple[list[_Row], Tensor, Tensor]:
        """Read the states that are there: the rows that have read all, and the logits and states after them.

        One chunk each, so that no text waits for a long prompt. If no text is read whole, further chunks follow.
        """
        for row in rows:
            self._cache.lengths[row.held.slot] = row.held.num_read
        self._cache.close_gaps(self._held.values())
        ready: list[int] = []
        logits = x = torch.empty(0)
        while rows and not ready:
            reads, states = [], []
            for row in rows:
                piece, first = row.held.piece(), row.held.begin + row.held.num_read + 1
                reads.append(Read(row.held.slot, row.ask.text[first : first + len(piece)]))
                states.append(piece)
            logits, x = self._read(reads, torch.cat(states))
            for row, piece in zip(rows, states, strict=True):
                row.held.num_read += len(piece)
                row.num_read += len(piece) if len(piece) > _USUALLY_READ else 0
            ready = [number for number, row in enumerate(rows) if not row.held.fresh]
        if len(ready) == len(rows):
            return rows, logits, x
        return [rows[number] for number in ready], logits[ready], x[ready]

    def _read(self, reads: Sequence[Read], states: Tensor) -> tuple[Tensor, Tensor]:
        output = self.network.read(self._cache, reads, states)
        for read in reads:
            self._cache.lengths[read.slot] += len(read.token_ids)
        return output
