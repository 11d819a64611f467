"""Which drafted tokens stay. Every rule gives the tokens the target's own distribution, whatever the drafter proposes.

`verify` turns the logits of a pass into a verdict on each sequence's proposal. The rules it follows are pure functions
of numbers; `engine.drawing` has those that draw.

A chain, greedy: a draft stays while it equals the target's argmax. A chain from a deterministic drafter, whose q is
one-hot (Leviathan et al. 2023): x is accepted with probability p(x), else the next token is drawn from p without x,
renormalised; after the last accepted draft it is drawn from p. That is what a token y drawn from p says at each place:
x is accepted where y = x, and where it is not, y has the distribution of p without x. So the target draws a token at
every place, as it takes the likeliest at every place of a greedy text, and a draft stays while it equals them.

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
and a one-hot q, so again a token y drawn from r says all of it: the child that equals y is accepted, and where none
does, y is the target's own token. Tokens that follow from the text may be sorted, merged and pruned in any way.

Drawn tokens come first among the children of a node. A drawn chain is verified as a block, and what its verdict leaves,
max(w p - q, 0), is r for the other children of the node where it ended: they only decide how the block's own next token
is drawn from r. Siblings that were drawn without replacement (SpecInfer, Miao et al. 2023; Sequoia, Chen et al. 2024)
are tried one by one: x is accepted with probability min(1, r(x) / q(x)), r being normalised, and after a rejection r
is max(r - q, 0) and q loses x. After them r does not depend on what was drawn, so the children that follow from the
text may also follow from what was drawn: one that equals a drawn sibling is left out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from itertools import islice
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from torch import Tensor

from alphaloop.engine import SecondChoice
from alphaloop.errors import DecodeFailed
from engine.drawing import followed, verify_drawn
from engine.network.operations import best_tokens
from engine.proposal import Proposal, tree_depths
from engine.sampling import drawn_tokens, tokens_of, uniforms_of
from engine.verdict import DraftVerdict, TokenLogprob

if TYPE_CHECKING:
    from engine.sequence import Sequence


#: Most bytes of a distribution in float64 that a CPU computes at once: more than its cache holds takes longer.
_PIECE_BYTES: Final = 4 << 20


class _Judged(NamedTuple):
    """A sequence with its proposal and its rows of the round's logits."""

    number: int  #: in the round
    rows: range
    sequence: Sequence
    proposal: Proposal


def verify(logits: Tensor, judged: SequenceOf[tuple[Sequence, Proposal]]) -> list[DraftVerdict]:
    """One verdict a sequence; `logits` [rows, vocabulary] holds 1 + len(tokens) rows of each, one after the other.

    `TokenChooser` has the order of the steps. Greedy jobs with plain logits are verified together, sampled jobs with
    equal cuts too, and such jobs with a seed. Before that a constraint, a bias, a penalty or a barred token is computed
    for each sequence that has it. Raises DecodeFailed for logits that are not finite, because a choice from them has no
    meaning.
    """
    best: list[int] = []
    # What is drawn from plain logits is refused where these become probabilities, without a wait for the device.
    if any(sequence.choice.is_greedy or not sequence.choice.is_plain for sequence, _ in judged):
        best, are_finite = best_tokens(logits)
        if not are_finite:
            raise DecodeFailed("the model returned logits that are not finite")
    verdicts: dict[int, DraftVerdict] = {}
    alike: defaultdict[tuple[_Rule, tuple[float, ...]], list[_Judged]] = defaultdict(list)
    everyone: list[_Judged] = []
    begin = 0
    for number, (sequence, proposal) in enumerate(judged):
        choice, end = sequence.choice, begin + 1 + len(proposal.tokens)
        one = _Judged(number, range(begin, end), sequence, proposal)
        everyone.append(one)
        if choice.takes_likeliest:
            verdicts[number] = _verify_likeliest(best[begin:end], logits, one)
        else:
            is_chosen = choice.is_greedy or choice.is_reproducible
            rule: _Rule = _chosen if is_chosen else _tried if proposal.q else _drawn
            alike[rule, choice.cut].append(one)
        begin = end
    for (rule, _), members in alike.items():
        for piece in _pieces(members, logits):
            for one, verdict in zip(piece, rule(_scores(logits, piece), piece), strict=True):
                verdicts[one.number] = verdict
    _add_second_choices(verdicts, logits, everyone)
    _add_logprobs(verdicts, logits, everyone)
    return [verdicts[number] for number in range(len(judged))]


def _pieces(members: list[_Judged], logits: Tensor) -> Iterator[list[_Judged]]:
    """The members, those with plain scores first: all at once on a device, as many as a CPU's cache holds."""
    members = sorted(members, key=lambda one: not one.sequence.choice.is_plain)
    most_rows = _PIECE_BYTES // (8 * logits.shape[1]) if logits.device.type == "cpu" else len(logits)
    piece: list[_Judged] = []
    num_rows = 0
    for one in members:
        if piece and num_rows + len(one.rows) > most_rows:
            yield piece
            piece, num_rows = [], 0
        piece.append(one)
        num_rows += len(one.rows)
    yield piece


def _scores(logits: Tensor, piece: list[_Judged]) -> Tensor:
    """The scores that these sequences choose from, one after the other: [rows, vocabulary]."""
    plain = [row for one in piece if one.sequence.choice.is_plain for row in one.rows]
    is_run = bool(plain) and plain[-1] - plain[0] == len(plain) - 1  # no copy
    parts = [logits[plain[0] : plain[-1] + 1]] if is_run else [logits[plain]] if plain else []
    for _, rows, sequence, proposal in piece:
        if not sequence.choice.is_plain:
            scores = sequence.choice.scores(logits[rows.start : rows.stop], sequence.text, proposal.paths)
            if sequence.constrained is not None:
                sequence.constrained.bury(scores, proposal.paths)
            parts.append(scores)
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _chosen(scores: Tensor, piece: list[_Judged]) -> list[DraftVerdict]:
    """Sequences whose token at each place follows from its row of `scores`."""
    choices = [
        (one.sequence.choice, len(one.sequence.text) + depth) for one in piece for depth in (0, *one.proposal.depths)
    ]
    return _each(verify_against_choices, tokens_of(scores, choices), piece)


def _drawn(scores: Tensor, piece: list[_Judged]) -> list[DraftVerdict]:
    """Sequences whose token at each place is drawn from the distribution of its row of `scores`."""
    tokens = drawn_tokens(scores, [(one.sequence.choice, len(one.rows)) for one in piece])
    return _each(verify_against_draws, tokens, piece)


def _tried(scores: Tensor, piece: list[_Judged]) -> list[DraftVerdict]:
    """Sequences whose drafts were drawn."""
    uniforms = uniforms_of([(one.sequence.choice, len(one.rows)) for one in piece])
    p = piece[0].sequence.choice.probabilities(scores)
    return verify_drawn(p, [one.proposal for one in piece], uniforms)


def _each(
    verify: Callable[[list[int], Proposal], DraftVerdict], tokens: list[int], piece: list[_Judged]
) -> list[DraftVerdict]:
    """The verdict on each proposal where `tokens` [rows] are the target's."""
    verdicts, begin = [], 0
    for one in piece:
        verdicts.append(verify(tokens[begin : begin + len(one.rows)], one.proposal))
        begin += len(one.rows)
    return verdicts


#: From the scores of sequences, rows of one after the other, to their verdicts.
_Rule = Callable[[Tensor, list[_Judged]], list[DraftVerdict]]


def verify_against_choices(best: list[int], proposal: Proposal) -> DraftVerdict:
    """One sequence for which the target has chosen `best` [1 + len(tokens)]."""
    if proposal.parents is None:
        return verify_greedy(best, proposal.tokens)
    return verify_tree_greedy(best, proposal.tokens, proposal.parents)


def verify_against_draws(tokens: list[int], proposal: Proposal) -> DraftVerdict:
    """One sequence for which the target has drawn `tokens` [1 + len(tokens)], whose drafts follow from the text."""
    if proposal.parents is None:
        return verify_greedy(tokens, proposal.tokens)
    return followed(proposal, tokens)


def _verify_likeliest(best: list[int], logits: Tensor, one: _Judged) -> DraftVerdict:
    """One greedy sequence that bars nothing; `best` is the likeliest token in each of its rows of `logits`.

    The likeliest token of all is the likeliest of what a constraint leaves, if it is among these: no mask is needed.
    """
    _, rows, sequence, proposal = one
    if sequence.choice.is_plain:
        return verify_against_choices(best, proposal)
    scores = logits[rows.start : rows.stop]
    if sequence.spec.sampling.is_adjusted:
        scores = sequence.choice.adjusted(scores, sequence.text, proposal.paths)
        best = scores.argmax(dim=-1).tolist()
    if sequence.constrained is not None:
        best = sequence.constrained.best(best, scores, proposal.paths)
    return verify_against_choices(best, proposal)


def _add_second_choices(verdicts: dict[int, DraftVerdict], logits: Tensor, everyone: list[_Judged]) -> None:
    """Add the second choice at each token of watched sequences."""
    watched = [one for one in everyone if one.sequence.is_watched]
    if not watched:
        return
    emitted = [_emitting(verdicts[one.number], one) for one in watched]
    scores = logits[[row for rows in emitted for row in rows]].float()
    begin = 0
    for one, rows in zip(watched, emitted, strict=True):
        if (constrained := one.sequence.constrained) is not None:
            paths = one.proposal.paths
            constrained.restrict(scores[begin : begin + len(rows)], [paths[row - one.rows.start] for row in rows])
        begin += len(rows)
    values, tokens = scores.topk(2)
    pairs = torch.cat(((values[:, :1] - values[:, 1:]).double(), tokens[:, 1:].double()), dim=1)
    second = iter([SecondChoice(int(token), gap) for gap, token in pairs.tolist()])
    for one, rows in zip(watched, emitted, strict=True):
        choices = tuple(islice(second, len(rows)))
        verdicts[one.number] = verdicts[one.number]._replace(second_choices=choices)


def _add_logprobs(verdicts: dict[int, DraftVerdict], logits: Tensor, everyone: list[_Judged]) -> None:
    """Add logprobs for sequences that ask for them.

    They are those of the model itself: from the logits as they come, before anything is barred, biased or penalised,
    and before temperature, top_k, top_p and min_p. That is vLLM's default (`raw_logprobs`). So a token that was drawn
    at a high temperature shows how likely the model holds it, and the numbers do not depend on how a job is decoded.
    In float32 or better.
    """
    nums = {one.number: num for one in everyone if (num := one.sequence.spec.sampling.num_logprobs) is not None}
    if not nums:
        return
    asking = [one for one in everyone if one.number in nums]
    rows = [row for one in asking for row in _emitting(verdicts[one.number], one)]
    tokens = [token for one in asking for token in _emitted(verdicts[one.number], one.proposal)]
    wanted = logits[rows]
    logprobs = wanted.to(torch.promote_types(wanted.dtype, torch.float32)).log_softmax(dim=-1)
    num = min(max(nums.values()), logprobs.shape[1])
    chosen = torch.tensor(tokens, dtype=torch.long, device=logits.device)[:, None]
    best = logprobs.topk(num, dim=-1)
    # Read together, because each read waits for a GPU: a float64 holds any token id exactly.
    read = torch.cat((logprobs.gather(1, chosen).double(), best.indices.double(), best.values.double()), dim=1)
    numbers = iter(zip(tokens, read.tolist(), strict=True))
    for one in asking:
        end = 1 + min(nums[one.number], num)
        of_text = [
            TokenLogprob(token, of_row[0], tuple(zip(map(int, of_row[1:end]), of_row[1 + num :], strict=False)))
            for token, of_row in islice(numbers, 1 + len(verdicts[one.number].path))
        ]
        verdicts[one.number] = verdicts[one.number]._replace(logprobs=tuple(of_text))


def _emitting(verdict: DraftVerdict, one: _Judged) -> list[int]:
    """The rows of the round that the sequence's tokens were chosen from."""
    return [one.rows.start, *(one.rows.start + 1 + place for place in verdict.path)]


def _emitted(verdict: DraftVerdict, proposal: Proposal) -> list[int]:
    return [*(proposal.tokens[place] for place in verdict.path), verdict.next_token]


def verify_greedy(best: SequenceOf[int], draft: SequenceOf[int]) -> DraftVerdict:
    """One sequence. `best` [k + 1]: the target's choice after the pending token and after each draft; `draft` [k]."""
    num_accepted = 0
    for token, drafted in zip(best, draft, strict=False):
        if token != drafted:
            break
        num_accepted += 1
    return DraftVerdict(num_accepted, best[num_accepted])


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
