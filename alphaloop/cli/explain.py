"""`alphaloop explain TASK`: what history says, what each alternative is expected to bring, and what was decided."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import typer

from alphaloop.acceptance import EvidenceKey, prompt_bucket
from alphaloop.cli.connection import open_database
from alphaloop.cli.options import connected_settings
from alphaloop.cli.screen import note, out, print_json, table
from alphaloop.deciding.belief import Belief
from alphaloop.deciding.goodput import DrafterState
from alphaloop.deciding.policy import Decision, DecisionContext, decide
from alphaloop.deciding.posterior import believe_all
from alphaloop.errors import AlphaloopError, ConfigError
from alphaloop.settings import Settings
from alphaloop.store.acceptance_state import AcceptanceStateStore
from alphaloop.store.costs import CostStore
from alphaloop.store.database import Database
from alphaloop.store.decisions import Choice, DecisionChange, DecisionLog
from alphaloop.store.drafts import DraftRegistry
from alphaloop.store.engines import EngineStore, MeasuredEngine
from alphaloop.store.history import HistoryStore

EXAMPLE: Final = "alphaloop explain code --batch 4"

_MAX_ALTERNATIVES: Final = 10
_MAX_CHANGES: Final = 5
#: Nothing is explored without a budget, whatever is drawn.
_NO_EXPLORATION: Final = 1.0


@dataclass(frozen=True, slots=True)
class Explanation:
    """The decision that a worker would take now, and what it rests on."""

    task: str
    engine: MeasuredEngine
    sampling_bucket: str
    batch: int
    expected_tokens: float
    prompt_tokens: float | None  #: mean of the task's traffic; None without any
    drafters: Sequence[DrafterState]
    beliefs: dict[str, Belief]
    decision: Decision
    changes: Sequence[DecisionChange]


def explain(
    context: typer.Context,
    task: str = typer.Argument(help="The task to explain."),
    batch: int | None = typer.Option(None, min=1, help="Batch size; the worker's, if not given."),
    sampling: str = typer.Option("greedy", help="Which sampling settings: greedy, t<=0.5, t<=1.0 …"),
    as_json: bool = typer.Option(False, "--json", help="Print as JSON."),
) -> None:
    """Say how a task is decoded now, and why.

    Takes the same history and the same measured costs through the same policy as a worker does.
    """
    settings = connected_settings(context, broker=False)
    if settings.tasks and task not in settings.tasks:
        raise ConfigError(f"no task {task!r} in configs/tasks.toml", hint=f"one of {', '.join(settings.tasks)}")
    with open_database(settings) as database:
        found = explanation(database, settings, task, batch or settings.worker.batch_size, sampling, datetime.now(UTC))
    if as_json:
        print_json(_as_json(found))
    else:
        _show(found)


def explanation(
    database: Database, settings: Settings, task: str, batch: int, sampling_bucket: str, now: datetime
) -> Explanation:
    """Decide as the engine that was calibrated last would. Raises AlphaloopError before the first calibration."""
    engines = EngineStore(database).measured()
    if not engines:
        raise AlphaloopError("no worker has measured its device yet", hint="start one with `alphaloop up`")
    engine, history, registry = engines[0], HistoryStore(database), DraftRegistry(database)
    drafters = _drafters(registry, settings, engine.target_revision)
    revisions = {drafter.name: drafter.revision for drafter in drafters}
    usual = history.expected_tokens(task, now=now, window_days=settings.worker.history_days)
    limit = float(settings.tasks[task].max_tokens) if task in settings.tasks else 256.0
    expected = limit if usual is None else min(limit, usual)
    prompt_tokens = history.expected_prompt_tokens(task, now=now, window_days=settings.worker.history_days)
    costs = CostStore(database).load(engine.device, engine.engine, engine.target_revision, revisions)
    half_life = timedelta(days=settings.worker.history_half_life_days)
    memories = {row.key: row.memory.faded(now, half_life) for row in AcceptanceStateStore(database).of_task(task)}
    wanted = EvidenceKey(
        task, engine.target_revision, engine.engine, sampling_bucket, prompt_bucket(round(prompt_tokens or 0))
    )  # fmt: skip
    beliefs = believe_all(memories, wanted, drafters, settings.policy.limits())
    decision = decide(
        beliefs, drafters, costs,
        DecisionContext(
            task=task, batch=batch, expected_tokens=expected, draw=_NO_EXPLORATION, prompt_tokens=prompt_tokens
        ),
        settings.policy.limits(),
    )  # fmt: skip
    changes = DecisionLog(database).latest(task, _MAX_CHANGES)
    return Explanation(
        task, engine, sampling_bucket, batch, expected, prompt_tokens, drafters, beliefs, decision, changes
    )


def _drafters(registry: DraftRegistry, settings: Settings, target_revision: str) -> list[DrafterState]:
    """The configured drafters as they were last registered for this target."""
    stale = registry.stale(target_revision)
    newest = {draft.drafter: draft for draft in registry.all() if draft.target_revision == target_revision}
    return [
        DrafterState(name, draft.draft_revision, drafter.max_draft_tokens, (name, draft.draft_revision) in stale)
        for name, drafter in settings.models.drafters.items()
        if (draft := newest.get(name)) is not None
    ]


def _show(found: Explanation) -> None:
    screen, decision = out(), found.decision
    how = _choice(Choice(decision.mode, decision.drafter, decision.num_draft_tokens))
    screen.print(f"{found.task}: {how} ({decision.reason.replace('_', ' ')})", style="bold")
    screen.print(f"{decision.explanation}\n")
    behind = "" if found.prompt_tokens is None else f" behind {found.prompt_tokens:.0f} of a prompt"
    screen.print(
        f"for a batch of {found.batch}, {found.sampling_bucket}, about {found.expected_tokens:.0f} tokens a job"
        f"{behind}, on {found.engine.device}, {found.engine.engine}\n",
        soft_wrap=True, markup=False,
    )  # fmt: skip
    _show_evidence(found)
    if decision.alternatives:
        shown = table(
            "alternative", "tokens/round", "ms/round", "tok/s each", "speed-up (95 %)",
            right=["tokens/round", "ms/round", "tok/s each"], title="expected, best first",
        )  # fmt: skip
        for option in decision.alternatives[:_MAX_ALTERNATIVES]:
            name = f"{option.drafter} k={option.num_draft_tokens}" if option.drafter else "vanilla"
            gain = f"{option.speedup:.2f} ({option.speedup_low:.2f}–{option.speedup_high:.2f})"
            cells = (f"{option.tokens_per_round:.2f}", f"{option.round_ms:.1f}", f"{option.tokens_per_s:.1f}")
            shown.add_row(name, *cells, gain if option.drafter else "1.00")
        screen.print(shown)
        screen.print()
    if not found.changes:
        note("the choice has never been logged")
        return
    shown = table("when", "from", "to", "reason", "why", title="last changes")
    for change in found.changes:
        before = _choice(change.before) if change.before else "-"
        when = change.decided_at.strftime("%Y-%m-%d %H:%M:%S")
        shown.add_row(when, before, _choice(change.after), change.reason.replace("_", " "), change.explanation)
    screen.print(shown)


def _show_evidence(found: Explanation) -> None:
    if not found.drafters:
        out().print("no drafter has been registered for this target\n")
        return
    positions = max(belief.max_draft_tokens for belief in found.beliefs.values())
    shown = table("drafter", "jobs", *(f"α{i + 1}" for i in range(positions)), "", right=["jobs"], title="believed")
    for drafter in found.drafters:
        belief = found.beliefs[drafter.name]
        cells = [f"{alpha:.2f}" for alpha in belief.acceptance]
        cells += [""] * (positions - len(cells))
        shown.add_row(drafter.name, f"{belief.jobs:.0f}", *cells, "stale" if drafter.is_stale else "")
    out().print(shown)


def _choice(choice: Choice) -> str:
    return f"{choice.drafter} k={choice.num_draft_tokens}" if choice.drafter else choice.mode


def _belief(belief: Belief) -> dict[str, Any]:
    return {
        "jobs": belief.jobs,
        "design_effect": belief.design_effect,
        "acceptance": belief.acceptance,
        "reach": belief.reach,
        "tokens_per_round": belief.tokens,
        "tokens_per_round_sd": belief.tokens_sd,
    }


def _as_json(found: Explanation) -> dict[str, Any]:
    return {
        "task": found.task,
        "engine": asdict(found.engine),
        "sampling_bucket": found.sampling_bucket,
        "batch": found.batch,
        "expected_tokens": found.expected_tokens,
        "prompt_tokens": found.prompt_tokens,
        "drafters": [asdict(drafter) for drafter in found.drafters],
        "beliefs": {name: _belief(belief) for name, belief in found.beliefs.items()},
        "decision": asdict(found.decision),
        "changes": [asdict(change) for change in found.changes],
    }
