"""What the target says to each sequence's proposal: from a pass's logits to verdicts."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import torch
from torch import Tensor

from worker.decoding.proposal import Proposal
from worker.decoding.sequence import Sequence
from worker.decoding.verification.block import verify_block
from worker.decoding.verification.chain import Verdict, verify_deterministic, verify_greedy
from worker.decoding.verification.tree import tree_depths, verify_tree, verify_tree_greedy


def verdicts(logits: Tensor, asked: SequenceOf[tuple[Sequence, Proposal]]) -> list[Verdict]:
    """One verdict a sequence; `logits` [rows, vocabulary] holds 1 + len(tokens) rows of each, one behind the other.

    Greedy jobs whose scores are the logits themselves, which are most, are settled together; sampled ones share the
    computation of their distributions where these are cut alike. Raises RuntimeError where logits are not finite, as
    nothing chosen from them means anything.
    """
    values, best = logits.max(dim=-1)
    if not bool(values.isfinite().all()):
        raise RuntimeError("the model returned logits that are not finite")
    found: dict[int, Verdict] = {}
    simple: dict[int, tuple[int, SequenceOf[int]]] = {}
    sampled: dict[tuple[float, ...], dict[int, Tensor]] = {}
    begin = 0
    for index, (sequence, proposal) in enumerate(asked):
        end = begin + 1 + len(proposal.tokens)
        choice = sequence.choice
        if choice.is_greedy and choice.is_plain:
            if proposal.parents is None:
                simple[index] = (begin, proposal.tokens)
            else:
                found[index] = verify_tree_greedy(best[begin:end], proposal.tokens, proposal.parents)
        else:
            scores = choice.scores(logits[begin:end], sequence.text, proposal.tokens, proposal.parents)
            if choice.is_greedy or choice.is_reproducible:
                found[index] = _settled(scores, sequence, proposal)
            else:
                sampled.setdefault(choice.cut, {})[index] = scores
        begin = end
    if simple:
        found |= zip(simple, _greedy_chains(best, list(simple.values())), strict=True)
    for alike in sampled.values():
        some = asked[next(iter(alike))][0].choice
        p = some.probabilities(torch.cat([*alike.values()]))
        begin = 0
        for index, scores in alike.items():
            found[index] = _drawn(p[begin : begin + len(scores)], *asked[index])
            begin += len(scores)
    return [found[index] for index in range(len(asked))]


def _greedy_chains(best: Tensor, chains: SequenceOf[tuple[int, SequenceOf[int]]]) -> list[Verdict]:
    num_proposed = [len(tokens) for _, tokens in chains]
    width = max(num_proposed)
    rows = [[begin + min(column, len(tokens)) for column in range(width + 1)] for begin, tokens in chains]
    drafts = [[*tokens, *[0] * (width - len(tokens))] for _, tokens in chains]
    device = best.device
    return verify_greedy(
        best[torch.tensor(rows, device=device)],
        torch.tensor(drafts, dtype=torch.long, device=device),
        torch.tensor(num_proposed, device=device),
    )


def _settled(scores: Tensor, sequence: Sequence, proposal: Proposal) -> Verdict:
    """One sequence whose tokens follow from its scores: greedy with adjusted scores, or with the noise of a seed."""
    tokens = proposal.tokens
    parents = range(-1, len(tokens) - 1) if proposal.parents is None else proposal.parents
    best = sequence.choice.tokens(scores, [len(sequence.text) + depth for depth in (0, *tree_depths(parents))])
    if proposal.parents is not None:
        return verify_tree_greedy(best, tokens, proposal.parents)
    return _greedy_chains(best, [(0, tokens)])[0]


def _drawn(p: Tensor, sequence: Sequence, proposal: Proposal) -> Verdict:
    """One sequence that draws from `p` [1 + len(tokens), vocabulary]."""
    tokens = proposal.tokens
    uniforms = sequence.choice.uniforms(len(tokens) + 1, p.device)
    if proposal.parents is not None:
        return verify_tree(p, proposal.q, tokens, proposal.parents, uniforms, with_replacement=proposal.q is not None)
    drafts = torch.tensor(tokens, dtype=torch.long, device=p.device)
    if proposal.q is None:
        return verify_deterministic(p, drafts, uniforms)
    return verify_block(p, proposal.q, drafts, uniforms)
