"""What the switchback experiment measures on a simulated device, beside the speed-up that is true there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final, NamedTuple

from alphaloop.experiment.figures import ExpectationPair, SpeedupSubject, expectation_pair
from alphaloop.experiment.observe import Slice, Treatment
from benchmarks.policy.rules.as_steps import Truth
from benchmarks.policy.rules.ours import ENGINE, TARGET
from benchmarks.policy.slot_round import SlotRound

FIRST_DRAFT: Final = "r1"


class _Drafted(NamedTuple):
    """A subject of the experiment with one drafter."""

    subject: str
    drafter: str

    @property
    def as_stored(self) -> SpeedupSubject:
        """As the database names it."""
        task, _, sampling = self.subject.partition(" ")
        return SpeedupSubject(task, sampling, TARGET, ENGINE, "host", "device", self.drafter, FIRST_DRAFT)


@dataclass(slots=True)
class _OpenPair:
    """What has come in since the last pair was closed."""

    slices: list[Slice] = field(default_factory=list)
    truth: Truth = field(default_factory=Truth)


class MeasuredBesideTruth:
    """Slices, true speed-ups by subject, and pairs of an expected and a measured speed-up.

    Pairs are closed as alphaloop/store/switchback.py closes them.
    """

    def __init__(self) -> None:
        self.slices: list[Slice] = []
        self.truth: dict[str, Truth] = {}
        #: Pairs, and the true speed-up of their rounds.
        self.pairs: list[tuple[ExpectationPair, float]] = []
        self._open: dict[_Drafted, _OpenPair] = {}

    def note_round(self, done: SlotRound, on_trial: Mapping[int, str], treatments: Mapping[str, Treatment]) -> None:
        """A round outside control: its time, and what that would be with all that is on trial in vanilla.

        `on_trial` has the subject by job, `treatments` are by subject.
        """
        if not on_trial:
            return
        vanilla_ms = done.vanilla_ms([i for i, one in enumerate(done.running) if one.job.number in on_trial])
        for subject in set(on_trial.values()):
            places = [i for i, one in enumerate(done.running) if on_trial.get(one.job.number) == subject]
            read_ms = len(places) * (done.read_ms + done.draft_read_ms)
            its = Truth(sum(done.num_tokens[i] for i in places) * vanilla_ms + read_ms, len(places) * done.ms)
            drafted = _Drafted(subject, treatments[subject].drafter)
            self.truth.setdefault(subject, Truth()).add(its)
            self._open.setdefault(drafted, _OpenPair()).truth.add(its)

    def note_slices(self, ended: Sequence[Slice], now: datetime) -> list[ExpectationPair]:
        """Slices that ended with a round; returns the pairs that they closed."""
        self.slices += ended
        for one in ended:
            self._open.setdefault(_Drafted(one.task, one.treatment.drafter), _OpenPair()).slices.append(one)
        closed: list[ExpectationPair] = []
        for drafted in sorted({_Drafted(one.task, one.treatment.drafter) for one in ended}):
            its = self._open[drafted]
            pair = expectation_pair(drafted.as_stored, its.slices, now)
            if pair is not None:
                self.pairs.append((pair, its.truth.speedup))
                self._open[drafted] = _OpenPair()
                closed.append(pair)
        return closed
