"""What a run knows of every drafter in every task, and what it finds wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from alphaloop.measurements import AcceptedLevel, DriftSubject
from scheduler.causes.cause import Finding, Incident
from scheduler.causes.naming import Evidence, explain
from scheduler.causes.probe_history import ProbeHistory, Step
from scheduler.verdicts import TrafficVerdict

#: Task and drafter.
About = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Judged:
    """One drafter in one task."""

    evidence: Evidence
    steps: tuple[Step, ...]
    findings: tuple[Finding, ...]
    all_steps: tuple[Step, ...]  #: also from before a level was accepted: what a draft's status rests on

    @property
    def subject(self) -> DriftSubject:
        """With the revisions in use."""
        return self.evidence.subject


def judge(
    traffic: Sequence[TrafficVerdict],
    probes: Sequence[ProbeHistory],
    incidents: Sequence[Incident],
    in_use: Mapping[About, DriftSubject],
    margin: float,
    accepted: Mapping[About, AcceptedLevel],
) -> dict[About, Judged]:
    """Judge everything that was decoded or probed. `traffic` is of the revisions `in_use`.

    Where a level was accepted, nothing from before the change to it is compared with.
    """
    whole = {(history.task, history.drafter): history for history in probes}
    histories = {about: history.since(accepted.get(about)) for about, history in whole.items()}
    verdicts: dict[About, list[TrafficVerdict]] = {}
    for verdict in traffic:
        verdicts.setdefault((verdict.subject.task, verdict.subject.drafter), []).append(verdict)
    found = {}
    for about in sorted(histories.keys() | verdicts.keys()):
        task, drafter = about
        history = histories.get(about) or ProbeHistory(task, drafter, (), margin, {})
        evidence = Evidence(
            subject=in_use[about],
            traffic=tuple(verdicts.get(about, ())),
            probes=history,
            elsewhere=tuple(h for (other, name), h in histories.items() if name == drafter and other != task),
            incidents=tuple(i for i in incidents if i.task == task and i.drafter in ("", drafter)),
            margin=margin,
        )
        all_steps = tuple(whole.get(about, history).steps())
        found[about] = Judged(evidence, tuple(history.steps()), tuple(explain(evidence)), all_steps)
    return found
