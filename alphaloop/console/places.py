"""The places of the console: what the head of every page links to."""

from __future__ import annotations

from typing import Final

#: In order: address, name, key behind g.
PLACES: Final = (
    ("/", "Now", "n"),
    ("/tasks", "Tasks", "t"),
    ("/jobs", "Jobs", "j"),
    ("/batches", "Batches", "b"),
    ("/dead-letters", "Dead letters", "l"),
    ("/drift", "Drift", "d"),
    ("/drafts", "Drafts", "f"),
    ("/reports", "Reports", "r"),
)
#: What the addresses below a place begin with, where that is not the place's own.
_BELOW: Final = {"/jobs": "/job", "/batches": "/batch", "/reports": "/report", "/dead-letters": "/dead-letter"}


def place_of(path: str) -> str | None:
    """The place to which an address belongs."""
    below = (place for place, *_ in PLACES[1:] if path.startswith(_BELOW.get(place, place)))
    return next(below, "/" if path in ("/", "/now") else None)
