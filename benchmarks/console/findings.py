"""What a made-up scheduler has found: a drift event that is open, one that is over, and an incident."""

from __future__ import annotations

from datetime import datetime, timedelta

from alphaloop.measurements import DriftSubject
from alphaloop.store.database import Database
from alphaloop.store.drift import DriftEventStore, EventChange, EventContent, EventState
from alphaloop.store.incidents import Incident, IncidentKind, IncidentStore
from benchmarks.console.plans import DRAFT, DRAFTER, ENGINE, TARGET


def find(database: Database, now: datetime) -> None:
    """Write all three."""
    store = DriftEventStore(database)
    fallen = EventContent(
        DriftSubject("code", DRAFTER, DRAFT, TARGET),
        "traffic_changed",
        "α₁ of code with lookup fell by .11 [.08 .14], from .74 to .63; its probes are steady (.75, within ±.05).",
        "The jobs have changed, not the draft: look at what new producers send, or let the policy choose a smaller k.",
        {"flagged_by": "traffic"},
        41.5,
        now - timedelta(hours=3),
        now - timedelta(hours=2, minutes=20),
    )
    over = EventContent(
        DriftSubject("summarization", DRAFTER, DRAFT, TARGET),
        "setup_changed",
        "α₁ of summarization with lookup fell by .07 [.04 .10] when the engine's dtype changed.",
        "Nothing, if the change was meant.",
        {"flagged_by": "probes"},
        0.0,
        None,
        None,
    )
    store.write([EventChange(None, EventState.OPENED, fallen, fallen.verdict)], now - timedelta(hours=2))
    (first,) = store.open_events()
    store.write(
        [EventChange(first.id, EventState.CONFIRMED, fallen, "Later jobs agree: .63 [.61 .66].")],
        now - timedelta(hours=1),
    )
    store.write([EventChange(None, EventState.OPENED, over, over.verdict)], now - timedelta(days=2))
    second = max(event.id for event in store.open_events())
    closed = "Back within ±.05 of .62 for 64 jobs: an equivalence test says so."
    store.write([EventChange(second, EventState.CLOSED, over, closed)], now - timedelta(days=1))
    wrong = Incident(
        IncidentKind.WRONG_TEXT,
        "sql",
        DRAFTER,
        DRAFT,
        TARGET,
        ENGINE,
        ("probe-5f0c6f9d", "control-5f0c6f9d"),
        "A probe's text differs from its control's at token 17, by 3.1 nats: more than a near-tie.",
        {},
    )
    IncidentStore(database).open([wrong], now - timedelta(minutes=40))
