"""The prefix cache: keys and values that prompts of several jobs have in common, kept when no sequence has them.

`network.slots` copies a prefix from a sequence that runs. Here it is kept after that sequence, in memory of its own,
and copied into the slot of a later job. A prefix is kept once prompts of two jobs of one scope had it, and only as far
as both had it. A scope is a task and a segment: how fast a first token comes shows whether another job had the same
prefix, so jobs of one segment never meet what jobs of another sent.

Nothing here is needed for any text. Memory is bounded, the running sequences' comes first, and what spares the fewest
tokens per byte is evicted first: tokens spared, which halve every `HALF_LIFE_S`, over bytes.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import KW_ONLY, dataclass, field
from typing import Final, NamedTuple

from torch import Tensor

from engine.answer import Scope
from engine.device import is_out_of_memory
from engine.network.slots import SHORTEST, WORTH_A_PASS, SlotCache, num_shared
from engine.sequence import Sequence

log = logging.getLogger(__name__)

#: Share of `max_cache_bytes`, where `models.target.max_prefix_cache_bytes` is not set.
PREFIX_CACHE_SHARE: Final = 0.25
HALF_LIFE_S: Final = 600.0
#: Prompts of a scope that a job's is compared with at most, each by a binary search.
MOST_NOTED: Final = 128
#: Tokens of prompts that are remembered for that, over all scopes, of 4 bytes each.
MOST_NOTED_TOKENS: Final = 1 << 20


class Spared(NamedTuple):
    """What cached prefixes were good for."""

    num_hits: int = 0  #: texts that began with one
    num_tokens: int = 0  #: that these did not have to read


@dataclass(eq=False)
class PrefixCache:
    """The prefixes kept beside `cache`, in at most `max_bytes`, and never more than `fit` allowed last. 0: none."""

    cache: SlotCache
    max_bytes: int
    _: KW_ONLY
    clock: Callable[[], float] = time.monotonic
    num_bytes: int = field(init=False, default=0)  #: held now

    def __post_init__(self) -> None:
        self._held: defaultdict[Scope, list[_Prefix]] = defaultdict(list)
        self._noted: OrderedDict[str, tuple[Scope, array[int]]] = OrderedDict()  # by job, the oldest first
        self._of_scope: defaultdict[Scope, OrderedDict[str, array[int]]] = defaultdict(OrderedDict)
        self._num_noted_tokens = 0
        self._spared = Spared()

    def note(self, sequence: Sequence) -> None:
        """Remember a job's prompt, so that others can be compared with it."""
        scope, job = sequence.spec.scope, sequence.spec.owner
        if not self.max_bytes or scope is None or job in self._noted:
            return
        prompt = array("i", sequence.text[: sequence.num_prompt])
        self._noted[job], self._of_scope[scope][job] = (scope, prompt), prompt
        self._num_noted_tokens += len(prompt)
        if len(self._of_scope[scope]) > MOST_NOTED:
            self.forget(next(iter(self._of_scope[scope])))
        while self._num_noted_tokens > MOST_NOTED_TOKENS:
            self.forget(next(iter(self._noted)))

    def forget(self, job: str) -> None:
        """A job was cancelled: what it had in common with others is not looked for."""
        if job not in self._noted:
            return
        scope, prompt = self._noted.pop(job)
        self._num_noted_tokens -= len(prompt)
        del self._of_scope[scope][job]
        if not self._of_scope[scope]:
            del self._of_scope[scope]

    def copy_into(self, unread: SequenceOf[Sequence]) -> None:
        """Give the empty slots of `unread` what is held of their texts, always short of the last token."""
        copies: defaultdict[tuple[_Prefix, int], list[int]] = defaultdict(list)
        for sequence in unread:
            scope = sequence.spec.scope
            if scope is None or scope not in self._held or self.cache.lengths[sequence.slot]:
                continue
            longest, num_tokens = self._longest(scope, array("i", sequence.text[:-1]))
            if longest is not None and num_tokens >= SHORTEST:
                copies[longest, num_tokens].append(sequence.slot)
        for (prefix, num_tokens), slots in copies.items():
            self.cache.put_in(prefix.states, slots, num_tokens)
            num_spared = num_tokens * len(slots)
            prefix.spare(num_spared, self.clock())
            self._spared = Spared(self._spared.num_hits + len(slots), self._spared.num_tokens + num_spared)

    def keep(self, sequence: Sequence, max_bytes: int) -> None:
        """A sequence leaves its slot: keep what its prompt and another job's have in common, unless that is held.

        `max_bytes`: what running sequences leave. Prefixes that are worth less are evicted; those that are worth more
        stay. Where memory runs out, all of them go.
        """
        scope, job = sequence.spec.scope, sequence.spec.owner
        if scope is None or job not in self._noted:
            return
        prompt = self._noted[job][1]
        others = (other for other_job, other in self._of_scope[scope].items() if other_job != job)
        num_tokens = max((num_shared(prompt, other, len(prompt)) for other in others), default=0)
        num_tokens = min(num_tokens, self.cache.lengths[sequence.slot])
        _, num_held = self._longest(scope, prompt)
        if num_tokens < WORTH_A_PASS.get(self.cache.device.type, 512) or num_tokens - num_held < SHORTEST:
            return
        tokens, now = prompt[:num_tokens], self.clock()
        within = [prefix for prefix in self._held.get(scope, ()) if prefix.num_shared(tokens) == len(prefix.tokens)]
        worth = num_tokens + sum(prefix.worth(now) for prefix in within)
        if not self._make_room(self.cache.bytes_out(num_tokens), worth, within, min(max_bytes, self.max_bytes)):
            return
        try:
            states = self.cache.take_out(sequence.slot, num_tokens)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self.give_back()
            return
        self._held[scope].append(_Prefix(scope, tokens, states, worth, now))
        self.num_bytes += states.nbytes

    def fit(self, max_bytes: int) -> None:
        """Hold no more than that, because running sequences need the rest."""
        if self.num_bytes <= max_bytes:
            return
        now = self.clock()
        for prefix in sorted(self._all(), key=lambda prefix: prefix.worth_per_byte(now)):
            if self.num_bytes <= max_bytes:
                return
            self._evict(prefix)

    def give_back(self) -> bool:
        """Evict all prefixes, because memory ran out; whether there were any."""
        if not self.num_bytes:
            return False
        log.warning("memory ran out: the prefix cache is dropped", extra={"action": "prefix_cache_dropped"})
        self._held.clear()
        self.num_bytes = 0
        return True

    def clear(self) -> None:
        """Forget every text."""
        self._held.clear()
        self._noted.clear()
        self._of_scope.clear()
        self._num_noted_tokens = self.num_bytes = 0
        self._spared = Spared()

    def take_spared(self) -> Spared:
        """What was spared since the last call."""
        taken, self._spared = self._spared, Spared()
        return taken

    def _all(self) -> list[_Prefix]:
        return [prefix for prefixes in self._held.values() for prefix in prefixes]

    def _longest(self, scope: Scope, text: array[int]) -> tuple[_Prefix | None, int]:
        """The prefix that has most of a text, and how many tokens."""
        longest = max(self._held.get(scope, ()), key=lambda prefix: prefix.num_shared(text), default=None)
        return longest, 0 if longest is None else longest.num_shared(text)

    def _make_room(self, num_bytes: int, worth: float, within: SequenceOf[_Prefix], max_bytes: int) -> bool:
        """Room for a prefix that holds those of `within` too; False where what is worth more has it."""
        now = self.clock()
        missing, evicted = self.num_bytes + num_bytes - max_bytes, []
        for prefix in sorted(self._all(), key=lambda prefix: (prefix not in within, prefix.worth_per_byte(now))):
            if prefix not in within and (missing <= 0 or prefix.worth_per_byte(now) >= worth / num_bytes):
                break
            evicted.append(prefix)
            missing -= prefix.states.nbytes
        if missing > 0:
            return False
        for prefix in evicted:
            self._evict(prefix)
        return True

    def _evict(self, prefix: _Prefix) -> None:
        held = self._held[prefix.scope]
        held.remove(prefix)
        self.num_bytes -= prefix.states.nbytes
        if not held:
            del self._held[prefix.scope]


@dataclass(eq=False)
class _Prefix:
    """Tokens with their keys and values."""

    scope: Scope
    tokens: array[int]
    states: Tensor  #: as `SlotCache.take_out` gave it
    _spared: float  # tokens, faded up to `_at_s`
    _at_s: float

    def num_shared(self, text: array[int]) -> int:
        return num_shared(self.tokens, text, len(text))

    def spare(self, num_tokens: int, now: float) -> None:
        self._spared, self._at_s = self.worth(now) + num_tokens, now

    def worth(self, now: float) -> float:
        """Tokens that it spared, the older the fewer."""
        return float(self._spared * 0.5 ** ((now - self._at_s) / HALF_LIFE_S))

    def worth_per_byte(self, now: float) -> float:
        return self.worth(now) / self.states.nbytes
