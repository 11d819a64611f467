"""The index over earlier results: where did the last tokens of a text stand before, and what followed?

A `Run` is a suffix array (Manber & Myers 1993) over the tokens of many results, read backwards: all places are sorted
by the token before them, then by the one before that. So the places with the longest match lie side by side, a binary
search finds them, and how many there are says how often the match was written. A token takes 8 bytes: 4 for itself and
4 for its place in the order.

A `MemoryIndex` is a few runs of growing size. New results make a small run, and runs of similar size are merged (the
logarithmic method, Bentley & Saxe 1980). So an addition sorts a few thousand tokens, and each token is sorted anew a
bounded number of times.

A run never changes, apart from `wipe`: a reader in another thread holds a tuple of runs and needs no lock.
"""

from __future__ import annotations

import math
import threading
import weakref
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from alphaloop.lookup import MAX_NGRAM, MAX_OCCURRENCES

#: Tokens by which places are sorted: as many as the longest match has.
DEPTH: Final = MAX_NGRAM
#: Bytes of a token in a run: itself, and its place in the order.
BYTES_PER_TOKEN: Final = 8
#: Runs with fewer tokens are always merged: sorting them takes a millisecond or two.
LEAST_TOKENS: Final = 8192
#: Runs are merged unless the older one is this many times as large.
_GROWTH: Final = 4
#: Ends each result and equals no token: neither a match nor a continuation crosses it.
_END: Final = 0xFFFFFFFF
_WIDTH: Final = 4  #: bytes of a token
#: Tokens with ids below 2 ** 21 - 1 are sorted by threes: their numbers fit into 63 bits.
_PACKED_BITS: Final = 21
#: Matches that are shorter than the longest one by more are left out: they weigh less than a sixteenth of it.
_SHORTER: Final = 4
_STEPS: Final = np.arange(128)
#: Every 64th place in the order has its next two tokens beside it: comparing these numbers costs no call.
_SIGNPOSTED: Final = 64

Tokens = NDArray[np.uint32]
Places = NDArray[np.int64]


class ResultWriter(NamedTuple):
    """Whose result a text is, as far as sharing asks."""

    segment: str
    batch_id: str  #: empty without a batch


@dataclass(frozen=True, slots=True)
class RememberedText:
    """A result as the index takes it."""

    text_id: int  #: of its row
    writer: ResultWriter
    tokens: Tokens


class Run:
    """Results in one suffix array. Any thread reads it."""

    def __init__(self, texts: Sequence[RememberedText]) -> None:
        """`texts` are in order of age, the oldest first. Takes about a microsecond a token."""
        newest_first = texts[::-1]
        parts: list[Tokens] = []
        for text in newest_first:
            parts += (np.array([_END], np.uint32), text.tokens[::-1])
        backwards = np.concatenate([*parts, np.full(DEPTH, _END, np.uint32)])
        self._ids = array("q", [text.text_id for text in newest_first])
        self._begins = array("q", np.cumsum([0, *(len(text.tokens) + 1 for text in newest_first)]).tolist())
        self._writers = list(dict.fromkeys(text.writer for text in newest_first))
        numbers = {writer: number for number, writer in enumerate(self._writers)}
        self._writer_of = array("i", [numbers[text.writer] for text in newest_first])
        self._places = _order(backwards)
        self._order = memoryview(self._places)  # type: ignore[arg-type]
        self._data = bytearray(backwards.astype(">u4").tobytes())
        #: The same bytes as numbers that the machine may read the other way round: equal is equal.
        self._raw = np.frombuffer(self._data, np.uint32)
        self._signposts = self._pairs()

    @property
    def num_tokens(self) -> int:
        """Tokens of its results, and one for the end of each."""
        return int(self._begins[-1])

    @property
    def num_bytes(self) -> int:
        """What it takes."""
        beside = (self._ids, self._begins, self._writer_of, self._signposts)
        return len(self._data) + self._places.nbytes + sum(each.itemsize * len(each) for each in beside)

    def find(self, wanted: bytes) -> tuple[int, int]:
        """Where in the order `wanted` would stand, and the longest match beside that, in tokens."""
        place = bisect_left(self._order, wanted, *self._between(wanted), key=_reader(self._data, len(wanted)))
        return place, max(self._agreement(place - 1, wanted), self._agreement(place, wanted))

    def around(self, wanted: bytes, place: int, least: int, most: int) -> tuple[Places, Places]:
        """Up to `most` places that agree over `least` tokens or more, longest match first: (places, match lengths).

        If more than `most` agree over the longest match, `most` of them at equal distances.
        """
        places = self._places[max(place - most, 0) : place + most].astype(np.int64)
        num = len(wanted) // _WIDTH
        differs = np.ones((len(places), num + 1), bool)
        np.not_equal(
            self._raw.take(places[:, None] + _STEPS[:num]), np.frombuffer(wanted, np.uint32), out=differs[:, :num]
        )
        lengths = differs.argmax(axis=1)
        nearest = (-lengths).argsort(kind="stable")[:most]
        places, lengths = places[nearest], lengths[nearest]
        if len(lengths) == most and lengths[0] == lengths[-1]:
            return self._sample(wanted[: int(lengths[0]) * _WIDTH], most), lengths
        num = int(np.count_nonzero(lengths >= least))
        return places[:num], lengths[:num]

    def _sample(self, prefix: bytes, most: int) -> Places:
        low, high = self._between(prefix)
        low = bisect_left(self._order, prefix, low, high, key=_reader(self._data, len(prefix)))
        high = bisect_right(self._order, prefix, low, high, key=_reader(self._data, len(prefix)))
        spread = low + np.arange(most) * (high - low) // most
        return self._places.take(spread, mode="clip").astype(np.int64)  # after `wipe` it may point beyond the end

    def _between(self, wanted: bytes) -> tuple[int, int]:
        """The part of the order that holds every context which begins as `wanted` does."""
        pair = wanted[: 2 * _WIDTH]
        least, most = (int.from_bytes(pair.ljust(2 * _WIDTH, byte), "big") for byte in (b"\x00", b"\xff"))
        begin, end = bisect_left(self._signposts, least) - 1, bisect_right(self._signposts, most)
        return max(begin, 0) * _SIGNPOSTED, min(end * _SIGNPOSTED, len(self._order))

    def _pairs(self) -> array[int]:
        backwards, posted = self._raw.view(">u4"), self._places[::_SIGNPOSTED]
        first, second = (backwards[posted + step].astype(np.uint64) for step in (0, 1))
        return array("Q", (first << np.uint64(8 * _WIDTH) | second).tobytes())

    def _agreement(self, place: int, wanted: bytes) -> int:
        """Tokens over which the context at this place of the order agrees with `wanted`; -1 beyond its ends."""
        if not 0 <= place < len(self._order):
            return -1
        begin, num = self._order[place] * _WIDTH, len(wanted)
        differ = int.from_bytes(self._data[begin : begin + num], "big") ^ int.from_bytes(wanted, "big")
        return (num * 8 - differ.bit_length()) // (_WIDTH * 8)

    def following(self, places: Places, num_tokens: int) -> list[list[int]]:
        """Up to `num_tokens` tokens that followed each place."""
        tokens = self._raw.take(places[:, None] - _STEPS[1 : num_tokens + 1], mode="clip")
        rows: list[list[int]] = tokens.view(">u4").tolist()
        return [row[: row.index(_END)] if _END in row else row for row in rows]

    def writers(self, places: Places) -> list[ResultWriter]:
        """Whose result each place is in."""
        return [self._writers[self._writer_of[bisect_right(self._begins, place) - 1]] for place in places.tolist()]

    def texts(self, gone: Collection[int] = ()) -> list[RememberedText]:
        """Its results without those of these ids, the oldest first."""
        backwards, kept = self._raw.view(">u4"), []
        for number, text_id in enumerate(self._ids):
            if text_id not in gone:
                tokens = backwards[self._begins[number] + 1 : self._begins[number + 1]][::-1].astype(np.uint32)
                kept.append(RememberedText(text_id, self._writers[self._writer_of[number]], tokens))
        return kept[::-1]

    def holds(self, ids: Collection[int]) -> bool:
        """Whether one of these results is here."""
        return any(text_id in ids for text_id in self._ids)

    def wipe(self, gone: Collection[int]) -> None:
        """Overwrite the tokens of these results.

        The order around them is wrong from then on, so a search may miss a match. It finds nothing that is not there.
        """
        numbers = [number for number, text_id in enumerate(self._ids) if text_id in gone]
        for number in numbers:
            begin, end = (self._begins[number] + 1) * _WIDTH, self._begins[number + 1] * _WIDTH
            self._data[begin:end] = b"\xff" * (end - begin)
        if numbers:
            self._signposts = self._pairs()


class MemoryIndex:
    """Results of one scope. One thread adds and forgets, another merges, any thread reads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # of what follows, held for moments
        self._runs: tuple[Run, ...] = ()  # the newest first
        self._waiting: list[RememberedText] = []  # to be merged
        self._forgotten: set[int] = set()  # wiped, and perhaps still in a run
        self._alive: weakref.WeakSet[Run] = weakref.WeakSet()  # also those that only a reader holds

    @property
    def runs(self) -> tuple[Run, ...]:
        """What can be searched now."""
        return self._runs

    @property
    def num_tokens(self) -> int:
        """Tokens that can be searched, and those that wait for `merge`; each result has one more for its end."""
        with self._lock:
            return sum(run.num_tokens for run in self._runs) + sum(len(text.tokens) + 1 for text in self._waiting)

    @property
    def is_merged(self) -> bool:
        """Whether nothing waits for `merge`."""
        return not self._waiting and not self._forgotten

    def add(self, texts: Iterable[RememberedText]) -> None:
        """Take in results, the oldest first. They are found after the next `merge`."""
        with self._lock:
            self._waiting += texts

    def forget(self, ids: Collection[int]) -> None:
        """Let these results be found no more, from now on; the next `merge` frees their memory."""
        with self._lock:
            self._waiting = [text for text in self._waiting if text.text_id not in ids]
            self._forgotten.update(ids)
            for run in self._alive:
                run.wipe(ids)

    def merge(self) -> None:
        """Make runs of what was added, without what was forgotten. A reader goes on with the runs that it has."""
        with self._lock:
            texts, forgotten, kept = list(self._waiting), set(self._forgotten), list(self._runs)
        num_waiting, num_tokens = len(texts), sum(len(text.tokens) + 1 for text in texts)
        while kept and texts and kept[0].num_tokens <= max(LEAST_TOKENS, _GROWTH * num_tokens):
            num_tokens += kept[0].num_tokens
            texts = kept.pop(0).texts(forgotten) + texts
        runs = [Run(texts)] if texts else []
        for run in kept:
            if not run.holds(forgotten):
                runs.append(run)
            elif left := run.texts(forgotten):
                runs.append(Run(left))
        with self._lock:
            late = self._forgotten - forgotten
            for run in runs:
                run.wipe(late)
            self._alive.update(runs)
            self._runs, self._forgotten = tuple(runs), late
            done = {text.text_id for text in texts[len(texts) - num_waiting :]}
            self._waiting = [text for text in self._waiting if text.text_id not in done]


@dataclass(frozen=True, slots=True)
class MemoryView:
    """What one text may see of an index: all of it, or of other segments only what several writers wrote."""

    runs: Callable[[], tuple[Run, ...]]
    least: int  #: tokens of the shortest match
    most: int  #: of the longest one; at most DEPTH
    own_segment: str | None = None  #: of a shared index: the text's own segment; None: all results are of its segment

    def frozen(self) -> MemoryView:
        """The same, and nothing that is added later."""
        runs = self.runs()
        return MemoryView(lambda: runs, self.least, self.most, self.own_segment)

    def continuations(self, suffix: Sequence[int], num_tokens: int) -> Sequence[tuple[float, list[int]]]:
        """Weight of each occurrence of the end of `suffix`, as a match length, and up to `num_tokens` tokens after it.

        Many occurrences say more than one, but they are not independent, and the memory has thousands of places where
        the text itself has one. So n of them weigh together what 1 + log2 n of them would. The oldest weighs half of
        what the newest does.
        """
        seen = self.occurrences(suffix, num_tokens)
        less = math.log2(len(seen) / (1 + math.log2(len(seen)))) if seen else 0.0
        return [(length - age - less, following) for length, age, following in seen]

    def occurrences(self, suffix: Sequence[int], num_tokens: int) -> list[tuple[int, float, list[int]]]:
        """Match length, age, and the tokens after each occurrence that may be seen, the longest match first.

        MAX_OCCURRENCES at most, and none shorter than the longest one by more than _SHORTER. Ages are from 0,
        the newest token of the memory, to 1.
        """
        wanted = np.array(suffix[: -self.most - 1 : -1], ">u4").tobytes()
        places_of_runs = [(run, *run.find(wanted)) for run in self.runs()]
        longest = max((length for *_, length in places_of_runs), default=-1)
        least = max(self.least, longest - _SHORTER)
        total, num_newer = sum(run.num_tokens for run, *_ in places_of_runs), 0
        seen: list[tuple[int, float, ResultWriter | None, list[int]]] = []
        for run, place, length in places_of_runs:
            if length >= least:
                places, lengths = run.around(wanted, place, least, MAX_OCCURRENCES)
                writers: Iterable[ResultWriter | None] = (
                    run.writers(places) if self.own_segment is not None else repeat(None)
                )
                ages = ((places + num_newer) / total).tolist()
                seen += zip(lengths.tolist(), ages, writers, run.following(places, num_tokens), strict=False)
            num_newer += run.num_tokens
        if len(places_of_runs) > 1:
            seen.sort(key=lambda occurrence: -occurrence[0])
        del seen[MAX_OCCURRENCES:]
        if self.own_segment is not None:
            seen = self._shown(seen)
        return [(length, age, following) for length, age, _, following in seen if following]

    def _shown(
        self, seen: list[tuple[int, float, ResultWriter | None, list[int]]]
    ) -> list[tuple[int, float, ResultWriter | None, list[int]]]:
        """Keep of other segments' results what a second writer, of another batch or segment, wrote as well."""
        shown = [
            len(following) if writer and writer.segment == self.own_segment else 0 for *_, writer, following in seen
        ]
        groups, depth = [list(range(len(seen)))], 0
        while groups:
            split: dict[tuple[int, int], list[int]] = {}
            for number, group in enumerate(groups):
                for index in group:
                    following = seen[index][3]
                    if len(following) > depth:
                        split.setdefault((number, following[depth]), []).append(index)
            depth += 1
            groups = [group for group in split.values() if len({seen[index][2] for index in group}) > 1]
            for group in groups:
                for index in group:
                    shown[index] = max(shown[index], depth)
        return [(*occurrence[:3], occurrence[3][:num]) for occurrence, num in zip(seen, shown, strict=True)]


def _reader(data: bytearray, num_bytes: int) -> Callable[[int], bytes]:
    """Reads the first `num_bytes` of the context of a place."""

    def context(place: int) -> bytes:
        begin = place * _WIDTH
        return bytes(data[begin : begin + num_bytes])

    return context


def _order(backwards: Tokens) -> NDArray[np.int32]:
    """The places that have a token before and one after, sorted by their contexts up to DEPTH tokens; newest first.

    Prefix doubling: ranks by n tokens give those by 2 n.
    """
    num = len(backwards)
    is_end = backwards == _END
    codes, width = backwards.astype(np.int64), 1
    # As bytes are compared, an end comes after every token.
    codes[is_end] = codes.max(where=~is_end, initial=0) + 1
    if codes.max() < 1 << _PACKED_BITS:
        padded = np.concatenate([codes, np.zeros(2, np.int64)])
        codes = (padded[:num] << 2 * _PACKED_BITS) | (padded[1 : num + 1] << _PACKED_BITS) | padded[2:]
        width = 3
    order = np.argsort(codes, kind="stable")
    while width < DEPTH:
        ordered = codes[order]
        ranks = np.empty(num, np.int64)
        ranks[order] = np.concatenate([[0], np.cumsum(ordered[1:] != ordered[:-1])])
        codes = ranks * num
        codes[: num - width] += ranks[width:]
        width *= 2
        order = np.argsort(codes, kind="stable")
    is_place = ~is_end
    is_place[1:] &= ~is_end[:-1]
    is_place[0] = False
    return np.ascontiguousarray(order[is_place[order]].astype(np.int32))
