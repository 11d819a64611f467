"""The drafts, and whether each is fit to serve."""

from __future__ import annotations

from starlette.requests import Request

from alphaloop.console.page import Page
from alphaloop.console.sources import Sources
from alphaloop.store.drafts import DraftRegistry


def drafts(sources: Sources, request: Request) -> Page:
    """Every draft revision that was registered."""
    return Page("drafts.html.j2", "Drafts", {"drafts": DraftRegistry(sources.database).all()})
