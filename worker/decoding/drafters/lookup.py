"""Look-up: propose what followed earlier occurrences of the text's last tokens.

Saxena 2023 (prompt look-up decoding); Oliaro et al., arXiv 2411.04975 (SuffixDecoding: frequencies, and lengths that
scale with the match). A proposal is a function of the text so far, and where results are remembered of the results
before it: its draft distribution is one-hot, and it is gated, which its revision says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from alphaloop.deciding.goodput import DrafterState
from alphaloop.settings.model import LookupDrafterSettings
from worker.decoding.drafters.continuations import Rule, grow
from worker.decoding.drafters.earlier_results import EarlierResults
from worker.decoding.drafters.suffixes import SuffixIndex
from worker.decoding.proposal import NOTHING, Ask, Proposal
from worker.engine import Sampling


@dataclass(frozen=True, slots=True)
class OpenText:
    """A sequence in flight."""

    text: Sequence[int]  #: prompt and output, the engine's own list
    num_prompt_tokens: int
    index: SuffixIndex
    earlier: EarlierResults | None  #: None: this task's results are not remembered

    def continuations(self, num_tokens: int) -> list[tuple[int, list[int]]]:
        """The match length of each occurrence, and `num_tokens` tokens behind it: its own first, then earlier results'.

        Where a match lies so close to the end that the text runs out, the text is taken to be periodic.
        """
        text, end = self.text, len(self.text)
        self.index.advance(end - 1)
        found = []
        for length, place in self.index.matches(text):
            behind = list(text[place : place + num_tokens])
            if len(behind) < num_tokens:
                behind = (behind * (num_tokens // (end - place) + 1))[:num_tokens]
            found.append((length, behind))
        if self.earlier is not None:
            found += self.earlier.continuations(text, num_tokens)
        return found


class LookupDrafter:
    """`worker.decoding.proposal.Drafter` without a model."""

    def __init__(self, name: str, settings: LookupDrafterSettings) -> None:
        self._settings = settings
        self._rule = Rule(settings.min_probability, settings.num_branches)
        self._open: dict[str, OpenText] = {}
        self._earlier = {
            task: EarlierResults(settings.min_ngram, settings.max_ngram, settings.max_remembered_bytes)
            for task in settings.remember_tasks
        }
        self._state = DrafterState(name, _revision(settings), settings.max_draft_tokens, is_stale=False)

    @property
    def state(self) -> DrafterState:
        """Its name, revision and longest draft."""
        return self._state

    def open(self, job_id: str, text: Sequence[int], sampling: Sampling, task: str) -> None:
        """A sequence begins; `text` is its prompt, a live list that grows with every round."""
        del sampling  # what followed before does not depend on it
        index = SuffixIndex(text, self._settings.min_ngram, self._settings.max_ngram)
        self._open[job_id] = OpenText(text, len(text), index, self._earlier.get(task))

    def propose(self, asks: Sequence[Ask]) -> list[Proposal]:
        """One proposal an ask, in order."""
        return [self._propose(self._open[ask.job_id], ask.num_tokens) for ask in asks]

    def close(self, job_id: str) -> None:
        """A sequence has ended, finished or cancelled; where its task's results are remembered, its output is.

        Half a result is as good as a whole one to look things up in: each of its tokens is the target's own. Prompts
        are never remembered.
        """
        ended = self._open.pop(job_id, None)
        if ended is not None and ended.earlier is not None:
            ended.earlier.remember(ended.text[ended.num_prompt_tokens :])

    def clear(self) -> None:
        """Forget every sequence and keep none of their texts, whatever state a failed round left them in."""
        self._open.clear()

    def _propose(self, opened: OpenText, num_tokens: int) -> Proposal:
        if num_tokens < 1:
            return NOTHING
        tokens, parents = grow(opened.continuations(num_tokens), num_tokens, self._rule)
        return Proposal(tuple(tokens), None if parents is None else tuple(parents))


def _revision(settings: LookupDrafterSettings) -> str:
    """The method has no weights: what it proposes is settled by these settings and this code's version."""
    revision = (
        f"lookup2-n{settings.min_ngram}-{settings.max_ngram}-p{settings.min_probability:g}-b{settings.num_branches}"
    )
    if settings.remember_tasks:
        revision += f"-m{settings.max_remembered_bytes}-{'+'.join(sorted(settings.remember_tasks))}"
    return revision
