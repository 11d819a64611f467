"""What a decision was taken from, as a JSON document of at most 4 KiB; and the decision, taken again from it. Pure.

A snapshot has the posteriors as they were inferred and the counts behind them, what rounds of the decision's load were
expected to take, the jobs, the budget, the incumbent, the limits, and what was decided. Figures have five digits. So
the same policy decides the same again, and other rules decide with what was known then. What is inferred from evidence
is not inferred again: a snapshot has no evidence of other tasks.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, replace
from datetime import UTC, datetime, timedelta
from itertools import groupby
from typing import Any, Final, NamedTuple, TypeVar
from uuid import UUID

from alphaloop.costs import CostKind, CostPoint, CostTable, RoundCosts
from alphaloop.deciding.decision import Decision, DecisionContext, DraftSetting, Reason
from alphaloop.deciding.evidence import EvidenceSums
from alphaloop.deciding.expectation_error import ExpectationError
from alphaloop.deciding.exploration import ExplorationBudget
from alphaloop.deciding.goodput import Alternative, DrafterState, Shares
from alphaloop.deciding.job_facts import Aim, Objective, PolicyLimits, Subject, TaskRules
from alphaloop.deciding.policy import Group, decide_groups
from alphaloop.deciding.posterior import Posterior, Profile
from alphaloop.messages import Decoding, Mode, Purpose

#: Of a snapshot, as JSON.
MOST_BYTES: Final = 4096
_ROOM_FOR_DROPPED: Final = 70
#: Loads of groups of which costs are kept.
_MOST_LOADS: Final = 4
#: Posteriors and counts whose JSON is remembered.
_MOST_SHARED: Final = 2000
#: Texts in a snapshot are cut after so many characters: an operator's pattern may be of any length.
_MOST_CHARACTERS: Final = 120
_VERSION: Final = 1
_T = TypeVar("_T")
_json: Final = json.JSONEncoder(allow_nan=False, check_circular=False, separators=(",", ":")).encode


@dataclass(frozen=True, slots=True)
class SessionFacts:
    """What all decisions of a session share, apart from the drafters."""

    owner: str  #: the worker
    host: str
    device: str
    engine: str
    target_revision: str
    num_slots: int
    half_life: timedelta  #: of evidence
    limits: PolicyLimits


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One decision about jobs that were admitted together: everything it was taken from, and its outcome."""

    decision_id: UUID
    decided_at: datetime
    subject: Subject
    context: DecisionContext  #: with the mode and the objective of that time
    deadline_ms: float | None  #: until the earliest deadline of the jobs
    groups: tuple[Group, ...]
    drafters: tuple[DrafterState, ...]
    costs: CostTable
    seen: Mapping[str, EvidenceSums]  #: by drafter, of the whole task
    is_split: bool  #: whether segments differ beyond chance and are decided apart
    incumbent: DraftSetting | None
    budget: ExplorationBudget | None
    decisions: tuple[Decision, ...]  #: by group
    is_whole: bool = True  #: whether all groups and drafters are in it; False of a document that was too long

    def decide(self, limits: PolicyLimits) -> tuple[Decision, ...]:
        """The decision of each group, taken again."""
        return decide_groups(
            self.groups,
            self.drafters,
            self.costs,
            self.context,
            limits,
            incumbent=self.incumbent,
            budget=self.budget,
        )

    def is_reproduced(self, again: Sequence[Decision]) -> bool:
        """Whether a decision taken again is the one that was taken. One of a document that was too long is not."""
        return self.is_whole and [(one.setting, one.reason) for one in again] == [
            (one.setting, one.reason) for one in self.decisions
        ]

    def under(self, rules: TaskRules, drafters: Sequence[DrafterState]) -> Snapshot:
        """The same jobs at the same moment with other rules for the task, and these drafters or shorter drafts."""
        objective = objective_of(rules, self.deadline_ms)
        asked = self.subject.decoding
        decoding = rules.decoding if asked is Decoding.AUTO else asked
        names = {drafter.name for drafter in drafters}
        groups = tuple(
            replace(group, posteriors={name: its for name, its in group.posteriors.items() if name in names})
            for group in self.groups
        )
        context = replace(self.context, objective=objective, decoding=decoding)
        return replace(self, context=context, groups=groups, drafters=tuple(drafters))


def objective_of(rules: TaskRules, deadline_ms: float | None) -> Objective:
    """The task's target, else the earliest deadline of the jobs, else throughput.

    The task's target has precedence, because a deadline that is hours away would otherwise disable it.
    """
    if rules.objective.aim is not Aim.THROUGHPUT or deadline_ms is None:
        return rules.objective
    return Objective(Aim.DEADLINE, deadline_ms)


def session_content(facts: SessionFacts, drafters: Iterable[DrafterState]) -> dict[str, Any]:
    """What a worker decides with, as JSON."""
    return {**_facts_content(facts), "drafters": [_drafter_content(drafter) for drafter in drafters]}


def read_session(content: Mapping[str, Any]) -> tuple[SessionFacts, tuple[DrafterState, ...]]:
    """From `session_content`. Raises KeyError, TypeError or ValueError."""
    facts = SessionFacts(
        owner=content["owner"],
        host=content["host"],
        device=content["device"],
        engine=content["engine"],
        target_revision=content["target_revision"],
        num_slots=content["num_slots"],
        half_life=timedelta(microseconds=content["half_life_us"]),
        limits=PolicyLimits(**content["limits"]),
    )
    return facts, tuple(_read_drafter(one) for one in content["drafters"])


class SnapshotEncoder:
    """Writes the snapshots of one session as JSON. One thread uses it at a time.

    Decisions share their drafters for hours and their posteriors for about a second, so these are written once.
    """

    def __init__(self, facts: SessionFacts) -> None:
        self._facts = _json(_facts_content(facts))[1:-1]
        self._drafters: dict[DrafterState, str] = {}
        self._shared: dict[int, tuple[object, str]] = {}  # by identity; holds the object so that its id stays taken

    def encode(self, snapshot: Snapshot) -> str:
        """The document, at most `MOST_BYTES` of ASCII.

        What does not fit is dropped, the least likely first: alternatives, then drafters with their posteriors and
        costs, then the smallest groups of jobs. The document says how many of each. The drafters that were chosen and
        the largest group stay.
        """
        if len(self._shared) > _MOST_SHARED or len(self._drafters) > _MOST_SHARED:
            self._shared.clear()
            self._drafters.clear()
        ranked, first = _ranked(snapshot), snapshot.decisions[0]
        document = _Document(
            snapshot,
            self._facts,
            drafters={one.name: self._drafter(one) for one in snapshot.drafters},
            seen={name: self._once(its, _seen_text) for name, its in snapshot.seen.items() if its.jobs > 0},
            costs=_cost_texts(snapshot),
            groups=[
                _GroupText(
                    group.num_jobs,
                    _group_text(
                        group, decision, like_the_first=number > 0 and decision.explanation == first.explanation
                    ),
                    {name: self._once(its, _posterior_text) for name, its in group.posteriors.items()},
                )
                for number, (group, decision) in enumerate(zip(snapshot.groups, snapshot.decisions, strict=True))
            ],
            alternatives=[_alternative_text(one) for one in ranked],
        )
        text = document.text()
        if len(text) <= MOST_BYTES:
            return text
        document.shorten(len(text) - MOST_BYTES, [one.drafter for one in ranked])
        return document.text()

    def _drafter(self, drafter: DrafterState) -> str:
        if drafter not in self._drafters:
            self._drafters[drafter] = _json(_drafter_content(drafter))
        return self._drafters[drafter]

    def _once(self, shared: _T, text: Callable[[_T], str]) -> str:
        known = self._shared.get(id(shared))
        if known is None:
            known = self._shared[id(shared)] = shared, text(shared)
        return known[1]


class _GroupText(NamedTuple):
    num_jobs: int
    text: str  #: without its posteriors
    posteriors: dict[str, str]


@dataclass(slots=True)
class _Document:
    """The parts of a document, each as JSON, so that it is known what a part takes."""

    snapshot: Snapshot
    facts: str
    drafters: dict[str, str]
    seen: dict[str, str]
    costs: dict[str, str]  #: the target's under an empty name
    groups: list[_GroupText]
    alternatives: list[str]
    num_alternatives: int = 0  #: dropped
    num_drafters: int = 0
    num_groups: int = 0

    def text(self) -> str:
        """The document."""
        parts = {
            "drafters": _list(self.drafters.values()),
            "seen": _object(self.seen),
            "costs": _list(self.costs.values()),
            "groups": _list(f'{{{its.text},"posteriors":{_object(its.posteriors)}}}' for its in self.groups),
            "alternatives": _list(self.alternatives),
        }
        if self.num_alternatives or self.num_drafters or self.num_groups:
            parts["dropped"] = (
                f'{{"alternatives":{self.num_alternatives},"drafters":{self.num_drafters},"groups":{self.num_groups}}}'
            )
        body = ",".join(f'"{name}":{value}' for name, value in parts.items())
        rest = _json(_rest_content(self.snapshot, self.drafters))[1:-1]
        return f'{{"version":{_VERSION},{self.facts},{rest},{body}}}'

    def shorten(self, excess: int, ranked: Sequence[str | None]) -> None:
        """Drop so many bytes or more; `ranked` are the drafters of the alternatives, the best first."""
        excess += _ROOM_FOR_DROPPED
        while excess > 0 and self.alternatives:
            excess -= len(self.alternatives.pop()) + 1
            self.num_alternatives += 1
        chosen = {decision.drafter for decision in self.snapshot.decisions}
        best = {drafter: rank for rank, drafter in reversed(list(enumerate(ranked)))}
        for name in sorted(self.drafters.keys() - chosen, key=lambda name: (-best.get(name, len(ranked)), name)):
            if not self._is_too_long:
                return
            for by_drafter in self._by_drafter:
                by_drafter.pop(name, None)
            self.num_drafters += 1
        while self._is_too_long and len(self.groups) > 1:
            least = min(reversed(range(len(self.groups))), key=lambda index: self.groups[index].num_jobs)
            del self.groups[least]
            self.num_groups += 1
        if self._is_too_long:  # very long drafts, or names: the outcome alone
            self.num_drafters += len(self.drafters)
            for by_drafter in self._by_drafter:
                by_drafter.clear()

    @property
    def _by_drafter(self) -> list[dict[str, str]]:
        return [self.drafters, self.seen, self.costs, *(its.posteriors for its in self.groups)]

    @property
    def _is_too_long(self) -> bool:
        return len(self.text()) > MOST_BYTES


def decode(
    content: Mapping[str, Any], decision_id: UUID, decided_at: datetime, task: str, sampling_bucket: str, running: int
) -> tuple[Snapshot, SessionFacts]:
    """From a document and the columns of its row. Raises KeyError, TypeError or ValueError for one of another form."""
    facts, drafters = read_session(content)
    subject = _read_subject(content.get("subject", {}), task, sampling_bucket)
    groups = tuple(_read_group(one) for one in content["groups"])
    budget = content.get("budget")
    snapshot = Snapshot(
        decision_id=decision_id,
        decided_at=decided_at,
        subject=subject,
        context=_read_context(content["context"], subject, running, decided_at),
        deadline_ms=content.get("deadline_ms"),
        groups=groups,
        drafters=drafters,
        costs=_read_costs(content["costs"]),
        seen={name: _read_seen(its, decided_at) for name, its in content["seen"].items()},
        is_split=content.get("is_split", False),
        incumbent=_read_setting(content.get("incumbent")),
        budget=None if budget is None else _read_budget(budget),
        decisions=tuple(
            _read_decision(one["decision"], drafters, content["groups"][0]["decision"].get("explanation", ""))
            for one in content["groups"]
        ),
        is_whole=not any(content.get("dropped", {}).get(what) for what in ("drafters", "groups")),
    )
    return snapshot, facts


def _ranked(snapshot: Snapshot) -> Sequence[Alternative]:
    """The alternatives of the largest group, those that must stay first, then the best first."""
    largest = max(zip(snapshot.groups, snapshot.decisions, strict=True), key=lambda pair: pair[0].num_jobs)[1]
    chosen = {one.setting for one in snapshot.decisions} | {snapshot.incumbent, DraftSetting()}
    return sorted(largest.alternatives, key=lambda one: DraftSetting(one.drafter, one.num_draft_tokens) not in chosen)


def _facts_content(facts: SessionFacts) -> dict[str, Any]:
    return {
        **{name: getattr(facts, name) for name in ("owner", "host", "device", "engine", "target_revision")},
        "num_slots": facts.num_slots,
        "half_life_us": facts.half_life // timedelta(microseconds=1),
        "limits": asdict(facts.limits),
    }


def _rest_content(snapshot: Snapshot, drafters: Container[str]) -> dict[str, Any]:
    """What is neither of the session nor of one drafter or group; figures by drafter of these drafters alone."""
    context, subject, budget = snapshot.context, snapshot.subject, snapshot.budget
    aim, target_ms = context.objective.aim, context.objective.target_ms

    def of_these(by_drafter: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in by_drafter.items() if name in drafters}

    content: dict[str, Any] = {
        "context": _given(
            num_jobs=context.num_jobs,
            expected_tokens=_number(context.expected_tokens),
            known_output_jobs=_number(context.known_output_jobs) or None,
            prompt_tokens=_number(context.prompt_tokens),
            max_sequence_tokens=_number(context.max_sequence_tokens),
            max_output_tokens=_number(context.max_output_tokens),
            decoding=None if context.decoding is Decoding.AUTO else context.decoding.value,
            aim=None if aim is Aim.THROUGHPUT else aim.value,
            # JSON has no infinity, which is the target of a task that has none.
            target_ms=_number(target_ms) if math.isfinite(target_ms) else None,
            free_cache_bytes=context.free_cache_bytes,
            free_elsewhere=of_these(context.free_elsewhere) or None,
            cannot_serve={name: _cut(why) for name, why in of_these(context.cannot_serve).items()} or None,
        )
    }
    content |= _given(
        subject=_given(
            decoding=None if subject.decoding is Decoding.AUTO else subject.decoding.value,
            purpose=None if subject.purpose is Purpose.TRAFFIC else subject.purpose.value,
            probe_drafter=subject.probe_drafter,
            probe_num_draft_tokens=subject.probe_num_draft_tokens,
            switched_off=_cut(subject.switched_off),
        )
        or None,
        deadline_ms=_number(snapshot.deadline_ms),
        is_split=snapshot.is_split or None,
        incumbent=_setting_content(snapshot.incumbent),
        budget=budget
        and _given(
            balance=_number(budget.balance),
            accrued=_number(budget.accrued),
            spent=_number(budget.spent),
            unseen=None if budget.unseen is None else _rounded(of_these(budget.unseen)),
            unseen_s=_rounded(of_these(budget.unseen_s)) or None,
            decided_at=None if budget.decided_at is None else budget.decided_at.timestamp(),
        ),
    )
    return content


def _read_subject(content: Mapping[str, Any], task: str, sampling_bucket: str) -> Subject:
    return Subject(
        task,
        sampling_bucket,
        Decoding(content.get("decoding", Decoding.AUTO)),
        Purpose(content.get("purpose", Purpose.TRAFFIC)),
        content.get("probe_drafter"),
        content.get("probe_num_draft_tokens"),
        content.get("switched_off"),
    )


def _read_context(content: Mapping[str, Any], subject: Subject, running: int, at: datetime) -> DecisionContext:
    target_ms = content.get("target_ms")
    return DecisionContext(
        task=subject.task,
        num_running=running,
        num_jobs=content["num_jobs"],
        expected_tokens=content["expected_tokens"],
        purpose=subject.purpose,
        decoding=Decoding(content.get("decoding", Decoding.AUTO)),
        probe_drafter=subject.probe_drafter,
        probe_num_draft_tokens=subject.probe_num_draft_tokens,
        prompt_tokens=content.get("prompt_tokens"),
        objective=Objective(Aim(content.get("aim", Aim.THROUGHPUT)), math.inf if target_ms is None else target_ms),
        known_output_jobs=content.get("known_output_jobs", 0.0),
        free_cache_bytes=content.get("free_cache_bytes"),
        free_elsewhere=content.get("free_elsewhere", {}),
        max_sequence_tokens=content.get("max_sequence_tokens"),
        max_output_tokens=content.get("max_output_tokens"),
        cannot_serve=content.get("cannot_serve", {}),
        switched_off=subject.switched_off,
        now=at,
    )


def _group_text(group: Group, decision: Decision, *, like_the_first: bool) -> str:
    by_running = [
        [one.drafter, one.num_draft_tokens, len(list(its))] for one, its in groupby(decision.settings_by_running)
    ]
    content = {
        "num_jobs": group.num_jobs,
        "segment": group.segment,
        "prompt_bucket": group.prompt_bucket,
        "alike": {name: _number(jobs) for name, jobs in group.alike.items() if jobs > 0},
        "decision": _given(
            drafter=decision.drafter,
            num_draft_tokens=decision.num_draft_tokens,
            reason=decision.reason.value,
            explanation=None if like_the_first else decision.explanation[: 2 * _MOST_CHARACTERS],
            kept=None if decision.kept == decision.setting else _setting_content(decision.kept),
            by_running=by_running or None,
        ),
    }
    return _json(content)[1:-1]


def _read_group(content: Mapping[str, Any]) -> Group:
    return Group(
        content["num_jobs"],
        {name: _read_posterior(its) for name, its in content["posteriors"].items()},
        content["segment"],
        content["prompt_bucket"],
        content["alike"],
    )


def _posterior_text(posterior: Posterior) -> str:
    profile = posterior.profile
    # Of what is the same at every position, one number is written.
    parts = (
        profile.mean,
        (profile.common_var,),
        profile.own_var,
        _one_of_alike(profile.loading),
        _one_of_alike(posterior.reach),
        _one_of_alike(posterior.offered),
        (posterior.jobs, posterior.design_effect, posterior.kept),
        posterior.error,
    )
    return _list(map(_floats, parts))


def _read_posterior(content: Sequence[Any]) -> Posterior:
    mean, (common_var,), own_var, loading, reach, offered, (jobs, design_effect, kept), error = content
    size = len(mean)
    return Posterior(
        Profile(tuple(mean), common_var, tuple(own_var), _spread(loading, size)),
        _spread(reach, size),
        jobs,
        design_effect,
        kept,
        _spread(offered, size),
        ExpectationError(*error),
    )


def _read_decision(content: Mapping[str, Any], drafters: Sequence[DrafterState], first: str) -> Decision:
    name = content.get("drafter")
    by_running = tuple(
        DraftSetting(drafter, k) for drafter, k, number in content.get("by_running", ()) for _ in range(number)
    )
    return Decision(
        Mode.SPECULATIVE if name else Mode.VANILLA,
        name,
        next((drafter.revision for drafter in drafters if drafter.name == name), None),
        content["num_draft_tokens"],
        Reason(content["reason"]),
        content.get("explanation", first),
        settings_by_running=by_running,
        kept=_read_setting(content["kept"]) if "kept" in content else None,
    )


def _seen_text(its: EvidenceSums) -> str:
    return _list(map(_floats, ((its.jobs, its.rounds, its.offered), its.trials, its.accepts)))


def _read_seen(content: Sequence[Any], at: datetime) -> EvidenceSums:
    (jobs, rounds, offered), trials, accepts = content
    return EvidenceSums(at, jobs=jobs, rounds=rounds, offered=offered, trials=tuple(trials), accepts=tuple(accepts))


def _cost_texts(snapshot: Snapshot) -> dict[str, str]:
    """What was timed, at the loads of the decision: name, kind, times by load and width, variances, reading a prompt.

    Costs between the measured contexts and batches are interpolated here: of a table of some hundred points, a decision
    uses a dozen.
    """
    costs, context = snapshot.costs, snapshot.context
    size, shares = context.size, Shares(context.num_running, snapshot.drafters)
    # Groups with different drafters share a pass, but each drafter proposes for its own sequences.
    each = context.num_running / context.num_jobs
    apart = snapshot.groups[:_MOST_LOADS] if len(snapshot.groups) > 1 else ()
    of_groups = [max(1, round(each * group.num_jobs)) for group in apart]
    rounds: dict[int, RoundCosts] = {}
    found: dict[str, str] = {}
    for drafter in (None, *snapshot.drafters):
        name = drafter.name if drafter else None
        load = shares.of(drafter) if drafter else shares.vanilla
        is_served = name is not None and costs.is_served(name)
        lines: list[str] = []
        widths: Sequence[float] = (1.0,)
        for whole in sorted({math.floor(load), math.ceil(load), *(() if costs.is_of_servers else of_groups)}):
            if whole not in rounds:
                rounds[whole] = costs.rounds(whole, size.context if size else None)
            line = rounds[whole].line(name)
            if line is not None:
                lines.append(f"[{whole},{_floats(line[0])},{_floats(line[1])}]")
                widths = line[0] if is_served else widths
        if lines:
            kind = CostKind.SERVED if is_served else CostKind.ROUND
            variances = [rounds[math.floor(load)].variance(name, width) for width in widths]
            reading = (0.0, 0.0)
            if size is not None:
                num_read = drafter.num_read(size.num_prompt_tokens) if drafter else size.num_prompt_tokens
                reading = math.ceil(num_read), costs.prefill_ms(name, num_read)
            parts = (_json(name), f'"{kind.value}"', _list(lines), _floats(variances), _floats(reading))
            found[name or ""] = _list(parts)
    return found


def _read_costs(content: Sequence[Any]) -> CostTable:
    points = []
    for name, kind, lines, variances, (num_read, reading_ms) in content:
        for load, widths, times in lines:
            of_widths = variances if len(variances) == len(widths) else [variances[0]] * len(widths)
            for width, ms, variance in zip(widths, times, of_widths, strict=True):
                points.append(CostPoint(name, load, width, ms, 1, kind=CostKind(kind), correction_variance=variance))
        if reading_ms > 0:
            points.append(CostPoint(name, 1, num_read, reading_ms, 1, context=0, kind=CostKind.PREFILL))
    return CostTable(points)


def _alternative_text(one: Alternative) -> str:
    expected = one.num_draft_tokens, one.speedup, one.speedup_low, one.speedup_high, one.tokens_per_s
    return f"[{_json(one.drafter)},{_floats(expected)[1:]}"


def _read_budget(content: Mapping[str, Any]) -> ExplorationBudget:
    at = content.get("decided_at")
    return ExplorationBudget(**{**content, "decided_at": None if at is None else datetime.fromtimestamp(at, UTC)})


def _drafter_content(drafter: DrafterState) -> dict[str, Any]:
    """Its fields that are not as usual."""
    values = ((field, getattr(drafter, field.name)) for field in fields(drafter))
    return {field.name: value for field, value in values if field.default is MISSING or value != field.default}


def _read_drafter(content: Mapping[str, Any]) -> DrafterState:
    tuples = {name: tuple(content[name]) for name in ("offers", "through") if name in content}
    return DrafterState(**{**content, **tuples})


def _setting_content(setting: DraftSetting | None) -> list[Any] | None:
    return None if setting is None else [setting.drafter, setting.num_draft_tokens]


def _read_setting(values: Sequence[Any] | None) -> DraftSetting | None:
    return None if values is None else DraftSetting(*values)


def _given(**values: Any) -> dict[str, Any]:
    """Those that are not None: most decisions need few of them."""
    return {name: value for name, value in values.items() if value is not None}


def _cut(text: str | None) -> str | None:
    return None if text is None else text[:_MOST_CHARACTERS]


def _number(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")


def _rounded(by_drafter: Mapping[str, float]) -> dict[str, float]:
    return {name: float(f"{value:.6g}") for name, value in by_drafter.items()}


def _floats(values: Sequence[float]) -> str:
    """A list of numbers as JSON, five times as fast as the encoder of the standard library."""
    if not math.isfinite(sum(values)):
        raise ValueError("expected finite figures in a snapshot")
    return _list(["%.5g" % value for value in values])  # noqa: UP031 - the fastest way


def _list(texts: Iterable[str]) -> str:
    return f"[{','.join(texts)}]"


def _object(texts: Mapping[str, str]) -> str:
    return f"{{{','.join(f'{_json(name)}:{text}' for name, text in texts.items())}}}"


def _one_of_alike(values: Sequence[float]) -> Sequence[float]:
    return values[:1] if len(set(values)) == 1 else values


def _spread(values: Sequence[float], size: int) -> tuple[float, ...]:
    return tuple(values) * size if len(values) == 1 else tuple(values)
