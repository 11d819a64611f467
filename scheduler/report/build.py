"""From counts, choices and findings to the report as data. Pure.

Besides the lines of tasks, events, probes and drafts: acceptance over time and when its revisions changed,
expected beside measured speed-ups, what speculation saved, what jobs cost, and when nothing was measured.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import chain, groupby, pairwise
from typing import Final

from alphaloop.acceptance import Interval, consecutive_runs, share_interval
from alphaloop.as_decoded import NextJob, percent
from alphaloop.experiment.figures import ExpectationPair, TaskSpeedup, by_drafter, reliability
from alphaloop.experiment.wording import judged
from alphaloop.explaining.refreshing import RefreshLine
from alphaloop.measurements import DecodedJob, ProbeResult, Stream
from alphaloop.probe_plan import Measurement
from alphaloop.store.decision_inputs import DraftRevision
from alphaloop.store.drift import DriftEvent, KnownIncident
from alphaloop.store.lacks import Lack
from alphaloop.store.spending import Spending, SpentBy
from alphaloop.store.task_figures import TaskFigures
from alphaloop.wording import how_many
from scheduler.counts import RunCounts
from scheduler.events import Flagged
from scheduler.probe_history import ProbeSetup, differences
from scheduler.probing import SentProbes, Watched
from scheduler.report.data import (
    CostLine,
    DraftLine,
    DriftLine,
    DriftReport,
    ExpectationLine,
    GapLine,
    HistoryPoint,
    IncidentLine,
    LackLine,
    ProbeLine,
    RefreshReport,
    RevisionMark,
    SpentLine,
    TaskHistory,
    TaskLine,
)

STEPS: Final = tuple(timedelta(minutes=m) for m in (1, 5, 15, 60, 360, 1440))
MAX_POINTS: Final = 24
MAX_OWNERS: Final = 10
OWNERS: Final = (SpentBy.SEGMENT, SpentBy.KEY, SpentBy.BATCH)
REPORTED: Final = (SpentBy.TASK, SpentBy.PURPOSE, *OWNERS)


@dataclass(frozen=True, slots=True)
class RunFindings:
    """What a run found and did, of which its report is made."""

    counts: RunCounts
    figures: Mapping[str, TaskFigures]  #: of the last day, which every screen shows
    choices: Mapping[str, NextJob]
    drafts: Sequence[DraftRevision]
    events: Sequence[DriftEvent]  #: the drift that is open after the run
    sent: SentProbes
    measured: Mapping[str, TaskSpeedup]
    incidents: Sequence[KnownIncident]
    lacks: Sequence[Lack]  #: that are open
    watched: Watched
    flagged: Flagged
    spent: Mapping[SpentBy, Sequence[Spending]]  #: in the last day, by each of REPORTED, the most device time first
    refreshes: Sequence[RefreshLine]  #: open, or changed lately

    @property
    def tasks(self) -> list[str]:
        """Every task that was decoded, probed or chosen for, sorted."""
        return sorted({*self.counts.tasks, *self.choices, *self.figures})


def build_report(run: RunFindings) -> DriftReport:
    """The report of one run."""
    counts, plan, incidents = run.counts, run.sent.plan, run.incidents
    spent = {row.name: row for row in run.spent[SpentBy.TASK]}
    tasks = tuple(_task_line(run, task, spent.get(task)) for task in run.tasks)
    drift = tuple(DriftLine.of(event, event.content, event.subject) for event in run.events)
    draft_lines = tuple(map(DraftLine.of, run.drafts))
    return DriftReport(
        created_at=counts.now,
        covers_from=counts.since,
        covers_to=counts.now,
        headline=_headline(tasks, drift, draft_lines, incidents),
        tasks=tasks,
        drift=drift,
        opened=run.flagged.num_opened,
        closed=run.flagged.num_closed,
        probes=tuple(_probe_line(line) for line in plan.measurements if line.is_sent),
        probes_waiting=tuple(_probe_line(line) for line in plan.waiting),
        probe_budget_device_s=round(plan.budget_device_s, 3),
        num_due=len(plan.measurements),
        num_probe_sets=plan.num_probe_sets,
        incidents=tuple(IncidentLine.of(line, line.found, num_jobs=len(line.found.job_ids)) for line in incidents),
        lacks=tuple(LackLine.of(lack, sentence=lack.shown(counts.now)) for lack in run.lacks),
        exactness=run.watched,
        drafts=draft_lines,
        refreshes=tuple(map(RefreshReport.of, run.refreshes)),
        spending=tuple(SpentLine.of(spent, by=by) for by in OWNERS for spent in _named(run.spent[by])[:MAX_OWNERS]),
        history=_history(counts),
    )


def _probe_line(measurement: Measurement) -> ProbeLine:
    return ProbeLine.of(
        measurement.due,
        num_probes=measurement.num_decoded,
        num_scored=measurement.num_prompts - measurement.num_decoded,
        device_s=round(measurement.device_s, 3),
        at_stake_device_s=round(measurement.due.at_stake_device_s, 3),
    )


def _task_line(run: RunFindings, task: str, spent: Spending | None) -> TaskLine:
    counts, figures = run.counts, run.figures.get(task) or TaskFigures(task)
    choice, measured = run.choices.get(task), run.measured.get(task)
    drafter = choice.drafter if choice and choice.drafter else _most_tried(counts, task)
    seen: dict[str, object] = {"num_speculative_jobs": 0, "alpha_num_draft_tokens": ()}
    if figures.alpha_1 is not None:
        seen = {
            "num_speculative_jobs": figures.num_alpha_jobs,
            "acceptance_from": "traffic",
            "acceptance_drafter": figures.alpha_drafter,
            "sampling_buckets": (figures.alpha_sampling_bucket,),
            "form_bucket": figures.alpha_form_bucket or "",
            "alpha_counted": figures.alpha_counted,
            "alpha_num_draft_tokens": tuple(sorted(set(figures.alpha_num_draft_tokens or ()))),
        }
    elif drafter:
        seen |= _of_probes(counts, task, drafter)
    choice = choice and judged(choice, measured)
    if choice is None:
        seen |= {"mode": None, "num_draft_tokens": 0, "reason": ""}
    else:
        seen |= {
            "next_running": choice.running,
            "next_revisions": choice.revisions,
            "next_expected_low": choice.expected_low,
        }
    seen["saved_device_s"] = saved = None if measured is None else measured.saved_device_s
    if spent is not None:
        seen |= {"num_saved_passes": spent.num_saved_passes, "cost": cost_line(spent, saved)}
    return TaskLine.of(figures, choice, drafter=drafter, measured=measured, **seen)


def _of_probes(counts: RunCounts, task: str, drafter: str) -> dict[str, object]:
    """Without traffic, what the last probes showed."""
    probes = counts.latest_probes(task, drafter)
    if (first := alpha_1(probes)) is None:
        return {}
    return {
        "num_speculative_jobs": len(probes),
        "acceptance_from": "probes",
        "acceptance_drafter": drafter,
        "sampling_buckets": ("greedy",),
        "alpha_1": first,
        "alpha": pooled_alpha(probes),
        "alpha_num_draft_tokens": tuple(sorted({probe.num_draft_tokens for probe in probes})),
    }


def _most_tried(counts: RunCounts, task: str) -> str | None:
    tried: Counter[str] = Counter()
    for stream, jobs in counts.current_streams().items():
        if stream.task == task:
            tried[stream.drafter] += len(jobs)
    tried.update(probe.drafter for probe in counts.probes if probe.task == task)
    return max(sorted(tried), key=lambda drafter: tried[drafter], default=None)


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
    sentence = f"{how_many(num_jobs, 'job')} of {how_many(len(tasks), 'task')} in the last day"
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


# Over time


def _history(counts: RunCounts) -> dict[str, TaskHistory]:
    histories: dict[str, TaskHistory] = {}
    for task in counts.tasks:
        drafter = _most_tried(counts, task)
        if drafter and (history := task_history(counts, task, drafter)):
            histories[task] = history
    return histories


def task_history(counts: RunCounts, task: str, drafter: str) -> TaskHistory | None:
    """The history of a task with a drafter, under every revision; None where nothing was tested."""
    streams = {s: jobs for s, jobs in counts.streams.items() if (s.task, s.drafter) == (task, drafter)}
    jobs = sorted(chain.from_iterable(streams.values()), key=lambda job: job.decoded_at)
    probes = sorted(
        (p for p in counts.probes if (p.task, p.drafter) == (task, drafter) and p.scheduled_for >= counts.since),
        key=lambda probe: probe.scheduled_for,
    )
    step = _step(jobs)
    traffic = tuple(alpha_over_time(jobs, step))
    probed = tuple(_probe_points(probes))
    if not traffic and not probed:
        return None
    seen = [(decoded[0].decoded_at, _setup(stream)) for stream, decoded in streams.items()]
    marks = _marks([*seen, *((probe.scheduled_for, _setup(probe)) for probe in probes)])
    return TaskHistory(
        drafter=drafter, step_s=step.total_seconds(), traffic=traffic, probes=probed, revisions=tuple(marks)
    )


def _setup(seen: Stream | ProbeResult) -> ProbeSetup:
    return ProbeSetup(seen.target_revision, seen.draft_revision, seen.engine)


def _step(jobs: Sequence[DecodedJob]) -> timedelta:
    span = jobs[-1].decoded_at - jobs[0].decoded_at if jobs else timedelta()
    return next((step for step in STEPS if span / step <= MAX_POINTS), STEPS[-1])


def _probe_points(probes: Sequence[ProbeResult]) -> Iterable[HistoryPoint]:
    """A point for every run whose probes were decoded."""
    for scheduled_for, group in groupby(probes, key=lambda probe: probe.scheduled_for):
        results = list(group)
        if first := alpha_1(results):
            yield HistoryPoint(start=scheduled_for, num_jobs=len(results), alpha_1=first)


def _marks(seen: Iterable[tuple[datetime, ProbeSetup]]) -> Iterable[RevisionMark]:
    """When each setup was seen first, and how it differs from the one that was new before it."""
    known: list[ProbeSetup] = []
    for at, setup in sorted(seen, key=lambda one: one[0]):
        if setup in known:
            continue
        if known:
            yield RevisionMark(at=at, changed=differences(known[-1], setup))
        known.append(setup)


def alpha_over_time(jobs: Sequence[DecodedJob], step: timedelta) -> Iterable[HistoryPoint]:
    """α of position 1 by stretches of `step`, oldest first; stretches without a trial are left out."""
    by_start: dict[int, list[DecodedJob]] = {}
    for job in jobs:
        by_start.setdefault(int(job.decoded_at.timestamp() // step.total_seconds()), []).append(job)
    for index, group in sorted(by_start.items()):
        if first := alpha_1(group):
            start = datetime.fromtimestamp(index * step.total_seconds(), UTC)
            yield HistoryPoint(start=start, num_jobs=len(group), alpha_1=first)


def alpha_1(jobs: Sequence[DecodedJob] | Sequence[ProbeResult]) -> Interval | None:
    """Acceptance of first drafted tokens of `jobs`, in the order of their decoding; None where nothing was tested.

    Runs of consecutive jobs are the clusters.
    """
    return share_interval(consecutive_runs([(job.accepts[0], job.trials[0]) for job in jobs if job.trials]))


def pooled_alpha(jobs: Sequence[DecodedJob] | Sequence[ProbeResult]) -> Interval | None:
    """The same over all positions."""
    return share_interval(consecutive_runs([(sum(job.accepts), sum(job.trials)) for job in jobs]))


# Expectations, savings, costs, gaps


def expectation_lines(pairs: Iterable[ExpectationPair]) -> tuple[ExpectationLine, ...]:
    """A line for each task and drafter, in order of their names."""
    return tuple(ExpectationLine.of(reliability(points), points=points) for points in by_drafter(pairs).values())


def cost_line(spent: Spending, saved_device_s: Interval | None) -> CostLine:
    """The cost of a task's traffic. Amounts are null without a price, and where nothing was decoded.

    What was saved is priced as the task's jobs of the day were on average.
    """
    return CostLine(
        num_jobs=spent.num_jobs,
        num_tokens=spent.num_tokens,
        device_s=round(spent.device_s, 3),
        cost=spent.cost,
        per_1000_jobs=spent.per(spent.num_jobs, 1_000),
        per_million_tokens=spent.per(spent.num_tokens, 1_000_000),
        saved=spent.cost_of(saved_device_s),
    )


def _named(rows: Iterable[Spending]) -> list[Spending]:
    return [row for row in rows if row.name]


def gaps(runs: Sequence[datetime], now: datetime, longest_pause: timedelta) -> tuple[GapLine, ...]:
    """Times without a run that are longer than `longest_pause`, oldest first. `runs` are starts, oldest first."""
    return tuple(
        GapLine(begins=before, ends=after) for before, after in pairwise((*runs, now)) if after - before > longest_pause
    )
