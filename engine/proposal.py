"""A drafter's question and answer, and what rounds made of its answers. A chain is a tree without branches.

A sequence's rounds are counted for the drafter that each of them belongs to, and for drafters with the same weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from alphaloop.acceptance import PREFILL, AcceptanceCounts, ProposerCounts, RunningCounts, added
from alphaloop.deciding.goodput import DrafterState
from alphaloop.engine import DrafterCounts, ProposalShape, Sampling, ShadowCounts
from alphaloop.errors import DecodeFailed
from alphaloop.lookup import ViewOf

if TYPE_CHECKING:
    from engine.constraint import ConstrainedText
    from engine.sampling import TokenChooser
    from engine.states import States


@dataclass(frozen=True, slots=True)
class Ask:
    """One running sequence that wants drafts this round."""

    job_id: str
    text: Sequence[int]  #: prompt and output so far, the live list: its last token is pending, in no cache yet
    num_tokens: int  #: most tokens wanted
    choice: TokenChooser  #: how this job's tokens are chosen
    is_timed: bool = False  #: as many as are asked for, however doubtful: what that takes is measured
    #: The target's states since the last ask; None where the drafter has no `taps`, or where there are none yet.
    states: States | None = None


@dataclass(frozen=True, slots=True, eq=False)
class DraftDistributions:
    """What drafts were drawn from, one row a draft, on the drafter's device.

    Only tokens that could be drawn are held: of a job with top_k = 50 and a vocabulary of 50,000 a thousandth.
    """

    probabilities: Tensor  #: [n, columns], float64; each row adds up to 1
    token_ids: Tensor | None = None  #: [n, columns]: of each column; None: column i is token i

    @classmethod
    def of_rows(cls, rows: Sequence[tuple[Tensor, Tensor | None]]) -> DraftDistributions:
        """From each draft's probabilities and their tokens, both [columns]: a narrower row is padded with 0."""
        if all(tokens is None for _, tokens in rows):
            return cls(torch.stack([p for p, _ in rows]))
        known = [(p, torch.arange(len(p), device=p.device) if tokens is None else tokens) for p, tokens in rows]
        columns = max(len(p) for p, _ in known)
        padded = [[functional.pad(part, (0, columns - len(part))) for part in row] for row in known]
        return cls(torch.stack([p for p, _ in padded]), torch.stack([tokens for _, tokens in padded]))

    @classmethod
    def joined(cls, parts: Sequence[DraftDistributions]) -> DraftDistributions:
        """The rows of all, one after the other."""
        if len(parts) == 1:
            return parts[0]
        if all(part.token_ids is None for part in parts):
            return cls(torch.cat([part.probabilities for part in parts]))
        known = [
            (part.probabilities, _every_column(part.probabilities) if part.token_ids is None else part.token_ids)
            for part in parts
        ]
        columns = max(p.shape[1] for p, _ in known)
        padded = [[functional.pad(of, (0, columns - of.shape[1])) for of in part] for part in known]
        return cls(torch.cat([p for p, _ in padded]), torch.cat([ids for _, ids in padded]))

    def __len__(self) -> int:
        return len(self.probabilities)

    def __getitem__(self, index: slice | Tensor) -> DraftDistributions:
        return DraftDistributions(self.probabilities[index], None if self.token_ids is None else self.token_ids[index])

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """Probabilities, and the token ids where it has them."""
        return (self.probabilities,) if self.token_ids is None else (self.probabilities, self.token_ids)

    @property
    def device(self) -> torch.device:
        """Where they lie."""
        return self.probabilities.device

    def of(self, tokens: Tensor) -> Tensor:
        """The probability of one token a row, [n]."""
        if self.token_ids is None:
            return self.probabilities.gather(1, tokens[:, None]).squeeze(1)
        return self.probabilities.where(self.token_ids == tokens[:, None], 0.0).sum(dim=1)

    def taken_from(self, weights: Tensor) -> Tensor:
        """`weights` [n, vocabulary] less these."""
        if self.token_ids is None:
            return weights - self.probabilities
        return weights.scatter_add(1, self.token_ids, -self.probabilities)

    def without(self, tokens: Tensor) -> DraftDistributions:
        """Renormalised, each row with no probability for its own of `tokens` [n]: what is drawn from after it."""
        if self.token_ids is None:
            left = self.probabilities.scatter(1, tokens[:, None], 0.0)
        else:
            left = self.probabilities.where(self.token_ids != tokens[:, None], 0.0)
        return DraftDistributions(left / left.sum(dim=1, keepdim=True), self.token_ids)

    def followed_by(self, tokens: Sequence[int]) -> DraftDistributions:
        """With a further row for each of `tokens`, which had no alternative."""
        if not tokens:
            return self
        certain = torch.zeros((len(tokens), self.probabilities.shape[1]), dtype=torch.float64, device=self.device)
        ids = torch.tensor(tokens, dtype=torch.long, device=self.device)[:, None]
        if self.token_ids is None:
            return DraftDistributions(torch.cat((self.probabilities, certain.scatter(1, ids, 1.0))))
        certain[:, 0] = 1.0
        return DraftDistributions(
            torch.cat((self.probabilities, certain)),
            torch.cat((self.token_ids, ids.expand(-1, self.token_ids.shape[1]))),
        )


def _every_column(p: Tensor) -> Tensor:
    return torch.arange(p.shape[1], device=p.device).expand(len(p), -1)


@dataclass(frozen=True, slots=True, eq=False)
class Proposal:
    """Tokens for the target to verify; fewer than asked, or none, is an answer too."""

    tokens: tuple[int, ...] = ()
    #: None for a chain. Otherwise token i hangs on token parents[i] < i; -1 is the pending token. Siblings are
    #: verified in order.
    parents: tuple[int, ...] | None = None
    #: What the first len(q) tokens were drawn from, row by row, of a chain all of them. Siblings among them were drawn
    #: in their order, without replacement, from the row of the first. The other tokens follow from the text and from
    #: what was drawn: their distribution is one-hot. None: the whole proposal is deterministic.
    q: DraftDistributions | None = None
    #: By the drafter's own estimate, the probability of the tokens up to and with each one; empty: not known.
    together: tuple[float, ...] = ()
    num_read: int = 0  #: tokens of the text that its drafter read for it first, beyond those of a usual round
    #: Who proposed each token, or `FORCED`; empty: all are the drafter's own.
    proposers: tuple[str, ...] = ()

    @property
    def depths(self) -> list[int]:
        """Depth of each token, 1 for a child of the pending token."""
        return list(range(1, len(self.tokens) + 1)) if self.parents is None else tree_depths(self.parents)

    @property
    def trial_depths(self) -> list[int]:
        """The same without forced tokens, which are no trials: of such a token, the depth of the one before it."""
        if not self.proposers or FORCED not in self.proposers:
            return self.depths
        depths: list[int] = []
        for index, proposer in enumerate(self.proposers):
            parent = index - 1 if self.parents is None else self.parents[index]
            depths.append((depths[parent] if parent >= 0 else 0) + (proposer != FORCED))
        return depths

    def forced_in(self, path: Sequence[int]) -> list[int]:
        """Places on a path of accepted tokens, from 0, at which the token was forced."""
        if not self.proposers:
            return []
        return [place for place, index in enumerate(path) if self.proposers[index] == FORCED]

    def children(self, parent: int) -> Sequence[int]:
        """Indices of the tokens after token `parent`; after the pending token if that is -1."""
        if self.parents is None:
            return range(parent + 1, min(parent + 2, len(self.tokens)))
        return [index for index, above in enumerate(self.parents) if above == parent]

    @property
    def paths(self) -> list[tuple[int, ...]]:
        """No token, and then each with its ancestors before it: after each of them the target chooses."""
        paths: list[tuple[int, ...]] = [()]
        for index, token in enumerate(self.tokens):
            paths.append((*paths[index if self.parents is None else self.parents[index] + 1], token))
        return paths


#: In `Proposal.tokens` of a draft that is only scored: a token that no pass over the text shows.
UNKNOWN: Final = -1
#: In `Proposal.proposers`: the token is the only one allowed at its place, so it is taken without a trial.
FORCED: Final = "forced"
NOTHING = Proposal()


def tree_depths(parents: Sequence[int]) -> list[int]:
    """Depth of each token, 1 for a child of the pending token; the greatest is the length of the proposal."""
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return depths


def check_answers(asks: Sequence[Ask], answers: Sequence[Proposal], vocabulary: int | None = None) -> None:
    """Raise DecodeFailed for answers that the target cannot read or that verification would not understand.

    `vocabulary` is the target's; None: not looked at.
    """
    if len(answers) != len(asks):
        raise DecodeFailed(f"expected {len(asks)} proposals, found {len(answers)}")
    for ask, answer in zip(asks, answers, strict=True):
        num = len(answer.tokens)
        if num > ask.num_tokens:
            raise DecodeFailed(f"expected at most {ask.num_tokens} draft tokens, found {num}")
        if answer.parents is not None and (
            len(answer.parents) != num or any(not -1 <= parent < i for i, parent in enumerate(answer.parents))
        ):
            raise DecodeFailed("expected a parent before each draft token, found another tree")
        if answer.q is not None and (len(answer.q) > num if answer.parents is not None else len(answer.q) != num):
            raise DecodeFailed(f"expected distributions of {num} draft tokens, found {len(answer.q)}")
        if vocabulary is None:
            continue
        if num and not 0 <= min(answer.tokens) <= max(answer.tokens) < vocabulary:
            least, most = min(answer.tokens), max(answer.tokens)
            raise DecodeFailed(f"expected draft tokens below {vocabulary}, found {least}, {most}")
        if answer.q is not None and answer.q.token_ids is None and answer.q.probabilities.shape[1] != vocabulary:
            shape = tuple(answer.q.probabilities.shape)
            raise DecodeFailed(f"expected distributions over {vocabulary} tokens, found {shape}")


class Drafter(Protocol):
    """Proposes tokens for many sequences at once. Deterministic in its asks and each job's own randomness.

    A drafter needs `state` and `propose`; it inherits a default for what else it does not have. One that repeats the
    last token:

        class Echo(Drafter):
            def __init__(self, name: str, settings: EchoSettings) -> None:
                self.state = settings.state(name, "1")

            def propose(self, asks: Sequence[Ask]) -> list[Proposal]:
                return [Proposal((ask.text[-1],) * ask.num_tokens) for ask in asks]

    The text [5, 6, 7], asked for two tokens, gets Proposal((7, 7)); the target verifies both in its next pass. A line
    of `engine.drafters.methods.METHODS` opens it; `EchoSettings` is a `DraftingSettings` with a `method` of its own.
    The engine calls `open`, then `propose` once a round, then `close`, for each sequence.
    """

    state: DrafterState  #: name, revision and longest draft; raise the revision when proposals change
    taps: tuple[int, ...] = ()  #: states of the target that it wants with each ask (`engine.states`)
    shadow_share: float = 0.0  #: most of a text's decoding time that scoring it with `rereading` may take; 0: never
    device: torch.device | None = None  #: where it keeps keys and values; None where it keeps none
    bytes_per_token: int = 0  #: keys and values of one token of a text
    longest_text: int | None = (
        None  #: tokens after which it proposes nothing; None where the target's limit comes first
    )
    source_names: frozenset[str] = frozenset()  #: other drafters that it asks, whose slots its sequences hold

    def open(self, job_id: str, text: Sequence[int], sampling: Sampling, task: str, segment: str = "") -> None:
        """A sequence wants drafts from now on, from its beginning or from the middle of its output.

        `text` is its prompt and its output so far, a live list that grows with every round. `task` and `segment` are
        its job's; a job that must not search earlier results has no task.
        """
        return

    def propose(self, asks: Sequence[Ask]) -> list[Proposal]:
        """One proposal an ask, in order, of at most `ask.num_tokens` tokens; NOTHING where there is nothing to say."""

    def close(self, job_id: str) -> None:
        """A sequence has ended, or drafts with another drafter; nothing happens if it was never opened."""
        return

    def clear(self) -> None:
        """Forget every sequence, whatever state a failed round left."""
        return

    @property
    def num_cache_bytes(self) -> int:
        """Memory that its own keys and values hold now, without those of its sources."""
        return 0

    def by_source(self) -> Mapping[str, tuple[float, ProposalShape]]:
        """Seconds and shape of the last proposals of each source that was asked."""
        return {}

    def sharing(self) -> tuple[float, Sequence[SharedWeightDrafter]]:
        """Its gate, and the drafters of the same weights for which its rounds count too."""
        return 0.0, ()

    def use_memory(self, view_of: ViewOf) -> None:
        """Search earlier results too, from the next text on, if it can."""
        return

    def rereading(
        self, text: list[int], task: str, segment: str = "", predicted: Sequence[int] = ()
    ) -> Callable[[int], Proposal] | None:
        """What it would propose for a text that others decode, at most as many tokens as a call asks for.

        `text` is the prompt; the caller appends to it and asks again. `predicted` is what the job expects. None where
        that takes a pass a round.
        """
        return None

    def teacher_forced(
        self, seen: list[int], output: Sequence[int], constrained: ConstrainedText | None
    ) -> Callable[[int], Proposal] | None:
        """What it would propose after `seen`, the prompt of a greedy text, to which the caller appends `output`.

        Earlier results are not used. None where its drafts do not follow from one pass over the text.
        """
        return None


@dataclass(frozen=True, slots=True)
class SharedWeightDrafter:
    """A drafter of the same weights; `min_probability` is its gate, 0 for none."""

    state: DrafterState
    min_probability: float


@dataclass(slots=True)
class _Rounds:
    """The rounds of one drafter."""

    state: DrafterState
    longest: int  #: most tokens that a round was allowed
    shortest: int  #: fewest that a round was allowed
    running: RunningCounts = field(default_factory=RunningCounts)
    chances: list[int] = field(default_factory=list)

    @property
    def counts(self) -> AcceptanceCounts:
        """Of its rounds up to now."""
        return self.running.counts

    def reach(self, num: int) -> None:
        """The first positions of a round were chances. Without one, it is a round without any."""
        self.chances += [0] * (max(num, 1) - len(self.chances))
        for position in range(num):
            self.chances[position] += 1


class RoundCounts:
    """A round belongs to the drafter that it allowed at least one token; otherwise it is vanilla.

    A round in which the token limit left room for the target's token only still belongs to the allowed drafter,
    because every run of that drafter has such rounds.
    """

    def __init__(self) -> None:
        self.num_vanilla_rounds = 0  #: without a drafter: one token each, which was not drafted
        self.num_vanilla_forced = 0  #: forced tokens that came with these rounds
        #: By drafter that may be asked: its gate, and the drafters with the same weights, for which its rounds count.
        self.sharing: dict[str, tuple[float, Sequence[SharedWeightDrafter]]] = {}
        self._drafters: dict[str, _Rounds] = {}
        self._shared: dict[str, _Rounds] = {}
        #: Trials and accepts by depth of each proposer, from the first round on in which the drafter was not alone.
        self._by_proposer: dict[str, tuple[list[int], list[int]]] = {}

    def take_drafted(
        self,
        drafter: DrafterState,
        num_allowed: int,
        *,
        num_asked: int,
        num_proposed: int,
        num_accepted: int,
        num_emitted: int,
        num_tested: int | None = None,
        num_forced: int = 0,
    ) -> None:
        """Count a round of `drafter`.

        `num_allowed` is its k > 0, `num_asked` what the token limit left of that. The other numbers are those of
        AcceptanceCounts.with_round. A position is a chance where it was asked for and all before it were accepted, as
        far as the text goes.
        """
        if (rounds := self._drafters.get(drafter.name)) is None:
            rounds = self._drafters[drafter.name] = _Rounds(drafter, num_allowed, num_allowed)
        rounds.longest, rounds.shortest = max(rounds.longest, num_allowed), min(rounds.shortest, num_allowed)
        rounds.running.take_round(
            num_proposed, num_accepted, num_emitted=num_emitted, num_tested=num_tested, num_forced=num_forced
        )
        rounds.reach(min(num_asked, num_emitted))

    def take_proposers(self, drafter: str, proposal: Proposal, path: Sequence[int], *, num_emitted: int) -> None:
        """Count the proposers of a round of `drafter`, before `take_drafted` counts it: see ProposerCounts.

        `path` are the indices of the accepted tokens, `num_emitted` how many of the round's tokens belong to the text.
        Nothing is kept of a job in which all is the drafter's own.
        """
        if not self._by_proposer:
            if not proposal.proposers:
                return
            for name, counts in ((name, rounds.counts) for name, rounds in self._drafters.items()):
                if counts.trials:
                    self._by_proposer[name] = list(counts.trials), list(counts.accepts)
        depth = 0
        for place in range(min(len(path) + 1, num_emitted)):
            siblings = proposal.children(path[place - 1] if place else -1)
            tried = [(proposal.proposers[index] if proposal.proposers else drafter, index) for index in siblings]
            if tried and all(name == FORCED for name, _ in tried):
                continue
            taken = proposal.tokens[path[place]] if place < len(path) else None
            for name in dict.fromkeys(name for name, _ in tried if name != FORCED):
                trials, accepts = self._by_proposer.setdefault(name, ([], []))
                trials += [0] * (depth + 1 - len(trials))
                accepts += [0] * (depth + 1 - len(accepts))
                trials[depth] += 1
                accepts[depth] += any(own == name and proposal.tokens[index] == taken for own, index in tried)
            depth += 1

    def take_shared(
        self,
        drafter: str,
        proposal: Proposal,
        num_accepted: int,
        *,
        num_emitted: int,
        num_asked: int,
        num_possible: int,
    ) -> None:
        """Count a round of `drafter` for the others of `sharing`.

        `num_asked` drafts were wanted, and `num_possible` would not have passed the token limit.

        Drafters with the same weights and the same reading of the prompt differ only in where they end a draft. Up to
        the end of the shorter draft both propose the same tokens, so a round of one shows how many of the other's
        tokens would have been accepted. The other's tokens after the end of the actual draft are unknown: those
        positions are no chances.

        The counts are an estimate. A gate ends drafts at doubtful tokens, so the unknown tokens are not a random part,
        and rounds begin where the decoding drafter began them. On 122 greedy texts of a pair (Qwen2.5-Coder 1.5B and
        0.5B, four tasks) tokens a round at k = 3 were 1.7 % below to 1.5 % above those of real runs for a plain draft
        counted by a gated one, and 1.3 to 4.0 % above for a gated draft counted by a plain one. Sampled drafts are
        verified as a block: of a longer block a little more of each beginning is accepted.

        Drafters with a gate below that one are left out: where the decoding drafter's gate ended a draft, the length of
        their draft is unknown, and the rounds whose length is known are a biased sample.
        """
        gate, others = self.sharing.get(drafter, (0.0, ()))
        if not others:
            return
        num_tokens = len(proposal.tokens)
        is_closed = bool(num_tokens) and _closing(proposal, gate) is not None
        for other in others:
            if 0 < other.min_probability < gate:
                continue
            state, most = other.state, other.state.max_draft_tokens
            rounds = self._shared.setdefault(state.name, _Rounds(state, most, most, chances=[0] * most))
            limit = min(most, num_possible) if num_asked else 0
            end = min(limit, _closing(proposal, other.min_probability) or limit)
            # Where the decoding drafter proposed nothing or ended without its gate, this one would have done the same.
            is_whole = end <= num_tokens or (num_tokens < num_asked and not is_closed)
            known = min(end, num_tokens)
            accepted = min(num_accepted, known)
            emitted = min(accepted + 1, num_emitted)
            depth = limit if not is_whole and not other.min_probability else known
            rounds.running.take_round(depth, accepted, num_emitted=emitted, num_tested=min(known, num_accepted + 1))
            # Beyond the asked length only the ends of drafts are known; they alone would make drafts look short.
            rounds.reach(min(limit if is_whole else known, num_asked, emitted))

    @property
    def total(self) -> AcceptanceCounts:
        """All rounds."""
        num_rounds = self.num_vanilla_rounds
        vanilla = AcceptanceCounts(num_rounds, num_rounds, num_forced=self.num_vanilla_forced)
        return sum((rounds.counts for rounds in self._drafters.values()), vanilla)

    @property
    def chances(self) -> tuple[int, ...]:
        """By position, all drafters together."""
        return added(*(rounds.chances for rounds in self._drafters.values()))

    @property
    def drafted(self) -> tuple[DrafterCounts, ...]:
        """The rounds of each drafter that had any, in the order in which the drafters began."""
        return tuple(
            DrafterCounts(name, rounds.state.revision, rounds.longest, rounds.counts, tuple(rounds.chances))
            for name, rounds in self._drafters.items()
        )

    @property
    def proposers(self) -> tuple[ProposerCounts, ...]:
        """What each proposer offered, where some round's tokens were not all its drafter's own; else nothing."""
        return tuple(
            ProposerCounts(name, tuple(trials), tuple(accepts)) for name, (trials, accepts) in self._by_proposer.items()
        )

    @property
    def shared(self) -> tuple[ShadowCounts, ...]:
        """What drafters with the same weights would have had, with one round for the prefill.

        Those that drafted themselves are left out: their own counts are better.
        """
        return tuple(
            ShadowCounts(
                name,
                rounds.state.revision,
                rounds.longest,
                PREFILL + rounds.counts,
                tuple(rounds.chances),
                is_whole=False,
            )
            for name, rounds in self._shared.items()
            if name not in self._drafters
        )

    def has_drafted_throughout(self, drafter: str, num_draft_tokens: int, *, num_prefill_rounds: int) -> bool:
        """Whether every round after the prefill allowed `drafter` at least `num_draft_tokens`, and there was one."""
        rounds = self._drafters.get(drafter)
        is_alone = len(self._drafters) == 1 and self.num_vanilla_rounds <= num_prefill_rounds
        return rounds is not None and is_alone and rounds.shortest >= num_draft_tokens


def _closing(proposal: Proposal, gate: float) -> int | None:
    """How many tokens a drafter with that gate would have proposed at most; None where it was not reached."""
    return next((place for place, through in enumerate(proposal.together, 1) if through < gate), None)
