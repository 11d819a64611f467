"""What the target says to each sequence's proposal: from a pass's logits to verdicts."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import torch
from torch import Tensor

from worker.decoding.proposal import Proposal
from worker.decoding.sequence import Sequence
from worker.decoding.verify import Verdict, verify_deterministic, verify_greedy
from worker.decoding.verify_block import verify_block
from worker.decoding.verify_tree import tree_depths, verify_tree, verify_tree_greedy


def verdicts(logits: Tensor, asked: SequenceOf[tuple[Sequence, Proposal]]) -> list[Verdict]:
    """One verdict a sequence; `logits` [rows, vocabulary] holds 1 + len(tokens) rows of each, one behind the other.

    Greedy jobs whose scores are the logits themselves, which are most, are settled together. Raises RuntimeError where
    logits are not finite, as nothing chosen from them means anything.
    """
    values, best = logits.max(dim=-1)
    if not bool(values.isfinite().all()):
        raise RuntimeError("the model returned logits that are not finite")
    found: dict[int, Verdict] = {}
    simple: dict[int, tuple[int, SequenceOf[int]]] = {}
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
            found[index] = _verdict(logits[begin:end], sequence, proposal)
        begin = end
    if simple:
        found |= zip(simple, _greedy_chains(best, list(simple.values())), strict=True)
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


def _verdict(logits: Tensor, sequence: Sequence, proposal: Proposal) -> Verdict:
    """One sequence that samples, or whose scores are adjusted."""
    choice, tokens, device = sequence.choice, proposal.tokens, logits.device
    scores = choice.scores(logits, sequence.text, tokens, proposal.parents)
    if choice.is_greedy or choice.is_reproducible:
        parents = range(-1, len(tokens) - 1) if proposal.parents is None else proposal.parents
        positions = [len(sequence.text) + depth for depth in (0, *tree_depths(parents))]
        best = choice.tokens(scores, positions)
        if proposal.parents is not None:
            return verify_tree_greedy(best, tokens, proposal.parents)
        return _greedy_chains(best, [(0, tokens)])[0]
    p = choice.probabilities(scores)
    uniforms = choice.uniforms(len(tokens) + 1, device)
    if proposal.parents is not None:
        return verify_tree(p, proposal.q, tokens, proposal.parents, uniforms, with_replacement=proposal.q is not None)
    drafts = torch.tensor(tokens, dtype=torch.long, device=device)
    if proposal.q is None:
        return verify_deterministic(p, drafts, uniforms)
    return verify_block(p, proposal.q, drafts, uniforms)
