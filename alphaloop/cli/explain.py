"""`alphaloop explain TASK`: the evidence, the expected goodput of each alternative, and the decision."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import groupby
from typing import Final

import typer
from rich.text import Text

from alphaloop.acceptance import Z95
from alphaloop.as_decoded import at_load, drafted_sentence, setting
from alphaloop.batches.progress import latest_jobs
from alphaloop.cli.options import AS_JSON, connected_settings, example, open_database
from alphaloop.cli.screen import out, paragraph, print_json, table
from alphaloop.costs import CostKind
from alphaloop.deciding.expectation_error import NO_ERROR, ExpectationError
from alphaloop.deciding.goodput import Alternative, DrafterState, Shares
from alphaloop.deciding.job_facts import Aim
from alphaloop.errors import AlphaloopError, ConfigError
from alphaloop.experiment.wording import draft_lengths, expectations, sentence, why
from alphaloop.explaining.explanation import (
    HISTORY,
    Evidence,
    ExplainRequest,
    Explanation,
    RecordedAs,
    explain_recorded,
    explain_task,
    usual_request,
)
from alphaloop.explaining.wording import document, opening
from alphaloop.settings import Settings
from alphaloop.store.database import Database
from alphaloop.store.decisions import ChoiceFigures, DecisionChange, ExpectedSpeedup, SnapshotStore
from alphaloop.store.task_figures import figures_of
from alphaloop.store.traffic import TrafficStore
from alphaloop.wording import (
    acceptance_of,
    counted_apart,
    counts,
    how_many,
    moment_ago,
    named,
    rate,
    second,
    share,
    share_with_interval,
    words,
)
from alphaloop.wording import sentence as capitalized

#: As alphaloop.acceptance.sampling_bucket and form_bucket make them.
_BUCKET: Final = re.compile(r"greedy(,adjusted)?|t(<=0\.5|<=1\.0|>1\.0)(,cut)?(,seeded)?(,adjusted)?")
_FORM: Final = re.compile(r"(?=[a-z])(json|regex|choice|grammar)?((^|,)tools)?((^|,)images)?((^|,)predicted)?|text")
_MAX_ALTERNATIVES: Final = 10
_AIMS: Final = {
    Aim.TIME_PER_TOKEN: "time per token",
    Aim.TIME_TO_FIRST_TOKEN: "time to first token",
    Aim.DEADLINE: "deadline",
}
#: Past this many drafters, columns of α would not fit.
_DRAFTERS_ABREAST: Final = 2


@example("""\
alphaloop explain code --batch 4
alphaloop explain code --segment gold --at 2026-09-01T12:00
alphaloop explain --job 0b5c1c1e
alphaloop explain chat --sampling 't<=1.0' --at 3d --json""")
def explain(
    context: typer.Context,
    task: str | None = typer.Argument(None, help="The task to explain."),
    job: str | None = typer.Option(None, help="A decoded job, by its id, in place of a task."),
    segment: str = typer.Option("", help="Segment of the jobs; jobs without a segment, if not given."),
    at: str | None = typer.Option(
        None, help="The last decision up to a time: 2026-09-01T12:00 (UTC), or 90m, 2h, 3d ago."
    ),
    batch: int | None = typer.Option(
        None,
        min=1,
        help="Batch size; if not given, the usual one of the last day. With --at: the decision at about this load.",
    ),
    sampling: str | None = typer.Option(
        None, help="Sampling bucket: greedy, t<=0.5, t<=1.0 …; if not given, that of most jobs of the last day."
    ),
    form: str | None = typer.Option(
        None, help="Form: text, json, regex, choice, grammar, tools, images …; if not given, that of most jobs."
    ),
    as_json: bool = AS_JSON,
) -> None:
    """Show how a task is decoded, and why.

    Applies the policy of a worker to the same evidence and the same measured costs. Prints the evidence, the
    alternatives with their expected goodput, the reason, measurements, and the last changes of the choice. With --at or
    --job, takes a past decision again from its snapshot.
    """
    if (task is None) == (job is None):
        raise typer.BadParameter("expected either a task or --job: alphaloop explain code, alphaloop explain --job ID")
    now = datetime.now(UTC)
    when = now if at is None else moment_ago(at, now, "--at")
    if sampling is not None and not _BUCKET.fullmatch(sampling):
        raise ConfigError(
            f"--sampling: expected a sampling bucket, found {sampling[:60]!r}",
            hint="greedy, t<=0.5, t<=1.0 or t>1.0; with ,cut ,seeded ,adjusted where it applies",
        )
    if form is not None and not _FORM.fullmatch(form):
        raise ConfigError(
            f"--form: expected the form of a job, found {form[:60]!r}",
            hint="text, json, regex, choice or grammar; with ,tools ,images where it applies; or tools, images",
        )
    settings = connected_settings(context, broker=False)
    with open_database(settings) as database:
        if job is not None:
            explanation = _explain_job(database, job)
        elif task is not None:
            check_task(database, settings, task)
            figures = figures_of(database, task, None if at is None else when)
            usual = usual_request(figures, when, is_now=at is None, segment=segment)
            request = replace(usual, batch=batch or usual.batch, sampling_bucket=sampling or usual.sampling_bucket)
            if form is not None:
                request = replace(request, form_bucket="" if form == "text" else form)
            explanation = (
                explain_task(database, settings, request) if at is None else _explain_last(database, request, batch)
            )
    if as_json:
        print_json(document(explanation))
    else:
        show(explanation)


def _explain_last(database: Database, request: ExplainRequest, batch: int | None) -> Explanation:
    """The last decision up to the moment, with `batch` the last beside about that many sequences."""
    store = SnapshotStore(database)
    stored = store.last(request.task, request.sampling_bucket, request.at, running=batch)
    if stored is None:
        beside = f" at a batch of about {batch}" if batch else ""
        kept = store.first_and_last(request.task)
        others = "none of the task" if kept is None else f"those from {second(kept[0])} to {second(kept[1])}"
        raise AlphaloopError(
            f"expected a decision of {request.task}, {request.sampling_bucket}{beside}, up to {second(request.at)}, "
            f"found {others}",
            hint="decisions are kept for `scheduler.history_retention_days`; without --at: what would be decided now",
        )
    return explain_recorded(database, stored, segment=request.segment, form_bucket=request.form_bucket)


def _explain_job(database: Database, job_id: str) -> Explanation:
    store, job_id = SnapshotStore(database), latest_jobs(database, [job_id])[job_id].job_id
    stored, kind = store.of_job(job_id), store.kind_of_job(job_id)
    if kind is None or stored is None:
        raise AlphaloopError(
            f"no recorded decision of job {job_id}",
            hint="it was not decoded, or that was more than `scheduler.history_retention_days` ago",
        )
    return explain_recorded(database, stored, segment=kind[0], prompt_bucket=kind[1], form_bucket=kind[2])


def check_task(database: Database, settings: Settings, task: str | None) -> None:
    """Raises ConfigError for a task that is neither configured nor in history."""
    if not settings.tasks or task in (None, *settings.tasks):
        return
    seen = TrafficStore(database).tasks()
    if task not in seen:
        known = sorted({*settings.tasks, *seen})
        raise ConfigError(f"no task {task!r} in configs/tasks.toml or in history", hint=f"one of {', '.join(known)}")


def show(explained: Explanation) -> None:
    """Print everything, the answer first."""
    decision, request = explained.decision, explained.request
    reason = why(explained.next_job)
    what = "decided" if explained.recorded is not None else "next job"
    next_job = f"{setting(explained.next_job)} {at_load(explained.next_job)}"
    paragraph(f"{request.task}, {what}: {next_job} ({reason})", style="bold")
    paragraph(f"{drafted_sentence(explained.figures.decoded)} in the {'last day' if request.is_now else 'day before'}.")
    paragraph(" ".join(opening(explained)))
    paragraph(capitalized(decision.explanation), style="dim")
    if explained.recorded is not None:
        paragraph(_recorded(explained.recorded, request.at), style="dim")
    _heading("request")
    paragraph(_asked(explained))
    _heading("evidence")
    _show_evidence(explained)
    if decision.alternatives:
        _heading("alternatives, best first")
        _show_alternatives(explained)
        paragraph(_costs(explained))
    _heading("measured")
    for line in _measured(explained):
        paragraph(line)
    _heading("changes, newest first")
    _show_changes(explained.changes)


def _recorded(recorded: RecordedAs, at: datetime) -> str:
    groups = f" in {recorded.num_groups} groups" if recorded.num_groups > 1 else ""
    sentences = f"Decided on {second(at)} for {how_many(recorded.num_jobs, 'job')}{groups} on {recorded.host}. "
    if recorded.is_reproduced:
        return sentences + "Taken again from its snapshot, it is the same decision."
    if not recorded.is_whole:
        return sentences + "Its snapshot has no room for all drafters and groups of jobs: it is shown as taken."
    return sentences + "Taken again from its snapshot, it is another decision: the program has changed since."


def _asked(explained: Explanation) -> str:
    request, context = explained.request, explained.context
    segment = f", segment {request.segment}" if request.segment else ""
    prompt = "" if context.prompt_tokens is None else f" after prompts of about {context.prompt_tokens:.0f}"
    num_known = round(context.known_output_jobs)
    known = f"from {how_many(num_known, 'job')}" if num_known else "their limit"
    sentences = (
        f"A batch of {request.batch}, {request.kind}{segment}: about {context.expected_tokens:.0f} tokens "
        f"a job{prompt} ({known}), on {explained.engine.shown}."
    )
    if context.objective.aim in _AIMS:
        sentences += f" Target: {context.objective.target_ms:g} ms {_AIMS[context.objective.aim]}."
    if explained.recorded is not None:
        return sentences
    if explained.fleet is not None:
        ended = (f"They do not ask {name} for {why}." for name, why in explained.fleet.ended.items())
        sentences += " ".join(("", explained.fleet.sentence, *ended))
    return f"{sentences} Memory, deadlines, patterns and the sampling settings of single jobs are not considered."


def _show_alternatives(explained: Explanation) -> None:
    columns = ("tokens/round", "ms/round", "tok/s each [95 %]", "speed-up [95 %]")
    right = [*columns[:2]]
    has_target = any(a.chance < 1 for a in explained.decision.alternatives)
    shown_table = table("", *columns, *(["on target"] if has_target else []), right=right)
    for option in _listed(explained):
        cells = (f"{option.tokens_per_round:.2f}", f"{option.round_ms:.1f}", _tokens_per_s(explained, option))
        gain = f"{option.speedup:.2f} [{option.speedup_low:.2f} {option.speedup_high:.2f}]" if option.drafter else "1"
        chance = [f"{option.chance:.0%}"] if has_target else []
        shown_table.add_row(named(option.drafter, option.num_draft_tokens), *cells, gain, *chance)
    out().print(shown_table)
    left = len(explained.decision.alternatives) - _MAX_ALTERNATIVES
    if left > 0:
        paragraph(f"{left} more {'is' if left == 1 else 'are'} expected to be slower; --json has the rest.")


def _listed(explained: Explanation) -> list[Alternative]:
    """The best alternatives, the chosen one and vanilla."""
    decision = explained.decision
    chosen = (None, 0), (decision.drafter, decision.num_draft_tokens)
    must = [option for option in decision.alternatives if (option.drafter, option.num_draft_tokens) in chosen]
    rest = [option for option in decision.alternatives if option not in must][: _MAX_ALTERNATIVES - len(must)]
    return [option for option in decision.alternatives if option in must or option in rest]


def _tokens_per_s(explained: Explanation, option: Alternative) -> str:
    speed = rate(option.tokens_per_s)
    if option.drafter is None:
        return speed
    posterior, k = explained.evidence[option.drafter].posterior, option.num_draft_tokens
    low, high = posterior.tokens_bounds(k, explained.context.expected_tokens if explained.context.size else 1.0)
    tokens, widened = posterior.tokens[k], Z95 * option.error.sd
    bounds = (math.hypot(math.log(tokens / low), widened), math.hypot(math.log(high / tokens), widened))
    slowest, fastest = option.tokens_per_s * math.exp(-bounds[0]), option.tokens_per_s * math.exp(bounds[1])
    return f"{speed} [{rate(slowest)} {rate(fastest)}]"


def _costs(explained: Explanation) -> str:
    context = explained.context.size.context if explained.context.size else None
    shares = Shares(explained.request.batch, explained.drafters)
    here = explained.costs.rounds(shares.vanilla, context)
    best = next((a for a in explained.decision.alternatives if a.drafter), None)
    sentences = f"Costs: a vanilla round takes {here.part_ms(None, 1) or 0:.1f} ms"
    if best is not None and best.drafter is not None and explained.costs.is_served(best.drafter):
        sentences += f"; a round of {best.drafter}'s server {best.round_ms:.1f} ms"
    elif best is not None:
        k = best.num_draft_tokens
        sentences += f"; at k={k} the target's pass {here.part_ms(None, k + 1) or 0:.1f} ms at its widest"
        sentences += f" and the draft {here.part_ms(best.drafter, k + 1) or 0:.1f} ms"
    if explained.context.prompt_tokens:
        sentences += f"; reading a prompt {explained.costs.prefill_ms(None, explained.context.prompt_tokens):.1f} ms"
    points = [p for p in explained.costs.points if p.kind is not CostKind.PREFILL and p.num_corrections]
    sentences += f". Measured {second(explained.engine.measured_at)}"
    if points:
        low, high = min(p.correction for p in points), max(p.correction for p in points)
        rounds = sum(p.num_corrections for p in points)
        sentences += f", corrected by {how_many(rounds, 'real round')} to {low:.2f}–{high:.2f} of that"
    return sentences + "."


def _measured(explained: Explanation) -> list[str]:
    measured = explained.measured
    sentences = [_counted(explained)]
    if measured.speedup is None:
        sentences.append("No speed-up was measured: no slice of the experiment was recorded in the day before.")
    else:
        sentences.append(sentence(measured.speedup.subject.drafter, measured.speedup))
    sentences += [expectations(expected) for expected in measured.expectations]
    errors = {name: evidence.posterior.error for name, evidence in explained.evidence.items()}
    sentences += filter(None, (_correction(name, error) for name, error in errors.items()))
    if not measured.all.num_jobs:
        return [*sentences, f"No job like these was decoded in the last {HISTORY.days} days."]
    explored = "nothing was explored"
    if measured.explored.num_jobs:
        of_tokens = measured.explored.num_tokens / measured.all.num_tokens
        explored = f"{measured.explored.num_jobs} were explored, {of_tokens:.1%} of the tokens"
    sentences.append(
        f"Of the last {how_many(measured.all.num_jobs, 'job')} like these in {HISTORY.days} days, {explored}. "
        f"The budget for exploration is {explained.explore_share:.1%}."
    )
    return sentences


def _counted(explained: Explanation) -> str:
    """The figures of the task as every screen has them."""
    figures = explained.figures
    by_status = f" ({counts(figures.by_status)})" if figures.jobs else ""
    apart = f", apart from {apart}" if (apart := counted_apart(figures.num_probes, figures.num_controls)) else ""
    when = "In the last day" if explained.request.is_now else "In the day before"
    sentences = f"{when} the task had {how_many(figures.num_jobs, 'job')} of traffic{by_status}{apart}."
    if figures.alpha_1 is None:
        return sentences
    lengths = draft_lengths(figures.alpha_num_draft_tokens or ())
    with_what = acceptance_of(figures.alpha_drafter, None, lengths, figures.alpha_of)
    num_jobs = how_many(figures.num_alpha_jobs, "job")
    return f"{sentences} α₁ was {share_with_interval(figures.alpha_1)} ({with_what}; {num_jobs})."


def _correction(drafter: str, error: ExpectationError) -> str:
    if error == NO_ERROR:
        return ""
    return (
        f"Above, the expected speed-up of {drafter} is corrected by {error.factor:.2f}x, and its bounds allow for an "
        f"error of {math.exp(Z95 * error.sd) - 1:.0%}, by what earlier expectations missed."
    )


def _show_changes(changes: Sequence[DecisionChange]) -> None:
    if not changes:
        paragraph("No choice has been logged.")
    for change in changes:
        before = named(change.before.drafter, change.before.num_draft_tokens) if change.before else "nothing"
        after = named(change.after.drafter, change.after.num_draft_tokens)
        step = f"{before} → {after}" if before != after else f"{after} stays, for another reason"
        where = f"batch {change.batch}, {change.sampling_bucket}"
        paragraph(f"{second(change.decided_at)}  {step} ({words(change.reason)}; {where})", style="bold")
        paragraph(capitalized(change.explanation), indent=2)
        if change.figures is not None:
            paragraph(_then(change.figures), indent=2)


def _then(figures: ChoiceFigures) -> str:
    sentences = f"Expected then: {_expected(figures.chosen)}"
    if figures.rival is not None:
        sentences += f", {_expected(figures.rival)}"
    alphas = [share(a / n if n else None) for a, n in zip(figures.accepts, figures.trials, strict=True)][:6]
    seen = f"; from {how_many(round(figures.jobs), 'job')}" + (
        f" with α by position {' '.join(alphas)}" if alphas else ""
    )
    return sentences + seen + "."


def _expected(expected: ExpectedSpeedup) -> str:
    name = named(expected.drafter, expected.num_draft_tokens)
    if expected.drafter is None:
        return f"{name} 1"
    return f"{name} {expected.speedup:.2f}x ({expected.speedup_low:.2f} to {expected.speedup_high:.2f})"


def _heading(text: str) -> None:
    out().print()
    out().print(Text(text, style="bold cyan"))


def _show_evidence(explained: Explanation) -> None:
    """What was counted of each drafter, in sentences, then acceptance by position, side by side."""
    if not explained.drafters:
        paragraph("No drafter has been registered for this target.")
        return
    for drafter in explained.drafters:
        sentences = _seen(drafter, explained.evidence[drafter.name])
        if names := " and ".join(other.name for other in explained.drafters if other.shares_weights_with(drafter)):
            sentences += f" Rounds of {names} count for {drafter.name} too, because the weights are the same."
        paragraph(sentences)
    if explained.request.segment and explained.request.segment not in explained.segments:
        known = ", ".join(sorted(name for name in explained.segments if name)) or "none"
        paragraph(f"No job of segment {explained.request.segment} was seen; known: {known}.")
    for begin in range(0, len(explained.drafters), _DRAFTERS_ABREAST):
        _show_positions(
            [(d.name, explained.evidence[d.name]) for d in explained.drafters[begin : begin + _DRAFTERS_ABREAST]]
        )


def _seen(drafter: DrafterState, evidence: Evidence) -> str:
    posterior = evidence.posterior
    stale = " Flagged stale, or retired." if drafter.is_stale else ""
    if evidence.seen.jobs <= 0:
        return f"{drafter.name}: no job of this task yet.{_sources(evidence)}{stale}"
    rounds = evidence.seen.rounds
    sentences = (
        f"{drafter.name}: {evidence.seen.jobs:.0f} jobs and probes, weighted by age, that it decoded or was scored on, "
        f"{evidence.jobs_alike:.0f} of them like these, "
        f"{rounds:.0f} rounds, {evidence.seen.offered / max(rounds, 1e-9):.0%} with a proposal.{_sources(evidence)}"
    )
    if posterior.design_effect > 1.05:
        sentences += (
            f" Design effect {posterior.design_effect:.1f}: jobs differ, so the variance is larger by this factor."
        )
    if posterior.kept < 0.99:
        sentences += f" Recent jobs contradict older ones, whose weight is reduced to {posterior.kept:.0%}."
    if evidence.is_split:
        sentences += " Segments differ beyond chance and are decided separately."
    return sentences + stale


def _sources(evidence: Evidence) -> str:
    borrowed = evidence.borrowed
    if borrowed is None:
        return ""
    of_task = (
        f"{borrowed.same_jobs:.0%} jobs like these, {borrowed.same_task:.0%} other jobs of the task, "
        if evidence.seen.jobs > 0
        else ""
    )
    return f" Sources of α₁: {of_task}{borrowed.other_tasks:.0%} other tasks, {borrowed.assumed:.0%} prior."


def _show_positions(abreast: Sequence[tuple[str, Evidence]]) -> None:
    names = [column for name, _ in abreast for column in (f"{name} expected α", "tested", "reach")]
    shown_table = table("position", *names, right=["position", "tested", "reach"])
    rows = range(max(len(evidence.acceptance) for _, evidence in abreast))
    for cells, alike in groupby(
        rows, key=lambda i: [cell for _, evidence in abreast for cell in _position(evidence, i)]
    ):
        first, *more = alike
        shown_table.add_row(f"{first + 1}–{more[-1] + 1}" if more else str(first + 1), *cells)
    out().print(shown_table)


def _position(evidence: Evidence, i: int) -> tuple[str, str, str]:
    if i >= len(evidence.acceptance):
        return "", "", ""
    tested = f"{evidence.tested[i]:.0f}" if evidence.tested[i] else "not tested"
    return share_with_interval(evidence.acceptance[i]), tested, share(evidence.posterior.reach[i])
