"""The experiment over whole requests, on two simulated servers whose law and true speed-up are known."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from statistics import mean

import pytest

from alphaloop.experiment.assign import RequestDesign, RequestSchedule
from alphaloop.experiment.estimate import compared_blocks, load_law, measured_speedup
from alphaloop.experiment.observe import Phase, RequestFacts, Slice, Treatment, TrialGroup
from tests.unit.alphaloop.experiment.request_world import Concluded, KnownLoad, RequestScenario, play

START = datetime(2026, 1, 1, tzinfo=UTC)
CODE = TrialGroup("code greedy", Treatment("draft", 4))
DESIGN = RequestDesign(control_share=0.2, control_turnover=1.0, window_turnover=1.0, least_counted=4)


def facts(second: float) -> RequestFacts:
    return RequestFacts(START + timedelta(seconds=second), 50, 50, 0, 1.0, 0.1, 4.0, 0.0, 200.0)


class Traffic:
    """Four requests at once, each of four seconds; one starts and one ends each second."""

    def __init__(self, design: RequestDesign = DESIGN, *, trials: tuple[TrialGroup, ...] = (CODE,)) -> None:
        self.schedule = RequestSchedule(design, random.Random(1))
        self.trials = trials
        self.speculates: list[bool] = []
        self.slices: list[Slice] = []

    def run(self, num_seconds: int, *, lost: frozenset[int] = frozenset()) -> None:
        for _ in range(num_seconds):
            second = len(self.speculates)
            now = START + timedelta(seconds=second)
            if second >= 4:
                ended = None if second - 4 in lost else facts(second - 4)
                self.schedule.end(f"{second - 4}", ended, now)
            trial = self.trials[second % len(self.trials)]
            self.speculates.append(self.schedule.start(f"{second}", trial, now))
            self.slices += self.schedule.take()


def test_a_block_counts_requests_before_while_and_after_others_start_vanilla() -> None:
    traffic = Traffic()
    traffic.run(400)
    first = traffic.speculates.index(False)
    num_control = traffic.speculates[first:].index(True)
    assert num_control == 4
    by_phase = {one.phase: one for one in traffic.slices if one.block_id == traffic.slices[0].block_id}
    assert by_phase.keys() == set(Phase)
    begun = {phase: (one.started_at - START).total_seconds() for phase, one in by_phase.items()}
    # The switch is at `first`: four requests run then, and the four before them have ended.
    assert begun[Phase.BEFORE] == first - 8 + 1
    assert begun[Phase.CONTROL] == first
    # The last vanilla request starts at first + 3 and ends four seconds later, just before another one starts.
    assert begun[Phase.AFTER] == first + 7
    assert {one.num_prompt_rounds for phase, one in by_phase.items() if phase is not Phase.BETWEEN} == {4}
    counted = sum(one.num_prompt_rounds for one in (*traffic.slices, *traffic.schedule.close()))
    assert counted == 400 - 4, "every request that ended is counted once"


def test_trials_switch_together_and_are_compared_with_themselves() -> None:
    traffic = Traffic(replace(DESIGN, least_counted=8), trials=(CODE, CODE, TrialGroup("sql greedy", CODE.treatment)))
    traffic.run(600)
    blocks = compared_blocks(one for one in traffic.slices if one.task == "code greedy")
    assert len(blocks) > 3
    assert {one.block_id for one in traffic.slices if one.task == "sql greedy"}.isdisjoint(
        block.control.block_id for block in blocks
    )


def test_requests_of_which_nothing_is_known_hold_nothing_up() -> None:
    traffic = Traffic()
    traffic.run(400, lost=frozenset(range(0, 400, 5)))
    assert {one.phase for one in traffic.slices} == set(Phase)
    traffic.schedule.end("never started", None, START)


@pytest.mark.parametrize("share", [0.02, 0.2])
def test_the_share_of_control_is_that_of_the_design_where_one_request_runs_at_a_time(share: float) -> None:
    schedule = RequestSchedule(RequestDesign(control_share=share), random.Random(1))
    speculates = []
    for number in range(5000):
        began = START + timedelta(seconds=10 * number)
        speculates.append(schedule.start(f"{number}", CODE, began))
        schedule.end(f"{number}", facts(10 * number), began + timedelta(seconds=9))
    assert speculates.count(False) / len(speculates) == pytest.approx(share, rel=0.15)


def test_time_without_requests_earns_no_control() -> None:
    schedule = RequestSchedule(DESIGN, random.Random(1))
    arms = []
    for number in range(30):
        began = START + timedelta(hours=number)
        arms.append(schedule.start(f"{number}", CODE, began))
        schedule.end(f"{number}", facts(3600.0 * number), began + timedelta(seconds=1))
    assert arms.count(False) < 12


def run(scenario: RequestScenario, seed: int, num_requests: int = 1500) -> Concluded:
    return play(scenario, seed, RequestDesign(control_share=0.2), num_requests)


@pytest.mark.parametrize(
    ("scenario", "speedup"),
    [
        (RequestScenario("null, own devices"), 1.0),
        (RequestScenario("draft, one device", num_draft_tokens=4, cost=1.9, is_shared=True), None),
    ],
    ids=lambda given: given.name if isinstance(given, RequestScenario) else "",
)
def test_intervals_hold_the_truth_and_control_its_share(scenario: RequestScenario, speedup: float | None) -> None:
    found = [run(scenario, seed) for seed in range(8)]
    assert mean(one.control_share for one in found) == pytest.approx(0.2, abs=0.05)
    true = sum(one.truth.vanilla_s + one.truth.prompt_s for one in found) / sum(
        one.truth.treatment_s + one.truth.prompt_s for one in found
    )
    if speedup is not None:
        assert true == pytest.approx(speedup)
    shown = [one for one in found if one.low > 0]
    assert len(shown) >= 6
    # Of eight intervals of 95 %, more than two miss the truth in one of 170 times.
    assert sum(one.low <= true <= one.high for one in shown) >= len(shown) - 2


def test_a_law_is_told_from_control_slices_that_are_parted_by_load() -> None:
    def one(phase: Phase, block: int, part: int, *, beside: float, elsewhere: float, context: float) -> Slice:
        round_s = 0.01 * (1 + block % 3) * (1 + 0.1 * beside + 0.05 * elsewhere) * (1 + 0.2 * context / 1000)
        return Slice(
            block_id=f"{block}",
            task="code",
            phase=phase,
            treatment=CODE.treatment,
            started_at=START + timedelta(seconds=100 * block + 10 * part),
            num_rounds=100,
            num_sequence_rounds=100,
            num_tokens=100,
            num_proposed=0,
            sequence_s=100 * round_s,
            sum_running=round(100 * beside),
            sum_elsewhere=100 * elsewhere,
            sum_context=100 * context,
        )

    rng = random.Random(1)
    slices = []
    for block in range(12):
        slices.append(one(Phase.BEFORE, block, 0, beside=8, elsewhere=1, context=300))
        slices.append(one(Phase.AFTER, block, 9, beside=8, elsewhere=0, context=300))
        slices += [
            one(Phase.CONTROL, block, part, beside=part, elsewhere=rng.randrange(9), context=rng.choice((100.0, 900.0)))
            for part in range(2, 8)
        ]
    law = load_law(compared_blocks(slices))
    assert law.slopes == pytest.approx([0.1, 0.05, 0.2], rel=0.02)
    assert abs(law.influence).max() < 1e-3
    found = measured_speedup(slices)
    assert found.speedup.mean == pytest.approx(1.0, rel=1e-3), "the load moves, and speculation does nothing"
    whole = [one for one in slices if one.phase is not Phase.CONTROL or one.started_at.second == 40]
    assert load_law(compared_blocks(whole)) is None, "of a device, whose control slices are whole"


def test_workers_that_share_servers_find_the_truth_with_a_load_that_is_read_now_and_then() -> None:
    shared = RequestScenario("null, two workers", num_workers=2)

    def error(known: KnownLoad) -> float:
        """Of the mean of four runs; the truth is 1."""
        found = [run(replace(shared, known_load=known), seed, 3000) for seed in range(4)]
        return mean(math.log(one.ratio) for one in found)

    assert error("own") < -0.1
    assert abs(error("read")) < 0.02
