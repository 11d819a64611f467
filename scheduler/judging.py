"""What a run knows of every drafter in every task, and what it finds wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from alphaloop.measurements import DriftSubject
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
) -> dict[About, Judged]:
    """Judge everything that was decoded or probed. `traffic` is of the revisions `in_use`."""
    histories = {(history.task, history.drafter): history for history in probes}
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
        found[about] = Judged(evidence, tuple(history.steps()), tuple(explain(evidence)))
    return found
