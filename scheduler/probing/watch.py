"""The watch over exactness: probes are compared with their controls, token by token.

Speculative decoding promises the target's own text. A greedy probe and its control are the same prompt, decoded with a
drafter and without, so their tokens are equal. Passes of another width round differently. Where the target's two best
choices are almost equal, rounding may swap them, and the texts part from there; both are right. A third choice may be
as near as the second, and the engine tells only the second, so no difference at such a place proves anything. Every
other difference is an incident: one is enough, no statistic is needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, Final

from alphaloop.probe_texts import DecodedText, TextPair
from alphaloop.store.incidents import Incident, IncidentKind, IncidentStore, KnownIncident
from alphaloop.store.probes import ProbeStore

#: Probes that were not decoded so long after their run never will be.
_LOOK_BACK: Final = timedelta(days=2)


@dataclass(frozen=True, slots=True)
class Watched:
    """What one run compared."""

    num_pairs: int = 0  #: decoded by one target and engine
    num_equal: int = 0
    num_near_ties: int = 0
    num_opened: int = 0
    num_closed: int = 0


@dataclass(frozen=True, slots=True)
class ExactnessWatch:
    """Compares what was decoded since the last run; opens incidents, and closes those that later probes disprove."""

    texts: ProbeStore
    incidents: IncidentStore

    def compare_new(self, now: datetime) -> Watched:
        """Compare every new pair once. An incident is over when its task and drafter are compared again without one."""
        pairs = self.texts.uncompared(now - _LOOK_BACK)
        found = [incident for pair in pairs for incident in examine(pair)]
        over = disproved(self.incidents.open_incidents(), pairs, found)
        self.incidents.close([one.id for one in over], now)
        num_opened = self.incidents.open(merged(found), now)
        self.texts.mark_compared([pair.probe.job_id for pair in pairs], now)
        comparable = [pair for pair in pairs if pair.is_comparable]
        num_equal = sum(pair.is_equal for pair in comparable)
        num_wrong = sum(one.kind is IncidentKind.WRONG_TEXT for one in found)
        return Watched(len(comparable), num_equal, len(comparable) - num_equal - num_wrong, num_opened, len(over))


def examine(pair: TextPair) -> list[Incident]:
    """What is wrong with a pair; nothing where the texts are equal or part at a near-tie, and their counts add up."""
    return [*_examine_one(pair.control), *_examine_one(pair.probe), *_compare(pair)]


def merged(found: Iterable[Incident]) -> list[Incident]:
    """One incident a fault, with all the jobs that show it; the first of them is its evidence."""
    by_subject: dict[tuple[str, ...], Incident] = {}
    for one in found:
        subject = (one.kind, one.task, one.drafter, one.draft_revision, one.target_revision, one.engine)
        before = by_subject.get(subject)
        job_ids = tuple(dict.fromkeys((*before.job_ids, *one.job_ids))) if before else one.job_ids
        by_subject[subject] = replace(before or one, job_ids=job_ids)
    return list(by_subject.values())


def disproved(
    incidents: Iterable[KnownIncident], pairs: Iterable[TextPair], found: Sequence[Incident]
) -> list[KnownIncident]:
    """Open incidents whose task and drafter were compared again, with nothing wrong."""
    compared = {(text.task, text.drafter) for pair in pairs for text in (pair.control, pair.probe)}
    wrong = {(one.task, one.drafter) for one in found}
    right = compared - wrong
    return [one for one in incidents if (one.found.task, one.found.drafter) in right]


def _examine_one(decoded: DecodedText) -> list[Incident]:
    text, found = decoded.text, []
    num_tokens = len(text.token_ids)
    who = f"{decoded.drafter or 'vanilla'} decoding of {decoded.task}"
    if decoded.num_tokens != num_tokens:
        sentence = f"The counts of {who} speak of {decoded.num_tokens} tokens, the text has {num_tokens}."
        evidence = {"num_counted": decoded.num_tokens, "num_tokens": num_tokens}
        found.append(_incident(IncidentKind.WRONG_COUNTS, decoded, sentence, evidence))
    if text.finish_reason == "length" and num_tokens < text.max_tokens:
        sentence = f"A text of {who} ended for its length after {num_tokens} of {text.max_tokens} tokens."
        evidence = {"num_tokens": num_tokens, "max_tokens": text.max_tokens}
        found.append(_incident(IncidentKind.CUT_SHORT, decoded, sentence, evidence))
    return found


def _compare(pair: TextPair) -> list[Incident]:
    control, probe = pair.control, pair.probe
    if pair.is_equal or not pair.is_comparable:
        return []
    truth, other = control.text, probe.text
    both = zip(truth.token_ids, other.token_ids, strict=False)
    place = next((i for i, (one, another) in enumerate(both) if one != another), None)
    evidence: dict[str, Any]
    if place is None:
        told = f"is {len(other.token_ids)} tokens long instead of {len(truth.token_ids)}"
        evidence = {"num_tokens": len(other.token_ids), "num_control_tokens": len(truth.token_ids)}
    elif len(truth.gaps) <= place:
        told = f"is another text from token {place + 1} on; the engine does not tell how close the choice was"
        evidence = {"place": place, "gap": None, "near_tie": truth.near_tie}
    elif truth.gaps[place] <= truth.near_tie:
        return []
    else:
        gap = truth.gaps[place]
        told = f"is another text from token {place + 1} on, where the target's second choice is {gap:.3g} behind"
        is_second = truth.second_ids[place] == other.token_ids[place]
        evidence = {"place": place, "gap": gap, "near_tie": truth.near_tie, "is_second_choice": is_second}
    sentence = f"What {probe.drafter} decodes for a probe of {probe.task} {told}: it is not the target's own text."
    found = _incident(IncidentKind.WRONG_TEXT, probe, sentence, {**evidence, "control_job_id": control.job_id})
    return [found]


def _incident(kind: IncidentKind, decoded: DecodedText, sentence: str, evidence: dict[str, Any]) -> Incident:
    return Incident(
        kind,
        decoded.task,
        decoded.drafter,
        decoded.draft_revision,
        decoded.target_revision,
        decoded.engine,
        (decoded.job_id,),
        sentence,
        evidence,
    )
