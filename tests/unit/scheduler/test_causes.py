"""Causes are named from evidence; whether traffic moved, and whether only the shares of its segments did."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler.causes import Cause, SeenIncident, explain, move_of, within_change
from scheduler.drift.watching import State, TrafficVerdict
from scheduler.probe_history import ProbeSetup
from tests.fixtures.drift import FIRST, SUBJECT, day, evidence, history, jobs, measured

HIGH, LOW = [16, 15, 17, 16, 15, 16], [8, 7, 9, 8, 7, 8]
STEADY_PROBES = history(*(measured(number, HIGH) for number in range(11)))


def test_steady_probes_on_both_sides_of_the_change_mean_other_jobs() -> None:
    (finding,) = explain(evidence(jobs(), probes=STEADY_PROBES))
    assert (finding.cause, finding.subject) == (Cause.TRAFFIC_CHANGED, SUBJECT)
    assert finding.sentence == (
        "Acceptance of small on code fell from 0.70 to 0.50, change -0.20 [-0.25 -0.15], between 2026-01-09 04:48 UTC "
        "and 2026-01-09 14:24 UTC. On 6 fixed probe prompts the draft was steady across that time "
        "(+0.00 [+0.00 +0.00]): the jobs have changed, not the draft."
    )


def test_probes_from_before_the_change_show_nothing() -> None:
    probes = history(*(measured(number, HIGH) for number in range(9)))
    (finding,) = explain(evidence(jobs(), probes=probes))
    assert finding.cause is Cause.TOO_LITTLE_EVIDENCE
    assert "were measured before the change" in finding.sentence
    assert "sent at once" in finding.action


def test_a_fall_of_four_prompts_that_is_not_significant_is_not_steady() -> None:
    probes = history(*(measured(n, [16] * 4) for n in range(9)), measured(9, [2, 14, 16, 16]))
    (finding,) = explain(evidence(jobs(), probes=probes))
    assert finding.cause is Cause.TOO_LITTLE_EVIDENCE
    assert "on 4 prompts the change was -0.20" in finding.sentence
    assert "Register more probe prompts" in finding.action


@pytest.mark.parametrize(
    ("after", "cause", "told"),
    [
        (FIRST, Cause.FAULT, "Neither the models nor the engine changed on record"),
        (replace(FIRST, target_revision="target-2"), Cause.DRAFT_STALE, "changed from target-1 to target-2"),
        (replace(FIRST, draft_revision="draft-2"), Cause.BAD_DRAFT, "changed from draft-1 to draft-2"),
        (replace(FIRST, engine="engine-2"), Cause.SETUP_CHANGED, "changed from engine-1 to engine-2"),
        (
            ProbeSetup("target-2", "draft-1", "engine-2"),
            Cause.TOO_LITTLE_EVIDENCE,
            "which of these is to blame is open",
        ),
    ],
)
def test_what_changed_between_two_probes_names_the_cause(after: ProbeSetup, cause: Cause, told: str) -> None:
    (finding,) = explain(evidence(probes=history(measured(1, HIGH), measured(2, LOW, after))))
    assert finding.cause is cause
    assert "6 probe prompts of code, acceptance of small's first tokens was 0.39" in finding.sentence
    assert told in finding.sentence
    assert finding.action


def test_traffic_that_falls_with_the_probes_is_one_finding() -> None:
    probes = history(*(measured(n, HIGH) for n in range(8)), measured(9, LOW))
    verdict = jobs(when=(7.5, 8.5))
    (finding,) = explain(evidence(verdict, probes=probes))
    assert (finding.cause, finding.traffic) == (Cause.FAULT, verdict)


def test_other_jobs_while_an_older_fault_lasts_are_a_finding_of_their_own() -> None:
    probes = history(*(measured(n, HIGH) for n in range(3)), *(measured(n, LOW) for n in range(3, 11)))
    assert {f.cause for f in explain(evidence(jobs(), probes=probes))} == {Cause.FAULT, Cause.TRAFFIC_CHANGED}


def test_a_shift_of_the_mix() -> None:
    parts = [jobs(State.STEADY, (0.0, -0.03, 0.03), segment=name) for name in "ab"]
    (finding,) = explain(evidence(jobs(), *parts, probes=STEADY_PROBES))
    assert finding.cause is Cause.MIX_SHIFT
    assert "the change is +0.00 [-0.02 +0.02]: most of it is their shares of the jobs." in finding.sentence


def test_a_fall_that_the_mean_hides_is_told() -> None:
    (finding,) = explain(
        evidence(jobs(State.STEADY, (0.0, -0.03, 0.03)), jobs(segment="a"), jobs(segment="b"), probes=STEADY_PROBES)
    )
    assert finding.cause is Cause.TRAFFIC_CHANGED
    assert "(segments a, b) fell" in finding.sentence
    assert "The mean over all segments hides it." in finding.sentence


def test_an_incident_makes_the_engine_the_first_suspect() -> None:
    seen = (SeenIncident(day(8.8), "code", "small", "wrong_text"),)
    (finding,) = explain(evidence(jobs(), probes=STEADY_PROBES, incidents=seen))
    assert finding.cause is Cause.FAULT
    assert "1 incident was recorded" in finding.sentence
    older = (SeenIncident(day(2), "code", "small", "wrong_text"),)
    (finding,) = explain(evidence(jobs(), probes=STEADY_PROBES, incidents=older))
    assert finding.cause is Cause.TRAFFIC_CHANGED


def test_an_incident_beside_a_new_target_leaves_the_cause_open() -> None:
    probes = history(measured(1, HIGH), measured(2, LOW, replace(FIRST, target_revision="target-2")))
    seen = (SeenIncident(day(1.5), "code", "small", "wrong_text"),)
    (finding,) = explain(evidence(probes=probes, incidents=seen))
    assert finding.cause is Cause.TOO_LITTLE_EVIDENCE


def test_probes_of_other_tasks_tell_where_there_are_none() -> None:
    fallen = history(*(measured(n, HIGH, task="chat") for n in range(8)), measured(9, LOW, task="chat"), task="chat")
    (finding,) = explain(evidence(jobs(), elsewhere=(fallen,)))
    assert finding.cause is Cause.FAULT
    assert "those of chat fell too" in finding.sentence
    steady = history(*(measured(n, HIGH, task="chat") for n in range(11)), task="chat")
    (finding,) = explain(evidence(jobs(), elsewhere=(steady,)))
    assert finding.cause is Cause.TOO_LITTLE_EVIDENCE
    assert "never probed" in finding.sentence


def test_a_rise_that_the_probes_share_is_no_finding() -> None:
    rise = jobs(State.ROSE, (0.2, 0.15, 0.25))
    risen = history(*(measured(n, LOW) for n in range(8)), measured(9, HIGH))
    assert explain(evidence(rise, probes=risen)) == []
    (finding,) = explain(evidence(rise, probes=STEADY_PROBES))
    assert finding.cause is Cause.TRAFFIC_CHANGED


def test_nothing_moved() -> None:
    assert explain(evidence(probes=STEADY_PROBES)) == []
    assert explain(evidence()) == []
    assert move_of([steady(""), steady("a")]) is None


FELL = jobs()


def steady(segment: str, half: float = 0.03) -> TrafficVerdict:
    return jobs(State.STEADY, (0.0, -half, half), segment=segment)


def test_thin_segments_are_steady_together() -> None:
    thin = [jobs(State.TOO_LITTLE, (0.01, -0.1, 0.12), segment=f"s{i}") for i in range(16)]
    move = move_of([FELL, *thin])
    assert move.mix is not None
    few = move_of([FELL, *thin[:1], steady("x", 0.5)])
    assert few.mix is None, "two of them show nothing"


def test_one_segment_that_fell_is_named() -> None:
    move = move_of([FELL, steady("a"), jobs(change=(-0.4, -0.5, -0.3), segment="b")])
    assert (move.mix, [v.segment for v in move.segments], move.verdict.segment) == (None, ["b"], "")


@pytest.mark.parametrize("overall", [steady(""), jobs(State.ROSE, (0.1, 0.06, 0.14))])
def test_every_segment_falls_while_the_mean_does_not(overall: TrafficVerdict) -> None:
    parts = [jobs(segment="a"), jobs(segment="b", when=(8.0, 8.4))]
    move = move_of([overall, *parts])
    assert (move.state, bool(move.verdict.segment), len(move.segments)) == (State.FELL, True, 2)
    assert (move.changed_after, move.changed_before) == (day(8.0), day(8.6))


def test_a_mean_that_falls_while_every_segment_rises_is_a_shift_of_the_mix() -> None:
    parts = [jobs(State.STEADY, (0.03, 0.01, 0.05), segment=name) for name in "ab"]
    move = move_of([FELL, *parts])
    assert move.mix is not None


def test_a_fall_inside_segments_beside_a_shift_of_the_mix_is_a_fall() -> None:
    parts = [jobs(State.TOO_LITTLE, (-0.08, -0.12, -0.04), segment=name) for name in "ab"]
    move = move_of([jobs(change=(-0.3, -0.33, -0.27)), *parts])
    assert move.mix is None


def test_the_change_within_segments_is_weighted_by_their_shares_afterwards() -> None:
    parts = [
        jobs(change=(-0.4, -0.5, -0.3), segment="small", num_after=25),
        jobs(State.STEADY, (0.0, -0.02, 0.02), segment="large", num_after=75),
    ]
    within = within_change(parts)
    assert within.mean == pytest.approx(-0.1)
    assert within.mean - within.low == pytest.approx((0.025**2 + 0.015**2) ** 0.5)
    assert within_change([]) is None
