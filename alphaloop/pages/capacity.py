"""The page of `alphaloop capacity --picture`: for each target, what arrived over time and the fleets for it.

The page has no script and fetches nothing; everything from outside is escaped.
"""

from __future__ import annotations

from datetime import timedelta

from alphaloop.capacity.fleet import PERIOD_S
from alphaloop.explaining.capacity import Capacity, TargetCapacity
from alphaloop.pages.drawing import FleetLine, WorkOverTime, environment, work_over_time
from alphaloop.wording import minute, span


def capacity_page(answer: Capacity) -> str:
    """Self-contained HTML; of an answer without targets, a page that says so."""
    page = environment("alphaloop.pages").get_template("capacity.html.j2")
    return page.render(
        answer=answer,
        deadline=span(answer.request.deadline_s),
        since=minute(answer.request.since),
        until=minute(answer.request.until),
        panels=[(target, work_over_time(_work(target))) for target in answer.targets],
        period=span(PERIOD_S),
    )


def _work(target: TargetCapacity) -> WorkOverTime:
    step, window = timedelta(seconds=PERIOD_S), target.busiest
    num_steps = max(len(target.arrived_s), int(-(-target.span_s // PERIOD_S)))
    devices = [device_s / PERIOD_S for device_s in target.arrived_s]
    fleets = []
    for plan in target.plans:
        if plan.fleet is not None:
            low, high = plan.devices or (plan.fleet.num_devices, plan.fleet.num_devices)
            fleets.append(FleetLine(plan.shown_name, plan.fleet.num_devices, low, high, plan.is_expected))
    return WorkOverTime(
        begins_at=target.seen.begins_at,
        step=step,
        devices=[*devices, *[0.0] * (num_steps - len(devices))],
        fleets=fleets,
        window=(target.busiest_at, timedelta(seconds=window.length_s), window.num_devices),
        window_name=f"busiest {span(window.length_s)}: {window.num_devices:.2f}",
    )
