"""Look-up: propose what followed earlier occurrences of the text's last tokens.

Saxena 2023 (prompt look-up decoding); Oliaro et al., arXiv 2411.04975 (SuffixDecoding: frequencies, and lengths that
scale with the match). A proposal is a function of the text so far and of remembered results, so its draft distribution
is one-hot. It has a gate, which is part of its revision.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from alphaloop.lookup import EarlierResults, Rule, SearchedText, SuffixIndex
from alphaloop.settings.models import LookupDrafterSettings
from worker.decoding.proposal import Ask, Proposal
from worker.engine import Sampling


class LookupDrafter:
    """`worker.decoding.proposal.Drafter` without a model."""

    def __init__(self, name: str, settings: LookupDrafterSettings) -> None:
        self._settings = settings
        self._rule = Rule(settings.min_probability, settings.num_branches)
        self._open: dict[str, SearchedText] = {}
        self._earlier = {
            task: EarlierResults(settings.min_ngram, settings.max_ngram, settings.max_remembered_bytes)
            for task in settings.remember_tasks
        }
        self.state = settings.state(name, _revision(settings))
        self.shadow_share = settings.shadow_share  #: most of a text's decoding time that scoring it may take

    def open(self, job_id: str, text: Sequence[int], sampling: Sampling, task: str) -> None:
        """The sequence wants drafts from now on; `text` is prompt and output, a live list that grows."""
        del sampling  # what followed before does not depend on it
        index = SuffixIndex(text, self._settings.min_ngram, self._settings.max_ngram)
        self._open[job_id] = SearchedText(text, index, self._earlier.get(task))

    def propose(self, asks: Sequence[Ask]) -> list[Proposal]:
        """One proposal an ask, in order."""
        return [self._propose(self._open[ask.job_id], ask.num_tokens) for ask in asks]

    def close(self, job_id: str) -> None:
        """The sequence wants no more drafts from here; nothing happens if it was never opened."""
        self._open.pop(job_id, None)

    def clear(self) -> None:
        """Forget every sequence and keep none of their texts, whatever state a failed round left them in."""
        self._open.clear()

    def rereading(self, text: list[int], task: str) -> Callable[[int], Proposal]:
        """What it would have proposed for a text that others decoded, at most so many tokens a call.

        `text` is the prompt; the caller appends to it and asks again. Of earlier results only those count that are
        remembered now: not the text itself, nor what ends while it is written.
        """
        index, earlier = SuffixIndex(text, self._settings.min_ngram, self._settings.max_ngram), self._earlier.get(task)
        opened = SearchedText(text, index, earlier, earlier.num_ever if earlier is not None else 0)
        return lambda num_tokens: self._propose(opened, num_tokens)

    def remember(self, task: str, output: Sequence[int]) -> None:
        """Take in the output of a sequence that has ended, finished or cancelled, with any drafter.

        Unfinished output is remembered too, because each of its tokens is the target's own. Prompts are never
        remembered. Without effect for tasks whose results are not remembered.
        """
        if (earlier := self._earlier.get(task)) is not None:
            earlier.remember(output)

    def _propose(self, opened: SearchedText, num_tokens: int) -> Proposal:
        tokens, parents = opened.propose(num_tokens, self._rule)
        return Proposal(tuple(tokens), None if parents is None else tuple(parents))


def _revision(settings: LookupDrafterSettings) -> str:
    """The method has no weights: what it proposes is settled by these settings and this code's version."""
    revision = (
        f"lookup2-n{settings.min_ngram}-{settings.max_ngram}-p{settings.min_probability:g}-b{settings.num_branches}"
    )
    if settings.remember_tasks:
        revision += f"-m{settings.max_remembered_bytes}-{'+'.join(sorted(settings.remember_tasks))}"
    return revision
