"""What becomes of drift events and drafts, and what a fall costs while nobody acts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

import pytest

from alphaloop.acceptance import Interval
from alphaloop.as_decoded import NextJob
from alphaloop.experiment.figures import TaskSpeedup
from alphaloop.measurements import DriftSubject
from alphaloop.store.decision_inputs import DraftStatus
from alphaloop.store.drift import DriftEvent, EventChange, EventState
from scheduler.causes import Cause, DrafterEvidence, DriftFinding, Judged, explain
from scheduler.drift.watching import State
from scheduler.events import TaskPace, event_changes, lost_tokens_per_s, status_changes
from scheduler.probe_history import ProbeHistory, ProbeSetup
from tests.fixtures.drift import FIRST, SUBJECT, day, evidence, history, jobs, measured
from tests.fixtures.runs import task_speedup

HIGH, LOW = [16, 15, 17, 16, 15, 16], [8, 7, 9, 8, 7, 8]
TARGET_2 = replace(FIRST, target_revision="target-2")
STEADY = jobs(State.STEADY, (0.0, -0.02, 0.02))


@dataclass
class Ledger:
    """Events as the database would keep them from run to run."""

    events: list[DriftEvent] = field(default_factory=list)

    def run(self, found: DrafterEvidence, now: datetime) -> list[EventState]:
        """One run; the states that it gave."""
        steps = tuple(found.probes.steps())
        judged = Judged(found, steps, tuple(explain(found)), steps)
        about = found.subject.task, found.subject.drafter
        made = event_changes({about: judged}, self.events, lambda finding: 5.0, now, forget_after=timedelta(days=90))
        for change in made:
            self._apply(change, now)
        return [change.state for change in made if change.state is not None]

    def _apply(self, change: EventChange, now: datetime) -> None:
        if change.event_id is None:
            number = len(self.events) + 1
            self.events.append(DriftEvent(number, change.content, now, now, None, None, None, None, None, None, 0))
            return
        old = self.events[change.event_id - 1]
        again = {"closed_at": None, "closed_because": None, "raised_at": now, "num_reopened": old.num_reopened + 1}
        changed = {
            EventState.CLOSED: {"closed_at": now, "closed_because": change.sentence},
            EventState.CONFIRMED: {"confirmed_at": now},
            EventState.EXPLAINED: {"raised_at": now, "confirmed_at": None},
            EventState.REOPENED: again,
        }
        its = changed[change.state] if change.state else {}
        self.events[change.event_id - 1] = replace(old, content=change.content, **its)


def probed(*runs: Sequence[int]) -> ProbeHistory:
    """A run a day."""
    return history(*(measured(number, run) for number, run in enumerate(runs)))


def test_a_lasting_fall_is_one_event_until_probes_show_that_it_is_over() -> None:
    ledger = Ledger()
    assert ledger.run(evidence(probes=probed(HIGH, LOW)), day(1.1)) == [EventState.OPENED]
    assert ledger.run(evidence(probes=probed(HIGH, LOW)), day(1.2)) == [], "nothing new was measured"
    assert ledger.run(evidence(probes=probed(HIGH, LOW, LOW)), day(2.1)) == [EventState.CONFIRMED]
    assert ledger.run(evidence(probes=probed(HIGH, LOW, LOW, LOW)), day(3.1)) == []
    half = [14, 11, 16, 13, 12, 14]
    assert ledger.run(evidence(probes=probed(HIGH, LOW, LOW, LOW, half)), day(4.1)) == [], "better, but not shown over"
    assert ledger.run(evidence(probes=probed(HIGH, LOW, LOW, LOW, half, HIGH)), day(5.1)) == [EventState.CLOSED]
    (event,) = ledger.events
    assert "back where it was before the fall: change +0.00" in event.closed_because


def test_what_comes_back_is_the_same_event() -> None:
    ledger = Ledger()
    ledger.run(evidence(probes=probed(HIGH, LOW)), day(1.1))
    ledger.run(evidence(probes=probed(HIGH, LOW, HIGH)), day(2.1))
    assert ledger.run(evidence(probes=probed(HIGH, LOW, HIGH, LOW)), day(3.1)) == [EventState.REOPENED]
    (event,) = ledger.events
    assert (event.num_reopened, event.closed_at, event.raised_at) == (1, None, day(3.1))


def test_too_little_evidence_becomes_a_cause_within_the_same_event() -> None:
    ledger = Ledger()
    assert ledger.run(evidence(jobs(), probes=probed(*[HIGH] * 8)), day(8.7)) == [EventState.OPENED]
    assert ledger.events[0].cause == "too_little_evidence"
    fallen = history(*(measured(n, HIGH) for n in range(8)), measured(8.7, LOW))
    assert ledger.run(evidence(jobs(), probes=fallen), day(8.8)) == [EventState.EXPLAINED]
    (event,) = ledger.events
    assert (event.cause, event.state) == ("fault", EventState.OPENED)


def test_a_cause_is_not_given_up_for_too_little_evidence() -> None:
    ledger = Ledger()
    ledger.run(evidence(jobs(), probes=probed(*[HIGH] * 11)), day(10.1))
    assert ledger.events[0].cause == "traffic_changed"
    assert ledger.run(evidence(jobs(), probes=probed(*[HIGH] * 8)), day(10.2)) == []
    assert ledger.events[0].cause == "traffic_changed"


def test_a_fault_that_healed_is_not_blamed_on_the_jobs() -> None:
    ledger = Ledger()
    ledger.run(evidence(jobs(), probes=probed(*[HIGH] * 9, LOW)), day(9.1))
    assert ledger.events[0].cause == "fault"
    for number in range(1, 5):  # the jobs' event lasts until they are shown to be steady
        ledger.run(evidence(jobs(), probes=probed(*[HIGH] * 9, LOW, *[HIGH] * number)), day(9.1 + number))
    assert [event.cause for event in ledger.events] == ["fault"]
    assert ledger.run(evidence(STEADY, probes=probed(*[HIGH] * 9, LOW, *[HIGH] * 4)), day(14)) == [EventState.CLOSED]


def test_traffic_closes_its_event_when_it_is_steady_not_when_it_is_silent() -> None:
    ledger = Ledger()
    ledger.run(evidence(jobs(), probes=probed(*[HIGH] * 11)), day(10.1))
    assert ledger.run(evidence(probes=probed(*[HIGH] * 11)), day(10.2)) == []
    unsure = jobs(State.TOO_LITTLE, (-0.04, -0.1, 0.02))
    assert ledger.run(evidence(unsure, probes=probed(*[HIGH] * 11)), day(10.3)) == []
    assert ledger.run(evidence(STEADY, probes=probed(*[HIGH] * 11)), day(10.4)) == [EventState.CLOSED]


def test_twice_as_many_jobs_confirm_an_event_of_traffic() -> None:
    ledger = Ledger()
    ledger.run(evidence(jobs(num_after=60)), day(8.7))
    assert ledger.run(evidence(jobs(num_after=110)), day(8.9)) == []
    assert ledger.run(evidence(jobs(num_after=120)), day(9.1)) == [EventState.CONFIRMED]


def test_another_draft_ends_an_event_of_traffic() -> None:
    ledger = Ledger()
    ledger.run(evidence(jobs()), day(8.7))
    another = replace(evidence(), subject=DriftSubject("code", "small", "draft-2", "target-1"))
    assert ledger.run(another, day(9)) == [EventState.CLOSED]


def test_two_causes_are_two_events() -> None:
    ledger = Ledger()
    runs = [measured(0, HIGH), measured(3, LOW, TARGET_2), measured(8, LOW, TARGET_2), measured(9, [2] * 6, TARGET_2)]
    ledger.run(evidence(probes=history(*runs[:3])), day(8.1))
    assert ledger.run(evidence(probes=history(*runs)), day(9.1)) == [EventState.CONFIRMED, EventState.OPENED]
    assert [event.cause for event in ledger.events] == ["draft_stale", "fault"]
    healed = history(*runs, measured(10, LOW, TARGET_2))
    assert ledger.run(evidence(probes=healed), day(10.1)) == [EventState.CLOSED]
    assert [event.closed_at is None for event in ledger.events] == [True, False]


def test_an_event_older_than_all_measurements_ends() -> None:
    ledger = Ledger()
    ledger.run(evidence(probes=probed(HIGH, LOW)), day(1.1))
    later = evidence(probes=history(measured(91, LOW), measured(92, LOW)))
    assert ledger.run(later, day(90)) == []
    assert ledger.run(later, day(92)) == [EventState.CLOSED]


def test_what_was_found_of_a_level_that_is_accepted_meanwhile_opens_nothing() -> None:
    ledger = Ledger()
    fallen = evidence(probes=probed(HIGH, LOW))
    assert ledger.run(fallen, day(1)) == [EventState.OPENED]
    ledger.events[0] = replace(ledger.events[0], closed_at=day(3), closed_because="accepted", accepted_at=day(3))
    assert ledger.run(fallen, day(2)) == [], "the run began before"
    assert ledger.run(fallen, day(4)) == [EventState.OPENED], "a finding after it is another event"
    assert [event.num_reopened for event in ledger.events] == [0, 0]


FELL = DriftFinding(SUBJECT, Cause.FAULT, "It fell.", "Look.", day(8), day(9), jobs(), None, None)
SPECULATIVE = NextJob("speculative", "small", 3, "faster", "")
VANILLA = NextJob("vanilla", None, 0, "not_faster", "")


def speedup(mean: float, since: datetime, drafter: str = "small") -> TaskSpeedup:
    return task_speedup(Interval(mean, mean - 0.1, mean + 0.1), since, drafter=drafter)


def test_measured_speed_ups_are_taken_where_both_are_known() -> None:
    pace = TaskPace(100.0, SPECULATIVE, speedup(1.8, day(7)), speedup(1.2, day(9.5)))
    assert lost_tokens_per_s(FELL, pace) == pytest.approx(50.0)
    # A task that is vanilla now loses the whole speed-up.
    assert lost_tokens_per_s(FELL, TaskPace(100.0, VANILLA, speedup(1.8, day(7)), None)) == pytest.approx(80.0)


@pytest.mark.parametrize("now", [None, speedup(1.2, day(8.5)), speedup(1.2, day(9.5), "lookup")])
def test_the_expected_speed_ups_stand_in_for_one_that_was_not_measured_since(now: TaskSpeedup | None) -> None:
    before, after = (sum(alpha**i for i in range(4)) for alpha in (0.7, 0.5))
    found = lost_tokens_per_s(FELL, TaskPace(100.0, SPECULATIVE, speedup(1.8, day(7)), now))
    assert found == pytest.approx(100 * (before / after - 1))


@pytest.mark.parametrize(
    "pace",
    [
        TaskPace(0.0, SPECULATIVE, None, None),
        TaskPace(100.0, None, None, None),
        TaskPace(100.0, VANILLA, None, None),
        TaskPace(100.0, replace(SPECULATIVE, drafter="lookup"), speedup(1.8, day(7), "lookup"), None),
    ],
)
def test_thin_evidence_is_not_known(pace: TaskPace) -> None:
    assert lost_tokens_per_s(FELL, pace) is None


def test_a_rise_costs_nothing() -> None:
    rose = replace(FELL, traffic=jobs(State.ROSE, (0.2, 0.15, 0.25)))
    assert lost_tokens_per_s(rose, TaskPace(100.0, SPECULATIVE, None, None)) == 0.0


STATUS_2 = ("small", "draft-1", "target-2")


def judged(probes: ProbeHistory) -> Judged:
    found = evidence(probes=probes)
    subject = replace(found.subject, task=probes.task)
    return Judged(replace(found, subject=subject), (), (), tuple(probes.steps()))


@pytest.mark.parametrize(
    ("status", "accepts", "becomes"),
    [
        (DraftStatus.ACTIVE, LOW, DraftStatus.STALE),
        (DraftStatus.ACTIVE, [15, 14, 16, 15, 14, 15], None),  # a flag, but no reason to do without it
        (DraftStatus.STALE, LOW, None),
        (DraftStatus.STALE, [10, 16, 11, 16, 15, 14], None),  # not shown to be back
        (DraftStatus.STALE, HIGH, DraftStatus.ACTIVE),
        (DraftStatus.RETIRED, LOW, None),
    ],
)
def test_a_status_changes_by_evidence(status: DraftStatus, accepts: list[int], becomes: DraftStatus | None) -> None:
    one = judged(history(measured(0, HIGH), measured(1, LOW, TARGET_2), measured(2, accepts, TARGET_2)))
    found = status_changes([one], {STATUS_2: status})
    assert [change.status for change in found] == ([becomes] if becomes else [])


def test_a_worse_new_draft_is_stale_from_its_first_probes() -> None:
    new = ProbeSetup("target-1", "draft-2", "engine-1")
    one = judged(history(measured(0, HIGH), measured(1, LOW, new)))
    (change,) = status_changes([one], {("small", "draft-2", "target-1"): DraftStatus.ACTIVE})
    assert (change.draft_revision, change.status) == ("draft-2", DraftStatus.STALE)
    assert change.reason == "α₁ fell by 0.40 [0.40 0.40] on 6 probe prompts of 1 task"


@pytest.mark.parametrize(
    "after", [FIRST, replace(FIRST, engine="engine-2"), ProbeSetup("target-2", "draft-1", "engine-2")]
)
def test_a_fault_or_another_engine_makes_no_draft_stale(after: ProbeSetup) -> None:
    one = judged(history(measured(0, HIGH), measured(1, LOW, after)))
    draft = ("small", after.draft_revision, after.target_revision)
    assert status_changes([one], {draft: DraftStatus.ACTIVE}) == []


def test_a_status_is_judged_over_all_tasks() -> None:
    def task(name: str, accepts: list[int]) -> Judged:
        return judged(history(measured(0, HIGH, task=name), measured(1, accepts, TARGET_2, task=name), task=name))

    statuses = {STATUS_2: DraftStatus.ACTIVE}
    many = [task("code", [12] * 6), *(task(name, HIGH) for name in ("sql", "rag", "math", "chat"))]
    assert status_changes(many, statuses) == []
    assert len(status_changes(many[:1], statuses)) == 1
