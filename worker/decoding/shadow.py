"""Scores look-up on texts that it does not decode, or decodes with shorter drafts than it could.

While a text is being written it is read again as look-up would have decoded it, in virtual rounds (virtual_rounds.py):
look-up proposes behind what stands so far, the proposal is compared with the tokens that really follow, and the text
goes on by those that agree and one more.

Why these counts have exactly the distribution of a real run's. Look-up's proposal follows from the text before it, and
its q is one-hot: a proposed x is accepted with probability p(x), and after a rejection the target's token is drawn from
p without x. So in a real run x is accepted if and only if the token that comes to stand there is x, and that token has
the distribution p, whether or not anything was proposed. The counts of a real run are thus a function of its text
alone, the function computed here, and every exact way to decode gives the text the same distribution. For greedy jobs
and reproducible ones (accepted on equality by definition) the text itself is the same, and so are the counts. Siblings
of a tree, each accepted with what is left of p and then taken out of it, are the same case: one of them is accepted if
and only if it is the token that comes. Where a dtype rounds, a text may differ by a near-tie, as two real runs may.

One difference: a shadow uses the results that were remembered when the job began, while a real run also uses results
that end during the run. The first round of a prompt whose last piece is a single token can draft, in virtual rounds as
in real ones, because the reading of a prompt depends on the slots beside it and not on the drafter.

A text that look-up itself decoded in some rounds only, or at a smaller k, is scored with its longest drafts, so longer
drafts need no exploration. That score contains all that the run's own counts contain, so it replaces them as evidence
(`Outcome.evidence`). If look-up drafts in every round with its longest drafts, there is nothing to score.

Between two rounds scoring takes `ADVANCE_S` at most. A text that ends usually has a few virtual rounds left, so its
result waits half a millisecond. It waits longer only after a long prompt with a short output, or if look-up was paused
for the first time just before the end.

Scores contain no times. Scoring works for look-up only: a draft model would have to run its passes, which are the cost
that scoring should avoid, and where its q is not one-hot, equality with the text understates its acceptance.

Only traffic is scored. Probes and control jobs repeat the same prompts, and look-up has probes of its own.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import Final, Literal, Protocol

from worker.decoding.drafters.lookup import LookupDrafter
from worker.decoding.proposal import Drafter
from worker.decoding.sampling.randomness import key_of
from worker.decoding.virtual_rounds import VirtualRounds
from worker.engine import ShadowCounts

#: Most that readings may take between two rounds, in seconds.
ADVANCE_S: Final = 0.002
#: A job's weight in the pace fades by this with every later job: the pace is that of about the last hundred jobs.
FADING: Final = 0.99


class RunningText(Protocol):
    """What scoring needs of a sequence."""

    job_id: str
    task: str  #: empty for jobs that are no traffic
    text: list[int]  #: prompt and output so far
    num_prompt: int
    is_first_drafted: bool  #: its first round was no prefill
    finish_reason: Literal["stop", "length"] | None  #: None while it runs
    device_s: float  #: what decoding it took

    @property
    def max_tokens(self) -> int:
        """Most tokens that the output may have."""

    def has_drafted_throughout(self, drafter: str, num_draft_tokens: int) -> bool:
        """Whether every round behind the prefill allowed `drafter` at least `num_draft_tokens`, and there was one."""


@dataclass(slots=True)
class Pace:
    """Recent times of decoding and scoring, and from them the share of texts to score. Seconds."""

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


@dataclass(slots=True, eq=False)
class _Reading:
    """One text as one look-up drafter would decode it."""

    sequence: RunningText
    drafter: LookupDrafter
    rounds: VirtualRounds
    seconds: float = 0.0
    has_failed: bool = False

    @property
    def is_needed(self) -> bool:
        """Whether the run's own counts say less."""
        state = self.drafter.state
        return not self.sequence.has_drafted_throughout(state.name, state.max_draft_tokens)

    def take_round(self) -> bool:
        """Count a round; False where none is left for now."""
        sequence = self.sequence
        return self.rounds.take_round(
            sequence.text,
            has_ended=sequence.finish_reason is not None,
            is_first_drafted=sequence.is_first_drafted,
        )

    @property
    def shadow(self) -> ShadowCounts:
        """What was counted."""
        state = self.drafter.state
        return ShadowCounts(state.name, state.revision, state.max_draft_tokens, self.rounds.counts)


def _raise(drafter: str, method: str, error: Exception) -> None:
    raise error


class Shadows:
    """Scores texts with look-up drafters as far as these do not decode them, within each one's share of time.

    If not all texts are scored, they are drawn by job_id with a probability that depends on earlier jobs only, so the
    choice does not depend on the text.

    A reading that raises is dropped, and `failed` is called with the drafter, the method and the error.
    """

    def __init__(
        self,
        drafters: Mapping[str, Drafter],
        clock: Callable[[], float] = time.perf_counter,
        *,
        failed: Callable[[str, str, Exception], object] = _raise,
        ended: Container[str] = (),
    ) -> None:
        """`ended`: drafters that score nothing any more."""
        self._drafters = drafters
        self._clock = clock
        self._failed = failed
        self._ended = ended
        self._paces: dict[str, Pace] = {}
        self._readings: deque[_Reading] = deque()

    def begin(self, sequence: RunningText) -> None:
        """Draw who scores a sequence that is admitted now, with what each drafter remembers of the task by now."""
        if not sequence.task:
            return
        for name, drafter in self._lookups():
            chance = self._pace(name).share_to_score(drafter.shadow_share)
            if _uniform(sequence.job_id, name) < chance:
                seen = sequence.text[: sequence.num_prompt]
                try:
                    propose = drafter.rereading(seen, sequence.task, drafter.num_remembered(sequence.task))
                except Exception as error:
                    self._failed(name, "rereading", error)
                    continue
                rounds = VirtualRounds(propose, seen, drafter.state.max_draft_tokens, sequence.max_tokens)
                self._readings.append(_Reading(sequence, drafter, rounds))

    def advance(self) -> None:
        """Read on in the running texts, in turn, for at most ADVANCE_S and one round."""
        began = now = self._clock()
        for _ in range(len(self._readings)):
            reading = self._readings[0]
            while reading.is_needed and self._takes_round(reading):
                before, now = now, self._clock()
                reading.seconds += now - before
                if now - began >= ADVANCE_S:
                    return
            if not reading.has_failed:
                self._readings.rotate(-1)

    def end(self, sequence: RunningText) -> tuple[ShadowCounts, ...]:
        """The counts of each drafter on a text that has ended."""
        if not sequence.task:
            return ()
        for name, _ in self._lookups():
            self._pace(name).decoded(sequence.device_s)
        found = []
        for reading in self._drop(sequence):
            if reading.is_needed:
                began = self._clock()
                while self._takes_round(reading):
                    pass
                if not reading.has_failed:
                    found.append(reading.shadow)
                self._pace(reading.drafter.state.name).scored(reading.seconds + self._clock() - began)
        return tuple(found)

    def cancel(self, sequence: RunningText) -> None:
        """Forget a sequence that does not end by itself."""
        self._drop(sequence)

    def clear(self) -> None:
        """Forget every sequence."""
        self._readings.clear()

    def _takes_round(self, reading: _Reading) -> bool:
        """Count a round; False where none is left for now. One that raises ends its reading."""
        try:
            return reading.take_round()
        except Exception as error:
            reading.has_failed = True
            if reading in self._readings:
                self._readings.remove(reading)
            self._failed(reading.drafter.state.name, "rereading", error)
            return False

    def _drop(self, sequence: RunningText) -> list[_Reading]:
        dropped = [reading for reading in self._readings if reading.sequence is sequence]
        for reading in dropped:
            self._readings.remove(reading)
        return dropped

    def _pace(self, name: str) -> Pace:
        return self._paces.setdefault(name, Pace())

    def _lookups(self) -> list[tuple[str, LookupDrafter]]:
        return [
            (name, one)
            for name, one in self._drafters.items()
            if isinstance(one, LookupDrafter) and name not in self._ended
        ]


def _uniform(job_id: str, drafter: str) -> float:
    return (key_of("shadow", job_id, drafter) + 2**63) / 2**64
