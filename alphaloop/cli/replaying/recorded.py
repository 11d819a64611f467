"""Recorded decisions of a replay: whether they come out as they were, and what the other settings decide."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import NamedTuple
from uuid import UUID

from alphaloop.deciding.decision import Decision, DraftSetting
from alphaloop.deciding.decision_inputs import DecisionInputs
from alphaloop.deciding.recorded import NotReproducible
from alphaloop.deciding.recorded_replay import OtherRules, ReplaySession
from alphaloop.deciding.replay import PastJob, Rules
from alphaloop.settings import Settings
from alphaloop.store.database import Database
from alphaloop.store.past_decisions import DecisionRecord, PastDecisions, RecordedDecisions


class Decided(NamedTuple):
    """What the other settings decide for a job."""

    setting: DraftSetting
    reason: str


class RecordedReplay:
    """Decides recorded decisions again, day by day; jobs ask for theirs by the decision that they were decoded with."""

    def __init__(self, database: Database, was: Settings, would: Settings, rules: Rules, task: str | None) -> None:
        self._past, self._task = PastDecisions(database), task
        self._rules = other_rules(was, would, rules)
        halves = [timedelta(days=settings.worker.history_half_life_days) for settings in (was, would)]
        self._half_life = halves[1] if halves[0] != halves[1] else None
        self._sessions: dict[UUID, ReplaySession] = {}
        self._decided: dict[UUID, dict[tuple[str, str], Decided]] = {}
        self._until: datetime | None = None
        self.num_recorded = 0
        self.num_reproduced = 0

    def read_until(self, since: datetime, until: datetime) -> None:
        """Decide what was decided from `since`, or from where the last call ended, up to `until`."""
        begin = self._until or since
        past = self._past.between(begin, until, task=self._task)
        others = (
            past
            if self._half_life is None
            else self._past.between(begin, until, task=self._task, half_life=self._half_life)
        )
        for record in past.records:
            self.num_recorded += 1
            self.num_reproduced += past.is_reproduced(record)
            try:
                decisions = self._decide(record, past, others)
            except NotReproducible:
                continue
            self._decided[record.decision_id] = _by_kind(past.inputs(record), decisions)
        self._until = until

    def decided(self, job: PastJob) -> Decided | None:
        """For a job; None where its decision is not recorded."""
        if job.decode_batch_id is None:
            return None
        return self._decided.get(job.decode_batch_id, {}).get((job.key.prompt_bucket, job.key.segment))

    def _decide(
        self, record: DecisionRecord, past: RecordedDecisions, others: RecordedDecisions
    ) -> tuple[Decision, ...]:
        inputs, facts = past.inputs(record), past.facts(record)
        if self._half_life is None and self._rules.are_those_of(inputs, facts):
            return past.decide(record)
        if record.session_id not in self._sessions:
            fading = replace(facts, half_life=self._half_life or facts.half_life)
            self._sessions[record.session_id] = ReplaySession(fading, self._rules)
        return self._sessions[record.session_id].decide(inputs, others.positions(record))


def other_rules(was: Settings, would: Settings, rules: Rules) -> OtherRules:
    """The replayed settings; `was` are today's, which say what of the drafters was changed."""
    before, after = was.models.drafters, would.models.drafters
    longest = {
        name: after[name].max_draft_tokens
        for name in before.keys() & after.keys()
        if after[name].max_draft_tokens != before[name].max_draft_tokens
    }
    return OtherRules(rules, longest, frozenset(before.keys() - after.keys()))


def _by_kind(inputs: DecisionInputs, decisions: Sequence[Decision]) -> dict[tuple[str, str], Decided]:
    """By prompt bucket and segment: jobs that share both share a decision."""
    return {
        (job.prompt_bucket, job.segment): Decided(decision.setting, decision.reason.value)
        for job, decision in zip(inputs.jobs, decisions, strict=True)
    }
