"""The night's tables, at most 80 columns wide."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from rich.table import Table

from benchmarks.reporting import console, table_of
from benchmarks.week.play import CLAIRVOYANT

_WIDTH: Final = 80
_LABELS: Final = {
    "worker": "a real worker",
    "slack": "simulated: alphaloop",
    "arrival": "first come",
    "earliest deadline": "clairvoyant, deadline",
    "least slack": "clairvoyant, slack",
}


def print_deadlines(met: Mapping[str, Mapping[str, float]], num_dated: int) -> None:
    """Shares of deadlines met: the worker, and the simulated contestants on the same jobs."""
    streams = list(met["worker"])
    table = table_of(f"share of {num_dated:,} deadlines met", "order", *(_short(name) for name in streams))
    for name, of in met.items():
        table.add_row(_LABELS[name], *(f"{of[stream]:.3f}" for stream in streams))
    _print(table)


def _short(name: str) -> str:
    return name.replace(" batch", "\nbatch")


def print_claims(met: Mapping[str, Mapping[str, float]], real: Mapping[str, Any], simulated: Mapping[str, Any]) -> None:
    """Each claim, real beside simulated. The worker's deadlines are compared with simulated contestants."""
    table = table_of("the week's claims in this night", "claim", "bar", "real", "simulated")
    for row in _rows(met, real, simulated):
        table.add_row(*row)
    _print(table)


def _rows(
    met: Mapping[str, Mapping[str, float]], real: Mapping[str, Any], simulated: Mapping[str, Any]
) -> Iterator[tuple[str, ...]]:
    best, first = max(met[name]["all"] for name in CLAIRVOYANT), met["arrival"]["all"]
    both = met["worker"]["all"], met["slack"]["all"]
    yield "deadlines met", "", *(f"{share:.3f}" for share in both)
    yield "over the clairvoyant's, simulated", ">= .98", *(f"{share / best:.3f}" for share in both)
    yield "over first come's, simulated", "", *(f"{share / first:.3f}" for share in both)
    for stage in real["ends"]["num_by_stage"]:
        held = (
            f"{of['ends']['num_held_by_stage'][stage]} of {of['ends']['num_by_stage'][stage]}"
            for of in (real, simulated)
        )
        yield f"ends held, {float(stage):.0%} of a batch ended", ".90-.97", *held
    yield "ends held, every promise", "", f"{real['ends']['num_held']} of {real['ends']['num']}", "-"
    widths = (of["ends"]["half_width_at_a_quarter"] for of in (real, simulated))
    yield (
        "half width over what remained, 25%",
        "<= .2",
        *("-" if width is None else f"{width:.2f}" for width in widths),
    )
    ratios = (of["busy_planned_over_used"] for of in (real, simulated))
    yield "busy in 2nd half, planned/used", ".85-1.15", *(f"{ratio:.3f}" for ratio in ratios)
    waits = (f"{of['undated_median_s']:.0f} / {of['undated_most_s']:.0f} s" for of in (real, simulated))
    yield "undated: median / longest", "", *waits


def _print(table: Table) -> None:
    console.print(table, width=_WIDTH)
