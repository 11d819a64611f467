"""`alphaloop cost`: what jobs took of the device, and what that cost."""

from __future__ import annotations

import csv
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Final

import typer

from alphaloop.cli.options import AS_JSON, connected_settings, example, open_database
from alphaloop.cli.screen import note, out, print_json, table
from alphaloop.explaining.spending import SpendingTable, spending_table
from alphaloop.store.spending import SpentBy
from alphaloop.wording import FORMS, how_many, minute, moment_ago, one_line

_MAX_SHOWN: Final = 50
_COLUMNS: Final = ("name", "num_jobs", "num_prompt_tokens", "num_tokens", "device_s", "cost")
#: A spreadsheet takes a cell that begins so for a formula.
_FORMULA: Final = ("=", "+", "-", "@", "\t", "\r")


@example("""\
alphaloop cost
alphaloop cost --by segment --since 7d
alphaloop cost --by batch --since 2026-09-01 --until 2026-10-01 --csv""")
def cost(
    context: typer.Context,
    by: SpentBy = typer.Option(SpentBy.TASK, help="What jobs are summed by."),
    since: str | None = typer.Option(None, help=f"Decoded since then: {FORMS}. The last day without it."),
    until: str | None = typer.Option(None, help="Decoded until then; now without it."),
    as_csv: bool = typer.Option(False, "--csv", help="Print as CSV, with a header."),
    as_json: bool = AS_JSON,
) -> None:
    """Show what jobs of traffic took of the device, and what that cost.

    By purpose also probes and controls. Money needs prices.per_hour. What speculation saved is shown by task for the
    last day, where a speed-up was measured.
    """
    if as_csv and as_json:
        raise typer.BadParameter("expected either --csv or --json")
    settings, now = connected_settings(context, broker=False), datetime.now(UTC)
    begin = moment_ago(since, now, "--since") if since else None
    end = moment_ago(until, now, "--until") if until else None
    if begin is not None and begin > (end or now):
        raise typer.BadParameter("expected --since before --until")
    with open_database(settings) as database:
        spent = spending_table(database, settings.prices, by, since=begin, until=end, now=now)
    if as_json:
        print_json(spent.as_json())
    elif as_csv:
        _write_csv(spent)
    else:
        _show(spent)
    if spent.no_cost_because is not None and not as_json:
        note(spent.no_cost_because)


def _show(spent: SpendingTable) -> None:
    times = f"from {minute(spent.since)} to {minute(spent.until)}"
    if not spent.rows:
        note(f"no job was decoded {times}")
        return
    note(f"decoded {times}")
    figures = ("jobs", "tokens", "device s", *(("cost",) if spent.currency is not None else ()))
    shown = table(spent.by.value, *figures, *(("saved",) if spent.saved else ()), right=figures)
    sums = [spent.total] if len(spent.rows) > 1 else []
    for row in (*spent.rows[:_MAX_SHOWN], *sums):
        cells = [one_line(row.name) or "-", f"{row.num_jobs:,}", f"{row.num_tokens:,}", f"{row.device_s:,.1f}"]
        cells += [spent.cost_in_words(row)] if spent.currency is not None else []
        cells += [spent.saved_in_words(row.name) or "-"] if spent.saved else []
        shown.add_row(*cells)
    out().print(shown)
    if (num_left := len(spent.rows) - _MAX_SHOWN) > 0:
        note(f"… and {how_many(num_left, 'row')} more, with less device time; --csv and --json have them all")


def _write_csv(spent: SpendingTable) -> None:
    """Amounts are empty cells where no price is set or nothing was measured."""
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow((*_COLUMNS, "currency", "saved", "saved_low", "saved_high"))
    for row in spent.rows:
        figures, saved = asdict(row), spent.saved.get(row.name)
        bounds = (None, None, None) if saved is None else (saved.mean, saved.low, saved.high)
        cells = (*(figures[name] for name in _COLUMNS), spent.currency, *bounds)
        writer.writerow([f"'{cell}" if isinstance(cell, str) and cell.startswith(_FORMULA) else cell for cell in cells])
