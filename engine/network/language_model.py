"""A loaded model as a function of the slot cache, compared with its own modules when it is loaded.

`fused` computes the families that it knows; `_UnfusedDecoder` computes the others by transformers' own modules. A pass
that is long enough to leave a window of thousands of tokens would take longer than loading. So the compared pass is
short and the window is made shorter still; that masks and rotations hold at the real boundaries is checked on these
alone.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from typing import Any, Final

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.masking_utils import sliding_window_causal_mask_function

from alphaloop.errors import UnsupportedModel
from engine.network.fused import FAMILIES, FusedDecoder, can_fuse
from engine.network.kv_layout import KvShape
from engine.network.passes import Pass, Placed, Read, ReadGroup, plan_pass
from engine.network.slots import SlotCache
from engine.states import FINAL
from engine.text_facts import FULL, SLIDING, TextFacts, layer_configs, text_config, text_facts

#: Tokens of a prompt that one pass reads where nothing else waits for it.
PREFILL_CHUNK: Final = 512


class LanguageModel:
    """A decoder-only model on its device, in eval mode, whose passes over slots were compared with its own.

    The compared passes read a few tokens, with a window so short that these cross it. At the windows and boundaries
    that the config names, where a pass would take too long, masks and rotations alone are compared. A fused model is
    compared by its first layers, as many as it takes to have two, and one of each kind: all of a kind are computed
    alike.
    """

    def __init__(self, model: Any, num_positions: int) -> None:
        """Takes over `model`. If the model can be fused, its layers are emptied. Raises UnsupportedModel."""
        self.config = model.config
        self.num_positions = num_positions  #: tokens of the longest text
        self.device: torch.device = model.device
        self.vocabulary_size: int = model.get_output_embeddings().weight.shape[0]
        self.num_rows: int = model.get_input_embeddings().weight.shape[0]  #: tokens that can be read
        self.is_fused = can_fuse(model.config)
        facts = text_facts(model.config)
        if (error := rotation_error(model, facts, num_positions)) is not None:
            raise UnsupportedModel(error)
        num_layers = _num_compared(facts) if self.is_fused else len(facts.kinds)
        expected = _reference(model, facts, num_layers)
        self._network = FusedDecoder(model, num_positions) if self.is_fused else _UnfusedDecoder(model)
        left_out = range(num_layers, len(facts.kinds))
        compared = self.without(left_out) if left_out else self
        if (error := compared._error(expected) or self._error_of_numbers()) is not None:
            raise UnsupportedModel(error)

    @property
    def num_layers(self) -> int:
        """Layers, whose inputs can be tapped."""
        return self.kv_shape.num_layers

    @property
    def hidden_size(self) -> int:
        """Numbers of a hidden state."""
        return int(text_config(self.config).hidden_size)

    @property
    def embeddings(self) -> Tensor:
        """[num_rows, hidden], as they are stored."""
        return self._network.embeddings

    @property
    def kv_shape(self) -> KvShape:
        """What it keeps of every token."""
        return self._network.kv_shape

    def without(self, skipped: Container[int]) -> LanguageModel:
        """The same weights in memory, without these layers, numbered from 0. At least one has to stay.

        Raises UnsupportedModel for a family that transformers' own modules compute, which cannot leave layers out.
        """
        if not isinstance(self._network, FusedDecoder):
            raise UnsupportedModel(
                f"expected a model of {', '.join(sorted(FAMILIES))} to leave layers out, found {self.config.model_type}"
            )
        skipping = copy(self)
        skipping._network = self._network.without(skipped)
        return skipping

    def new_cache(self, num_slots: int, *, max_bytes: int | None = None) -> SlotCache:
        """An empty cache for this model."""
        shape, most = self._network.kv_shape, self.num_positions
        return SlotCache(shape, num_slots, self.device, max_bytes=max_bytes, most_positions=most)

    def read(self, cache: SlotCache, reads: Sequence[Read]) -> Tensor:
        """One pass over `reads`. Each is written after its slot's length, which does not change.

        Returns the logits wanted, [sum of num_logits, vocabulary], in the order of `reads`.
        """
        return self._network(cache, plan_pass(cache, reads, self._network.window))[0]

    def read_tapped(
        self, cache: SlotCache, reads: Sequence[Read], taps: Sequence[int]
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """The same, with hidden states by tap (`engine.states`), which later passes leave as they are.

        A layer's are [sum of tokens, hidden], in the order of `reads`; those of FINAL [sum of num_logits, hidden].
        """
        plan = plan_pass(cache, reads, self._network.window)
        logits, states = self._network(cache, plan, tuple(taps))
        firsts = {placed.slot: placed.first for group in plan.groups for placed in group.placed}
        order = [firsts[read.slot] + column for read in reads for column in range(len(read.token_ids))]
        rows = torch.tensor(order, dtype=torch.long, device=self.device)
        # A copy: a compiled pass writes its states into the same memory each time.
        return logits, {tap: x.clone() if tap == FINAL else x.index_select(0, rows) for tap, x in states.items()}

    def prefill(self, cache: SlotCache, slot: int, token_ids: Sequence[int]) -> Tensor:
        """Append a text to a slot's content. Returns the logits after the last token, [1, vocabulary]."""
        for begin in range(0, len(token_ids), PREFILL_CHUNK):
            chunk = token_ids[begin : begin + PREFILL_CHUNK]
            is_last = begin + PREFILL_CHUNK >= len(token_ids)
            logits = self.read(cache, [Read(slot, chunk, num_logits=1 if is_last else 0)])
            cache.lengths[slot] += len(chunk)
            if is_last:
                return logits
        raise ValueError("expected at least one token")

    @torch.inference_mode()
    def _error(self, expected: tuple[int | None, Tensor]) -> str | None:
        """How ragged passes over slots differ from the model's own plain pass; None if they agree.

        `expected`: of `_reference`.
        """
        window = self._network.window
        if window is not None and (error := mask_error(window)) is not None:
            return error
        shortened, logits = expected
        try:
            self._network.set_window(shortened)
            return self._difference(logits)
        finally:
            self._network.set_window(window)

    @torch.inference_mode()
    def _error_of_numbers(self) -> str | None:
        """Why a pass over one token through all layers gives no numbers; None if it does."""
        cache = self.new_cache(1)
        logits = self.read(cache, [Read(cache.acquire(), [0])])
        return None if bool(logits.isfinite().all()) else _NO_NUMBERS

    def _difference(self, expected: Tensor) -> str | None:
        token_ids = _some_tokens(self.num_rows).tolist()
        cache = self.new_cache(3)
        slots = [cache.acquire() for _ in range(3)]
        used = (slots[0], slots[2])
        held = [Read(slot, text[:num], num_logits=0) for slot, text, num in zip(used, token_ids, NUM_HELD, strict=True)]
        self.read(cache, held)
        for read in held:
            cache.lengths[read.slot] += len(read.token_ids)
        first, second = (text[num : num + NUM_READ] for text, num in zip(token_ids, NUM_HELD, strict=True))
        # One row continues as a chain, the other as a tree: two tokens that are dropped, then the text.
        chain = Read(used[0], first, num_logits=NUM_READ)
        tree = Read(used[1], [0, 1, *second], num_logits=NUM_READ, parents=[-1, 0, -1, 2, 3, 4])
        seen = self.read(cache, [chain, tree]).float()
        error = float((seen - expected).norm() / expected.norm())
        limit = 0.05 if self.kv_shape.dtype in (torch.bfloat16, torch.float16) else 1e-3
        if error <= limit:
            return None
        if not bool(expected.isfinite().all()):
            return _NO_NUMBERS
        return (
            f"passes over the slot cache differ from the model's own by {error:.1e} of the logits' norm, "
            f"expected at most {limit}: its attention depends on more than the mask and the positions"
        )


#: A window that the tokens of `_some_tokens` cross before the first logits that are compared.
_SHORT_WINDOW: Final = 4
NUM_HELD: Final = (5, 4)  #: tokens of each text that its slot holds before
NUM_READ: Final = 4  #: tokens of each that the compared pass reads
_NO_NUMBERS: Final = "expected weights that give logits, found some that give no numbers: is the download complete?"
#: Positions before and after a boundary that are compared.
_REACH: Final = 2
#: Greatest difference of a rotation, whose numbers are about 1 at most: above float32's rounding of an angle, below
#: another frequency.
_ROTATION_TOLERANCE: Final = 1e-3


def _some_tokens(num_rows: int) -> Tensor:
    """Tokens [2, 9] of two texts that are read in both ways, of embeddings with that many rows."""
    return torch.randint(0, num_rows, (2, max(NUM_HELD) + NUM_READ), generator=torch.Generator().manual_seed(0))


def _num_compared(facts: TextFacts) -> int:
    """The fewest first layers that are two, and one of each kind."""
    return min(len(facts.kinds), max([2, *(facts.kinds.index(kind) + 1 for kind in facts.kinds)]))


@torch.inference_mode()
def _reference(model: Any, facts: TextFacts, num_layers: int) -> tuple[int | None, Tensor]:
    """A window, and the logits [2 * NUM_READ, vocabulary] of the first layers' own pass with it.

    The window is a short one if the model has any: what is within a longer one is seen by all layers.
    """
    window = None if facts.window is None else _SHORT_WINDOW
    with _shortened(model, window, num_layers):
        return window, _logits(model)


def mask_error(window: int) -> str | None:
    """How the mask around the end of a window differs from transformers' own rule; None if it does not."""
    first = max(0, window - _REACH)
    read = Read(0, [0] * (2 * _REACH + 1))
    group = ReadGroup((Placed(read, first, 0),), window, torch.float32, torch.device("cpu"))
    allowed = sliding_window_causal_mask_function(window)
    queries, keys = torch.arange(first, first + group.width)[:, None], torch.arange(group.num_keys)
    batch = torch.zeros((), dtype=torch.long)
    mask = group.local_mask
    seen = torch.ones(group.width, group.num_keys, dtype=torch.bool) if mask is None else mask[0, 0] == 0
    if bool((seen == allowed(batch, batch, queries, keys)).all()):
        return None
    return f"the mask around a window of {window} tokens differs from the model's own"


@torch.inference_mode()
def rotation_error(model: Any, facts: TextFacts, num_positions: int) -> str | None:
    """A position whose rotation depends on the positions that are computed with it; None if there is none.

    Compared are the first positions, and those around each window and boundary that the config names: each alone, and
    with the last position of the context.
    """
    rope = getattr(text_config(model.config), "rope_parameters", None) or {}
    parts = (rope, *(part for part in rope.values() if isinstance(part, dict)))
    named = [part.get("original_max_position_embeddings") for part in parts]
    named += [0, num_positions - 1, facts.window, facts.rope_boundary, facts.longest]
    marks = {int(mark) for mark in named if mark is not None}
    near = {mark + by for mark in marks for by in range(-_REACH, _REACH + 1)}
    positions = sorted(position for position in near if 0 <= position < num_positions)
    for rotate in _rotaries(model, facts):
        alone = torch.stack([rotate([position])[0] for position in positions])
        together = rotate([*positions, num_positions - 1])[: len(positions)]
        error = (alone - together).abs().amax(dim=-1)
        if float(error.max()) > _ROTATION_TOLERANCE:
            first = positions[int((error > _ROTATION_TOLERANCE).nonzero()[0])]
            return (
                f"the rotation of position {first} depends on the length of the text, so a text would depend on the "
                f"others in its batch: expected fixed frequencies up to a context of {num_positions}"
            )
    return None


def _logits(model: Any) -> Tensor:
    token_ids = _some_tokens(model.get_input_embeddings().weight.shape[0]).to(model.device)
    first = min(NUM_HELD)
    kept = token_ids.shape[1] - first
    logits: Tensor = model(input_ids=token_ids, use_cache=False, logits_to_keep=kept).logits.float()
    return torch.cat([row[held - first : held - first + NUM_READ] for row, held in zip(logits, NUM_HELD, strict=True)])


@contextmanager
def _shortened(model: Any, window: int | None, num_layers: int) -> Iterator[None]:
    """The model's own modules with another window and fewer layers: they read both from the config in every pass."""
    changed = {"num_hidden_layers": num_layers} | ({} if window is None else {"sliding_window": window})
    configs = [text_config(model.config), *layer_configs(model.config)]
    before = [(config, name, own) for config in configs for name in changed if (own := config.__dict__.get(name))]
    try:
        for config, name, _ in before:
            setattr(config, name, changed[name])
        yield
    finally:
        for config, name, own in before:
            setattr(config, name, own)


def _rotaries(model: Any, facts: TextFacts) -> Iterator[Any]:
    """Functions from positions to rotations [positions, size], one a kind of layer of each rotary embedding."""
    own = text_config(model.config).model_type
    for module in model.modules():
        config = getattr(module, "config", None)
        if not type(module).__name__.endswith("RotaryEmbedding") or getattr(config, "model_type", None) != own:
            continue
        types = getattr(module, "rope_type", None)
        for kind in sorted(set(facts.kinds)) if isinstance(types, dict) else [None]:
            yield _rotary(module, kind, model.device)


def _rotary(module: Any, kind: str | None, device: torch.device) -> Any:
    like = torch.empty(0, dtype=torch.float32, device=device)

    def rotate(positions: list[int]) -> Tensor:
        places = torch.tensor([positions], device=device)
        rotation = module(like, places) if kind is None else module(like, places, kind)
        parts = rotation if isinstance(rotation, tuple) else (torch.view_as_real(rotation).flatten(-2),)
        return torch.cat([part.reshape(len(positions), -1).float() for part in parts], dim=-1)

    return rotate


class _UnfusedDecoder:
    """A transformers model computed by its own modules: for families that `fused` does not know.

    Computes a pass group by group. The model's own forward reads each group as a padded rectangle."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.embeddings: Tensor = model.get_input_embeddings().weight.detach()
        self.kv_shape = KvShape.of(model.config, model.dtype)
        facts = text_facts(model.config)
        self.window = facts.window
        self._has_kinds = facts.has_kinds

    def set_window(self, window: int | None) -> None:
        """The window of sliding layers from now on."""
        self.window = window

    def __call__(self, cache: SlotCache, plan: Pass, taps: tuple[int, ...] = ()) -> tuple[Tensor, dict[int, Tensor]]:
        """Logits [wanted, vocabulary]; keys and values of all tokens are written into the cache.

        And the states of each tap, of a layer for all tokens as they lie.
        """
        parts = [self._read(cache, plan, group, taps) for group in plan.groups]
        logits, *states = (torch.cat(part) for part in zip(*parts, strict=True))
        if plan.wanted is not None:
            logits = logits.index_select(0, plan.wanted)
            states = [
                x.index_select(0, plan.wanted) if tap == FINAL else x for tap, x in zip(taps, states, strict=True)
            ]
        return logits, dict(zip(taps, states, strict=True))

    def _read(self, cache: SlotCache, plan: Pass, group: ReadGroup, taps: tuple[int, ...]) -> list[Tensor]:
        """Logits of the group's tokens, and their states of each tap."""
        rows = group.slots.stop - group.slots.start
        token_ids, positions = plan.token_ids[group.tokens], plan.positions[group.tokens]
        if group.padded is not None:
            token_ids, positions = token_ids[group.padded], positions[group.padded]
        output = self._model(
            input_ids=token_ids.view(rows, group.width),
            position_ids=positions.view(rows, group.width),
            attention_mask=self._masks(cache, group),
            past_key_values=_View(cache, plan, group),
            use_cache=True,
            output_hidden_states=bool(taps),
        )
        # transformers' list of states begins with the embeddings and ends after the last norm.
        flat = [x.flatten(0, 1) for x in (output.logits, *(output.hidden_states[tap] for tap in taps))]
        return flat if group.cells is None else [x.index_select(0, group.cells) for x in flat]

    def _masks(self, cache: SlotCache, group: ReadGroup) -> Tensor | dict[str, Tensor]:
        """As transformers' modules take them: by kind where layers differ, otherwise the one of all layers."""
        shape = (group.slots.stop - group.slots.start, 1, group.width, group.num_keys)
        full, local = (
            torch.zeros(shape, dtype=self.kv_shape.dtype, device=cache.device) if mask is None else mask
            for mask in (group.mask, group.local_mask)
        )
        if self.window is None:
            return full
        return {FULL: full, SLIDING: local} if self._has_kinds else local


class _View(Cache):
    """One group's slots, as transformers' modules expect a cache."""

    def __init__(self, cache: SlotCache, plan: Pass, group: ReadGroup) -> None:
        self._num_keys = group.num_keys
        super().__init__(layers=[_LayerView(held, plan, group) for held in cache.layers])

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._num_keys

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self._num_keys, 0


class _LayerView(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer's part of the cache. Only real tokens are written, never padding."""

    is_sliding = False

    def __init__(self, held: Tensor, plan: Pass, group: ReadGroup) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._held = held
        self._group = group
        self._stored = plan.stored.view(-1, held.shape[1])[group.tokens]
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise RuntimeError("a view of a slot cache has its memory from the start")

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write the group's tokens; returns keys and values of its rows, [rows, heads, num_keys, head_dim] each."""
        return self._written(key_states, first=0), self._written(value_states, first=self._held.shape[1] // 2)

    def _written(self, states: Tensor, first: int) -> Tensor:
        """Write the real tokens of `states` into the heads from `first`; returns what its rows hold there.

        A layer may have fewer and smaller heads than the cache: keys and values of latent attention differ.
        """
        num_heads, size = states.shape[1], states.shape[3]
        if num_heads > self._held.shape[1] // 2 or size > self._held.shape[3]:
            raise UnsupportedModel(
                f"expected keys and values of at most {self._held.shape[1] // 2} heads of {self._held.shape[3]}, "
                f"as the config says, found {num_heads} of {size}"
            )
        cells = states.transpose(1, 2).flatten(0, 1)
        if self._group.cells is not None:
            cells = cells.index_select(0, self._group.cells)
        flat = self._held.view(-1, self._held.shape[-1])
        places = self._stored[:, first : first + num_heads].reshape(-1)
        flat[:, :size].index_copy_(0, places, cells.reshape(-1, size))
        return self._held[self._group.slots, first : first + num_heads, : self._group.num_keys, :size]

    def get_seq_length(self) -> int:
        return self._group.num_keys

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._group.num_keys, 0

    def get_max_length(self) -> int:
        return -1
