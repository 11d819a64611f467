"""From a pass's logits to the verdict on each sequence's proposal."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import replace

import torch
from torch import Tensor

from alphaloop.errors import DecodeFailed
from worker.decoding.network.operations import best_tokens
from worker.decoding.proposal import Proposal
from worker.decoding.sequence import Sequence
from worker.decoding.verification.block import verify_block
from worker.decoding.verification.chain import Verdict, verify_deterministic, verify_greedy
from worker.decoding.verification.tree import tree_depths, verify_tree, verify_tree_greedy
from worker.engine import SecondChoice


def verdicts(logits: Tensor, asked: SequenceOf[tuple[Sequence, Proposal]]) -> list[Verdict]:
    """One verdict a sequence; `logits` [rows, vocabulary] holds 1 + len(tokens) rows of each, one behind the other.

    Most jobs are greedy with plain logits: their verdicts are computed together, with one wait for the device. Sampled
    jobs with equal cuts share the computation of their distributions. Raises DecodeFailed for logits that are not
    finite, because a choice from them has no meaning.
    """
    best, are_finite = best_tokens(logits)
    if not are_finite:
        raise DecodeFailed("the model returned logits that are not finite")
    found: dict[int, Verdict] = {}
    sampled: dict[tuple[float, ...], dict[int, Tensor]] = {}
    begin = 0
    for index, (sequence, proposal) in enumerate(asked):
        end = begin + 1 + len(proposal.tokens)
        choice = sequence.choice
        if choice.is_greedy and choice.is_plain:
            verdict = _followed(best[begin:end], proposal)
            found[index] = _with_second_choices(verdict, logits[begin:end]) if sequence.is_watched else verdict
        else:
            scores = choice.scores(logits[begin:end], sequence.text, proposal.tokens, proposal.parents)
            if choice.is_greedy or choice.is_reproducible:
                found[index] = _settled(scores, sequence, proposal)
            else:
                sampled.setdefault(choice.cut, {})[index] = scores
        begin = end
    for alike in sampled.values():
        some = asked[next(iter(alike))][0].choice
        p = some.probabilities(torch.cat([*alike.values()]))
        begin = 0
        for index, scores in alike.items():
            found[index] = _drawn(p[begin : begin + len(scores)], *asked[index])
            begin += len(scores)
    return [found[index] for index in range(len(asked))]


def _followed(best: list[int], proposal: Proposal) -> Verdict:
    """One sequence for which the target has chosen `best` [1 + len(tokens)]."""
    if proposal.parents is None:
        return verify_greedy(best, proposal.tokens)
    return verify_tree_greedy(best, proposal.tokens, proposal.parents)


def _with_second_choices(verdict: Verdict, logits: Tensor) -> Verdict:
    """The verdict on a greedy sequence with the second choice at each token of it."""
    rows = [0, *(index + 1 for index in verdict.path)]
    values, tokens = logits[rows].float().topk(2)
    gaps = (values[:, 0] - values[:, 1]).tolist()
    second = tuple(SecondChoice(token, gap) for token, gap in zip(tokens[:, 1].tolist(), gaps, strict=True))
    return replace(verdict, second_choices=second)


def _settled(scores: Tensor, sequence: Sequence, proposal: Proposal) -> Verdict:
    """One sequence whose tokens follow from its scores: greedy with adjusted scores, or with the noise of a seed."""
    tokens = proposal.tokens
    parents = range(-1, len(tokens) - 1) if proposal.parents is None else proposal.parents
    best = sequence.choice.tokens(scores, [len(sequence.text) + depth for depth in (0, *tree_depths(parents))])
    return _followed(best.tolist(), proposal)


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
