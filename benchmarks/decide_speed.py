"""How long a decision takes, and how long posteriors take to infer. Last line: JSON.

python -m benchmarks.decide_speed
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import cycle
from uuid import uuid4

from alphaloop.acceptance import AcceptanceCounts, EvidenceKey
from alphaloop.costs import CostKind, CostPoint, CostTable, timing_variance
from alphaloop.deciding.decision import DecisionContext, DraftSetting
from alphaloop.deciding.evidence import EvidenceSnapshot, EvidenceSums, KeyEvidence
from alphaloop.deciding.exploration import ExplorationBudget
from alphaloop.deciding.goodput import DrafterState
from alphaloop.deciding.inference import Posteriors
from alphaloop.deciding.job_facts import JobFacts, PolicyLimits, Subject, TaskRules
from alphaloop.deciding.policy import decide
from alphaloop.deciding.session import DecisionSession
from alphaloop.deciding.snapshot import SessionFacts, Snapshot, SnapshotEncoder
from benchmarks.policy.ours import BudgetsInMemory, ChoicesInMemory

NOW = datetime(2026, 1, 5, tzinfo=UTC)
HALF_LIFE, SUBJECT = timedelta(days=3), Subject("code", "greedy")
#: 12 + 7 draft lengths and vanilla: 20 alternatives.
DRAFTERS = (DrafterState("lookup", "r1", 12), DrafterState("draft", "r1", 7))
SAMPLINGS = ("greedy", "t<=0.5", "t<=1.0", "t>1.0")
PROMPTS = ("<=256", "<=1024", "<=4096")
REPEATS = 2000
NUM_SLOTS = 32


def main() -> None:
    """Time decisions of a warm task with 1 and 8 running sequences, and the posteriors they rest on.

    `session_us` is a whole decision of a session whose posteriors and settings by running sequences are known;
    `snapshot_us` is the writing of what it was taken from, which a worker does in the background (bar: 200).
    """
    snapshot, limits, points = EvidenceSnapshot(HALF_LIFE, _evidence(random.Random(1))), PolicyLimits(), _points()
    wanted = EvidenceKey("code", "target", "engine", "greedy", "<=256")

    def infer() -> list[object]:
        posteriors = Posteriors(snapshot, limits)
        return [posteriors.inferred(wanted, drafter, NOW) for drafter in DRAFTERS]

    posteriors = Posteriors(snapshot, limits)
    by_name = {drafter.name: posteriors.inferred(wanted, drafter, NOW).posterior for drafter in DRAFTERS}
    found = {"infer_us": _median_us(infer, REPEATS // 20)}
    for num_running in (1, 8):
        context = DecisionContext(SUBJECT, num_running, 1, 120.0, prompt_tokens=300.0)
        table = CostTable(points)

        def once(table: CostTable = table, context: DecisionContext = context) -> object:
            budget = ExplorationBudget(balance=500.0, unseen={"draft": 40.0})
            return decide(by_name, DRAFTERS, table, context, limits, incumbent=DraftSetting("lookup", 4), budget=budget)

        decision = decide(by_name, DRAFTERS, table, context, limits)
        found["num_alternatives"] = len(decision.alternatives)
        found[f"decide_us_running_{num_running}"] = _median_us(once, REPEATS)
        # The tables take turns, as costs change when a round was timed in between.
        whole = _in_session(snapshot, [table, CostTable(points)], num_running)
        found[f"session_us_running_{num_running}"] = _median_us(whole, REPEATS)
    found |= _snapshot(snapshot, points)
    for name, value in found.items():
        print(f"{name:32} {value:8.1f}")
    print(json.dumps(found))


def _in_session(
    snapshot: EvidenceSnapshot,
    tables: list[CostTable],
    num_running: int,
    note: Callable[[Snapshot], None] | None = None,
) -> Callable[[], object]:
    """A session's decision for one job; the cost tables take turns."""
    turns = cycle(tables)
    limits = PolicyLimits()
    session = DecisionSession(
        "target",
        "engine",
        Posteriors(snapshot, limits),
        choices=ChoicesInMemory(),
        budgets=BudgetsInMemory(snapshot, lambda: DRAFTERS),
        costs=lambda: next(turns),
        drafters=lambda: DRAFTERS,
        num_slots=NUM_SLOTS,
        note=note,
    )
    jobs, rules = [JobFacts(300, 120)], TaskRules()
    return lambda: session.decide(SUBJECT, jobs, rules, num_running=num_running, now=NOW, decision_id=uuid4())


def _snapshot(evidence: EvidenceSnapshot, points: list[CostPoint]) -> dict[str, float]:
    """What it takes to write down what a decision was taken from, and how long the document is.

    Posteriors stay for about a second and are written once; costs change with each round, so each decision has others.
    """
    noted: list[Snapshot] = []
    decide_one = _in_session(evidence, [CostTable(points) for _ in range(8)], 8, note=noted.append)
    for _ in range(REPEATS):
        decide_one()
    facts = SessionFacts("worker-1", "host", "device", "engine", "target", NUM_SLOTS, HALF_LIFE, PolicyLimits())
    encoder, turns = SnapshotEncoder(facts), cycle(noted)
    return {
        "snapshot_us": _median_us(lambda: encoder.encode(next(turns)), REPEATS),
        "snapshot_bytes": max(len(encoder.encode(one)) for one in noted[:50]),
    }


def _median_us(call: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e6


def _points() -> list[CostPoint]:
    points = []
    for batch in (1, 2, 4, 8):
        for width in (1, 2, 3, 5, 9, 13):
            points.append(CostPoint(None, batch, width, 20 + 2 * batch + 0.6 * batch * width, 9))
            points.append(CostPoint("lookup", batch, width, 0.05 * batch, 9))
            points.append(CostPoint("draft", batch, width, 3.0 * width + 0.2 * batch, 9))
    for batch, width in ((1, 1), (1, 13), (8, 1), (8, 13)):
        points.append(CostPoint(None, batch, width, 30 + 2 * batch + 0.6 * batch * width, 9, 2048))
    points += [CostPoint(None, 1, w, 0.5 * w, 5, 0, CostKind.PREFILL) for w in (1, 512)]
    points += [CostPoint("draft", 1, w, 0.07 * w, 5, 0, CostKind.PREFILL) for w in (1, 512)]
    return [replace(point, correction_variance=timing_variance(point.num_samples)) for point in points]


def _evidence(rng: random.Random) -> dict[EvidenceKey, KeyEvidence]:
    found = {}
    for drafter in DRAFTERS:
        for sampling in SAMPLINGS:
            for prompt in PROMPTS:
                evidence = KeyEvidence.empty(NOW)
                for _ in range(30):
                    evidence = evidence.with_job(_job(rng, drafter.max_draft_tokens), HALF_LIFE)
                key = EvidenceKey("code", "target", "engine", sampling, prompt, "", drafter.name, drafter.revision)
                found[key] = evidence
    return found


def _job(rng: random.Random, k: int) -> EvidenceSums:
    counts = AcceptanceCounts().with_round(0, 0, num_emitted=1)
    for _ in range(30):
        accepted = next((i for i in range(k) if rng.random() > 0.7), k)
        counts = counts.with_round(k, accepted, num_emitted=accepted + 1)
    return EvidenceSums.of_job(counts, k, NOW, counts.num_tokens, 200)


if __name__ == "__main__":
    main()
