"""`alphaloop capacity`: how many devices a deadline needs, and what they cost."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import typer

from alphaloop.cli.options import AS_JSON, connected_settings, example, open_database
from alphaloop.cli.screen import note, out, paragraph, print_json, table
from alphaloop.explaining.capacity import Capacity, CapacityRequest, FleetPlan, TargetCapacity, capacity
from alphaloop.settings.prices import PriceSettings
from alphaloop.wording import FORMS, how_many, minute, moment_ago, moment_ahead, money, one_line, span


@example("""\
alphaloop capacity --deadline 4h
alphaloop capacity --deadline 4h --price 2.50 --drafter lookup
alphaloop capacity --deadline 30m --since 28d --json""")
def show_capacity(
    context: typer.Context,
    deadline: str = typer.Option(help="Time from a job's arrival in which its text has to be there: 30m, 4h, 1d."),
    price: float | None = typer.Option(None, min=0, help="Of a device hour; without it the prices of the settings."),
    drafter: str | None = typer.Option(None, help="Also plan for this drafter, by what decisions expect of it."),
    since: str | None = typer.Option(None, help=f"From jobs decoded since then: {FORMS}. The last week without it."),
    until: str | None = typer.Option(None, help="From jobs decoded until then; now without it."),
    as_json: bool = AS_JSON,
) -> None:
    """Show how many devices keep a deadline, as jobs were decoded, in vanilla decoding, and with a drafter.

    A fleet is played over the arrivals of that time. Hours on: all devices, all the time. Hours busy: those in which
    they decode.
    """
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
        found = capacity(database, settings, CapacityRequest(deadline_s, begin, end, drafter), now)
    if as_json:
        print_json(found.as_json())
        return
    if not found.targets:
        note(f"no job was decoded from {minute(begin)} to {minute(end)}")
        return
    for target in found.targets:
        _show(target, found)
    for limit in found.limits:
        paragraph(limit, style="dim")
    if found.no_cost_because is not None:
        note(found.no_cost_because)


def _show(target: TargetCapacity, found: Capacity) -> None:
    seen, currency = target.seen, found.currency
    name = f"{one_line(seen.target)}: " if seen.target else ""
    jobs, length = how_many(seen.num_jobs, "job"), span(target.span_s)
    paragraph(f"{name}{jobs} in {length}, each within {span(found.request.deadline_s)}", style="bold")
    costs = () if currency is None else ("cost on", "cost busy")
    figures = ("devices", "hours on", "busy", *costs)
    shown = table("", *figures, right=figures)
    for plan in target.plans:
        shown.add_row(*_cells(plan, currency))
    out().print(shown)
    for plan in target.plans:
        if plan.unknown_because:
            paragraph(f"{one_line(plan.name)}: not known, because {one_line(plan.unknown_because)}.")
    busiest = target.busiest
    paragraph(
        f"Busiest {span(busiest.length_s)}: from {minute(target.busiest_at)}, with the work of "
        f"{busiest.num_devices:.2f} full devices."
    )
    if target.num_too_long:
        paragraph(f"{how_many(target.num_too_long, 'text')} would take longer than that alone on a device.")
    for limit in target.limits:
        paragraph(one_line(limit), style="dim")


def _cells(plan: FleetPlan, currency: str | None) -> list[str]:
    name = one_line(plan.name) + (" (expected)" if plan.is_expected else "")
    if plan.fleet is None:
        return [name, "-"]
    bounds = f" [{plan.devices[0]} {plan.devices[1]}]" if plan.devices else ""
    cells = [name, f"{plan.fleet.num_devices}{bounds}", f"{plan.on_h:,.1f}", f"{plan.busy_h:,.1f}"]
    costs = (plan.on_cost, plan.busy_cost)
    return cells + [money(cost, currency or "") for cost in costs if cost is not None]
