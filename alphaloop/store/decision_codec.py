"""A decision's inputs and its outcome as JSON: what the columns `inputs` and `outcome` of decision_records hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby
from operator import attrgetter
from typing import Any, Final
from uuid import UUID

from alphaloop.cost import CostTable
from alphaloop.deciding.decision import Decision, DraftSetting
from alphaloop.deciding.decision_inputs import DecisionInputs, SettingsOrigin
from alphaloop.deciding.evidence_source import JobLengths
from alphaloop.deciding.goodput import DrafterState
from alphaloop.deciding.job_facts import EngineConditions, JobFacts, Subject, TaskRules
from alphaloop.deciding.objective import Aim, Objective
from alphaloop.deciding.origins import PosteriorOrigin, SplitOrigin
from alphaloop.messages import Decoding, Purpose
from alphaloop.store.input_codec import budget_content, microseconds, moment, read_budget

_PARTS: Final = attrgetter("drafter", "num_draft_tokens")


@dataclass(frozen=True, slots=True)
class InputNumbers:
    """The numbers under which a decision's shared inputs are stored."""

    session: int
    costs: int
    posteriors: tuple[tuple[int, ...], ...]
    splits: tuple[int, ...]

    @property
    def all(self) -> tuple[int, ...]:
        """Every number."""
        posteriors = (one for group in self.posteriors for one in group)
        return (self.session, self.costs, *posteriors, *self.splits)


@dataclass(frozen=True, slots=True)
class SharedInputs:
    """The inputs behind these numbers."""

    drafters: tuple[DrafterState, ...]
    costs: CostTable
    posteriors: tuple[tuple[PosteriorOrigin, ...], ...]
    splits: tuple[SplitOrigin, ...]


def inputs_content(inputs: DecisionInputs, numbers: InputNumbers) -> dict[str, Any]:
    """The inputs, the shared ones by their numbers."""
    subject, rules, conditions, lengths = inputs.subject, inputs.rules, inputs.conditions, inputs.lengths
    content: dict[str, Any] = {
        "jobs": [_job(job) for job in inputs.jobs],
        "rules": [rules.max_tokens, rules.decoding.value, *_objective(rules.objective)],
        "lengths": [lengths.jobs, lengths.output_tokens, lengths.prompt_tokens],
        "incumbent": _setting(inputs.incumbent),
        "budget": budget_content(inputs.budget),
        "session": numbers.session,
        "costs": numbers.costs,
        "posteriors": numbers.posteriors,
    }
    # Most decisions need none of these.
    if numbers.splits:
        content["splits"] = numbers.splits
    if conditions.free_cache_bytes is not None or conditions.cannot_serve:
        content["conditions"] = [conditions.free_cache_bytes, dict(conditions.cannot_serve)]
    if conditions.free_elsewhere:
        content["free_elsewhere"] = dict(conditions.free_elsewhere)
    if any(inputs.settings_from):
        content["settings_from"] = [one and [one.decision_id.hex, one.job_index] for one in inputs.settings_from]
    others = [
        subject.decoding.value,
        subject.purpose.value,
        subject.probe_drafter,
        subject.probe_num_draft_tokens,
        subject.switched_off,
    ]
    if others != [Decoding.AUTO.value, Purpose.TRAFFIC.value, None, None, None]:
        content["subject"] = others
    return content


def numbers_of(content: Mapping[str, Any]) -> InputNumbers:
    """The numbers in `inputs_content`."""
    posteriors = tuple(tuple(group) for group in content["posteriors"])
    return InputNumbers(content["session"], content["costs"], posteriors, tuple(content.get("splits", ())))


def settings_from(content: Mapping[str, Any]) -> tuple[SettingsOrigin | None, ...]:
    """The earlier decisions in `inputs_content`, by group."""
    groups = content.get("settings_from") or [None] * len(content["posteriors"])
    return tuple(one and SettingsOrigin(UUID(one[0]), one[1]) for one in groups)


def read_inputs(
    decision_id: UUID,
    decided_at: datetime,
    task: str,
    sampling_bucket: str,
    num_running: int,
    content: Mapping[str, Any],
    shared: SharedInputs,
) -> DecisionInputs:
    """From a row of decision_records and its shared inputs."""
    decoding, purpose, *others = content.get("subject") or [Decoding.AUTO, Purpose.TRAFFIC, None, None, None]
    max_tokens, task_decoding, aim, target_ms = content["rules"]
    free_cache_bytes, cannot_serve = content.get("conditions") or (None, {})
    return DecisionInputs(
        decision_id=decision_id,
        subject=Subject(task, sampling_bucket, Decoding(decoding), Purpose(purpose), *others),
        jobs=tuple(_read_job(values) for values in content["jobs"]),
        rules=TaskRules(max_tokens, Decoding(task_decoding), _read_objective(aim, target_ms)),
        num_running=num_running,
        now=decided_at,
        conditions=EngineConditions(free_cache_bytes, cannot_serve, content.get("free_elsewhere") or {}),
        drafters=shared.drafters,
        costs=shared.costs,
        lengths=JobLengths(*content["lengths"]),
        splits=shared.splits,
        posteriors=shared.posteriors,
        incumbent=_read_setting(content["incumbent"]),
        budget=read_budget(content["budget"]),
        settings_from=settings_from(content),
    )


def outcome_content(decisions: Sequence[Decision]) -> dict[str, Any]:
    """What was decided: the different decisions, and which of them each job has, where there are several."""
    known: dict[int, int] = {}  # by identity: jobs of a group share one object
    found: list[dict[str, Any]] = []
    of_jobs: list[int] = []
    for decision in decisions:
        if id(decision) not in known:
            content = _decision(decision)
            if content not in found:
                found.append(content)
            known[id(decision)] = found.index(content)
        of_jobs.append(known[id(decision)])
    return {"decisions": found, "jobs": of_jobs} if len(found) > 1 else {"decisions": found}


def _decision(decision: Decision) -> dict[str, Any]:
    found = (one.speedup for one in decision.alternatives if one[:2] == (decision.drafter, decision.num_draft_tokens))
    return {
        "drafter": decision.drafter,
        "num_draft_tokens": decision.num_draft_tokens,
        "reason": decision.reason.value,
        "speedup": next(found, None),
        "kept": _setting(decision.kept),
        "by_running": [[*setting, len(list(its))] for setting, its in groupby(decision.settings_by_running, _PARTS)],
    }


def _job(job: JobFacts) -> list[Any]:
    values: list[Any] = [job.num_prompt_tokens, job.max_tokens]
    if job.segment or job.deadline is not None:
        values.append(job.segment)
    if job.deadline is not None:
        values.append(microseconds(job.deadline))
    return values


def _read_job(values: Sequence[Any]) -> JobFacts:
    prompt, max_tokens, *rest = values
    return JobFacts(prompt, max_tokens, rest[0] if rest else "", moment(rest[1]) if len(rest) > 1 else None)


def _objective(objective: Objective) -> tuple[str, float | None]:
    # JSON has no infinity, which is the target of a task that has none.
    return objective.aim.value, None if objective == Objective() else objective.target_ms


def _read_objective(aim: str, target_ms: float | None) -> Objective:
    return Objective() if target_ms is None else Objective(Aim(aim), target_ms)


def _setting(setting: DraftSetting | None) -> list[Any] | None:
    return None if setting is None else [setting.drafter, setting.num_draft_tokens]


def _read_setting(values: Sequence[Any] | None) -> DraftSetting | None:
    return None if values is None else DraftSetting(*values)
