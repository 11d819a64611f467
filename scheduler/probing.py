"""The jobs of probes, and the watch over exactness: each probe is compared with its control, token by token.

A probe is an ordinary job on the task's topic, greedy, with the drafter that it names and the k of its probe set,
whatever k is in force, because α_i moves a little with k. Its control is the same prompt decoded vanilla. In place of a
probe, a drafter may be scored on the control's text (alphaloop.probe_plan). Drafters that are not in use are measured
too, so that they can come back.

Speculative decoding promises the target's own text. A greedy probe and its control are the same prompt, decoded with a
drafter and without, so their tokens are equal. Passes of another width round differently. Where the target's two best
choices are almost equal, rounding may swap them, and the texts part from there; both are right. A third choice may be
as near as the second, and the engine reports only the second, so no difference at such a place proves anything. Every
other difference is an incident: one is enough, no statistic is needed. A server decodes a share of the probes beside a
sampled request, because releases have spoiled greedy texts there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from operator import attrgetter
from typing import Any, Final

from alphaloop.messages import Body, Decoding, Job, Purpose
from alphaloop.probe_plan import DueProbe, ProbePlan, decoded_positions
from alphaloop.probes import DecodedText, ProbeSet, TextPair, is_beside_sampled
from alphaloop.store.database import of_row
from alphaloop.store.drift import Incident, IncidentKind, IncidentStore, KnownIncident
from alphaloop.store.probes import ProbeStore

MAX_JOB_ID_CHARS: Final = 200


@dataclass(frozen=True, slots=True)
class SentProbes:
    """The probes that were due and those that were sent."""

    plan: ProbePlan = field(default_factory=ProbePlan)
    num_jobs_by_task: Mapping[str, int] = field(default_factory=dict)  #: probes and controls

    @property
    def num_jobs(self) -> int:
        """Probes and controls."""
        return sum(self.num_jobs_by_task.values())


@dataclass(frozen=True, slots=True)
class PlannedJob:
    """A probe or control and its row of probe_runs."""

    job: Job
    probe_set: str
    position: int
    prompt_id: str


def make_jobs(
    chosen: Sequence[DueProbe],
    sets: Mapping[str, ProbeSet],
    scheduled_for: datetime,
    *,
    num_prompts: int,
    deadline: datetime,
) -> list[PlannedJob]:
    """The jobs of this run: for each prompt a control, then a probe for each drafter that is decoded there.

    The ids follow from the run's time, so a run that is repeated sends the same jobs, and none is decoded twice.
    """
    planned = []
    for task in dict.fromkeys(due.task for due in chosen):
        probe_set = sets[task]
        of_task = [due for due in chosen if due.task == task]
        prompts = dict(sorted(probe_set.prompts.items())[:num_prompts])
        decoded = {due.drafter: decoded_positions(due, prompts, scheduled_for) for due in of_task}
        for position, prompt in prompts.items():
            scored = tuple(due.drafter for due in of_task if position not in decoded[due.drafter])
            common: dict[str, Any] = {
                "task": task,
                "body": Body.model_validate(prompt.body),
                "deadline": deadline,
            }
            control = Job(
                job_id=_job_id("control", task, scheduled_for, position, None),
                purpose=Purpose.CONTROL,
                decoding=Decoding.VANILLA,
                scored_drafters=scored,
                probe_num_draft_tokens=probe_set.num_draft_tokens if scored else None,
                **common,
            )
            planned.append(PlannedJob(control, probe_set.version, position, prompt.prompt_id))
            for due in of_task:
                if due.drafter not in scored:
                    probe = Job(
                        job_id=_job_id("probe", task, scheduled_for, position, due.drafter),
                        purpose=Purpose.PROBE,
                        probe_drafter=due.drafter,
                        probe_num_draft_tokens=due.num_draft_tokens,
                        **common,
                    )
                    planned.append(PlannedJob(probe, probe_set.version, position, prompt.prompt_id))
    return planned


def _job_id(purpose: str, task: str, scheduled_for: datetime, position: int, drafter: str | None) -> str:
    when = scheduled_for.astimezone(UTC).strftime("%Y%m%dT%H%M%S.%fZ").replace(".000000Z", "Z")
    name = "-".join([purpose, task, when, str(position), *([drafter] if drafter else [])])
    if len(name) <= MAX_JOB_ID_CHARS:
        return name
    return f"{purpose}-{when}-{hashlib.sha256(name.encode()).hexdigest()}"


#: Probes that were not decoded so long after their run never will be.
_LOOK_BACK: Final = timedelta(days=2)


@dataclass(frozen=True, slots=True)
class Watched:
    """What one run compared."""

    num_pairs: int = 0  #: decoded by one target and engine
    num_equal: int = 0
    num_near_ties: int = 0  #: they part where rounding may swap the target's two best choices
    num_opened: int = 0  #: incidents
    num_closed: int = 0  #: incidents, because later probes were right


def compare_new(texts: ProbeStore, incidents: IncidentStore, now: datetime) -> Watched:
    """Compare every pair once that was decoded since the last run. Opens incidents, closes those that are disproved.

    An incident is over when its task and drafter are compared again without one, beside a sampled request if it was.
    """
    pairs = texts.uncompared(now - _LOOK_BACK)
    incidents_now = [incident for pair in pairs for incident in examine(pair)]
    over = disproved(incidents.open_incidents(), pairs, incidents_now)
    incidents.close([incident.id for incident in over], now)
    num_opened = incidents.open(merged(incidents_now), now)
    texts.mark_compared([pair.probe.job_id for pair in pairs], now)
    comparable = [pair for pair in pairs if pair.is_comparable]
    num_equal = sum(pair.is_equal for pair in comparable)
    num_wrong = sum(incident.kind is IncidentKind.WRONG_TEXT for incident in incidents_now)
    return Watched(len(comparable), num_equal, len(comparable) - num_equal - num_wrong, num_opened, len(over))


def examine(pair: TextPair) -> list[Incident]:
    """What is wrong with a pair; nothing where the texts are equal or part at a near-tie, and their counts add up."""
    return [*_examine_one(pair.control), *_examine_one(pair.probe), *_compare(pair)]


#: Incidents that are alike in these are one fault.
_SUBJECT: Final = attrgetter("kind", "task", "drafter", "draft_revision", "target_revision", "engine")


def merged(found: Iterable[Incident]) -> list[Incident]:
    """One incident a fault, with all the jobs that show it; the first of them is its evidence."""
    by_subject: dict[tuple[str, ...], Incident] = {}
    for incident in found:
        subject = _SUBJECT(incident)
        before = by_subject.get(subject)
        job_ids = tuple(dict.fromkeys((*before.job_ids, *incident.job_ids))) if before else incident.job_ids
        by_subject[subject] = replace(before or incident, job_ids=job_ids)
    return list(by_subject.values())


def disproved(
    incidents: Iterable[KnownIncident], pairs: Iterable[TextPair], found: Sequence[Incident]
) -> list[KnownIncident]:
    """Open incidents whose task and drafter were compared again, with nothing wrong."""
    texts = (text for pair in pairs for text in (pair.control, pair.probe))
    compared = {(text.task, text.drafter, _is_beside_sampled(text)) for text in texts}
    right = compared - {_about(incident) for incident in found}
    return [incident for incident in incidents if _about(incident.found) in right]


def _about(incident: Incident) -> tuple[str, str, bool]:
    return incident.task, incident.drafter, bool(incident.evidence.get("is_beside_sampled"))


def _is_beside_sampled(decoded: DecodedText) -> bool:
    """Only servers have sampled neighbours, and only they say nothing of second choices."""
    return bool(decoded.drafter) and not decoded.text.gaps and is_beside_sampled(decoded.job_id)


def _examine_one(decoded: DecodedText) -> list[Incident]:
    text, incidents = decoded.text, list[Incident]()
    num_tokens = len(text.token_ids)
    who = f"{decoded.drafter or 'vanilla'} decoding of {decoded.task}"
    if decoded.num_tokens != num_tokens:
        sentence = f"The counts of {who} speak of {decoded.num_tokens} tokens, the text has {num_tokens}."
        evidence = {"num_counted": decoded.num_tokens, "num_tokens": num_tokens}
        incidents.append(_incident(IncidentKind.WRONG_COUNTS, decoded, sentence, evidence))
    if text.finish_reason == "length" and num_tokens < text.max_tokens:
        sentence = f"A text of {who} ended for its length after {num_tokens} of {text.max_tokens} tokens."
        evidence = {"num_tokens": num_tokens, "max_tokens": text.max_tokens}
        incidents.append(_incident(IncidentKind.CUT_SHORT, decoded, sentence, evidence))
    return incidents


def _compare(pair: TextPair) -> list[Incident]:
    control, probe = pair.control, pair.probe
    if pair.is_equal or not pair.is_comparable:
        return []
    truth, other = control.text, probe.text
    both = zip(truth.token_ids, other.token_ids, strict=False)
    place = next((i for i, (right, decoded) in enumerate(both) if right != decoded), None)
    evidence: dict[str, Any]
    if place is None:
        what = f"is {len(other.token_ids)} tokens long instead of {len(truth.token_ids)}"
        evidence = {"num_tokens": len(other.token_ids), "num_control_tokens": len(truth.token_ids)}
    elif len(truth.gaps) <= place:
        what = f"is another text from token {place + 1} on; the engine does not report how close the choice was"
        evidence = {"place": place, "gap": None, "near_tie": truth.near_tie}
    elif truth.gaps[place] <= truth.near_tie:
        return []
    else:
        gap = truth.gaps[place]
        what = f"is another text from token {place + 1} on, where the target's second choice is {gap:.3g} behind"
        is_second = truth.second_ids[place] == other.token_ids[place]
        evidence = {"place": place, "gap": gap, "near_tie": truth.near_tie, "is_second_choice": is_second}
    beside = " beside a sampled request" if _is_beside_sampled(probe) else ""
    evidence |= {"control_job_id": control.job_id, **({"is_beside_sampled": True} if beside else {})}
    sentence = (
        f"What {probe.drafter} decodes{beside} for a probe of {probe.task} {what}: it is not the target's own text."
    )
    return [_incident(IncidentKind.WRONG_TEXT, probe, sentence, evidence)]


def _incident(kind: IncidentKind, decoded: DecodedText, sentence: str, evidence: dict[str, Any]) -> Incident:
    return of_row(Incident, decoded, kind=kind, job_ids=(decoded.job_id,), sentence=sentence, evidence=evidence)
