"""Trained drafts on a real PostgreSQL: candidates until a worker serves them."""

from __future__ import annotations

import pytest

from alphaloop.store.database import Database
from alphaloop.store.drafts import DraftRegistry, DraftStatus

pytestmark = pytest.mark.postgres

FIGURES = {"alpha_by_position": [0.5, 0.4], "overlap": 0.37}


def register(drafts: DraftRegistry, *, trained_on: str = "3 texts") -> DraftStatus:
    return drafts.register_trained("small", "d1", "t1", parent_revision="t1", trained_on=trained_on, figures=FIGURES)


def test_a_trained_draft_is_a_candidate_with_its_figures(database: Database) -> None:
    drafts = DraftRegistry(database)
    assert register(drafts) == DraftStatus.CANDIDATE
    (known,) = drafts.all()
    assert (known.drafter, known.draft_revision, known.target_revision) == ("small", "d1", "t1")
    assert (known.parent_revision, known.trained_on, known.figures) == ("t1", "3 texts", FIGURES)
    assert (known.status, known.status_reason) == (DraftStatus.CANDIDATE, "trained, not served yet")
    assert drafts.stale("t1") == set()


def test_a_candidate_becomes_active_when_a_worker_serves_it(database: Database) -> None:
    drafts = DraftRegistry(database)
    register(drafts)
    drafts.register("small", "d1", "t1")
    (known,) = drafts.all()
    assert (known.status, known.status_reason) == (DraftStatus.ACTIVE, "served by a worker")
    assert known.figures == FIGURES


def test_registering_again_renews_the_facts_and_leaves_the_status(database: Database) -> None:
    drafts = DraftRegistry(database)
    register(drafts)
    drafts.set_status("small", "d1", "t1", DraftStatus.STALE, "probe α_1 fell")
    assert register(drafts, trained_on="4 texts") == DraftStatus.STALE
    drafts.register("small", "d1", "t1")
    (known,) = drafts.all()
    assert (known.status, known.status_reason, known.trained_on) == (DraftStatus.STALE, "probe α_1 fell", "4 texts")
