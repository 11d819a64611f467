"""`alphaloop measure`: whether speculation pays on the user's own prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import typer

from alphaloop.cli.processes import become

EXAMPLE: Final = """\
alphaloop measure --prompts mine.jsonl --task chat --max-tokens 128
alphaloop measure --prompts mine.jsonl --drafter lookup --k 2 --k 6 --batch 4 --bar 1.2
head -n 50 batch.jsonl | alphaloop measure --prompts - --temperature 0.8 --json"""


def measure(
    context: typer.Context,
    prompts: Path = typer.Option(help="JSONL in any form that `alphaloop enqueue` takes; - for standard input."),
    task: str | None = typer.Option(None, help="Whose settings the prompts get where they say nothing themselves."),
    max_tokens: int | None = typer.Option(None, min=1, help="Upper bound on generated tokens, for every prompt."),
    temperature: float | None = typer.Option(None, min=0.0, max=2.0, help="0 is greedy; for every prompt."),
    num: int = typer.Option(100, min=10, help="At most so many prompts; more are drawn from at random."),
    drafter: list[str] = typer.Option([], help="Only this drafter of configs/models.toml; may be given again."),
    k: list[int] = typer.Option([], "--k", min=1, help="Draft length; may be given again. 2, 4 and 8 if not given."),
    batch: int = typer.Option(1, min=1, max=256, help="Prompts decoded together."),
    repeats: int = typer.Option(1, min=1, help="How often every prompt is decoded in every way."),
    bar: float = typer.Option(1.3, min=0.1, help="Speed-up over vanilla that is worth shipping."),
    seed: int = typer.Option(0, help="Of the order in which everything is decoded, and of the prompts drawn."),
    as_json: bool = typer.Option(False, "--json", help="Print as JSON, every paired ratio included."),
) -> None:
    """Say whether speculation pays on your own prompts: ship, do not ship, or too close.

    Decodes 30 to 100 prompts with the configured target, vanilla and with each drafter and draft length in turn, in
    random order, and compares them prompt by prompt: speed with bounds, tails, acceptance, memory, texts, and reasons.
    Needs neither broker nor database. Ctrl-C reports what was measured so far.
    """
    arguments = [
        f"--prompts={prompts}",
        f"--num={num}",
        f"--batch={batch}",
        f"--repeats={repeats}",
        f"--bar={bar}",
        f"--seed={seed}",
        *(f"--drafter={name}" for name in drafter),
        *(f"--k={length}" for length in k),
    ]
    arguments += [] if task is None else [f"--task={task}"]
    arguments += [] if max_tokens is None else [f"--max-tokens={max_tokens}"]
    arguments += [] if temperature is None else [f"--temperature={temperature}"]
    arguments += ["--json"] if as_json else []
    become(context, "worker.measure_main", arguments, broker=False, database=False)
