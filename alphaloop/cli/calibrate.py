"""`alphaloop calibrate`: measure what rounds cost on this device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Final

import typer

from alphaloop.cli.carrying_out import carry_out
from alphaloop.cli.screen import FittedTable, note, out, print_json, table
from alphaloop.commands import CalibrateOrder, Calibration
from alphaloop.costs import CostKind, CostPoint

EXAMPLE: Final = """\
alphaloop calibrate
alphaloop calibrate --budget 20 --no-store --json"""


def calibrate(
    context: typer.Context,
    budget: float = typer.Option(40.0, min=1.0, help="Seconds to measure; required shapes may take longer."),
    no_store: bool = typer.Option(False, "--no-store", help="Only show the costs; needs no database."),
    as_json: bool = typer.Option(False, "--json", help="Print as JSON."),
) -> None:
    """Measure what rounds cost on this device, in under a minute.

    Times the target's passes and every drafter's proposals over batch sizes, widths and contexts, and the reading of
    prompts. Replaces the stored times for the workers of this device. Run it on an idle device: at its first start a
    worker measures only what is missing, and real rounds correct the costs.
    """

    def shown(found: Calibration) -> None:
        fields = asdict(found)
        print_json({**fields.pop("identity"), **fields}) if as_json else show(found)

    carry_out(context, CalibrateOrder(**context.params), Calibration, shown)


def show(found: Calibration) -> None:
    """Print milliseconds: a row for each batch and context, a column for each width."""
    screen, identity = out(), found.identity
    screen.print(f"{identity.target} on {identity.device}, {identity.engine}\n", soft_wrap=True, markup=False)
    screen.print("milliseconds of a round, by positions a sequence; a drafter proposes one fewer")
    screen.print(_rounds_table([point for point in found.points if point.kind is not CostKind.PREFILL]))
    if any(point.kind is CostKind.SERVED for point in found.points):
        screen.print("of a server that drafts, the whole round; batch is the requests in flight at one server")
    prompts = [point for point in found.points if point.kind is CostKind.PREFILL]
    if prompts:
        screen.print("\nreading a prompt")
        screen.print(_prompts_table(prompts))
    stored = "stored for the workers of this device" if found.is_stored else "not stored"
    note(f"{len(found.points)} shapes in {found.seconds:.0f} s, the loading of the model included; {stored}")


def _rounds_table(points: Sequence[CostPoint]) -> FittedTable:
    """The times of rounds."""
    widths = sorted({point.width for point in points})
    columns = [f"w={width}" for width in widths]
    made = table("what", "batch", "context", *columns, right=["batch", "context", *columns])
    times = {(p.drafter or "", p.context, p.batch, p.width): p.ms for p in points}
    last = None
    for part, context, batch in sorted({key[:3] for key in times}):
        cells = [times.get((part, context, batch, width)) for width in widths]
        name = part or "target"
        made.add_row(
            name if name != last else "", str(batch), str(context), *("" if ms is None else _ms(ms) for ms in cells)
        )
        last = name
    return made


def _prompts_table(points: Sequence[CostPoint]) -> FittedTable:
    made = table("what", "tokens", "ms", "ms/token", right=["tokens", "ms", "ms/token"])
    for point in sorted(points, key=lambda p: (p.drafter or "", p.width)):
        made.add_row(point.drafter or "target", str(point.width), _ms(point.ms), f"{point.ms / point.width:.3f}")
    return made


def _ms(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}"
