"""Which running sequences are on trial in a round, and what each subject had in it.

Two measure by rounds: the worker for its own engine (`worker/steering.py`), and the scheduler class inside vLLM for the
server that it runs in (`alphaloop/inside_vllm/measuring.py`). Both say which sequences are free to speculate and how
each would, ask for the arms before a round, and report the round.

A *subject* of the experiment is the set of sequences of one task and one sampling bucket that were free to speculate
and do so with one drafter. Slices have its name as their `task`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from alphaloop.experiment.assign import Arm, RoundSchedule
from alphaloop.experiment.observe import Expected, RoundFacts, Slice, TaskRound, Treatment, mean_expected


def subject_of(task: str, sampling_bucket: str) -> str:
    """The subject's name, "TASK BUCKET": a task's name has no space."""
    return f"{task} {sampling_bucket}"


def task_and_bucket(subject: str) -> tuple[str, str]:
    """What the name of a subject is made of."""
    task, _, sampling_bucket = subject.partition(" ")
    return task, sampling_bucket


@dataclass(frozen=True, slots=True)
class FreeSequence:
    """A running sequence that was free to speculate, and how it does."""

    subject: str
    treatment: Treatment  #: with k of 0 where it drafts nothing at this load
    expected: Expected | None = None  #: of its decision, where that was for this drafter
    rival: Treatment | None = None  #: with the drafter that this one may replace; None: it is not on trial against any


@dataclass(frozen=True, slots=True)
class Yielded:
    """What one job's sequences had in a round."""

    num_tokens: int
    num_proposed: int = 0  #: draft tokens that the target read for them
    num_sequences: int = 1


class RoundTrials:
    """The sequences of one device, by name. Not thread-safe: whoever runs the rounds owns it.

    Call `consider` when what runs has changed, `next_round` before each round and `observe` after it.
    """

    def __init__(self, schedule: RoundSchedule) -> None:
        self._schedule = schedule
        self._treatments: dict[str, Treatment] = {}  # by subject
        self._on_trial: dict[str, str] = {}  # subject by sequence
        self._expected: dict[str, Expected | None] = {}  # by subject
        self._rivals: dict[str, Treatment] = {}  # by subject
        self._arms: Mapping[str, Arm] = {}

    def consider(self, free: Mapping[str, FreeSequence]) -> None:
        """These run now. A subject's treatment is that of most of its sequences which draft."""
        votes: dict[str, Counter[Treatment]] = {}
        for sequence in free.values():
            if sequence.treatment.num_draft_tokens:
                votes.setdefault(sequence.subject, Counter())[sequence.treatment] += 1
        self._treatments = {subject: counts.most_common(1)[0][0] for subject, counts in votes.items()}
        self._on_trial = {
            name: sequence.subject
            for name, sequence in free.items()
            if sequence.subject in votes and sequence.treatment.drafter == self._treatments[sequence.subject].drafter
        }
        self._rivals = {free[name].subject: rival for name in self._on_trial if (rival := free[name].rival) is not None}
        expected: dict[str, list[Expected]] = {subject: [] for subject in votes}
        for name, subject in self._on_trial.items():
            if (own := free[name].expected) is not None:
                expected[subject].append(own)
        self._expected = {subject: mean_expected(values) for subject, values in expected.items()}

    def next_round(self) -> bool:
        """Draw the arms of the next round; whether they differ from those of the last one."""
        before, self._arms = self._arms, dict(self._schedule.next_round(self._treatments, self._rivals))
        return self._arms != before

    def is_control(self, name: str) -> bool:
        """Whether the sequence is control in the next round, and so decodes vanilla, or with its rival."""
        subject = self._on_trial.get(name)
        return subject is not None and subject in self._arms and self._arms[subject] != self._treatments[subject]

    def rival_of(self, name: str) -> Treatment | None:
        """How the sequence drafts in the next round because it is control; None: it decodes vanilla."""
        return self._arms.get(self._on_trial.get(name, ""))

    def observe(
        self,
        yielded: Mapping[str, Yielded],
        *,
        started_at: datetime,
        wall_s: float,
        num_running: int,
        mean_context_tokens: float,
        has_prompt: bool,
    ) -> tuple[Slice, ...]:
        """Count a round by its sequences that put out tokens; returns the slices that ended with it."""
        tasks: dict[str, TaskRound] = {}
        for name, own in yielded.items():
            if (subject := self._on_trial.get(name)) is not None and own.num_tokens:
                before = tasks.get(subject) or TaskRound(0, 0)
                tasks[subject] = TaskRound(
                    before.num_sequences + own.num_sequences,
                    before.num_tokens + own.num_tokens,
                    before.num_proposed + own.num_proposed,
                    self._expected.get(subject),
                )
        return self._schedule.observe(
            RoundFacts(started_at, wall_s, num_running, mean_context_tokens, has_prompt, tasks)
        )

    def close(self) -> tuple[Slice, ...]:
        """End all slices and return them."""
        return self._schedule.close()
