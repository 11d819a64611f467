"""A smaller model drafts, all sequences together, in slots of its own.

Leviathan et al. 2023, Chen et al. 2023. A sequence's slot holds the text as far as the draft has read it, then the
drafts that it read; those that became text stay. So a round begins by reading one or two tokens, and every
further draft is a pass of width 1 for all sequences that still want one. A draft whose tokenizer is not the target's
reads texts as `translation` writes them: its slot stays right up to the first token that is written otherwise.

`DraftModels` makes such drafters from their settings: checked against the target first, then loaded, each set of
weights once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field, replace
from functools import cached_property
from typing import Final, NamedTuple

import torch
from torch import Tensor

from alphaloop.deciding.goodput import DrafterState
from alphaloop.engine import Sampling
from alphaloop.errors import DecodeFailed
from alphaloop.settings.models import DraftModelDrafterSettings, Dtype, TargetSettings
from engine.constraint import ConstrainedText
from engine.device import Placement, available_bytes
from engine.drafters.draft_rows import DraftRow, choose, ends_draft, tried_places
from engine.drafters.draft_vocabulary import DraftTokens, read_draft_vocabulary, restrict_head
from engine.drafters.translation import TranslatedText, Translation
from engine.models import Target, load_weights
from engine.network.language_model import LanguageModel
from engine.network.passes import Read
from engine.network.slots import copy_prefixes, num_shared
from engine.pairing import (
    DeviceRoom,
    ModelFacts,
    check_pair,
    facts_of,
    num_shared_tokens,
    refuse_or_warn,
    translation_between,
)
from engine.proposal import NOTHING, UNKNOWN, Ask, Drafter, Proposal, SharedWeightDrafter

#: Tokens of one text that a pass reads at most.
CHUNK: Final = 512
#: Tokens that a round leaves for the next one to read: the last draft, where all were accepted, and the target's own.
_USUALLY_READ: Final = 2
#: The same with another tokenizer, which writes the last word or two of a text anew.
_USUALLY_READ_ANEW: Final = 16
#: First tokens that are always read.
NUM_FIRST: Final = 4


@dataclass(eq=False)
class DraftModelDrafter(Drafter):
    """Drafts with a language model. `state.revision` is that of its weights and dtype."""

    state: DrafterState
    model: LanguageModel
    tokens: DraftTokens
    _: KW_ONLY
    num_slots: InitVar[int]
    context_length: int  #: tokens of a text that it can hold; after them it proposes nothing
    min_probability: float = 0.0
    num_branches: int = 1  #: tokens beside each other at most, of jobs without a seed; 1: a chain
    shared_weights: Sequence[SharedWeightDrafter] = ()  #: with the same model, for which its rounds count too
    translation: Translation | None = None  #: None: the draft has the target's tokenizer

    def __post_init__(self, num_slots: int) -> None:
        # Probabilities are needed for a gate, its own or that of a shared-weight drafter.
        self._is_weighing = self.min_probability > 0 or any(other.min_probability for other in self.shared_weights)
        self.device, self.longest_text = self.model.device, self.context_length
        self.bytes_per_token = _per_token(self.model, self.translation)
        self._cache = self.model.new_cache(num_slots)
        self._held: dict[str, _Held] = {}
        self._usually_read = _USUALLY_READ if self.translation is None else _USUALLY_READ_ANEW

    @property
    def num_cache_bytes(self) -> int:
        """Memory that its keys and values hold now."""
        return self._cache.num_bytes

    def open(self, job_id: str, text: Sequence[int], sampling: Sampling, task: str, segment: str = "") -> None:
        """Take a slot for a sequence; its text is read at its next proposal."""
        most = self.state.max_prompt_tokens
        own = None if self.translation is None else TranslatedText(self.translation)
        self._held[job_id] = _Held(self._cache.acquire(), len(text), most, own)

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
        """A chain for each ask, with branches beside it where so configured, but for a job with a seed.

        A chain ends with a token that ends the text, and where the draft's context ends. Nothing is proposed for a
        text with a token that the draft has no embedding for: on a GPU, reading it would end the process.
        Where a pass fails, what was read before it stays counted, and the next call goes on from there.
        """
        proposals = [NOTHING] * len(asks)
        asking = [row for index, ask in enumerate(asks) if (row := self._row(index, ask))]
        rows, logits = self._read_texts(asking)
        while rows:
            choose(rows, logits, self.tokens, is_weighing=self._is_weighing)
            rows = [row for row in rows if row.wants_more(self.tokens, self.min_probability)]
            logits = self._read_drafts(rows)
        for row in asking:
            proposals[row.index] = row.proposal()
        return proposals

    def sharing(self) -> tuple[float, Sequence[SharedWeightDrafter]]:
        """Its gate, and the drafters of the same weights."""
        return self.min_probability, self.shared_weights

    def teacher_forced(
        self, seen: list[int], output: Sequence[int], constrained: ConstrainedText | None
    ) -> Callable[[int], Proposal] | None:
        """Its drafts after each beginning of the text, by one pass; None for trees and for tokens of its own."""
        if self.num_branches > 1 or self.translation is not None:
            return None
        num_prompt, choices = len(seen), self.choices(seen, output, constrained)

        def propose(num_tokens: int) -> Proposal:
            tokens: list[int] = []
            together = 1.0
            while len(tokens) < min(num_tokens, self.num_left(num_prompt, len(seen) - num_prompt)):
                place = len(seen) - num_prompt + len(tokens)
                is_known = place < len(output) and (not tokens or tokens[-1] == output[place - 1])
                if not is_known:
                    tokens.append(UNKNOWN)
                    continue
                token, probability = choices[place]
                if token < 0:
                    break  # the constraint allows none of the tokens that it proposes
                tokens.append(token)
                together *= probability
                if ends_draft(token, together, self.tokens, self.min_probability):
                    break
            return Proposal(tuple(tokens))

        return propose

    @torch.inference_mode()
    def choices(
        self, prompt: Sequence[int], output: Sequence[int], constrained: ConstrainedText | None = None
    ) -> list[tuple[int, float]]:
        """Its greedy choice, and the choice's probability, where each token of `output` stands: one pass over the text.

        `constrained` restricts the choices, and reads the output; -1 where it allows none of the draft's tokens.
        The prompt is read as when the draft decodes: of a long one an excerpt. Where its context ends, the choices end.
        Only of a draft with the target's tokenizer. Raises DecodeFailed for a text with a token that it has no
        embedding for.
        """
        text = excerpt(prompt, self.state.max_prompt_tokens)
        first = len(text) - 1
        read = [*text, *output[:-1]][: self.context_length]
        if (highest := max(read)) >= self.model.num_rows:
            raise DecodeFailed(f"expected tokens below {self.model.num_rows}, the rows of the draft, found {highest}")
        slot = self._cache.acquire()
        chosen: list[tuple[int, float]] = []
        try:
            for begin in range(0, len(read), CHUNK):
                tokens = read[begin : begin + CHUNK]
                num_wanted = min(len(tokens), begin + len(tokens) - first)
                logits = self._read([Read(slot, tokens, num_logits=max(num_wanted, 1))])
                if num_wanted > 0 and constrained is not None:
                    chosen += self._restricted_choices(logits, output[len(chosen) :], constrained)
                elif num_wanted > 0:
                    best = self.tokens.best(logits, 1)[:, 0].tolist()
                    chosen += zip(best, self.tokens.best_probability(logits).tolist(), strict=True)
        finally:
            self._cache.release(slot)
        return chosen

    def _restricted_choices(
        self, logits: Tensor, following: Sequence[int], constrained: ConstrainedText
    ) -> list[tuple[int, float]]:
        chosen: list[tuple[int, float]] = []
        for row, token in zip(self.tokens.spread(logits).float()[:, None], following, strict=False):
            constrained.restrict(row, [()])
            best, peak = int(row.argmax()), row.amax()
            probability = float((peak - row.logsumexp(-1)).exp())
            chosen.append((-1, 0.0) if bool(torch.isneginf(peak)) else (best, probability))
            constrained.take(token)
        return chosen

    def num_left(self, num_prompt: int, num_output: int) -> int:
        """Tokens that it can still draft after a text of this length; of a long prompt it holds an excerpt."""
        return self._num_left(int(self.state.num_read(num_prompt)) + num_output)

    def _num_left(self, num_held: int) -> int:
        # The last draft is never read, so the context has room for one more than it has positions.
        return self.context_length + 1 - num_held

    def _row(self, index: int, ask: Ask) -> _Row | None:
        held = self._held[ask.job_id]
        if ask.is_timed and held.translated is not None and not held.num_seen:
            held.translated = None  # a scratch text means nothing: it is read token by token
        held.take(ask.text)
        if not held.text or held.highest >= self.model.num_rows:
            return None
        num_wanted = min(ask.num_tokens, self.state.max_draft_tokens, self._num_left(len(held.text)))
        num_branches = 1 if ask.choice.is_reproducible else self.num_branches
        return _Row(index, ask, num_wanted, num_branches, held=held) if num_wanted > 0 else None

    def _read_texts(self, rows: list[_Row]) -> tuple[list[_Row], Tensor]:
        """Read what the slots lack of their texts: the rows that have all of it, and the logits after them.

        One chunk each, so that no text waits for a long prompt. If no text is read whole, further chunks follow.
        """
        for row in rows:
            row.held.keep()
            self._cache.lengths[row.held.slot] = row.held.num_text
        self._cache.close_gaps(self._held.values())
        helds = [row.held for row in rows]
        copy_prefixes(self._cache, [held for held in helds if not held.num_text], helds)
        for held in helds:
            held.num_text = self._cache.lengths[held.slot]
        ready: list[int] = []
        logits = torch.empty(0)
        while rows and not ready:
            pieces = [row.held.text[row.held.num_text : row.held.num_text + CHUNK] for row in rows]
            reads = [Read(row.held.slot, piece) for row, piece in zip(rows, pieces, strict=True)]
            logits = self._read(reads)
            for row, read in zip(rows, reads, strict=True):
                row.held.num_text += len(read.token_ids)
                if len(read.token_ids) > self._usually_read:
                    row.num_read += len(read.token_ids)
            ready = [number for number, row in enumerate(rows) if row.held.num_text == len(row.held.text)]
        return [rows[number] for number in ready], logits if len(ready) == len(rows) else logits[ready]

    def _read_drafts(self, rows: list[_Row]) -> Tensor:
        last = [
            row.tokens[-1] if self.translation is None else self.translation.draft_of[row.tokens[-1]] for row in rows
        ]
        logits = self._read([Read(row.held.slot, [token]) for row, token in zip(rows, last, strict=True)])
        for row, token in zip(rows, last, strict=True):
            row.held.drafts.append(token)
        return logits

    def _read(self, reads: Sequence[Read]) -> Tensor:
        if not reads:
            return torch.empty(0)  # no row wants another draft
        logits: Tensor = self.model.read(self._cache, reads)
        for read in reads:
            self._cache.lengths[read.slot] += len(read.token_ids)
        return logits


@dataclass(slots=True)
class _Held:
    """What one sequence's slot holds: `num_text` tokens of the text, then the drafts that were read."""

    slot: int
    num_opened: int  #: tokens of the sequence's text when it was opened
    most: int | None  #: of them that are read; None: all
    translated: TranslatedText | None  #: writes the text in the draft's tokens; None: they are the target's
    text: list[int] = field(default_factory=list)  #: what is read of the sequence's
    num_seen: int = 0  #: tokens of the sequence's text so far
    highest: int = -1  #: token of `text`
    num_text: int = 0
    drafts: list[int] = field(default_factory=list)

    def take(self, text: Sequence[int]) -> None:
        """Take in what was added to the sequence's text."""
        if not self.num_seen:
            self._append(text[: self.num_opened])
            self.text = excerpt(self.text, self.most)
        self._append(text[self.num_seen :])

    def _append(self, added: Sequence[int]) -> None:
        if not added:
            return
        self.num_seen += len(added)
        num_gone, fresh = (0, added) if self.translated is None else self.translated.take(added)
        begin = max(0, len(self.text) - num_gone)
        same = begin + num_shared(self.text[begin:], fresh, num_gone)
        if same < self.num_text:
            # From here on the slot holds another way to write the text, and drafts that followed it.
            self.num_text, self.drafts = same, []
        self.text[begin:] = fresh
        self.highest = max((self.highest, *fresh))

    def keep(self) -> None:
        """Count the drafts that became text, and drop the rest; the text's last token is always read anew.

        That token may have been read, in a round that failed after its proposals.
        """
        self.num_text = min(self.num_text, len(self.text) - 1)
        for draft in self.drafts:
            if self.num_text >= len(self.text) - 1 or self.text[self.num_text] != draft:
                break
            self.num_text += 1
        self.drafts = []


@dataclass(slots=True)
class _Row(DraftRow):
    """One sequence of a round."""

    _: KW_ONLY
    held: _Held


def excerpt(text: Sequence[int], num_kept: int | None) -> list[int]:
    """The first tokens of a prompt, then its last: `num_kept` together. All of it where it is no longer; None: always.

    What a draft reads of a prompt that is longer than it cares to read. The first tokens stay, because attention rests
    on them whatever they say (Xiao et al. 2024, "Efficient Streaming Language Models with Attention Sinks"), and so do
    those before its end, from which the next ones follow. What a draft has not read only makes its guesses worse, never
    the text: the target has read everything.
    """
    num_skipped = 0 if num_kept is None else max(0, len(text) - num_kept)
    return [*text[:NUM_FIRST], *text[NUM_FIRST + num_skipped :]]


@dataclass(eq=False)
class DraftModels:
    """The draft models of one target that is loaded already, and served as `served` says.

    Drafters of the same weights, dtype and device share the weights in memory, also with another gate or
    `max_prompt_tokens`.
    Those that read the same tokens and propose chains are shared-weight drafters: rounds of one count for the others.
    """

    drafters: Mapping[str, DraftModelDrafterSettings]
    served: TargetSettings
    target: Target
    _: KW_ONLY
    placement: Placement
    num_slots: int
    _loaded: dict[_Source, _LoadedDraft] = field(init=False, default_factory=dict)

    def load(self, name: str) -> DraftModelDrafter:
        """The drafter of that name.

        What `alphaloop check-pair` warns of is logged. Raises IncompatiblePair for what it refuses, ModelNotFound, or
        UnsupportedModel.
        """
        settings, target = self.drafters[name], self.target
        device = self.placement.drafts.get(name, target.device)
        source = _Source(settings.source, settings.revision, settings.dtype or self.served.dtype, device)
        of_draft = self._facts(source)
        translation = translation_between(self._of_target, of_draft)
        self._check(name, source, of_draft, translation)
        weights = self._loaded.get(source) or self._loaded.setdefault(source, _load(source, of_draft, translation))
        state = self._state(name, weights)
        return DraftModelDrafter(
            state,
            weights.model,
            DraftTokens(
                vocabulary=target.model.vocabulary_size,
                num_shared=target.model.vocabulary_size
                if weights.translation
                else num_shared_tokens(self._of_target, of_draft),
                end_tokens=target.end_tokens,
                token_ids=weights.token_ids,
            ),
            num_slots=self.num_slots,
            context_length=of_draft.context_length,
            min_probability=settings.min_probability,
            num_branches=settings.num_branches,
            shared_weights=[
                SharedWeightDrafter(self._state(other, weights), others.min_probability)
                for other, others in self.drafters.items()
                if others.state(other, "").shares_weights_with(state)
            ],
            translation=weights.translation,
        )

    @cached_property
    def _of_target(self) -> ModelFacts:
        served = self.served
        return self._facts(_Source(served.source, served.revision, served.dtype, self.target.device))

    def _facts(self, source: _Source) -> ModelFacts:
        context_length = self.target.identity.context_length
        return facts_of(source.name, dtype=source.dtype, revision=source.revision, context_length=context_length)

    def _state(self, name: str, weights: _LoadedDraft) -> DrafterState:
        settings = self.drafters[name]
        dtype = settings.dtype or self.served.dtype
        # Another dtype rounds otherwise, so its history is another. The target's own is in the engine's name.
        # A device changes no history: it decides what a draft costs, and costs are stored under the placement.
        base = weights.revision if dtype == self.served.dtype else f"{weights.revision}-{dtype}"
        # What it has not read makes it guess worse.
        read = "" if settings.max_prompt_tokens is None else f"-t{settings.max_prompt_tokens}"
        # These decide which positions are tried.
        tried = tried_places(settings, siblings="w")
        # So do the tokens that the draft shares with the target, and it reads texts as its own tokenizer writes them.
        translated = f"-i{weights.translation.revision}" if weights.translation else ""
        state = settings.state(name, base + translated + tried + read)
        return replace(
            state,
            cache_bytes_per_token=_per_token(weights.model, weights.translation),
            # There each token of a text takes a pass of its own.
            is_scorable=state.is_scorable and weights.translation is None,
        )

    def _check(self, name: str, source: _Source, draft: ModelFacts, translation: Translation | None) -> None:
        """Refuse the pair, or log its warnings. Memory counts as before anything was loaded."""
        target, settings = self.target, self.drafters[name]
        rooms = [DeviceRoom(str(target.device), available_bytes(target.device) + self._of_target.weight_bytes)]
        if source.device != target.device:
            rooms.append(DeviceRoom(str(source.device), available_bytes(source.device)))
        if source in self._loaded:
            rooms[-1] = replace(rooms[-1], free=rooms[-1].free + draft.weight_bytes)
        findings = check_pair(
            self._of_target,
            draft,
            num_slots=self.num_slots,
            max_draft_tokens=settings.max_draft_tokens,
            room=rooms[0],
            draft_room=rooms[-1],
            translation=translation,
        )
        refuse_or_warn(name, draft.source, findings)


class _Source(NamedTuple):
    """Where weights come from, their dtype, and where they go."""

    name: str
    revision: str | None
    dtype: Dtype
    device: torch.device


@dataclass(frozen=True, slots=True)
class _LoadedDraft:
    """A loaded model, which any number of drafters may read with: each has slots of its own."""

    model: LanguageModel
    revision: str
    token_ids: Tensor | None  #: the target's, of each column of its logits; None: column i is token i
    translation: Translation | None


def _load(source: _Source, facts: ModelFacts, translation: Translation | None) -> _LoadedDraft:
    loaded = load_weights(
        source.name, source.revision, source.dtype, source.device, context_length=facts.context_length
    )
    token_ids = rows = read_draft_vocabulary(loaded.folder)
    if translation is not None:
        rows, token_ids = translation.proposing(rows)
    if rows is not None and token_ids is not None:
        restrict_head(loaded.model, rows)
        token_ids = token_ids.to(source.device)
    return _LoadedDraft(loaded.over_slots(facts.context_length), loaded.revision, token_ids, translation)


def _per_token(model: LanguageModel, translation: Translation | None) -> int:
    """Bytes of keys and values of as much text as one token of the target stands for."""
    return math.ceil(model.kv_shape.bytes_per_token * (translation.length if translation else 1))
