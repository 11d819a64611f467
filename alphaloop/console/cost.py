"""What jobs took of the device, and what that cost."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final

from starlette.requests import Request

from alphaloop.console.page import Page, WrongRequest, past, text
from alphaloop.console.reading import Sources, errors_of
from alphaloop.explaining.spending import spending_table
from alphaloop.store.spending import SpentBy

_MAX_ROWS: Final = 100
#: A job has a page of its own, which says what it took.
_KINDS: Final = tuple(kind.value for kind in SpentBy if kind is not SpentBy.JOB)


def cost(sources: Sources, request: Request) -> Page:
    """The jobs that were decoded from `since` to `until`, the last day without both, summed by `by`."""
    asked = {name: value for name in ("by", "since", "until") if (value := text(request, name))}
    if (by := asked.get("by", SpentBy.TASK.value)) not in _KINDS:
        raise WrongRequest(f"by: expected one of {', '.join(_KINDS)}, found {by[:60]!r}")
    since, until = past(asked, "since"), past(asked, "until")
    if since is not None and since > (until or datetime.now(UTC)):
        raise WrongRequest("expected since before until")
    reading = sources.remembered.get(
        ("cost", *asked.items()),
        lambda: spending_table(
            sources.database,
            sources.settings.prices,
            SpentBy(by),
            since=since,
            until=until,
            now=datetime.now(UTC),
        ),
    )
    spent = reading.value
    rows = [] if spent is None else [(row, spent.saved_in_words(row.name)) for row in spent.rows[:_MAX_ROWS]]
    return Page(
        "cost.html.j2",
        "Cost",
        {
            "by": by,
            "spent": spent and spent.as_json(),
            "read_at": reading.read_at,
            "errors": errors_of(cost=reading),
        },
        {
            "asked": asked,
            "kinds": _KINDS,
            "table": spent,
            "rows": rows if spent is None or len(spent.rows) < 2 else [*rows, (spent.total, "")],
            "num_left": 0 if spent is None else max(0, len(spent.rows) - _MAX_ROWS),
        },
    )
