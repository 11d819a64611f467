"""`alphaloop cost`: what jobs took of the device, and what that cost."""

from __future__ import annotations

import csv
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Final

import typer

from alphaloop.acceptance import Interval
from alphaloop.cli.options import AS_JSON, connected_settings, example, open_database
from alphaloop.cli.screen import note, out, print_json, table
from alphaloop.prices import NO_PRICE
from alphaloop.store.spending import Spending, SpendingStore, SpentBy, total
from alphaloop.store.switchback import SwitchbackStore
from alphaloop.store.task_figures import begin_of
from alphaloop.wording import FORMS, how_many, minute, moment_ago, money, one_line

_MAX_SHOWN: Final = 50
_COLUMNS: Final = ("name", "num_jobs", "num_prompt_tokens", "num_tokens", "device_s", "cost", "currency")
_SAVED: Final = ("saved", "saved_low", "saved_high")


@example("""\
alphaloop cost
alphaloop cost --by segment --since 7d
alphaloop cost --by batch --since 2026-09-01 --until 2026-10-01 --csv > september.csv""")
def cost(
    context: typer.Context,
    by: SpentBy = typer.Option(SpentBy.TASK, help="What is summed up: jobs of one task, segment, …"),
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
    end = moment_ago(until, now, "--until") if until else now
    begin = moment_ago(since, now, "--since") if since else begin_of(end)
    if begin > end:
        raise typer.BadParameter("expected --since before --until")
    with open_database(settings) as database:
        spent = SpendingStore(database, settings.prices).by(by, begin, end)
        is_last_day = by is SpentBy.TASK and since is None and until is None
        speedups = SwitchbackStore(database).shown(now) if is_last_day else {}
    saved_s = {task: measured.saved_device_s for task, measured in speedups.items()}
    saved = {row.name: cost for row in spent if (cost := row.cost_of(saved_s.get(row.name))) is not None}
    currency, is_priced = settings.prices.currency, settings.prices.per_hour is not None
    if as_csv:
        _write_csv(spent, saved, currency)
    elif as_json:
        rows = [
            {**asdict(row), "currency": currency if is_priced else None, "saved": _bounds(saved.get(row.name))}
            for row in spent
        ]
        why = None if is_priced else NO_PRICE
        print_json({"by": by, "since": begin, "until": end, "rows": rows, "no_cost_because": why})
    elif not spent:
        note(f"no job was decoded from {minute(begin)} to {minute(end)}")
    else:
        note(f"decoded from {minute(begin)} to {minute(end)}")
        _show(by, spent, saved, currency)
    if not is_priced:
        note(NO_PRICE)


def _show(by: SpentBy, spent: Sequence[Spending], saved: Mapping[str, Interval], currency: str) -> None:
    figures = ("jobs", "tokens", "device s", *(("cost",) if spent[0].cost is not None else ()))
    shown = table(by.value, *figures, *(("saved",) if saved else ()), right=figures)
    all_of_them = [total(spent, "all")] if len(spent) > 1 else []
    for row in (*spent[:_MAX_SHOWN], *all_of_them):
        cells = [one_line(row.name) or "-", f"{row.num_jobs:,}", f"{row.num_tokens:,}", f"{row.device_s:,.1f}"]
        if row.cost is not None:
            cells.append(money(row.cost, currency))
        if saved:
            one = saved.get(row.name)
            cells.append(f"{money(one.mean, currency)} [{money(one.low, '')} {money(one.high, '')}]" if one else "-")
        shown.add_row(*cells)
    out().print(shown)
    if (num_left := len(spent) - _MAX_SHOWN) > 0:
        note(f"… and {how_many(num_left, 'row')} more, with less device time; --csv and --json have them all")


def _write_csv(spent: Sequence[Spending], saved: Mapping[str, Interval], currency: str) -> None:
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow((*_COLUMNS, *_SAVED))
    for row in spent:
        values, interval = _values(row, currency), saved.get(row.name)
        bounds = ("", "", "") if interval is None else (interval.mean, interval.low, interval.high)
        writer.writerow([*("" if values[name] is None else _as_text(values[name]) for name in _COLUMNS), *bounds])


def _values(row: Spending, currency: str) -> dict[str, object]:
    return {**asdict(row), "currency": currency if row.cost is not None else None}


def _bounds(interval: Interval | None) -> dict[str, float] | None:
    return None if interval is None else asdict(interval)


def _as_text(value: object) -> object:
    """A name that a spreadsheet would take for a formula is written as text."""
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r") else value
