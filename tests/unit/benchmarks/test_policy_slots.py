"""A simulated device with slots: it does what a worker does, and its counts add up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from alphaloop.acceptance import AcceptanceCounts
from alphaloop.deciding.decision import DraftSetting, Reason
from alphaloop.experiment.observe import Phase as SlicePhase
from benchmarks.policy.compare_slots import compare_on_slots, slot_rule_names
from benchmarks.policy.ours_on_slots import OursOnSlots
from benchmarks.policy.report import Measured
from benchmarks.policy.scenario import Acceptance, Phase, Producer, Scenario, Slots, Slower, Task
from benchmarks.policy.slot_oracle import SlotOracle, StaticSetting, know_slots
from benchmarks.policy.slots import Counter, Running, SlotRound, draw_jobs, draw_slot_stream, play_slots
from tests.unit.benchmarks.test_policy_simulator import DEVICE

BASE = Task(
    drafters={
        "draft": Acceptance(alpha=(0.8, 0.7, 0.6)),
        "lookup": Acceptance(alpha=(0.8, 0.7), reach=(0.4, 0.9)),
    },
    tokens=40,
)


def scenario(*, jobs: int = 60, task: Task = BASE, **others: Task) -> Scenario:
    return Scenario(
        name="test",
        story="",
        kind="stationary",
        device="test",
        tasks={"code": task, **others},
        draft_tokens={"draft": 7, "lookup": 7},
        phases=(Phase(jobs=jobs),),
        slots=Slots(num_slots=4),
    )


class Watching(StaticSetting):
    """Keeps what every round was like."""

    def __init__(self, setting: DraftSetting) -> None:
        super().__init__(setting)
        self.num_running: list[int] = []
        self.at_start: list[int] = []
        self.rounds: list[SlotRound] = []
        self.tokens: dict[int, int] = {}

    def start(self, jobs: Sequence[Running], num_running: int, now_ms: float) -> None:
        super().start(jobs, num_running, now_ms)
        self.at_start += [num_running] * len(jobs)

    def steer(self, running: Sequence[Running], slower: Slower, now_ms: float) -> None:
        self.num_running.append(len(running))

    def observe(self, done: SlotRound) -> None:
        self.rounds.append(done)
        for one, num in zip(done.running, done.num_tokens, strict=True):
            self.tokens[one.job.number] = self.tokens.get(one.job.number, 1) + num


@pytest.mark.parametrize("setting", [DraftSetting(), DraftSetting("draft", 3), DraftSetting("lookup", 7)])
def test_a_free_slot_is_refilled_in_the_next_round(setting: DraftSetting, seed: int) -> None:
    of = scenario()
    stream, rule = draw_slot_stream(of, DEVICE, seed), Watching(setting)
    trace = play_slots(stream, know_slots(of, DEVICE, num_jobs=20).table, rule)
    first_of_last = next(
        i for i, done in enumerate(rule.rounds) if any(one.job.number == len(stream.jobs) - 1 for one in done.running)
    )
    assert set(rule.num_running[: first_of_last + 1]) == {4}
    assert rule.num_running[first_of_last:] == sorted(rule.num_running[first_of_last:], reverse=True)
    assert set(rule.at_start) == {4}
    assert rule.tokens == {job.number: job.needed for job in stream.jobs}
    assert trace.ms == pytest.approx(sum(done.ms for done in rule.rounds)) == pytest.approx(trace.job_ms.sum())


def test_counts_of_rounds_at_one_length_are_those_of_the_engine(seed: int) -> None:
    """AcceptanceCounts refuses what no rounds can produce, and the tokens are the text's."""
    for job in draw_jobs(scenario(), 40, np.random.default_rng(seed)):
        for drafter, k in (("draft", 1), ("draft", 5), ("lookup", 7)):
            assert job.counts_at(drafter, k).num_tokens == job.needed


def test_chances_follow_a_length_that_changes() -> None:
    counter = Counter(3)
    assert counter.add(2, 2, 100, k=2) == 3
    assert counter.add(1, 0, 97, k=1) == 1
    assert counter.add(3, 3, 2, k=3) == 2
    assert counter.chances == (3, 2, 1)
    # The last text ended inside its accepted tokens: it is censored there.
    assert counter.counts == AcceptanceCounts(4, 1, 1, (3, 2, 0), (3, 2, 0), (2, 2, 0))


def test_producers_are_hidden_from_rules_and_known_to_the_oracle(seed: int) -> None:
    """One copies always, the other never. Blind, the oracle treats all jobs alike and takes longer."""
    never, always = Acceptance(alpha=(0.0,)), Acceptance(alpha=(1.0,))
    producers = (
        Producer(drafters={"lookup": always, "draft": never}),
        Producer(drafters={"lookup": never, "draft": always}),
    )
    of = scenario(task=BASE.model_copy(update={"producers": producers}))
    stream, known = draw_slot_stream(of, DEVICE, seed), know_slots(of, DEVICE, num_jobs=60)
    assert len({job.cell for job in stream.jobs}) == 1
    assert {job.kind for job in stream.jobs} == {0, 1}
    seeing, blind = (
        play_slots(stream, known.table, SlotOracle(known, is_blind=is_blind)) for is_blind in (False, True)
    )
    assert blind.ms > 1.1 * seeing.ms


def test_the_oracle_knows_that_tasks_share_a_drafters_proposals(seed: int) -> None:
    """Drafting for one task more costs little where the other drafts already. No single setting is faster."""
    other = BASE.model_copy(update={"drafters": {**BASE.drafters, "draft": Acceptance(alpha=(0.45, 0.4))}})
    of = scenario(jobs=200, chat=other)
    stream, known = draw_slot_stream(of, DEVICE, seed), know_slots(of, DEVICE)
    oracle = play_slots(stream, known.table, SlotOracle(known)).ms
    for setting in known.yields[0]:
        # Jobs of the estimate are others than these: a single setting may be ahead by luck, which is 1 % of 200 jobs.
        assert play_slots(stream, known.table, StaticSetting(setting)).ms > 0.98 * oracle, setting


def test_rounds_with_a_proposal_come_in_runs(seed: int) -> None:
    """Of the rounds behind one with a proposal, 9 of 10 have one too; the share of all rounds stays what it was."""
    task = BASE.model_copy(update={"run_rounds": 10.0, "correlation": 0.2, "tokens": 2000, "tokens_spread": 0.0})
    jobs = draw_jobs(scenario(task=task), 20, np.random.default_rng(seed))
    offered = [np.array(job.offered["lookup"]) > 0 for job in jobs]
    again = np.concatenate([one[1:][one[:-1]] for one in offered])
    assert again.mean() == pytest.approx(0.9, abs=4.5 * (0.09 / len(again)) ** 0.5)
    # 40,000 rounds in runs whose lengths are geometric are worth about 40,000 / 12 independent ones.
    assert np.concatenate(offered).mean() == pytest.approx(0.4, abs=4.5 * (0.24 * 12 / 40_000) ** 0.5)


def test_ours_follows_the_load_and_spends_a_small_share_on_control(seed: int) -> None:
    of = scenario(jobs=250)
    stream, known = draw_slot_stream(of, DEVICE, seed), know_slots(of, DEVICE, num_jobs=120)
    rule = OursOnSlots(of, DEVICE.points(), seed)
    trace = play_slots(stream, known.table, rule, is_control=rule.is_control)
    rule.close()
    phases = {one.phase for one in rule.measured.slices}
    assert SlicePhase.CONTROL in phases
    assert SlicePhase.BEFORE in phases
    assert [number for number, _, _ in rule.choices] == list(range(250))
    assert all(truth.speedup > 1.0 for truth in rule.measured.truth.values())
    explored = {number for number, _, reason in rule.choices if reason is Reason.EXPLORING}
    in_control = [ms for number, ms in enumerate(trace.budget_ms) if number not in explored]
    assert 0 < sum(in_control) < 0.05 * trace.ms


def test_a_seed_is_played_the_same_again(seed: int) -> None:
    of = scenario(jobs=40)
    known = know_slots(of, DEVICE, num_jobs=40)
    rules = slot_rule_names(of)
    first, again, other = (compare_on_slots(of, DEVICE, known, s, rules) for s in (seed, seed, seed + 1))
    assert first == again
    assert first != other
    assert set(first) == set(rules)
    assert all(score.of_oracle_net >= score.of_oracle > 0 for score in first.values())


def test_intervals_are_compared_with_the_truth(seed: int) -> None:
    of = scenario(jobs=20)
    score = compare_on_slots(of, DEVICE, know_slots(of, DEVICE, num_jobs=20), seed, ["ours"])["ours"]
    some = [
        replace(score, speedups=((1.2, 1.1, 1.3, true),), jobs_until_back=back) for true, back in ((1.25, 3), (1.0, 9))
    ]
    found = Measured.of([{"ours": one} for one in some])
    assert (found.num_intervals, found.num_covered, found.most_jobs_until_back) == (2, 1, 9)
    assert found.mean_error == pytest.approx((1.2 / 1.25 - 1 + 0.2) / 2)
