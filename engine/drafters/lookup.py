"""Look-up: propose what followed earlier occurrences of the text's last tokens.

Saxena 2023 (prompt look-up decoding); Oliaro et al., arXiv 2411.04975 (SuffixDecoding: frequencies, and lengths that
scale with the match). A proposal is a function of the text so far and of remembered results, so its draft distribution
is one-hot. It has a gate, which is part of its revision.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from alphaloop.engine import Sampling
from alphaloop.lookup import (
    BYTES_PER_TOKEN,
    MAX_NGRAM,
    MIN_NGRAM,
    EarlierResults,
    EarlierTexts,
    Rule,
    SearchedText,
    SharedTexts,
    SuffixIndex,
    ViewOf,
)
from alphaloop.settings.models import LookupDrafterSettings
from engine.constraint import ConstrainedText
from engine.proposal import Ask, Drafter, Proposal


class LookupDrafter(Drafter):
    """Drafts without a model."""

    def __init__(self, name: str, settings: LookupDrafterSettings) -> None:
        self._settings = settings
        self._rule = Rule(settings.min_probability, settings.num_branches)
        self._open: dict[str, SearchedText] = {}
        self._view_of: ViewOf | None = None
        self.state = settings.state(name, _revision(settings))
        self.shadow_share = settings.shadow_share  #: most of a text's decoding time that scoring it may take

    def use_memory(self, view_of: ViewOf) -> None:
        """Search earlier results too from the next text on, if the settings say so."""
        if self._settings.memory:
            self._view_of = view_of

    def open(self, job_id: str, text: Sequence[int], sampling: Sampling, task: str, segment: str = "") -> None:
        """The sequence wants drafts from now on; `text` is prompt and output, a live list that grows."""
        self._open[job_id] = self._searched(text, sampling.predicted, self._earlier(task, segment))

    def propose(self, asks: Sequence[Ask]) -> list[Proposal]:
        """One proposal an ask, in order."""
        return [self._propose(self._open[ask.job_id], ask.num_tokens) for ask in asks]

    def close(self, job_id: str) -> None:
        """The sequence wants no more drafts from here; nothing happens if it was never opened."""
        self._open.pop(job_id, None)

    def clear(self) -> None:
        """Forget every sequence and keep none of their texts, whatever state a failed round left them in."""
        self._open.clear()

    def rereading(
        self, text: list[int], task: str, segment: str = "", predicted: Sequence[int] = ()
    ) -> Callable[[int], Proposal]:
        """What it would have proposed for a text that others decoded, at most as many tokens as a call asks for.

        `text` is the prompt; the caller appends to it and asks again. It searches the earlier results
        that are remembered now: not the text itself, nor what ends while it is written.
        """
        earlier = self._earlier(task, segment)
        opened = self._searched(text, predicted, earlier and earlier.frozen())
        return lambda num_tokens: self._propose(opened, num_tokens)

    def teacher_forced(
        self, seen: list[int], output: Sequence[int], constrained: ConstrainedText | None
    ) -> Callable[[int], Proposal]:
        """As `rereading` without a task: of this text alone."""
        return self.rereading(seen, "")

    def _searched(self, text: Sequence[int], predicted: Sequence[int], memory: EarlierTexts | None) -> SearchedText:
        ngrams, prediction = (MIN_NGRAM, MAX_NGRAM), None
        if predicted:
            prediction = EarlierResults(*ngrams, BYTES_PER_TOKEN * (len(predicted) + 1))
            prediction.remember(predicted)
        return SearchedText(text, SuffixIndex(text, *ngrams), memory, prediction)

    def _earlier(self, task: str, segment: str) -> SharedTexts | None:
        """The results that a job may search; None for a probe or control, which have no task."""
        if self._view_of is None or not task:
            return None
        return self._view_of(task, segment, MIN_NGRAM, MAX_NGRAM)

    def _propose(self, opened: SearchedText, num_tokens: int) -> Proposal:
        tokens, parents, together = opened.propose(num_tokens, self._rule)
        return Proposal(tuple(tokens), None if parents is None else tuple(parents), together=tuple(together))


def _revision(settings: LookupDrafterSettings) -> str:
    """The method has no weights: what it proposes is settled by these settings and this code's version."""
    revision = f"lookup2-n{MIN_NGRAM}-{MAX_NGRAM}-p{settings.min_probability:g}-b{settings.num_branches}"
    return f"{revision}-m1" if settings.memory else revision
