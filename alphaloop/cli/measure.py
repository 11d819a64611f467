"""`alphaloop measure`: whether speculation pays on the user's own prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import typer

from alphaloop.cli.carrying_out import carry_out
from alphaloop.cli.measuring.as_json import as_json as report_as_json
from alphaloop.cli.measuring.screens import show
from alphaloop.cli.screen import print_json
from alphaloop.commands import MeasureOrder
from alphaloop.payoff.report import Report

EXAMPLE: Final = """\
alphaloop measure --prompts mine.jsonl --task chat --max-tokens 128
alphaloop measure --prompts mine.jsonl --drafter lookup --k 2 --k 6 --batch 4 --bar 1.2
head -n 50 batch.jsonl | alphaloop measure --prompts - --temperature 0.8 --json"""


def measure(
    context: typer.Context,
    prompts: Path = typer.Option(help="JSONL in any form that `alphaloop enqueue` takes; - for standard input."),
    task: str | None = typer.Option(None, help="Task whose settings are the defaults of the prompts."),
    max_tokens: int | None = typer.Option(None, min=1, help="Upper bound on generated tokens, for every prompt."),
    temperature: float | None = typer.Option(None, min=0.0, max=2.0, help="0 is greedy; for every prompt."),
    num: int = typer.Option(100, min=10, help="Most prompts to measure; drawn at random if there are more."),
    drafter: list[str] = typer.Option([], help="Only this drafter of configs/models.toml; may be repeated."),
    k: list[int] = typer.Option([], "--k", min=1, help="Draft length; may be repeated. 2, 4 and 8 if not given."),
    batch: int = typer.Option(1, min=1, max=256, help="Prompts decoded together."),
    repeats: int = typer.Option(1, min=1, help="How often every prompt is decoded with every setting."),
    bar: float = typer.Option(1.3, min=0.1, help="Speed-up over vanilla that is worth shipping."),
    seed: int = typer.Option(0, help="Seed of the order of decoding and of the choice of prompts."),
    as_json: bool = typer.Option(False, "--json", help="Print as JSON, every paired ratio included."),
) -> None:
    """Say whether speculation pays on your own prompts: ship, do not ship, or too close.

    Decodes 30 to 100 prompts with the configured target, vanilla and with each drafter and draft length in turn, in
    random order, and compares them prompt by prompt: speed with bounds, tails, acceptance, memory, texts, and reasons.
    Needs neither broker nor database. Ctrl-C reports what was measured so far.
    """

    def shown(report: Report) -> None:
        print_json(report_as_json(report)) if as_json else show(report)

    told = "stopping after this round; what was measured is reported. Ctrl-C again ends at once"
    carry_out(context, MeasureOrder(**context.params), Report, shown, on_interrupt=told)
