"""Which drafted tokens stay. Every rule gives the tokens the target's own distribution, whatever the drafter proposes.

`verify` turns the logits of a pass into a verdict on each sequence's proposal. The rules it follows are pure functions
of tensors.

A chain, greedy: a draft stays while it equals the target's argmax. A chain from a deterministic drafter, whose q is
one-hot (Leviathan et al. 2023): x is accepted with probability p(x), else the next token is drawn from p without x,
renormalised; after the last accepted draft it is drawn from p.

A chain that was drawn is verified as one block: Sun et al. 2024, "Block Verification Accelerates Speculative Decoding",
Algorithm 2 (arXiv 2403.10444). Token-wise verification stops at the first rejection. Here the longest prefix wins whose
own test passes, so a likely continuation can save an unlikely token. For every pair of models it accepts at least as
many tokens in expectation. It pays where drafts are drawn; for a one-hot q both rules accept alike.

A tree is `tokens` and `parents`: token i hangs on token parents[i] < i, or on the pending token where that is -1. Rows
of target tensors: row 0 is after the pending token, row i + 1 after token i. At every accepted node its children are
tried in order until one is accepted; where none is, the target's own token ends the round. r is what is left to be
drawn at a node, p at first. A child x that follows from the text (the likeliest tokens of a greedy draft, look-up) is
accepted with probability r(x), and taken out of r where it is rejected; after the last rejected child the target's
token is drawn from r (EAGLE, Li et al. 2024, arXiv 2401.15077). Each step is that of Leviathan et al. 2023 with r for p
and a one-hot q. Tokens that follow from the text may be sorted, merged and pruned in any way.

Drawn tokens come first among the children of a node. A drawn chain is verified as a block, and what its verdict leaves,
max(w p - q, 0), is r for the other children of the node where it ended: they only decide how the block's own next token
is drawn from r. Siblings that were drawn without replacement (SpecInfer, Miao et al. 2023; Sequoia, Chen et al. 2024)
are tried one by one: x is accepted with probability min(1, r(x) / q(x)), r being normalised, and after a rejection r
is max(r - q, 0) and q loses x. After them r does not depend on what was drawn, so the children that follow from the
text may also follow from what was drawn: one that equals a drawn sibling is left out.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from alphaloop.engine import SecondChoice
from alphaloop.errors import DecodeFailed
from engine.network.operations import best_tokens
from engine.proposal import DraftDistributions, Proposal, tree_depths

if TYPE_CHECKING:
    from engine.sequence import Sequence


def verify(logits: Tensor, judged: SequenceOf[tuple[Sequence, Proposal]]) -> list[DraftVerdict]:
    """One verdict a sequence; `logits` [rows, vocabulary] holds 1 + len(tokens) rows of each, one after the other.

    `TokenChooser` has the order of the steps. Most jobs are greedy with plain logits: their verdicts are computed
    together, with one wait for the device. Sampled jobs with equal cuts share the computation of their distributions.
    Raises DecodeFailed for logits that are not finite, because a choice from them has no meaning.
    """
    best, are_finite = best_tokens(logits)
    if not are_finite:
        raise DecodeFailed("the model returned logits that are not finite")
    verdicts: dict[int, DraftVerdict] = {}
    drawing: dict[tuple[float, ...], dict[int, Tensor]] = {}  # by cut, the scores of sequences that draw
    begin = 0
    for index, (sequence, proposal) in enumerate(judged):
        end = begin + 1 + len(proposal.tokens)
        if sequence.choice.takes_likeliest:
            verdicts[index] = _verify_likeliest(best[begin:end], logits[begin:end], sequence, proposal)
        else:
            scores = _scores(logits[begin:end], sequence, proposal)
            if sequence.choice.is_greedy or sequence.choice.is_reproducible:
                verdicts[index] = _verify_chosen(scores, sequence, proposal)
            else:
                drawing.setdefault(sequence.choice.cut, {})[index] = scores
        begin = end
    for alike in drawing.values():
        p = judged[next(iter(alike))][0].choice.probabilities(torch.cat([*alike.values()]))
        for index, own_p in zip(alike, torch.split(p, [len(scores) for scores in alike.values()]), strict=True):
            verdicts[index] = _verify_drawn(own_p, *judged[index])
    return _with_logprobs([verdicts[index] for index in range(len(judged))], logits, judged)


def _scores(logits: Tensor, sequence: Sequence, proposal: Proposal) -> Tensor:
    """The scores that one sequence chooses from [1 + len(tokens), vocabulary]."""
    scores = sequence.choice.scores(logits, sequence.text, proposal.paths)
    if sequence.constrained is not None:
        sequence.constrained.bury(scores, proposal.paths)
    return scores


def _verify_chosen(scores: Tensor, sequence: Sequence, proposal: Proposal) -> DraftVerdict:
    """One sequence whose token at each place follows from its `scores` [1 + len(tokens), vocabulary]."""
    places = [len(sequence.text) + depth for depth in (0, *proposal.depths)]
    return verify_against_choices(sequence.choice.tokens(scores, places).tolist(), proposal)


def verify_against_choices(best: list[int], proposal: Proposal) -> DraftVerdict:
    """One sequence for which the target has chosen `best` [1 + len(tokens)]."""
    if proposal.parents is None:
        return verify_greedy(best, proposal.tokens)
    return verify_tree_greedy(best, proposal.tokens, proposal.parents)


def _verify_likeliest(best: list[int], logits: Tensor, sequence: Sequence, proposal: Proposal) -> DraftVerdict:
    """One greedy sequence that bars nothing; `best` is the likeliest token in each row of its `logits`.

    The likeliest token of all is the likeliest of what a constraint leaves, if it is among these: no mask is needed.
    """
    constrained, paths, scores = sequence.constrained, proposal.paths, logits
    if sequence.spec.sampling.is_adjusted:
        scores = sequence.choice.adjusted(logits, sequence.text, paths)
        best = scores.argmax(dim=-1).tolist()
    if constrained is not None:
        best = constrained.best(best, scores, paths)
    verdict = verify_against_choices(best, proposal)
    if not sequence.is_watched:
        return verdict
    rows = [0, *(index + 1 for index in verdict.path)]
    emitted = scores[rows].float()
    if constrained is not None:
        constrained.restrict(emitted, [paths[row] for row in rows])
    return _with_second_choices(verdict, emitted)


def _with_second_choices(verdict: DraftVerdict, scores: Tensor) -> DraftVerdict:
    """The verdict on a greedy sequence with the second choice at each token of it, of which `scores` has the rows."""
    values, tokens = scores.topk(2)
    gaps = (values[:, 0] - values[:, 1]).tolist()
    second = tuple(SecondChoice(token, gap) for token, gap in zip(tokens[:, 1].tolist(), gaps, strict=True))
    return replace(verdict, second_choices=second)


def _with_logprobs(
    verdicts: list[DraftVerdict], logits: Tensor, judged: SequenceOf[tuple[Sequence, Proposal]]
) -> list[DraftVerdict]:
    """Add logprobs to the verdicts of sequences that ask for them."""
    begin = 0
    for index, (sequence, proposal) in enumerate(judged):
        if (num_ranked := sequence.spec.sampling.num_logprobs) is not None:
            verdict = verdicts[index]
            rows = [begin, *(begin + 1 + place for place in verdict.path)]
            tokens = [*(proposal.tokens[place] for place in verdict.path), verdict.next_token]
            verdicts[index] = replace(verdict, logprobs=_logprobs_of(logits[rows], tokens, num_ranked))
        begin += 1 + len(proposal.tokens)
    return verdicts


def _logprobs_of(logits: Tensor, tokens: SequenceOf[int], num_ranked: int) -> tuple[TokenLogprob, ...]:
    """The logprob of each token that was chosen from its row of `logits` [tokens, vocabulary]; in float32 or better.

    They are those of the model itself: from the logits as they come, before anything is barred, biased or penalised,
    and before temperature, top_k, top_p and min_p. That is vLLM's default (`raw_logprobs`). So a token that was drawn
    at a high temperature shows how likely the model holds it, and the numbers do not depend on how a job is decoded.
    """
    logprobs = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(dim=-1)
    chosen = torch.tensor(tokens, dtype=torch.long, device=logits.device)
    own = logprobs.gather(1, chosen[:, None]).squeeze(1).tolist()
    best = logprobs.topk(min(num_ranked, logprobs.shape[1]), dim=-1)
    ranked = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return tuple(
        TokenLogprob(token, value, tuple(zip(ids, values, strict=True)))
        for token, value, (ids, values) in zip(tokens, own, ranked, strict=True)
    )


def _verify_drawn(p: Tensor, sequence: Sequence, proposal: Proposal) -> DraftVerdict:
    """One sequence that draws from `p` [1 + len(tokens), vocabulary]."""
    tokens = proposal.tokens
    uniforms = sequence.choice.uniforms(len(tokens) + 1, p.device)
    if proposal.parents is not None and proposal.q is None:
        return verify_tree(p, tokens, proposal.parents, uniforms)
    if proposal.parents is not None and proposal.q is not None:
        return verify_drawn_tree(p, proposal.q, tokens, proposal.parents, uniforms)
    drafts = torch.tensor(tokens, dtype=torch.long, device=p.device)
    if proposal.q is None:
        return verify_deterministic(p, drafts, uniforms)
    return verify_block(p, proposal.q, drafts, uniforms)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token of the text, and the likeliest ones at its place, likeliest first, each with its logprob."""

    token_id: int
    logprob: float
    ranked: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class DraftVerdict:
    """What a round yields for one sequence: `num_accepted` of its drafts, then `next_token` of the target."""

    num_accepted: int
    next_token: int
    #: For a tree: which tokens of the proposal were accepted, root first. None for a chain: the first `num_accepted`.
    branch: tuple[int, ...] | None = None
    #: For a tree: depths at which a token was tried. None for a chain: all it accepted and the one that was rejected.
    num_tested: int | None = None
    #: For a watched sequence: by token that the round yields.
    second_choices: tuple[SecondChoice, ...] = ()
    #: For a sequence that wants them: by token that the round yields.
    logprobs: tuple[TokenLogprob, ...] = ()

    @property
    def path(self) -> tuple[int, ...]:
        """Indices of the accepted tokens in the proposal, root first."""
        return tuple(range(self.num_accepted)) if self.branch is None else self.branch


def verify_greedy(best: SequenceOf[int], draft: SequenceOf[int]) -> DraftVerdict:
    """One sequence. `best` [k + 1]: the target's choice after the pending token and after each draft; `draft` [k]."""
    hits = zip(best, draft, strict=False)
    num_accepted = next((place for place, (token, drafted) in enumerate(hits) if token != drafted), len(draft))
    return DraftVerdict(num_accepted, best[num_accepted])


def verify_deterministic(p: Tensor, draft: Tensor, uniforms: Tensor) -> DraftVerdict:
    """One sequence whose drafter is deterministic.

    `p` [k + 1, vocabulary]: the target's probabilities (float64). `draft` [k]. `uniforms` [k + 1]: independent draws
    from [0, 1), the last for the token that the target adds.
    """
    p_draft = p[:-1].gather(1, draft[:, None]).squeeze(1)
    num_accepted = int((uniforms[:-1] < p_draft).long().cumprod(0).sum())
    rest = p[num_accepted]
    if num_accepted < draft.shape[0]:
        rest = still_left(rest.index_fill(0, draft[num_accepted], 0.0), rest)
    return DraftVerdict(num_accepted, draw(rest, uniforms[-1]))


def draw(weights: Tensor, uniform: Tensor) -> int:
    """Index drawn in proportion to `weights` [vocabulary], by inverting their cumulative sum at `uniform`."""
    return int(draw_rows(weights[None], uniform.reshape(1)))


def draw_rows(weights: Tensor, uniforms: Tensor) -> Tensor:
    """The same for each row of `weights` [rows, vocabulary] at its own of `uniforms` [rows]: [rows]."""
    cumulative = weights.cumsum(dim=-1)
    # A uniform is below 1 by at least 2^-53, so no product rounds up to the whole sum. Sums taken in parallel may rise
    # by a bit where there is no weight.
    places = torch.searchsorted(cumulative, uniforms[:, None] * cumulative[:, -1:], right=True)
    return torch.where(weights.gather(1, places) > 0, places, weights.argmax(dim=-1, keepdim=True)).squeeze(1)


def still_left(residual: Tensor, before: Tensor) -> Tensor:
    """What is left to draw from after a rejection: `residual`, or `before` where rounding alone caused the rejection.

    Where p and q differ by rounding only, a draft is still rejected once in 10^16 times, and nothing remains.
    """
    return torch.where((residual > 0).any(), residual, before)


def verify_block(p: Tensor, q: DraftDistributions, draft: Tensor, uniforms: Tensor) -> DraftVerdict:
    """One sequence whose drafts were drawn from `q`.

    `p` [k + 1, vocabulary]: the target's probabilities (float64). `q`: k rows, what the drafts were drawn from. `draft`
    [k]. `uniforms` [k + 1]: independent draws from [0, 1), the last for the token that the target adds.

    With w_0 = 1 and w_i = min(1, w_(i-1) p(x_i) / q(x_i)), the prefix of length i < k passes with probability
    S_i / (S_i + 1 - w_i), where S_i is the sum of max(w_i p - q, 0) after it, and the whole draft with w_k. The next
    token is drawn from norm(max(w p - q, 0)) after the longest prefix that passes, or from p after the whole draft.
    """
    num_accepted, rest = _verify_as_block(p, q, draft, uniforms[:-1])
    return DraftVerdict(num_accepted, draw(rest, uniforms[-1]))


def _verify_as_block(p: Tensor, q: DraftDistributions, draft: Tensor, uniforms: Tensor) -> tuple[int, Tensor]:
    """How many drafts stay, and what the token after them is drawn from; `uniforms` [k]."""
    k = draft.shape[0]
    kept = _kept(p, q, draft)
    residuals = q.taken_from(kept[:-1, None] * p[:-1]).clamp_min(0.0)
    sums = residuals[1:].sum(dim=1)
    # 0 / 0, which no number is below, stands where w_i = 1 and p = q after it: a longer prefix passes there anyway.
    passing = torch.cat(((sums / (sums + 1 - kept[1:-1])), kept[-1:])) if k else kept[:0]
    lengths = torch.arange(1, k + 1, device=p.device)
    num_accepted = int(((uniforms < passing) * lengths).amax()) if k else 0
    rest = p[num_accepted]
    if num_accepted < k:
        rest = still_left(residuals[num_accepted], rest)
    return num_accepted, rest


def _kept(p: Tensor, q: DraftDistributions, draft: Tensor) -> Tensor:
    """w_0 … w_k of the algorithm, [k + 1]."""
    ratios = p[:-1].gather(1, draft[:, None]).squeeze(1) / q.of(draft)
    kept = [torch.ones((), dtype=p.dtype, device=p.device)]
    for ratio in ratios:
        kept.append((kept[-1] * ratio).clamp_max(1.0))
    return torch.stack(kept)


def verify_tree_greedy(best: SequenceOf[int], tokens: SequenceOf[int], parents: SequenceOf[int]) -> DraftVerdict:
    """The deepest path on which every token is the target's choice.

    `best` [n + 1]: the target's choice, greedy or coupled, after the pending token and after each of the n tokens.
    """
    depths = tree_depths(parents)
    hits = {-1}
    end, num_tested = -1, 0
    for i, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        if parent not in hits:
            continue
        num_tested = max(num_tested, depths[i])
        if token == best[parent + 1]:
            hits.add(i)
            # Equal siblings are both hits; only the deeper one may carry on.
            if end < 0 or depths[i] > depths[end]:
                end = i
    branch: list[int] = []
    place = end
    while place >= 0:
        branch.insert(0, place)
        place = parents[place]
    return DraftVerdict(len(branch), best[end + 1], tuple(branch), num_tested)


def verify_tree(p: Tensor, tokens: SequenceOf[int], parents: SequenceOf[int], uniforms: Tensor) -> DraftVerdict:
    """One sequence whose tree is deterministic.

    `p` [n + 1, vocabulary]: the target's probabilities (float64). `uniforms` [n + 1]: independent draws from [0, 1),
    the last for the token that the target adds. One wait for the device at each depth, and one at the end.
    """
    return _descend(p, None, tokens, parents, uniforms)


def verify_drawn_tree(
    p: Tensor, q: DraftDistributions, tokens: SequenceOf[int], parents: SequenceOf[int], uniforms: Tensor
) -> DraftVerdict:
    """One sequence whose first len(q) tokens were drawn from `q`, siblings without replacement.

    The others follow from the text and from what was drawn. Shapes as in `verify_tree`.
    """
    num_drawn = len(q)
    if any(parent != i - 1 for i, parent in enumerate(parents[:num_drawn])):
        return _descend(p, q, tokens, parents, uniforms)
    drafts = torch.tensor(tokens[:num_drawn], dtype=torch.long, device=p.device)
    num_accepted, rest = _verify_as_block(p[: num_drawn + 1], q, drafts, uniforms[:num_drawn])
    return _descend(p, q, tokens, parents, uniforms, accepted=range(num_accepted), left=rest)


def _descend(
    p: Tensor,
    q: DraftDistributions | None,
    tokens: SequenceOf[int],
    parents: SequenceOf[int],
    uniforms: Tensor,
    accepted: SequenceOf[int] = (),
    left: Tensor | None = None,
) -> DraftVerdict:
    """Try the children of each accepted node in order; if a block was `accepted`, its undrawn children only.

    `left` is what the block leaves to be drawn after it.
    """
    num_drawn, num_judged = 0 if q is None else len(q), 0 if left is None or q is None else len(q)
    children: list[list[int]] = [[] for _ in range(len(tokens) + 1)]
    for i, parent in enumerate(parents):
        if i >= num_judged:
            children[parent + 1].append(i)
    branch = list(accepted)
    num_tested = min(len(branch) + 1, num_judged)
    rest = p[0] if left is None else left
    while siblings := children[branch[-1] + 1 if branch else 0]:
        num_tested = len(branch) + 1
        # Everything of a depth is decided before the first answer is read: what is left does not depend on uniforms.
        chances, remaining = [], q if q is None or siblings[0] >= num_drawn else q[siblings[0] : siblings[0] + 1]
        for i in siblings:
            token = torch.tensor([tokens[i]], device=rest.device)
            if remaining is None or i >= num_drawn:
                chances.append(uniforms[i] * rest.sum() < rest[tokens[i]])
                rest = still_left(rest.index_fill(0, token, 0.0), rest)
                continue
            rest = rest / rest.sum()
            chances.append(uniforms[i] * remaining.of(token)[0] < rest[tokens[i]])
            rest = still_left(remaining.taken_from(rest[None])[0].clamp_min(0.0), rest)
            remaining = remaining.without(tokens[i])
        answers: list[bool] = torch.stack(chances).tolist()
        if not any(answers):
            break
        branch.append(siblings[answers.index(True)])
        rest = p[branch[-1] + 1]
    return DraftVerdict(len(branch), draw(rest, uniforms[-1]), tuple(branch), num_tested)
