"""`alphaloop capacity`: how many devices a deadline needs, and what they cost."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import typer

from alphaloop.cli.options import AS_JSON, connected_settings, example, open_database
from alphaloop.cli.screen import note, out, paragraph, print_json, table
from alphaloop.explaining.capacity import Capacity, CapacityRequest, capacity
from alphaloop.files import Destination
from alphaloop.pages.capacity import capacity_page
from alphaloop.settings.prices import PriceSettings
from alphaloop.wording import FORMS, minute, moment_ago, moment_ahead, one_line


@example("""\
alphaloop capacity --deadline 4h
alphaloop capacity --deadline 4h --price 2.50 --drafter lookup
alphaloop capacity --deadline 4h --picture capacity.html
alphaloop capacity --deadline 30m --since 28d --json""")
def show_capacity(
    context: typer.Context,
    deadline: str = typer.Option(help="Time from a job's arrival in which its text has to be there: 30m, 4h, 1d."),
    price: float | None = typer.Option(None, min=0, help="Of a device hour; without it the prices of the settings."),
    drafter: str | None = typer.Option(None, help="Also plan for this drafter, by what decisions expect of it."),
    since: str | None = typer.Option(None, help=f"From jobs decoded since then: {FORMS}. The last week without it."),
    until: str | None = typer.Option(None, help="From jobs decoded until then; now without it."),
    picture: Path | None = typer.Option(
        None, help="Write a page to this file instead that draws arrivals and fleets over time, - for standard output."
    ),
    as_json: bool = AS_JSON,
) -> None:
    """Show how many devices keep a deadline, as jobs were decoded, in vanilla decoding, and with a drafter.

    A fleet is played over the arrivals of that time. Hours on: all devices, all the time. Hours busy: those in which
    they decode.
    """
    if picture is not None and as_json:
        raise typer.BadParameter("expected either --picture or --json")
    page = None if picture is None else Destination.of(picture, option="--picture")
    settings, now = connected_settings(context, broker=False), datetime.now(UTC)
    begin = moment_ago(since, now, "--since") if since else now - timedelta(days=7)
    end = moment_ago(until, now, "--until") if until else now
    if begin > end:
        raise typer.BadParameter("expected --since before --until")
    deadline_s = (moment_ahead(deadline, now, "--deadline") - now).total_seconds()
    if price is not None:
        prices = PriceSettings(per_hour=price, currency=settings.prices.currency)
        settings = settings.model_copy(update={"prices": prices})
    with open_database(settings) as database:
        answer = capacity(database, settings, CapacityRequest(deadline_s, begin, end, drafter), now)
    if as_json:
        print_json(answer.as_json())
    elif not answer.targets:
        note(f"no job was decoded from {minute(begin)} to {minute(end)}")
    elif picture is not None and page is not None:
        with page.writing() as file:
            file.write(capacity_page(answer))
        if picture.is_file():
            note(f"written to {picture.absolute().as_uri()}")
    else:
        _show(answer)


def _show(answer: Capacity) -> None:
    for target in answer.targets:
        paragraph(target.headline(answer.request.deadline_s), style="bold")
        shown = table("", *answer.columns, right=answer.columns)
        for plan in target.plans:
            shown.add_row(*plan.cells(answer.currency))
        out().print(shown)
        for sentence in target.notes:
            paragraph(sentence)
        for limit in target.limits:
            paragraph(one_line(limit), style="dim")
    for limit in answer.limits:
        paragraph(limit, style="dim")
    if answer.no_cost_because is not None:
        note(answer.no_cost_because)
