"""The figures of a finished draft, in sentences and a table."""

from __future__ import annotations

from pathlib import Path

from alphaloop.cli.screen import FittedTable, out, table
from alphaloop.draft_card import DraftCard, MeasuredDraft, best_length
from alphaloop.wording import share


def show(card: DraftCard, folder: Path) -> None:
    """Print the figures by task, and the lines that serve the draft."""
    judgement = card.judgement
    shown = table("held-out", "texts", "α_1", "α_2", "α_3", "α_4", "overlap", right=["texts", "overlap"])
    for task, measured in judgement.by_task.items():
        _row(shown, task, measured)
    _row(shown, "all", judgement.total)
    _row(shown, "all, untrained", judgement.untrained)
    screen = out()
    screen.print(shown)
    length, speedup = best_length(judgement.total.alphas(), judgement.cost_ratio)
    screen.print(
        f"\nA pass of the draft takes {judgement.draft_pass_ms:.1f} ms, one of the target "
        f"{judgement.target_pass_ms:.1f} ms: c = {judgement.cost_ratio:.2f}.",
        markup=False,
    )
    if length:
        worth = f"At batch 1 the best length is k = {length}: about {speedup:.2f} × the target alone."
    else:
        worth = "At no length is it faster than the target alone: more texts or epochs, or another number of layers."
    screen.print(f"{worth} `alphaloop calibrate` measures it on the engine.", markup=False)
    screen.print(
        f'\nTo serve it, in configs/models.toml:\n\n[models.drafters.{card.name}]\nmethod = "draft_model"\n'
        f'source = "{folder.absolute()}"\nmax_draft_tokens = {max(1, length)}',
        markup=False,
        soft_wrap=True,
    )


def _row(shown: FittedTable, name: str, measured: MeasuredDraft) -> None:
    alphas = [*measured.alphas(), None, None, None, None][:4]
    shown.add_row(name, str(measured.num_texts), *map(share, alphas), share(measured.overlap()))
