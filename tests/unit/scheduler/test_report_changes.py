"""What changed between two reports, in sentences."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

import pytest

from alphaloop.acceptance import Interval
from alphaloop.experiment.estimate import Verdict
from alphaloop.measurements import DriftSubject
from alphaloop.server_identity import ServerIdentity
from alphaloop.store.drift import EventState, Incident, IncidentKind, KnownIncident, PastState
from alphaloop.store.workers import ServerLife
from scheduler.report.data import ChangeKind, DriftReport
from scheduler.report.wording import changes_between, freshness
from tests.fixtures.reports import AT, empty, full, task_line

HOUR = timedelta(hours=1)
SUBJECT = DriftSubject("code", "lookup", "r", "t")


def past(state: EventState, at: datetime, sentence: str = "It fell.", event_id: int = 7) -> PastState:
    return PastState(event_id, at, state, "draft_stale", sentence, "Ada", None)


def told(before: DriftReport, now: DriftReport) -> list[tuple[ChangeKind, str]]:
    return [(line.kind, line.sentence) for line in changes_between(before, now, [], [], []).lines]


def with_task(**update: object) -> DriftReport:
    return later(full(("code",)), tasks=(task_line("code").model_copy(update=update),))


def later(report: DriftReport, **update: object) -> DriftReport:
    return report.model_copy(update={"created_at": AT + HOUR, **update})


def with_verdict(verdict: Verdict, mean: float) -> DriftReport:
    bounds = Interval(mean=mean, low=mean - 0.02, high=mean + 0.02)
    measured = task_line("code").measured
    return with_task(measured=measured and measured.model_copy(update={"verdict": verdict, "speedup": bounds}))


def test_a_flag_has_one_line_with_all_that_became_of_it() -> None:
    states = [
        (SUBJECT, past(EventState.OPENED, AT + HOUR)),
        (SUBJECT, past(EventState.CONFIRMED, AT + 2 * HOUR)),
        (replace(SUBJECT, task="sql"), past(EventState.REOPENED, AT + HOUR, event_id=3)),
        (SUBJECT, past(EventState.CLOSED, AT + 3 * HOUR, "alpha_1 is steady again.")),
        (SUBJECT, past(EventState.ACKNOWLEDGED, AT + HOUR, event_id=9)),
    ]
    lines = changes_between(full(), later(full()), states, [], []).lines
    assert [line.sentence for line in lines] == [
        "code, lookup: flag 7 (draft stale) was opened, then confirmed, then closed: alpha_1 is steady again.",
        "sql, lookup: flag 3 (draft stale) was reopened.",
        "code, lookup: flag 9 (draft stale) was acknowledged by Ada.",
    ]


def test_a_server_that_came_back_as_another_is_named() -> None:
    identity = ServerIdentity("vllm-0.32.0", "m", None, 2048, ())
    life = ServerLife("plain", "t", "e", identity, "it answers as another model does", AT + HOUR, AT + HOUR)
    (line,) = changes_between(full(), later(full()), [], [], [life]).lines
    assert (line.kind, line.about) == (ChangeKind.SERVER, "plain")
    assert line.sentence == "endpoint plain: it answers as another model does."


def test_incidents_come_first() -> None:
    found = Incident(IncidentKind.CUT_SHORT, "sql", "", "", "t", "e", ("j",), "It ended early.", {})
    closed = [
        KnownIncident(1, found, AT - HOUR, AT + HOUR),
        KnownIncident(2, found, AT + HOUR / 2, AT + HOUR),
    ]
    now = later(full(), incidents=(full().incidents[0].model_copy(update={"opened_at": AT + HOUR}),))
    lines = changes_between(full(), now, [(SUBJECT, past(EventState.OPENED, AT + HOUR))], closed, []).lines
    assert [line.kind for line in lines] == [ChangeKind.INCIDENT] * 3 + [ChangeKind.FLAG]
    assert "incident opened, wrong text" in lines[0].sentence
    assert "incident closed, cut short" in lines[1].sentence
    assert "incident opened and closed, cut short" in lines[2].sentence


@pytest.mark.parametrize(
    ("update", "now"),
    [
        ({"num_draft_tokens": 4}, "with lookup k=4"),
        ({"drafter": "small"}, "with small k=8"),
        ({"mode": "vanilla", "num_draft_tokens": 0}, "vanilla"),
    ],
)
def test_a_choice_that_changed(update: dict[str, object], now: str) -> None:
    sentence = f"The next job of code would be decoded {now} at 4 running, before with lookup k=8."
    assert told(full(("code",)), with_task(**update)) == [(ChangeKind.CHOICE, sentence)]


def test_a_vanilla_task_whose_best_tried_drafter_changed_is_decoded_as_before() -> None:
    before = with_task(mode="vanilla", num_draft_tokens=0, drafter="lookup")
    assert told(before, with_task(mode="vanilla", num_draft_tokens=0, drafter="small")) == []


def test_a_new_task() -> None:
    unmeasured = task_line("sql").model_copy(update={"measured": None})
    (line,) = told(full(("code",)), later(full(("code", "sql")), tasks=(with_task().tasks[0], unmeasured)))
    assert line == (
        ChangeKind.CHOICE,
        "The next job of sql would be decoded with lookup k=8 at 4 running, and the task was not in the last report.",
    )


def test_a_speed_up_that_crossed_one_became_known_or_is_lost() -> None:
    faster, slower = with_verdict(Verdict.FASTER, 1.5), with_verdict(Verdict.SLOWER, 0.8)
    none = with_task(measured=None)
    assert told(faster, slower) == [
        (ChangeKind.SPEEDUP, "code: measured speed-up 0.80 [0.78 0.82], slower; before faster.")
    ]
    assert told(none, faster)[0][1].endswith("1.50 [1.48 1.52], faster; before no verdict yet.")
    assert told(faster, none) == [
        (ChangeKind.SPEEDUP, "code: the measured speed-up is not known any more; before faster.")
    ]
    assert told(faster, with_verdict(Verdict.FASTER, 1.6)) == [], "the same verdict"


def test_a_draft_whose_status_changed() -> None:
    now = later(full())
    (draft,) = now.drafts
    before = full().model_copy(update={"drafts": (draft.model_copy(update={"status": "active", "status_reason": ""}),)})
    ((kind, sentence),) = told(before, now)
    assert kind is ChangeKind.DRAFT
    assert sentence.startswith(
        f"lookup {draft.draft_revision} for target {draft.target_revision} is stale, was active: "
    )


@pytest.mark.parametrize(
    ("last", "sentence"),
    [
        (None, "No job of traffic was ever decoded."),
        (AT - timedelta(minutes=5), "The last job was decoded at 2026-11-21 05:55 UTC."),
        (AT - 3 * HOUR, "No job was decoded for 3 h: the last one at 2026-11-21 03:00 UTC."),
        (AT - 72 * HOUR, "No job was decoded for 3 days: the last one at 2026-11-18 06:00 UTC."),
    ],
)
def test_a_report_says_how_old_its_newest_job_is(last: datetime | None, sentence: str) -> None:
    found = freshness(empty().model_copy(update={"last_decoded_at": last, "next_due": AT + HOUR}))
    assert found[0] == sentence
    assert found[1] == "The next run is due at 2026-11-21 07:00 UTC: from then on this report is old."
