"""From counts, choices and findings to the report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from alphaloop.as_decoded import percent
from alphaloop.deciding.decision import NOT_A_CHOICE
from alphaloop.probing.plan import Measurement
from alphaloop.store.drafts import DraftRevision
from alphaloop.store.drift import DriftEvent
from alphaloop.store.incidents import KnownIncident
from alphaloop.store.task_figures import TaskFigures
from alphaloop.switchback.task_speedup import TaskSpeedup
from scheduler.causes.cause import Cause
from scheduler.counts import Counts
from scheduler.estimates import acceptance
from scheduler.facts import SentProbes, SettingInForce
from scheduler.flagging import Flagged
from scheduler.probing.watch import Watched
from scheduler.report.data import (
    DecodedLine,
    DraftLine,
    DriftLine,
    ExactnessLine,
    IncidentLine,
    MeasuredLine,
    ProbeLine,
    Report,
    TaskLine,
)
from scheduler.report.data_over_time import TaskHistory
from scheduler.report.history import task_history
from scheduler.report.part import Estimate


def build_report(
    counts: Counts,
    figures: Mapping[str, TaskFigures],
    choices: Mapping[str, SettingInForce],
    drafts: Sequence[DraftRevision],
    events: Sequence[DriftEvent],
    sent: SentProbes,
    measured: Mapping[str, TaskSpeedup],
    incidents: Sequence[KnownIncident],
    watched: Watched,
    flagged: Flagged,
) -> Report:
    """The report of one run.

    `figures` are those of the last day, which every screen shows; `events` is the drift that is open after the run,
    `measured` the speed-ups by task.
    """
    tasks = tuple(
        _task_line(counts, figures.get(task) or TaskFigures(task), choices.get(task), measured.get(task))
        for task in sorted({*counts.tasks, *choices, *figures})
    )
    drift = tuple(
        DriftLine(
            id=e.id,
            task=e.subject.task,
            drafter=e.subject.drafter,
            draft_revision=e.subject.draft_revision,
            cause=Cause(e.cause),
            state=e.state,
            verdict=e.content.verdict,
            action=e.content.action,
            lost_tokens_per_s=e.content.lost_tokens_per_s,
            opened_at=e.opened_at,
            num_reopened=e.num_reopened,
            acknowledged_by=e.acknowledged_by,
        )
        for e in events
    )
    draft_lines = tuple(
        DraftLine(
            drafter=d.drafter,
            draft_revision=d.draft_revision,
            target_revision=d.target_revision,
            status=d.status,
            status_reason=d.status_reason,
            status_changed_at=d.status_changed_at,
        )
        for d in drafts
    )
    return Report(
        created_at=counts.now,
        covers_from=counts.since,
        covers_to=counts.now,
        headline=_headline(tasks, drift, draft_lines, incidents),
        tasks=tasks,
        drift=drift,
        opened=flagged.num_opened,
        closed=flagged.num_closed,
        probes=tuple(_probe_line(one) for one in sent.plan.measurements if one.is_sent),
        probes_waiting=tuple(_probe_line(one) for one in sent.plan.waiting),
        probe_budget_device_s=round(sent.plan.budget_device_s, 3),
        num_due=len(sent.plan.measurements),
        num_probe_sets=sent.plan.num_probe_sets,
        incidents=tuple(_incident_line(one) for one in incidents),
        exactness=ExactnessLine(**asdict(watched)),
        drafts=draft_lines,
        history=_history(counts),
    )


def _incident_line(one: KnownIncident) -> IncidentLine:
    found = one.found
    return IncidentLine(
        kind=found.kind,
        task=found.task,
        drafter=found.drafter,
        engine=found.engine,
        sentence=found.sentence,
        num_jobs=len(found.job_ids),
        opened_at=one.opened_at,
    )


def _probe_line(one: Measurement) -> ProbeLine:
    return ProbeLine(
        task=one.due.task,
        drafter=one.due.drafter,
        num_draft_tokens=one.due.num_draft_tokens,
        num_probes=one.num_decoded,
        num_scored=one.num_prompts - one.num_decoded,
        last_probed=one.due.last_probed,
        why=one.due.why,
        device_s=round(one.device_s, 3),
        at_stake_device_s=round(one.due.at_stake_device_s, 3),
    )


def _task_line(
    counts: Counts, figures: TaskFigures, choice: SettingInForce | None, measured: TaskSpeedup | None
) -> TaskLine:
    task = figures.task
    choice = choice or _choice_seen(counts, task)
    drafter = choice.drafter if choice and choice.drafter else _most_tried(counts, task)
    line = TaskLine(
        task=task,
        num_jobs=figures.num_jobs,
        num_probes=figures.num_probes,
        num_controls=figures.num_controls,
        decoded=DecodedLine.of(figures.decoded) if figures.decoded else None,
        mode=choice.mode if choice else None,
        next_running=choice.running if choice else None,
        drafter=drafter,
        num_draft_tokens=choice.num_draft_tokens if choice else 0,
        reason=choice.reason if choice else "",
        explanation=choice.explanation if choice else "",
        num_speculative_jobs=0,
        measured=MeasuredLine.of(measured) if measured else None,
    )
    if figures.alpha_1 is not None:
        return line.model_copy(update=_of_traffic(figures))
    return line.model_copy(update=_of_probes(counts, task, drafter)) if drafter else line


def _of_traffic(figures: TaskFigures) -> dict[str, object]:
    return {
        "num_speculative_jobs": figures.num_alpha_jobs,
        "acceptance_from": "traffic",
        "acceptance_drafter": figures.alpha_drafter,
        "sampling_buckets": (figures.alpha_sampling_bucket,),
        "alpha_1": Estimate.of(figures.alpha_1) if figures.alpha_1 else None,
        "alpha": Estimate.of(figures.alpha) if figures.alpha else None,
        "alpha_num_draft_tokens": tuple(sorted(set(figures.alpha_num_draft_tokens or ()))),
    }


def _of_probes(counts: Counts, task: str, drafter: str) -> dict[str, object]:
    """Without traffic, what the last probes showed."""
    probes = counts.latest_probes(task, drafter)
    found = acceptance(probes)
    if found.alpha_1 is None:
        return {}
    return {
        "num_speculative_jobs": found.num_jobs,
        "acceptance_from": "probes",
        "acceptance_drafter": drafter,
        "sampling_buckets": ("greedy",),
        "alpha_1": Estimate.of(found.alpha_1),
        "alpha": Estimate.of(found.alpha) if found.alpha else None,
        "alpha_num_draft_tokens": tuple(sorted({probe.num_draft_tokens for probe in probes})),
    }


def _choice_seen(counts: Counts, task: str) -> SettingInForce | None:
    """The setting of the newest job of a task, for tasks without a logged decision."""
    seen = [
        (job, stream)
        for stream, jobs in counts.streams.items()
        if stream.task == task
        for job in jobs[-1:]
        if job.reason not in NOT_A_CHOICE
    ]
    if not seen:
        return None
    job, stream = max(seen, key=lambda s: s[0].decoded_at)
    mode = "speculative" if stream.drafter else "vanilla"
    return SettingInForce(mode, stream.drafter or None, job.num_draft_tokens, job.reason, "")


def _most_tried(counts: Counts, task: str) -> str | None:
    tried: Counter[str] = Counter()
    for stream, jobs in counts.current_streams().items():
        if stream.task == task:
            tried[stream.drafter] += len(jobs)
    tried.update(probe.drafter for probe in counts.probes if probe.task == task)
    return max(sorted(tried), key=lambda drafter: tried[drafter], default=None)


def _history(counts: Counts) -> dict[str, TaskHistory]:
    found: dict[str, TaskHistory] = {}
    for task in counts.tasks:
        drafter = _most_tried(counts, task)
        if drafter and (history := task_history(counts, task, drafter)):
            found[task] = history
    return found


def _headline(
    tasks: Sequence[TaskLine],
    drift: Sequence[DriftLine],
    drafts: Sequence[DraftLine],
    incidents: Sequence[KnownIncident],
) -> str:
    if not tasks:
        return "Nothing was decoded in this window: no acceptance to report yet."
    num_rounds = sum(line.decoded.num_rounds for line in tasks if line.decoded)
    num_drafted = sum(line.decoded.num_drafted_rounds for line in tasks if line.decoded)
    num_jobs = sum(line.num_jobs for line in tasks)
    jobs = f"{num_jobs} job{'' if num_jobs == 1 else 's'} of {len(tasks)} task{'' if len(tasks) == 1 else 's'}"
    sentence = f"{jobs} in the last day"
    if num_rounds:
        sentence += f"; {percent(num_drafted / num_rounds)} of the rounds drafted"
    stale = sorted({d.drafter for d in drafts if d.status == "stale"})
    if stale:
        sentence += f"; {', '.join(stale)} {'is' if len(stale) == 1 else 'are'} stale and not used"
    if incidents:
        sentence += f"; {len(incidents)} incident{'s are' if len(incidents) > 1 else ' is'} open: texts were wrong"
    if not drift:
        return f"{sentence}; no drift is open."
    moved = sorted({line.task for line in drift})
    return f"{sentence}; drift is open on {', '.join(moved)}."
