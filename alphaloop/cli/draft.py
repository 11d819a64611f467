"""`alphaloop draft`: train, register and list draft models of the target."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Final

import typer

from alphaloop.cli.carrying_out import carry_out
from alphaloop.cli.connection import open_database
from alphaloop.cli.draft_report import show
from alphaloop.cli.options import connected_settings
from alphaloop.cli.screen import note, out, print_json, table
from alphaloop.commands import RegisterOrder, TrainOrder
from alphaloop.draft_card import DraftCard, DraftJudgement
from alphaloop.store.drafts import DraftRegistry, DraftRevision
from alphaloop.wording import share

TRAIN_EXAMPLE: Final = """\
alphaloop draft train drafts/small
alphaloop draft train drafts/small --recipe configs/drafts/smollm2.toml
alphaloop draft train drafts/ours --prompts prompts.jsonl --task chat"""
REGISTER_EXAMPLE: Final = "alphaloop draft register drafts/small"
LIST_EXAMPLE: Final = "alphaloop draft list --json"


def train(
    context: typer.Context,
    folder: Path = typer.Argument(help="Folder of the draft: a new one, or that of a run that was stopped."),
    prompts: Path | None = typer.Option(
        None,
        help="JSONL to train on, in any form that `alphaloop enqueue` takes, - for standard input; without it the "
        "target writes prompts.",
    ),
    held_out: Path | None = typer.Option(
        None, help="JSONL to measure with, by task, never to train on; without it some of the others are held out."
    ),
    task: str | None = typer.Option(None, help="Task of lines that name none."),
    recipe: Path | None = typer.Option(None, help="TOML file of training settings; the defaults, if not given."),
    name: str | None = typer.Option(None, help="The registered name; the folder's name, if not given."),
    seed: int | None = typer.Option(None, help="Seed of the texts and their order; the recipe's, if not given."),
) -> None:
    """Make a small draft of the target: a few of its layers, distilled on its own outputs.

    Ctrl-C keeps what is done, and the same command continues from there. The finished folder is a plain model folder.
    Its figures on held-out text are printed and, where a database is configured or running, registered.
    """
    carry_out(context, TrainOrder(**context.params), DraftCard, lambda card: show(card, folder))


def register(
    context: typer.Context,
    folder: Path = typer.Argument(help="A folder that `alphaloop draft train` made."),
    name: str | None = typer.Option(None, help="The registered name; the name in training, if not given."),
) -> None:
    """Register a trained draft as a candidate, with its parent, training data and figures."""
    carry_out(context, RegisterOrder(**context.params), str, note)


def list_drafts(
    context: typer.Context,
    as_json: bool = typer.Option(False, "--json", help="Print as JSON, with all figures."),
) -> None:
    """List the registered drafts with their status and their figures on held-out text."""
    with open_database(connected_settings(context, broker=False)) as database:
        drafts = DraftRegistry(database).all()
    if as_json:
        print_json([asdict(draft) for draft in drafts])
        return
    if not drafts:
        note("no draft is known; a worker registers those it serves, `alphaloop draft train` those it makes")
        return
    shown = table("drafter", "revision", "target", "status", "α_1", "c", "trained on", right=["α_1", "c"])
    for draft in drafts:
        alpha, cost = _held_out(draft)
        shown.add_row(
            draft.drafter,
            draft.draft_revision,
            draft.target_revision,
            draft.status.value,
            share(alpha),
            share(cost),
            draft.trained_on or "-",
        )
    out().print(shown)


def _held_out(draft: DraftRevision) -> tuple[float | None, float | None]:
    """α_1 on held-out text and the cost ratio c; None if never measured."""
    if draft.figures is None:
        return None, None
    judgement = DraftJudgement.model_validate(draft.figures)
    return next(iter(judgement.total.alphas()), None), judgement.cost_ratio
