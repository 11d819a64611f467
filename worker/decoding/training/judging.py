"""A draft's acceptance on held-out texts, without speculative decoding.

Greedy decoding accepts a drafted token where it is the target's own next token, so one pass of the draft over the
target's text gives every acceptance (teacher forcing): the rounds are simulated over it. Sampled
decoding at temperature 1 accepts with probability Σ min(p, q) at each position.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from alphaloop.acceptance import AcceptanceCounts
from alphaloop.draft_card import Measured
from worker.decoding.training.teaching import Lesson


@dataclass(frozen=True, slots=True)
class Verdict:
    """Counts and sums over some texts. The sum of two is that of both sets of texts."""

    num_texts: int = 0
    counts: AcceptanceCounts = field(default_factory=AcceptanceCounts)  #: greedy rounds at k = the judge's
    num_positions: int = 0
    overlap: float = 0.0  #: sum over positions of Σ min(p, q); a lower bound, because the target's tail is not stored

    def __add__(self, other: Verdict) -> Verdict:
        return Verdict(
            self.num_texts + other.num_texts,
            self.counts + other.counts,
            self.num_positions + other.num_positions,
            self.overlap + other.overlap,
        )

    def measured(self) -> Measured:
        """The form in which a draft's card stores the figures."""
        counts = self.counts
        return Measured(
            num_texts=self.num_texts,
            num_tokens=counts.num_tokens,
            rounds=counts.rounds,
            proposed=counts.proposed,
            trials=counts.trials,
            accepts=counts.accepts,
            num_positions=self.num_positions,
            overlap_sum=round(self.overlap, 3),
        )


def walk_rounds(matches: Sequence[bool], num_draft_tokens: int) -> AcceptanceCounts:
    """Counts of greedy rounds at k over a text; `matches[i]`: the draft's best token at i is the text's."""
    counts, place = AcceptanceCounts(), 0
    while place < len(matches):
        num_proposed = min(num_draft_tokens, len(matches) - place - 1)
        num_accepted = 0
        while num_accepted < num_proposed and matches[place + num_accepted]:
            num_accepted += 1
        counts = counts.with_round(num_proposed, num_accepted, num_emitted=num_accepted + 1)
        place += num_accepted + 1
    return counts


@torch.inference_mode()
def judge(draft: Any, lessons: Iterable[Lesson], columns: Tensor | None, num_draft_tokens: int) -> dict[str, Verdict]:
    """By task. `columns` [vocabulary]: column of the draft's head for each token, -1: none; None: it has all."""
    verdicts: dict[str, Verdict] = {}
    for lesson in lessons:
        logits = draft(input_ids=lesson.token_ids[None, :-1].to(draft.device), use_cache=False).logits[0]
        # Position i predicts token i + 1: the answer's first token is predicted behind the prompt's last.
        behind = slice(max(0, lesson.first_answer - 1), None)
        q = logits[behind].float().softmax(dim=-1).cpu()
        wanted, top = lesson.token_ids[1:][behind], lesson.top_ids[behind]
        if columns is not None:
            wanted, top = columns[wanted], columns[top]
        p = lesson.top_log_probs[behind].exp().masked_fill(top < 0, 0.0)
        overlap = torch.minimum(p, q.gather(-1, top.clamp(min=0))).sum(dim=-1)
        matches = (q.argmax(dim=-1) == wanted).tolist()
        # The prefill yields the first token; rounds begin behind it.
        counts = walk_rounds(matches[1:], num_draft_tokens)
        verdict = Verdict(1, counts, len(overlap), float(overlap.double().sum()))
        verdicts[lesson.text.task] = verdicts.get(lesson.text.task, Verdict()) + verdict
    return verdicts
