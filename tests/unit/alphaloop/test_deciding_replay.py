"""History decided again, and what it would have cost: on streams whose answer is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from alphaloop.acceptance import AcceptanceCounts, EvidenceKey
from alphaloop.cost import CostPoint, CostTable
from alphaloop.deciding.decision import DraftSetting, Reason
from alphaloop.deciding.evidence import EvidenceSums
from alphaloop.deciding.evidence_snapshot import EvidenceSnapshot
from alphaloop.deciding.evidence_source import Place
from alphaloop.deciding.goodput import DrafterState
from alphaloop.deciding.hindsight import Case, Compared, Hindsight, Tally, total
from alphaloop.deciding.job_facts import TaskRules
from alphaloop.deciding.limits import PolicyLimits
from alphaloop.deciding.posterior import tokens_per_round
from alphaloop.deciding.posteriors import Posteriors
from alphaloop.deciding.replay import EngineName, PastJob, Replay, Rules
from alphaloop.messages import Decoding

NOW, STEP, HALF_LIFE = datetime(2026, 9, 1, tzinfo=UTC), timedelta(minutes=1), timedelta(days=3)
LOOKUP = DrafterState("lookup", "r1", 4)
NO_EXPLORATION = PolicyLimits(explore_share=0.0, control_share=0.0)
#: Every pass takes 30 ms, a draft 3 ms: four tokens drafted are a gain wherever more than a tenth of a token comes.
COSTS = CostTable(
    CostPoint(drafter, batch, width, ms, 5)
    for drafter, ms in ((None, 30.0), ("lookup", 3.0))
    for batch in (1, 4)
    for width in (1, 5)
)


def job(
    number: int,
    accepts: Sequence[int] | None,
    *,
    rounds: int = 20,
    task: str = "code",
    reason: str = "faster",
    purpose: str = "traffic",
    batch_size: int = 1,
) -> PastJob:
    """Decoded with so many accepts by position; vanilla without."""
    counts = AcceptanceCounts(rounds + 1, rounds + 1)
    key = EvidenceKey(task, "t", "e", "greedy", "<=256")
    if accepts is not None:
        trials = (rounds, *accepts[:-1])
        counts = AcceptanceCounts(rounds + 1, 1, 0, trials, trials, tuple(accepts))
        key = replace(key, drafter=LOOKUP.name, draft_revision=LOOKUP.revision)
    k = len(accepts or ())
    at = NOW + number * STEP
    sums = EvidenceSums.of_job(counts, k, at, counts.num_tokens, 20)
    return PastJob(key, "cpu", purpose, k, reason, 20, counts.num_tokens, batch_size, 1.0, at, sums, True)


#: The same, but every position of a pass takes 3 ms more.
DEAR_WIDTHS = CostTable(
    replace(point, median_ms=point.median_ms + 3.0 * point.batch * point.width * (point.drafter is None))
    for point in COSTS.points
)


def replay(
    snapshot: EvidenceSnapshot,
    *,
    limits: PolicyLimits = NO_EXPLORATION,
    was: Rules | None = None,
    costs: CostTable = COSTS,
) -> Replay:
    made = Replay(EngineName("cpu", "e", "t"), snapshot, costs, Rules(limits, {}), was=was)
    made.drafters = [LOOKUP]
    return made


def test_every_batch_is_decided_by_the_evidence_before_it() -> None:
    """A drafter of which nothing is accepted: tried while there is no evidence, and never again."""
    snapshot = EvidenceSnapshot(HALF_LIFE)
    again = replay(snapshot)
    found = []
    for number in range(30):
        past = job(number, (0, 0, 0, 0))
        (decision,) = again.decide([past])
        assert decision is not None
        found.append((decision.reason, decision.drafter))
        snapshot.add([(past.key, past.evidence)])
    assert found[0] == (Reason.NO_HISTORY, "lookup")
    assert found[-1] == (Reason.NOT_FASTER, None)
    assert again.num_batches == 30


def test_jobs_that_were_decided_together_are_decided_by_their_groups() -> None:
    """Gold's drafts are accepted, free's are not, and every drafted token makes the pass dearer for all."""
    snapshot = EvidenceSnapshot(HALF_LIFE)
    for number in range(20):
        for segment, accepts in (("gold", (19, 18, 17, 16)), ("free", (0, 0, 0, 0))):
            past = job(number, accepts)
            snapshot.add([(replace(past.key, segment=segment), past.evidence)])
    one = job(20, None, batch_size=4)
    mixed = [replace(one, key=replace(one.key, segment=name)) for name in ("gold", "free") * 2]
    again = replay(snapshot, costs=DEAR_WIDTHS)
    decisions = again.decide(mixed)
    assert again.num_batches == 1
    assert [decision and decision.drafter for decision in decisions] == ["lookup", None] * 2


def test_jobs_in_which_the_rules_have_no_say_are_not_decided_again() -> None:
    forced = job(0, None, reason="forced")
    again = replay(EvidenceSnapshot(HALF_LIFE))
    given = [forced, job(1, (8,), purpose="probe", reason="probe"), job(2, None, reason="no_memory")]
    assert again.decide(given) == (None, None, None)
    assert again.num_batches == 0
    first, none = again.decide([job(3, None), forced])
    assert (first is not None, none) == (True, None)
    by_task = Rules(NO_EXPLORATION, {"code": TaskRules(decoding=Decoding.VANILLA)})
    (freed,) = replay(EvidenceSnapshot(HALF_LIFE), was=by_task).decide([forced])
    assert freed is not None
    assert freed.drafter == "lookup"


def test_a_replay_can_be_repeated_and_explores_only_where_the_rules_say_so() -> None:
    def reasons(limits: PolicyLimits) -> list[str]:
        snapshot = EvidenceSnapshot(HALF_LIFE)
        again, found = replay(snapshot, limits=limits), []
        for number in range(600):
            past = job(number, (1, 0, 0, 0))
            (decision,) = again.decide([past])
            assert decision is not None
            found.append(decision.reason.value)
            if number < 20:
                snapshot.add([(past.key, past.evidence)])
        return found

    generous = PolicyLimits(explore_share=0.1, control_share=0.0)
    trials = reasons(generous)
    assert trials == reasons(generous)
    assert 0 < trials.count("exploring") < 60
    assert "exploring" not in reasons(NO_EXPLORATION)


def compared(snapshot: EvidenceSnapshot, was: DraftSetting, would: DraftSetting, seed: int = 0) -> Compared:
    tally = Tally()
    for _ in range(10):
        tally.add(60, 20, 1.0)
    case = Case(EvidenceKey("code", "t", "e", "greedy", "<=256"), 1, was, would)
    tasks: dict[str, Compared] = {}
    hindsight = Hindsight(snapshot, NO_EXPLORATION, seed)
    assert hindsight.compare({case: tally}, [LOOKUP], COSTS, NOW + timedelta(hours=1), tasks) == 0
    return tasks["code"]


def snapshot_of(num_jobs: int) -> EvidenceSnapshot:
    snapshot = EvidenceSnapshot(HALF_LIFE)
    for number in range(num_jobs):
        past = job(0, (1600, 1280, 1024), rounds=2000) if number % 2 else job(0, (1500, 1200, 960), rounds=2000)
        snapshot.add([(past.key, past.evidence)])
    return snapshot


def test_the_cost_of_another_setting_follows_from_acceptance(seed: int) -> None:
    """A vanilla token takes 30 ms; a round of three drafted 33 ms, for what α ≈ .8 brings."""
    found = compared(snapshot_of(200), DraftSetting(), DraftSetting("lookup", 3), seed)
    tokens = tokens_per_round((1550 / 2000, 0.8, 0.8))[3]
    assert found.was_s == pytest.approx(600 * 0.030)
    assert found.would_s == pytest.approx(600 * 0.033 / tokens, rel=0.01)
    assert found.ratio is not None
    assert found.ratio.low <= found.ratio.mean <= found.ratio.high
    assert found.ratio.mean == pytest.approx(1.1 / tokens, rel=0.01)
    assert (found.num_jobs, found.num_same_jobs, found.measured_s) == (10, 0, 10.0)
    vague = compared(snapshot_of(2), DraftSetting(), DraftSetting("lookup", 3), seed).ratio
    assert vague is not None
    assert vague.high - vague.low > 2 * (found.ratio.high - found.ratio.low)


def test_the_same_setting_costs_the_same_with_any_posterior(seed: int) -> None:
    found = compared(snapshot_of(2), DraftSetting("lookup", 3), DraftSetting("lookup", 3), seed)
    assert found.ratio is not None
    assert (found.ratio.low, found.ratio.mean, found.ratio.high) == (1.0, 1.0, 1.0)
    assert (found.num_same_jobs, found.num_untested_tokens) == (10, 0)
    twice = total([found, found])
    assert (twice.num_jobs, twice.was_s, twice.ratio) == (20, 2 * found.was_s, found.ratio)


def test_drafts_longer_than_any_tested_are_counted_apart() -> None:
    assert compared(snapshot_of(2), DraftSetting("lookup", 3), DraftSetting("lookup", 4)).num_untested_tokens == 600
    assert compared(snapshot_of(2), DraftSetting("lookup", 3), DraftSetting("lookup", 2)).num_untested_tokens == 0


def test_what_nobody_measured_is_left_out() -> None:
    case = Case(EvidenceKey("code", "t", "e", "greedy", "<=256"), 1, DraftSetting("small", 2), DraftSetting())
    tally, tasks = Tally(3, 60, 60, 1.0), dict[str, Compared]()
    hindsight = Hindsight(EvidenceSnapshot(HALF_LIFE), NO_EXPLORATION, 0)
    small = DrafterState("small", "r1", 4)
    assert hindsight.compare({case: tally}, [LOOKUP], COSTS, NOW, tasks) == 3
    assert hindsight.compare({case: tally}, [LOOKUP, small], COSTS, NOW, tasks) == 3
    assert tasks == {}


def test_a_tasks_evidence_moves_its_posterior_and_less_that_of_other_tasks() -> None:
    snapshot = snapshot_of(100)
    wanted = EvidenceKey("code", "t", "e", "greedy", "<=256")
    at = NOW + STEP
    posteriors = Posteriors(snapshot, NO_EXPLORATION)
    known, cold = (posteriors.of(replace(wanted, task=task), LOOKUP, at) for task in ("code", "chat"))
    assert known.acceptance[0] == pytest.approx(0.775, abs=0.01)
    assert 0.5 < cold.acceptance[0] < known.acceptance[0]
    assert cold.jobs == 0
    assert snapshot.knows(Place("code", "lookup", "r1"))
    assert not snapshot.knows(Place("code"))
    lengths = snapshot.lengths("code", [LOOKUP], NOW)
    assert lengths.prompt_tokens == 20
    assert snapshot.lengths("code", [LOOKUP], NOW + HALF_LIFE).jobs == pytest.approx(lengths.jobs / 2)
    assert snapshot.lengths("chat", [LOOKUP], NOW).output_tokens is None
