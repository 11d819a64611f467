"""Scoring look-up on texts that it did not decode, or decoded with shorter drafts than it could have.

A finished text is read again as look-up would have decoded it, in virtual rounds: it proposes behind what stands so
far, the proposal is compared with the tokens that really follow, and the text goes on by those that agree and one more.

Why these counts have exactly the distribution of a real run's. Look-up's proposal follows from the text before it, and
its q is one-hot: a proposed x is accepted with probability p(x), and after a rejection the target's token is drawn from
p without x. So in a real run x is accepted if and only if the token that comes to stand there is x, and that token has
the distribution p, whether or not anything was proposed. The counts of a real run are thus a function of its text
alone, the function computed here, and every exact way to decode gives the text the same distribution. For greedy jobs
and reproducible ones (accepted on equality by definition) the text itself is the same, and so are the counts. Siblings
of a tree, each accepted with what is left of p and then taken out of it, are the same case: one of them is accepted if
and only if it is the token that comes. Where a dtype rounds, a text may differ by a near-tie, as two real runs may.

One edge. What look-up remembers of a task is taken as it was when the job began; a real run also sees what ends while
it runs. The first round of a prompt whose last piece is a single token can draft, in virtual rounds as in real ones:
how a prompt is read depends on the slots beside it, not on the drafter.

A text that look-up itself decoded at a smaller k is scored at its longest: whether more would pay is known without
trying. That score says all that the run's own counts say, so it takes their place as evidence (`Outcome.evidence`).

What it does not give: times. And it holds for look-up only. To score a draft model its passes would have to be run,
which is the cost that is in question; and where its q is not one-hot, equality with the text understates it: then it is
the target's and the draft's distributions that have to be compared.

What is left out: jobs that are no traffic. Probes and controls are decoded again and again from the same prompts, and
look-up has probes of its own.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from alphaloop.acceptance import AcceptanceCounts
from worker.decoding.drafters.lookup import LookupDrafter
from worker.decoding.proposal import Drafter, Proposal
from worker.decoding.sampling.randomness import key_of
from worker.decoding.verification.tree import tree_depths
from worker.engine import ShadowCounts

#: Output tokens of a text in which a virtual round may begin. Bounds what one text takes: 10 to 30 ms.
MAX_TOKENS: Final = 512
#: What a job adds to the pace fades by this with every later one: the pace is that of the last hundred or so.
FADING: Final = 0.99


class FinishedText(Protocol):
    """What scoring needs of a sequence."""

    job_id: str
    task: str  #: empty for jobs that are no traffic
    text: list[int]
    num_prompt: int
    drafter: str | None
    longest_draft: int  #: most tokens that it was allowed to draft in a round
    is_first_drafted: bool  #: its first round was no prefill
    marks: Mapping[str, int]  #: what `Shadows.marks` returned when it began
    device_s: float  #: what decoding it took

    @property
    def max_tokens(self) -> int:
        """Most tokens that the output may have."""


@dataclass(slots=True)
class Pace:
    """What decoding and scoring took of late, and so how many texts may be scored. Seconds."""

    jobs: float = 0.0
    device_s: float = 0.0
    num_scored: float = 0.0
    scoring_s: float = 0.0

    def share_to_score(self, share: float) -> float:
        """How likely the next text is to be scored, so that scoring takes `share` of the device's time on average."""
        if share <= 0:
            return 0.0
        if not self.scoring_s:
            return 1.0
        return min(1.0, share * (self.device_s / self.jobs) / (self.scoring_s / self.num_scored))

    def decoded(self, device_s: float) -> None:
        """A job ended."""
        self.jobs, self.device_s = FADING * self.jobs + 1, FADING * self.device_s + device_s

    def scored(self, seconds: float) -> None:
        """A text was scored."""
        self.num_scored, self.scoring_s = FADING * self.num_scored + 1, FADING * self.scoring_s + seconds


class Shadows:
    """Scores finished texts with look-up drafters as far as they did not decode them, within each one's share of time.

    Which texts are scored, where that is not all of them, is drawn by job_id at a chance that only earlier jobs settle:
    nothing about a text decides whether it counts.
    """

    def __init__(self, drafters: Mapping[str, Drafter], clock: Callable[[], float] = time.perf_counter) -> None:
        self._drafters = drafters
        self._clock = clock
        self._paces: dict[str, Pace] = {}

    def marks(self, task: str) -> dict[str, int]:
        """How much of the task's results each drafter remembers when a sequence begins."""
        return {name: drafter.num_remembered(task) for name, drafter in self._lookups()}

    def score(self, ended: FinishedText) -> tuple[ShadowCounts, ...]:
        """What each drafter would have been counted with; then the text is remembered where its task's results are."""
        if not ended.task:
            return ()
        found = []
        for name, drafter in self._lookups():
            pace = self._paces.setdefault(name, Pace())
            pace.decoded(ended.device_s)
            is_own = name == ended.drafter
            if is_own and ended.longest_draft >= drafter.state.max_draft_tokens:
                continue  # its own counts say as much
            if _uniform(ended.job_id, name) < pace.share_to_score(drafter.shadow_share):
                began = self._clock()
                counts = _score(drafter, ended)
                pace.scored(self._clock() - began)
                found.append(ShadowCounts(name, drafter.state.revision, drafter.state.max_draft_tokens, counts))
            if not is_own:  # else it has remembered the text
                drafter.remember(ended.task, ended.text[ended.num_prompt :])
        return tuple(found)

    def _lookups(self) -> list[tuple[str, LookupDrafter]]:
        return [(name, one) for name, one in self._drafters.items() if isinstance(one, LookupDrafter)]


def replay(
    propose: Callable[[int], Proposal],
    seen: list[int],
    output: Sequence[int],
    num_draft_tokens: int,
    max_tokens: int,
    *,
    is_first_drafted: bool = False,
) -> AcceptanceCounts:
    """The counts of decoding `output` at k = `num_draft_tokens` with `propose`, which looks at `seen`.

    `seen` is the prompt and grows to the text. `max_tokens` is the job's own limit: a round never proposes past it. The
    round that ends the text is cropped like a real one; rounds that would begin behind MAX_TOKENS are left out. The
    first round is the prefill, which gives a token without a proposal, unless `is_first_drafted`.
    """
    rounds: Counter[tuple[int, int, int, int]] = Counter()
    num_done, num_output = 0, len(output)
    if not is_first_drafted:
        rounds[0, 0, 1, 0] = num_done = 1
        seen.append(output[0])
    while num_done < min(num_output, MAX_TOKENS):
        room = min(num_draft_tokens, max_tokens - num_done - 1)
        proposal = propose(room)
        following = output[num_done : num_done + room + 1]
        depth, num_accepted, num_tested = _agreement(proposal, following)
        num_emitted = min(num_accepted + 1, len(following))
        rounds[depth, num_accepted, num_emitted, num_tested] += 1
        seen += following[:num_emitted]
        num_done += num_emitted
    counts = AcceptanceCounts()
    for (depth, num_accepted, num_emitted, num_tested), times in rounds.items():
        one = AcceptanceCounts().with_round(depth, num_accepted, num_emitted=num_emitted, num_tested=num_tested)
        counts += _times(one, times)
    return counts


def _score(drafter: LookupDrafter, ended: FinishedText) -> AcceptanceCounts:
    seen, output = ended.text[: ended.num_prompt], ended.text[ended.num_prompt :]
    propose = drafter.rereading(seen, ended.task, ended.marks.get(drafter.state.name, 0))
    k = drafter.state.max_draft_tokens
    return replay(propose, seen, output, k, ended.max_tokens, is_first_drafted=ended.is_first_drafted)


def _agreement(proposal: Proposal, following: Sequence[int]) -> tuple[int, int, int]:
    """(depth of the proposal, tokens of it that follow, depths at which one was tried)."""
    tokens = proposal.tokens
    if proposal.parents is None:
        num_agreeing = 0
        for token, real in zip(tokens, following, strict=False):
            if token != real:
                break
            num_agreeing += 1
        return len(tokens), num_agreeing, min(len(tokens), num_agreeing + 1)
    depths = tree_depths(proposal.parents)
    parent, num_agreeing, num_tested = -1, 0, 0
    # Siblings differ and children come behind their parents, so one walk finds the path.
    for place, (token, of) in enumerate(zip(tokens, proposal.parents, strict=True)):
        if of != parent:
            continue
        num_tested = num_agreeing + 1
        if num_agreeing < len(following) and token == following[num_agreeing]:
            parent, num_agreeing = place, num_agreeing + 1
    return max(depths, default=0), num_agreeing, num_tested


def _times(counts: AcceptanceCounts, times: int) -> AcceptanceCounts:
    return AcceptanceCounts(
        times * counts.rounds,
        times * counts.num_empty_rounds,
        times * counts.num_cropped,
        tuple(times * count for count in counts.proposed),
        tuple(times * count for count in counts.trials),
        tuple(times * count for count in counts.accepts),
    )


def _uniform(job_id: str, drafter: str) -> float:
    return (key_of("shadow", job_id, drafter) + 2**63) / 2**64
