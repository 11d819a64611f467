"""Several drafters in one round: each text asks one of them, or all of them in one tree.

Which source a text asks, and what of the answers stands in the tree, follows from the text before the drafts: from the
probability that look-up gives its own first token, and from the order of the sources. It never follows from the
probability of a token that was drawn. The rule, its threshold and the sources' own revisions make up the revision, so
counts of two rules are never added up.

`switch`: the first source whose first token is likely enough by its own estimate; else the last one.

`tree`: every source is asked for what the ones before it left of the round's tokens; common beginnings are merged, and
a token that two propose stands once, under the first. A draft that was drawn comes first (verification.py says why);
whatever follows from the text may be merged into it. One drawn draft a text: a second one is left out.

The sources are the engine's own drafters of those names, so a draft model's weights and slots are there once. A text
drafts with one drafter at a time, so no source holds a text twice.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Final

from alphaloop.deciding.goodput import DrafterState
from alphaloop.engine import ProposalShape, Sampling
from alphaloop.settings.models import HybridDrafterSettings
from engine.proposal import NOTHING, Ask, Drafter, Proposal, check_answers

#: Version of what a rule does with the answers of its sources, part of the revision.
_VERSION: Final = 1
#: Tokens of a text that a source reads because others were asked before it: a part of such rounds, and no prompt.
_CATCHING_UP: Final = 64


class HybridDrafter(Drafter):
    """Drafts with `sources`, loaded already, in the order of the settings.

    Raises what a source raises: without it, rounds would be accepted on another level. Jobs can draft with the others
    under their own names.
    """

    def __init__(self, name: str, settings: HybridDrafterSettings, sources: Mapping[str, Drafter]) -> None:
        self._settings = settings
        self._sources = dict(sources)
        states = [source.state for source in sources.values()]
        self._most = {state.name: settings.most_tokens.get(state.name, state.max_draft_tokens) for state in states}
        keeping = [state for state in states if state.cache_bytes_per_token]
        read = [state.max_prompt_tokens for state in keeping]
        self.state = replace(
            settings.state(name, _revision(settings, states, self._most)),
            cache_bytes_per_token=sum(state.cache_bytes_per_token for state in keeping),
            max_prompt_tokens=None if None in read else max((most for most in read if most is not None), default=None),
        )
        #: Which states of the target its sources want.
        self.taps = tuple(sorted({tap for source in sources.values() for tap in source.taps}))
        self.source_names = frozenset(sources)
        self.bytes_per_token = sum(source.bytes_per_token for source in sources.values())
        self.device = next((source.device for source in sources.values() if source.bytes_per_token), None)
        #: By source, the seconds of the last proposals, and what it was asked for in them.
        self.seconds: dict[str, float] = {}
        self.shapes: dict[str, ProposalShape] = {}

    def by_source(self) -> Mapping[str, tuple[float, ProposalShape]]:
        """Seconds and shape of the last proposals of each source that was asked."""
        return {name: (seconds, self.shapes[name]) for name, seconds in self.seconds.items()}

    def open(self, job_id: str, text: Sequence[int], sampling: Sampling, task: str, segment: str = "") -> None:
        """Every source holds the text, also while another one is asked."""
        for source in self._sources.values():
            source.open(job_id, text, sampling, task, segment)

    def close(self, job_id: str) -> None:
        """The sequence has ended, or drafts with another drafter."""
        with ExitStack() as closing:  # every source, also after one that raises
            for source in self._sources.values():
                closing.callback(source.close, job_id)

    def clear(self) -> None:
        """Forget every sequence."""
        with ExitStack() as clearing:
            for source in self._sources.values():
                clearing.callback(source.clear)

    def propose(self, asks: Sequence[Ask]) -> list[Proposal]:
        """One proposal an ask, in order; `proposers` names the source of each token."""
        self.seconds, self.shapes = {}, {}
        return self._switched(asks) if self._settings.rule == "switch" else self._in_trees(asks)

    def _switched(self, asks: Sequence[Ask]) -> list[Proposal]:
        proposals, undecided = [NOTHING] * len(asks), list(range(len(asks)))
        for name in self._sources:
            for index, answer in zip(undecided, self._asked(name, [asks[i] for i in undecided]), strict=True):
                # Where the last one has nothing to say, an unlikely guess of the one before is better than none.
                before = proposals[index]
                proposals[index] = replace(
                    answer if answer.tokens else before, num_read=before.num_read + answer.num_read
                )
            self._hand_states(name, [ask for index, ask in enumerate(asks) if index not in undecided])
            # What is timed is a round of all of them, because a scratch text never gets past the first.
            undecided = [index for index in undecided if asks[index].is_timed or not self._is_likely(proposals[index])]
        return proposals

    def _is_likely(self, proposal: Proposal) -> bool:
        """Whether a draft that follows from the text is likely. The probability of a drawn token may decide nothing."""
        together = proposal.together if proposal.q is None else ()
        return bool(together) and together[0] >= self._settings.min_probability

    def _in_trees(self, asks: Sequence[Ask]) -> list[Proposal]:
        answers: list[list[Proposal]] = [[] for _ in asks]
        for name in self._sources:
            # Timed is what it takes where the sources before it find nothing, and leave it their room.
            rooms = [
                ask.num_tokens - (0 if ask.is_timed else len(merged(earlier, ask.num_tokens).tokens))
                for ask, earlier in zip(asks, answers, strict=True)
            ]
            wanting = [index for index, room in enumerate(rooms) if room > 0]
            wanted = [replace(asks[index], num_tokens=rooms[index]) for index in wanting]
            for index, answer in zip(wanting, self._asked(name, wanted), strict=True):
                answers[index].append(answer)
            self._hand_states(name, [ask for ask, room in zip(asks, rooms, strict=True) if room <= 0])
        return [merged(proposals, ask.num_tokens) for ask, proposals in zip(asks, answers, strict=True)]

    def _hand_states(self, name: str, asks: Sequence[Ask]) -> None:
        """Nothing is asked of a source that reads the target's states, but it needs those of every round."""
        source = self._sources[name]
        if asks and source.taps:
            source.propose([replace(ask, num_tokens=0) for ask in asks])

    def _asked(self, name: str, asks: Sequence[Ask]) -> list[Proposal]:
        """The answers of one source, each token with its name."""
        if not asks:
            return []
        most = self._most[name]
        bounded = [replace(ask, num_tokens=min(ask.num_tokens, most)) for ask in asks]
        began = time.perf_counter()
        answers = self._sources[name].propose(bounded)
        check_answers(bounded, answers)
        answers = [
            replace(
                answer,
                num_read=answer.num_read if answer.num_read > _CATCHING_UP else 0,
                proposers=(name,) * len(answer.tokens),
            )
            for answer in answers
        ]
        num_read, longest = sum(answer.num_read for answer in answers), max(len(answer.tokens) for answer in answers)
        self.seconds[name] = time.perf_counter() - began
        self.shapes[name] = ProposalShape(len(asks), 1 + longest, num_read)
        return answers


def merged(proposals: Sequence[Proposal], most: int) -> Proposal:
    """One tree of at most `most` tokens, in the order of the proposals; the first that was drawn comes before all.

    A token that two of them have after the same tokens stands once, under the first. A second drawn proposal is left
    out as a whole: leaving out those of its tokens that equal another one would bias the text.
    """
    drawn = [proposal for proposal in proposals if proposal.q is not None][:1]
    tokens, parents, proposers = list[int](), list[int](), list[str]()
    places: dict[tuple[int, int], int] = {}
    for proposal in (*drawn, *(proposal for proposal in proposals if proposal.q is None)):
        at = {-1: -1}
        for index, token in enumerate(proposal.tokens):
            of = index - 1 if proposal.parents is None else proposal.parents[index]
            if (parent := at.get(of)) is None:
                continue
            place = places.get((parent, token))
            if place is None and len(tokens) < most:
                place = places[parent, token] = len(tokens)
                tokens.append(token)
                parents.append(parent)
                proposers.append(proposal.proposers[index])
            if place is not None:
                at[index] = place
    q = drawn[0].q if drawn else None
    is_chain = all(parent == index - 1 for index, parent in enumerate(parents)) and len(q or tokens) == len(tokens)
    return Proposal(
        tuple(tokens),
        None if is_chain else tuple(parents),
        q,
        num_read=sum(proposal.num_read for proposal in proposals),
        proposers=tuple(proposers),
    )


def _revision(settings: HybridDrafterSettings, sources: Iterable[DrafterState], most: Mapping[str, int]) -> str:
    """The rule, its version and threshold, and each source's name and revision.

    A tree names each source's most tokens too, because they leave others more or less room.
    """
    is_tree = settings.rule == "tree"
    gate = "" if is_tree else f"-p{settings.min_probability:g}"
    parts = [f"{state.name}={state.revision}{f'@{most[state.name]}' if is_tree else ''}" for state in sources]
    return f"hybrid{_VERSION}-{settings.rule}{gate}({'+'.join(parts)})"
