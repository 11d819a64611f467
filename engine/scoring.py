"""Counts that a drafter would have on a text that it did not decode: no pass of the target, no speculative decoding.

`Shadows` reads along with look-up while texts are written; `with_scores` reads a control's text with the drafters that
its job asks for. Both walk over the text in virtual rounds: the drafter proposes after what stands so far, the
proposal is compared with the tokens that really follow, and the text goes on by those that agree and one more.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Container, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import KW_ONLY, dataclass, replace
from typing import Final

from alphaloop.acceptance import AcceptanceCounts, RunningCounts
from alphaloop.engine import Generation, PreparedJob, ShadowCounts
from engine.constraint import ConstrainedText
from engine.proposal import UNKNOWN, Drafter, Proposal
from engine.sampling import key_of
from engine.sequence import Sequence
from engine.verification import verify_against_choices

#: Most that readings may take between two rounds, in seconds.
ADVANCE_S: Final = 0.002
#: A job's weight in the pace fades by this with every later job: the pace is that of about the last hundred jobs.
_FADING: Final = 0.99
#: Output tokens of a text in which a virtual round may begin. Bounds what one text takes: 10 to 30 ms.
MAX_TOKENS: Final = 512
#: Stands after a text that has ended: no draft is this token.
_ENDED: Final = -2


def _raise(drafter: str, method: str, error: Exception) -> None:
    raise error


@dataclass(eq=False)
class Shadows:
    """Scores texts with look-up drafters as far as these do not decode them, within each one's share of time.

    Why these counts have exactly the distribution of a real run's. Look-up's proposal follows from the text before it,
    and its q is one-hot: a proposed x is accepted with probability p(x), and after a rejection the target's token is
    drawn from p without x. So in a real run x is accepted if and only if the token that comes to stand there is x, and
    that token has the distribution p, whether or not anything was proposed. The counts of a real run are thus a
    function of its text alone, the function computed here, and every exact way to decode gives the text the same
    distribution. For greedy jobs and reproducible ones (accepted on equality by definition) the text itself is the
    same, and so are the counts. Siblings of a tree, each accepted with what is left of p and then taken out of it, are
    the same case: one of them is accepted if and only if it is the token that comes. Where a dtype rounds, a text may
    differ by a near-tie, as two real runs may.

    One difference: a shadow uses the results that were remembered when the job began, while a real run also uses
    results that end during the run. The first round of a prompt whose last piece is a single token can draft, in
    virtual rounds as in real ones, because the reading of a prompt depends on the slots beside it and not on the
    drafter.

    A text that look-up itself decoded in some rounds only, or at a smaller k, is scored with its longest drafts, so
    longer drafts need no exploration. That score contains all that the run's own counts contain, so it replaces them as
    evidence (`Outcome.evidence`). If look-up drafts in every round with its longest drafts, there is nothing to score.

    Between two rounds scoring takes `ADVANCE_S` at most. A text that ends usually has a few virtual rounds left, so its
    result waits half a millisecond. It waits longer only after a long prompt with a short output, or if look-up was
    paused for the first time just before the end.

    Scores contain no times. Scoring along works for look-up only: a draft model would have to run its passes, which are
    the cost that it should avoid, and where its q is not one-hot, equality with the text understates its acceptance.
    Only traffic is scored. Probes and control jobs repeat the same prompts, and look-up has probes of its own.

    If not all texts are scored, they are drawn by job_id with a probability that depends on earlier jobs only, so the
    choice does not depend on the text.

    A reading that raises is dropped, and `failed` is called with the drafter, the method and the error.
    """

    drafters: Mapping[str, Drafter]
    clock: Callable[[], float] = time.perf_counter
    _: KW_ONLY
    failed: Callable[[str, str, Exception], object] = _raise
    ended: Container[str] = ()  #: drafters that score nothing any more

    def __post_init__(self) -> None:
        self._decoding = _Mean()  #: device seconds of a job
        self._scoring: defaultdict[str, _Mean] = defaultdict(_Mean)  #: seconds of a score, by drafter
        self._readings: deque[_Reading] = deque()

    def begin(self, sequence: Sequence) -> None:
        """Draw who scores a sequence that is admitted now, with what each drafter remembers of the task by now."""
        if not sequence.spec.task:
            return
        for name, drafter in self.drafters.items():
            if not drafter.shadow_share or name in self.ended:
                continue
            # So likely that scoring takes its share of the device's time on average.
            scoring, share = self._scoring[name].value, drafter.shadow_share
            uniform = (key_of("shadow", sequence.spec.owner, name) + 2**63) / 2**64
            if uniform * scoring < share * self._decoding.value or (share and not scoring):
                seen = sequence.text[: sequence.num_prompt]
                try:
                    predicted = sequence.spec.sampling.predicted
                    propose = drafter.rereading(seen, sequence.spec.task, sequence.spec.segment, predicted)
                    constrained = sequence.constrained and sequence.constrained.beginning()
                except Exception as error:
                    self.failed(name, "rereading", error)
                    continue
                if propose is None:
                    continue
                most = drafter.state.max_draft_tokens
                rounds = VirtualRounds(propose, seen, most, sequence.max_tokens, constrained)
                self._readings.append(_Reading(sequence, drafter, rounds))

    def advance(self) -> None:
        """Read on in the running texts, in turn, for at most ADVANCE_S and one round."""
        began = now = self.clock()
        for _ in range(len(self._readings)):
            reading = self._readings[0]
            while reading.is_needed and self._takes_round(reading):
                before, now = now, self.clock()
                reading.seconds += now - before
                if now - began >= ADVANCE_S:
                    return
            if not reading.has_failed:
                self._readings.rotate(-1)

    def end(self, sequence: Sequence) -> tuple[ShadowCounts, ...]:
        """The counts of each drafter on a text that has ended."""
        if not sequence.spec.task:
            return ()
        self._decoding.take(sequence.device_s)
        scores = []
        for reading in self.drop(sequence):
            if reading.is_needed:
                began = self.clock()
                while self._takes_round(reading):
                    pass
                if not reading.has_failed:
                    scores.append(reading.rounds.counted(reading.drafter))
                self._scoring[reading.drafter.state.name].take(reading.seconds + self.clock() - began)
        return tuple(scores)

    def drop(self, sequence: Sequence) -> list[_Reading]:
        """Forget a sequence that does not end by itself; what was read of it."""
        dropped = [reading for reading in self._readings if reading.sequence is sequence]
        for reading in dropped:
            self._readings.remove(reading)
        return dropped

    def clear(self) -> None:
        """Forget every sequence."""
        self._readings.clear()

    def _takes_round(self, reading: _Reading) -> bool:
        """Count a round; False where none is left for now. One that raises ends its reading."""
        sequence = reading.sequence
        if not sequence.has_begun:
            return False
        try:
            return reading.rounds.take_round(
                sequence.text,
                has_ended=sequence.finish_reason is not None,
                is_first_drafted=sequence.drafting.is_first_drafted,
            )
        except Exception as error:
            reading.has_failed = True
            if reading in self._readings:
                self._readings.remove(reading)
            self.failed(reading.drafter.state.name, "rereading", error)
            return False


@dataclass(slots=True)
class _Mean:
    """The mean of recent seconds; earlier ones fade."""

    total: float = 0.0
    num: float = 0.0

    @property
    def value(self) -> float:
        """0 of none."""
        return self.total / (self.num or 1.0)

    def take(self, seconds: float) -> None:
        """One more."""
        self.num, self.total = _FADING * self.num + 1, _FADING * self.total + seconds


@dataclass(slots=True, eq=False)
class _Reading:
    """One text as one look-up drafter would decode it."""

    sequence: Sequence
    drafter: Drafter
    rounds: VirtualRounds
    seconds: float = 0.0
    has_failed: bool = False

    @property
    def is_needed(self) -> bool:
        """Whether the run's own counts say less."""
        state = self.drafter.state
        return not self.sequence.drafting.has_drafted_throughout(state.name, state.max_draft_tokens)


def with_scores(
    generation: Generation,
    prepared: PreparedJob,
    drafters: Mapping[str, Drafter],
    failed: Callable[[str, str, Exception], object],
    *,
    constrained: ConstrainedText | None = None,
) -> Generation:
    """A control's text with the counts of the drafters that its job asks for, and with the time that this took.

    `constrained` is the text's own, wherever it stands: drafts are restricted, and tokens forced, as in a real run.

    A drafter that is not loaded or cannot be scored is left out. So is one that raises, which is then named to `failed`
    with its method and its error: a score is no part of the text.
    """
    began = time.perf_counter()
    scores = []
    for drafter in filter(None, map(drafters.get, prepared.job.scored_drafters)):
        state = drafter.state
        k = min(prepared.job.probe_num_draft_tokens or state.max_draft_tokens, state.max_draft_tokens)
        try:
            scored = score(
                drafter,
                prepared.token_ids,
                generation.token_ids,
                k,
                max_tokens=prepared.sampling.max_tokens,
                constrained=constrained,
            )
        except Exception as error:
            failed(state.name, "score", error)
            continue
        if scored is not None:
            scores.append(scored)
    if not scores:
        return generation
    seconds = time.perf_counter() - began
    return replace(generation, shadows=(*generation.shadows, *scores), device_s=generation.device_s + seconds)


def score(
    drafter: Drafter,
    prompt: SequenceOf[int],
    output: SequenceOf[int],
    num_draft_tokens: int,
    *,
    max_tokens: int,
    constrained: ConstrainedText | None = None,
) -> ShadowCounts | None:
    """The counts of decoding this greedy text at k = `num_draft_tokens`, the prefill's round among them.

    A greedy draft is accepted where its token is the target's own next one. Up to its first wrong token, a draft is
    thus the text itself, and what the drafter would say after every beginning of the text follows from one pass over
    it (teacher forcing). So trials and accepts by position are those of a real run at the same k, round by round. What
    a draft would say after its first wrong token is not known, and never tested in a real run either. Such a draft
    counts as k tokens long; a real one may have ended earlier there, at a token that ends a text or at its gate. So
    `proposed` may be larger than in a real run. In a dtype that rounds, passes of another width may swap two tokens
    that are almost equal, as in two real runs.

    `output` is what the target answered greedily, whole; `max_tokens` is the job's limit. Look-up uses this text alone,
    no earlier results. None for a drafter whose drafts do not follow from one pass: a draft model that proposes trees,
    or reads the text in tokens of its own.
    """
    seen = list(prompt)
    if (propose := drafter.teacher_forced(seen, output, constrained and constrained.beginning())) is None:
        return None
    rounds = VirtualRounds(propose, seen, num_draft_tokens, max_tokens, constrained and constrained.beginning())
    text = [*prompt, *output]
    while rounds.take_round(text, has_ended=True):
        pass
    return rounds.counted(drafter)


class VirtualRounds:
    """The counts of decoding a text at k = `num_draft_tokens` with `propose`, which looks at `seen`.

    `seen` is the prompt and grows by the tokens of each round. `max_tokens` is the job's own limit: a round never
    proposes past that. The round that ends the text is cropped like a real one. Rounds that would begin after
    MAX_TOKENS are left out.

    `constrained`, a beginning of the text's constraint, reads along. It fits each proposal as in a real run, and says
    where one token alone is allowed. Such a token is no trial of a draft that reaches it, and where it follows a
    round's tokens, it comes with the round. It may still be the token that the target adds, which is the round's own.
    """

    def __init__(
        self,
        propose: Callable[[int], Proposal],
        seen: list[int],
        num_draft_tokens: int,
        max_tokens: int,
        constrained: ConstrainedText | None = None,
    ) -> None:
        self._propose = propose
        self._seen = seen
        self._num_prompt = len(seen)
        self._num_draft_tokens = num_draft_tokens
        self._max_tokens = max_tokens
        self._constrained = constrained
        self._has_begun = False
        self._running = RunningCounts()
        self._by_chances: list[int] = []  # rounds in which each position was a chance

    def take_round(self, text: SequenceOf[int], *, has_ended: bool, is_first_drafted: bool = False) -> bool:
        """Count the next round over `text`, prompt and output; False where no round is left to count for now.

        `text` has its first round's tokens at least. While it is being written, a round waits until as many tokens
        stand as it could accept, and one more. The first round is the prefill, which gives a token without a proposal,
        unless `is_first_drafted`.
        """
        if not self._has_begun:
            # Forced tokens that the text begins with; its last token always has a round.
            self._running.num_forced += self._take_forced(text, self._most_forced(text))
        begin = len(self._seen)
        num_done = begin - self._num_prompt
        if num_done >= MAX_TOKENS or begin >= len(text):
            return False
        if not self._has_begun and not is_first_drafted:
            self._has_begun = True
            self._go_on(text[begin : begin + 1])
            self._running.take_round(0, 0, num_emitted=1, num_forced=self._take_forced(text, len(text)))
            return True
        room = min(self._num_draft_tokens, self._max_tokens - num_done - 1)
        following = text[begin : begin + room + 1]
        if len(following) <= room and not has_ended:
            return False
        self._has_begun = True
        proposal = self._fitted(self._propose(room), room)
        # A target that chooses what follows, whatever stands before.
        best = [following[depth] if depth < len(following) else _ENDED for depth in (0, *proposal.depths)]
        verdict = verify_against_choices(best, proposal)
        num_emitted = min(verdict.num_accepted + 1, len(following))
        self._go_on(following[:num_emitted])
        forced, num_tested = proposal.forced_in(verdict.path), verdict.num_tested
        num_forced = sum(place < num_emitted for place in forced)
        num_chances = min(room, num_emitted - num_forced)
        self._by_chances += [0] * (num_chances - len(self._by_chances))
        for position in range(num_chances):
            self._by_chances[position] += 1
        self._running.take_round(
            max(proposal.trial_depths, default=0),
            verdict.num_accepted - len(forced),
            num_emitted=num_emitted - num_forced,
            num_tested=None if num_tested is None else num_tested - len(forced),
            num_forced=num_forced + self._take_forced(text, len(text)),
        )
        return True

    @property
    def counts(self) -> AcceptanceCounts:
        """Of all rounds taken."""
        return self._running.counts

    @property
    def chances(self) -> tuple[int, ...]:
        """By position, as a generation's."""
        return tuple(self._by_chances)

    def counted(self, drafter: Drafter) -> ShadowCounts:
        """What was counted, as that of `drafter`."""
        state = drafter.state
        return ShadowCounts(state.name, state.revision, self._num_draft_tokens, self.counts, self.chances)

    def _most_forced(self, text: SequenceOf[int]) -> int:
        return min(len(text), self._num_prompt + self._max_tokens) - 1

    def _go_on(self, tokens: SequenceOf[int]) -> None:
        self._seen += tokens
        if self._constrained is not None:
            for token in tokens:
                self._constrained.take(token)

    def _take_forced(self, text: SequenceOf[int], end: int) -> int:
        """Go on by the forced tokens of `text` that stand next, those before the place `end`; how many."""
        before = len(self._seen)
        if self._constrained is not None:
            while len(self._seen) < end and self._constrained.forced_token is not None:
                self._go_on(text[len(self._seen) : len(self._seen) + 1])
        return len(self._seen) - before

    def _fitted(self, proposal: Proposal, num_tokens: int) -> Proposal:
        """The proposal as a real run would verify it."""
        if self._constrained is None:
            return proposal
        if UNKNOWN not in proposal.tokens:
            return self._constrained.fit(proposal, num_tokens, "")
        # After the first token that is not known nothing is, but that the draft goes on.
        known = proposal.tokens[: proposal.tokens.index(UNKNOWN)]
        kept = self._constrained.fit(Proposal(known), len(known), "")
        unknown = proposal.tokens[len(known) :]
        proposers = (*kept.proposers, *[""] * len(unknown)) if kept.proposers else ()
        return Proposal((*kept.tokens, *unknown), proposers=proposers)
