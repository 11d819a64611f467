"""Scores a drafter on a greedy text of the target, without speculative decoding (teacher forcing).

A greedy draft is accepted where its token is the target's own next one. Up to its first wrong token, a draft is thus
the text itself, and what the drafter would say behind every beginning of the text follows from one pass over it. The
rounds are walked over that text (virtual_rounds.py), so trials and accepts by position are those of a real run at the
same k, round by round. What a draft would say behind its first wrong token is not known, and never tested in a real run
either. Such a draft counts as k tokens long; a real one may have ended earlier there, at a token that ends a text or at
its gate. So `proposed` may be larger than in a real run. In a dtype that rounds, passes of another width may swap two
tokens that are almost equal, as in two real runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from alphaloop.acceptance import AcceptanceCounts
from worker.decoding.drafters.draft_model import DraftModelDrafter
from worker.decoding.drafters.lookup import LookupDrafter
from worker.decoding.proposal import Drafter, Proposal
from worker.decoding.virtual_rounds import VirtualRounds
from worker.engine import Generation, PreparedJob, ShadowCounts

#: Stands where a token is not known; no token has this id.
_UNKNOWN: Final = -1


def with_scores(
    generation: Generation,
    prepared: PreparedJob,
    drafters: Mapping[str, Drafter],
    failed: Callable[[str, str, Exception], object],
) -> Generation:
    """A control's text with the counts of the drafters that its job asks for, and with the time that this took.

    A drafter that is not loaded or cannot be scored is left out. So is one that raises, which is then named to `failed`
    with its method and its error: a score is no part of the text.
    """
    began = time.perf_counter()
    scores = []
    for drafter in filter(None, map(drafters.get, prepared.job.scored_drafters)):
        state = drafter.state
        k = min(prepared.job.probe_num_draft_tokens or state.max_draft_tokens, state.max_draft_tokens)
        try:
            counts = score(
                drafter, prepared.token_ids, generation.token_ids, k, max_tokens=prepared.sampling.max_tokens
            )
        except Exception as error:
            failed(state.name, "score", error)
            continue
        if counts is not None:
            scores.append(ShadowCounts(state.name, state.revision, k, counts))
    if not scores:
        return generation
    seconds = time.perf_counter() - began
    return replace(generation, shadows=(*generation.shadows, *scores), device_s=generation.device_s + seconds)


def score(
    drafter: Drafter, prompt: Sequence[int], output: Sequence[int], num_draft_tokens: int, *, max_tokens: int
) -> AcceptanceCounts | None:
    """The counts of decoding this text at k = `num_draft_tokens`, the prefill's round among them.

    `output` is what the target answered greedily, whole; `max_tokens` is the job's limit. Look-up uses this text alone,
    no earlier results. None for a drafter whose drafts do not follow from the text: a draft model that proposes trees.
    """
    seen = list(prompt)
    if isinstance(drafter, LookupDrafter):
        propose = drafter.rereading(seen, "", 0)
    elif isinstance(drafter, DraftModelDrafter) and drafter.num_branches == 1:
        propose = _rereading(drafter, seen, output)
    else:
        return None
    rounds = VirtualRounds(propose, seen, num_draft_tokens, max_tokens)
    text = [*prompt, *output]
    while rounds.take_round(text, has_ended=True):
        pass
    return rounds.counts


def _rereading(drafter: DraftModelDrafter, seen: Sequence[int], output: Sequence[int]) -> Callable[[int], Proposal]:
    """What a draft model would propose behind `seen`, a beginning of the text that grows."""
    num_prompt = len(seen)
    choices = drafter.choices(seen, output)

    def propose(num_tokens: int) -> Proposal:
        tokens: list[int] = []
        together = 1.0
        while len(tokens) < min(num_tokens, drafter.num_left(num_prompt, len(seen) - num_prompt)):
            place = len(seen) - num_prompt + len(tokens)
            is_known = place < len(output) and (not tokens or tokens[-1] == output[place - 1])
            if not is_known:
                tokens.append(_UNKNOWN)
                continue
            token, probability = choices[place]
            tokens.append(token)
            together *= probability
            if drafter.ends_draft(token, together):
                break
        return Proposal(tuple(tokens))

    return propose
