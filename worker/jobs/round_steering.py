"""Drafter and k of each running sequence in the next round: by what runs, and by the switchback experiment.

The distribution of a text does not depend on drafter and k, so the settings may change between any two rounds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime

from alphaloop.deciding.draft_lengths import LengthsTogether, RunningSequence
from alphaloop.deciding.policy import Decision, DraftSetting
from alphaloop.switchback.expectation import Expected, mean_expected
from alphaloop.switchback.rounds import RoundFacts, TaskRound
from alphaloop.switchback.schedule import Arm, SwitchbackSchedule
from alphaloop.switchback.slices import Treatment
from worker.engine import Step
from worker.jobs.lanes import LaneKey
from worker.jobs.running import RunningJob, RunningJobs
from worker.jobs.steering import TaskSlice, by_sampling_bucket, is_free, subject_of


class RoundSteering:
    """A `Steering` that sets drafters and k before each round and counts the round afterwards."""

    def __init__(self, schedule: SwitchbackSchedule, lengths: LengthsTogether, now: Callable[[], datetime]) -> None:
        self._schedule = schedule
        self._lengths = lengths
        self._now = now
        self._running_ids: frozenset[str] = frozenset()
        self._wanted: dict[str, DraftSetting] = {}
        self._treatments: dict[str, Treatment] = {}
        self._on_trial: dict[str, str] = {}  # subject by job_id
        self._expected: dict[str, Expected | None] = {}  # by subject
        self._arms: Mapping[str, Arm] = {}
        self._round_began = now()

    def begin(self, job_id: str, lane: LaneKey, decision: Decision, running: RunningJobs) -> DraftSetting:
        """As decided: the next round may change it."""
        return decision.setting

    def steer(self, running: RunningJobs) -> None:
        """Set how every sequence drafts in the next round."""
        jobs = running.by_id()
        is_same = self._running_ids == jobs.keys()
        if not is_same:
            self._running_ids = frozenset(jobs)
            self._consider(list(jobs.values()))
        before, self._arms = self._arms, dict(self._schedule.next_round(self._treatments))
        if not is_same or self._arms != before:
            running.redraft(self._setting_of)
        self._round_began = self._now()

    def observe(self, step: Step) -> list[TaskSlice]:
        """Count the round that ran; returns the slices that ended with it."""
        rounds: dict[str, TaskRound] = {}
        for job_id, num_tokens in step.tokens_by_job.items():
            subject = self._on_trial.get(job_id)
            if subject is not None and num_tokens:
                before = rounds.get(subject) or TaskRound(0, 0)
                rounds[subject] = TaskRound(
                    before.num_sequences + 1,
                    before.num_tokens + num_tokens,
                    before.num_proposed + step.proposed_by_job.get(job_id, 0),
                    self._expected.get(subject),
                )
        facts = RoundFacts(
            started_at=self._round_began,
            wall_s=step.wall_s,
            num_running=step.batch,
            mean_context_tokens=float(step.context),
            has_prompt=step.num_prefill_tokens > 0 or step.num_draft_prefill_tokens > 0,
            tasks=rounds,
        )
        return by_sampling_bucket(self._schedule.observe(facts))

    def close(self) -> list[TaskSlice]:
        """End all slices and return them: when the worker ends, or when a step failed."""
        return by_sampling_bucket(self._schedule.close())

    def _consider(self, jobs: Sequence[RunningJob]) -> None:
        """Find every sequence's setting outside control slices, and the subjects' treatments."""
        settings = self._lengths.settings([RunningSequence(job.lane, job.decision) for job in jobs], self._now())
        self._wanted = {job.job_id: setting for job, setting in zip(jobs, settings, strict=True)}
        votes: dict[str, Counter[Treatment]] = {}
        for job in jobs:
            setting = self._wanted[job.job_id]
            if setting.drafter and setting.num_draft_tokens and is_free(job.lane, job.decision):
                treatment = Treatment(setting.drafter, setting.num_draft_tokens)
                votes.setdefault(subject_of(job.lane), Counter())[treatment] += 1
        if not votes:
            self._treatments, self._on_trial, self._expected = {}, {}, {}
            return
        self._treatments = {subject: max(counts, key=lambda t: counts[t]) for subject, counts in votes.items()}
        self._on_trial = {job.job_id: subject_of(job.lane) for job in jobs if self._may_be_on_trial(job)}
        # Jobs that were decided together share a decision.
        decisions = {id(job.decision): job.decision for job in jobs}
        promised = {name: decision.expected for name, decision in decisions.items()}
        found: dict[str, list[Expected]] = {subject: [] for subject in votes}
        for job in jobs:
            subject, expected = self._on_trial.get(job.job_id), promised[id(job.decision)]
            if subject and expected and job.decision.drafter == self._treatments[subject].drafter:
                found[subject].append(expected)
        self._expected = {subject: mean_expected(its) for subject, its in found.items()}

    def _may_be_on_trial(self, job: RunningJob) -> bool:
        treatment = self._treatments.get(subject_of(job.lane))
        return (
            treatment is not None
            and is_free(job.lane, job.decision)
            and self._wanted[job.job_id].drafter == treatment.drafter
        )

    def _setting_of(self, job: RunningJob) -> DraftSetting:
        wanted = self._wanted[job.job_id]
        subject = self._on_trial.get(job.job_id)
        if subject is None or subject not in self._arms:
            return wanted
        arm = self._arms[subject]
        if arm is None:
            # Paused, not closed: after the slice the drafter continues where it was.
            return DraftSetting(wanted.drafter, 0)
        return wanted if arm == self._treatments.get(subject) else DraftSetting(arm.drafter, arm.num_draft_tokens)
