"""A whole measurement over an engine without a model, whose clock is what its rounds are said to cost.

What is compared and in which order: complete, balanced, the same for the same seed.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from pydantic import TypeAdapter

from alphaloop import commands
from alphaloop.cli.measure import SHORTER_IS_BETTER, report_as_json, show
from alphaloop.commands import EVENT
from alphaloop.deciding.goodput import DrafterState
from alphaloop.errors import ConfigError
from alphaloop.payoff.figures import VANILLA, ShipVerdict
from alphaloop.payoff.report import Footprint, Report
from tests.fakes import FakeEngine
from tests.fixtures.models import make_job
from worker.engine import Sampling, Step
from worker.measuring.observing import choose_candidates, choose_drafters, divide, turns
from worker.measuring.report import REASONS, DrafterRecords
from worker.measuring.session import MeasuringPlan, MeasuringSession, refuse_few

NUM = 14
SECRET = "zebra"


class Timed(FakeEngine):
    """Reading takes 20 ms, a vanilla round 10 ms, a drafted token 0.5 ms and its place in the pass 0.1 ms."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.now = 0.0

    def clock(self) -> float:
        """Seconds that steps have taken so far."""
        return self.now

    def step(self) -> Step:
        """With its times."""
        step = super().step()
        draft_s, verify_s = 0.0005 * (step.width - 1), 0.01 + 0.0001 * (step.width - 1)
        wall_s = 0.02 if step.num_prefill_tokens else draft_s + verify_s
        self.now += wall_s
        return replace(step, wall_s=wall_s, draft_s=draft_s, verify_s=verify_s, num_positions=step.batch * step.width)


def session_of(
    engine: Timed,
    *,
    lengths: tuple[int, ...] = (2, 4),
    batch: int = 1,
    repeats: int = 1,
    seed: int = 0,
    sampling: Sampling = Sampling(max_tokens=60, temperature=0.0),  # noqa: B008
    should_stop: Callable[[], bool] = lambda: False,
) -> MeasuringSession:
    prompts = [engine.prepare(make_job(f"{SECRET} {number}", number), sampling) for number in range(NUM)]
    plan = MeasuringPlan(prompts, choose_candidates(engine.drafters, lengths), batch, repeats, 1.3, seed)
    return MeasuringSession(engine, plan, should_stop=should_stop, clock=engine.clock)


def report_of(session: MeasuringSession) -> Report:
    session.run()
    return session.report(DrafterRecords(), lambda: Footprint((), 1 << 30, None), ["a note"])


def test_what_pays_ships_and_says_by_how_much(seed: int) -> None:
    report = report_of(session_of(Timed(acceptance=(0.95,)), seed=seed))
    assert {row.judgement.verdict for row in report.rows} == {ShipVerdict.SHIP}
    assert report.shipped.candidate.num_draft_tokens == 4
    assert report.shipped.figures.ratio.estimate > 2
    assert not report.shipped.reasons
    for row in report.rows:
        assert row.figures.exactness.num_equal == NUM
        assert row.costs.draft_step == pytest.approx(0.05, rel=0.05)
        # What the parts explain is what was measured.
        assert row.costs.speedup == pytest.approx(row.figures.ratio.estimate, rel=0.02)


def test_what_does_not_pay_says_why(seed: int) -> None:
    report = report_of(session_of(Timed(acceptance=(0.1,)), seed=seed))
    assert {row.judgement.verdict for row in report.rows} == {ShipVerdict.DO_NOT_SHIP}
    assert report.shipped is None
    for row in report.rows:
        assert {"account", "low_acceptance"} <= {name for name, _ in row.reasons}


@pytest.mark.parametrize(("batch", "repeats"), [(1, 1), (1, 2), (2, 1)])
def test_the_prompts_of_a_batch_are_one_pair_however_often_they_are_decoded(batch: int, repeats: int) -> None:
    session = session_of(Timed(num_slots=2), batch=batch, repeats=repeats)
    for row in report_of(session).rows:
        assert row.figures.ratio.num_values == NUM // batch
        assert row.figures.acceptance.num_texts == NUM * repeats
        assert len(row.figures.acceptance.by_prompt) == NUM
    assert all(generation.batch_size == batch for _, generation in session.measured.generations(VANILLA))


def test_an_interrupted_run_reports_whole_turns_and_leaves_the_engine_empty(
    rng: random.Random, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = Timed()
    stop_at = rng.randint(400, 900)
    session = session_of(engine, should_stop=lambda: engine.num_steps >= stop_at)
    report = report_of(session)
    assert report.is_interrupted
    assert 0 < report.num_turns < NUM == report.num_turns_planned
    assert all(len(turn) == 3 for turn in session.measured.turns)
    show(report)
    assert "INTERRUPTED: " in capsys.readouterr().out
    assert engine.load().num_running == 0


def test_an_interrupted_warm_up_leaves_nothing_to_report() -> None:
    session = session_of(Timed(), should_stop=lambda: True)
    session.run()
    assert session.measured.is_interrupted
    assert not session.measured.turns


def test_a_failing_step_keeps_what_was_measured() -> None:
    engine = Timed(failing_steps=[700])
    session = session_of(engine)
    report = report_of(session)
    assert session.failure is not None
    assert 0 < report.num_turns < NUM
    assert engine.load().num_running == 0


def test_sampled_prompts_are_not_compared_and_are_tried_greedy(rng: random.Random) -> None:
    sampled = Sampling(max_tokens=60, temperature=0.7)
    report = report_of(session_of(Timed(acceptance=(0.2,)), sampling=sampled))
    assert report.setup.temperature == 0.7
    for row in report.rows:
        assert row.figures.exactness.num_sampled == NUM
        assert row.figures.exactness.is_exact


@pytest.mark.parametrize(
    ("num_prompts", "batch", "num_candidates", "hint"),
    [
        (24, 4, 3, "at least 25 prompts"),
        (10, 2, 1, "at least 11 prompts"),
    ],
)
def test_too_few_batches_are_refused(num_prompts: int, batch: int, num_candidates: int, hint: str) -> None:
    with pytest.raises(ConfigError) as raised:
        refuse_few(num_prompts, batch, num_candidates)
    assert hint in raised.value.hint
    refuse_few(num_prompts + 1, batch, num_candidates)


@pytest.mark.parametrize("columns", [80, 100])
def test_the_report_fits_and_holds_no_prompt(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    report = report_of(session_of(Timed(acceptance=(0.45,), num_slots=1), lengths=(1, 3, 8)))
    show(report)
    told = capsys.readouterr().out
    assert max(map(len, told.splitlines())) <= columns
    for row in report.rows:
        assert f"{row.candidate.name}: {row.judgement.verdict.upper()}," in told
    assert "seed 0" in " ".join(told.split())
    assert "Note: a note." in told
    assert "exactly what vanilla wrote" in told
    machine = json.dumps(report_as_json(report))
    assert SECRET not in told + machine
    assert all(word not in machine for word in ("amber", "basil"))
    found = json.loads(machine)
    assert [one["name"] for one in found["candidates"]] == ["lookup k=1", "lookup k=3", "lookup k=8"]
    assert len(found["candidates"][0]["ratios"]) == NUM
    assert found["ship"] is None or found["ship"].startswith("lookup")


def test_a_report_crosses_to_the_command_line_unchanged() -> None:
    report = report_of(session_of(Timed(acceptance=(0.45,))))
    event = EVENT.validate_json(commands.ReportEvent(data=report).model_dump_json())
    assert isinstance(event, commands.ReportEvent)
    assert TypeAdapter(Report).validate_python(event.data) == report


def test_the_one_reason_told_of_slower_candidates_exists() -> None:
    assert SHORTER_IS_BETTER in {reason.__name__ for reason in REASONS}


LOOKUP = DrafterState("lookup", "1", 12)
SMALL = DrafterState("small", "2", 5)
TINY = DrafterState("tiny", "3", 1)


def test_every_drafter_gets_the_usual_lengths_that_it_can_draft() -> None:
    names = [candidate.name for candidate in choose_candidates([LOOKUP, SMALL, TINY], [])]
    assert names == ["lookup k=2", "lookup k=4", "lookup k=8", "small k=2", "small k=4", "tiny k=1"]


def test_lengths_that_were_asked_for_are_tried_once_each() -> None:
    names = [candidate.name for candidate in choose_candidates([LOOKUP, SMALL], [6, 3, 3])]
    assert names == ["lookup k=3", "lookup k=6", "small k=3"]
    with pytest.raises(ConfigError, match="at most 12, found 13"):
        choose_candidates([LOOKUP, SMALL], [4, 13])


def test_drafters_are_all_or_those_wanted() -> None:
    assert choose_drafters(["a", "b"], []) == ["a", "b"]
    assert choose_drafters(["a", "b"], ["b", "b"]) == ["b"]
    with pytest.raises(ConfigError, match="one of a, b, found 'c'"):
        choose_drafters(["a", "b"], ["c"])
    with pytest.raises(ConfigError, match="no drafter is configured"):
        choose_drafters([], [])


def test_blocks_hold_every_prompt_once_and_are_of_one_size(rng: random.Random) -> None:
    num_prompts, batch = rng.randint(1, 60), rng.randint(1, 9)
    blocks = divide(num_prompts, batch, rng)
    assert sorted(number for block in blocks for number in block) == list(range(num_prompts))
    sizes = {len(block) for block in blocks}
    assert max(sizes) <= batch
    assert max(sizes) - min(sizes) <= 1
    assert len(blocks) == -(-num_prompts // batch)


def test_every_block_is_decoded_in_every_way_and_nobody_is_always_first(seed: int) -> None:
    blocks = [(i,) for i in range(40)]
    candidates = choose_candidates([LOOKUP], [2, 4])
    order = list(turns(blocks, candidates, 3, random.Random(seed)))
    assert all(sorted(turn.candidates, key=repr) == sorted([VANILLA, *candidates], key=repr) for turn in order)
    for repeat in range(3):
        part = order[40 * repeat : 40 * (repeat + 1)]
        assert {turn.repeat for turn in part} == {repeat}
        assert sorted(turn.block for turn in part) == list(range(40))
        assert all(turn.prompts == blocks[turn.block] for turn in part)
    first = Counter(turn.candidates[0] for turn in order)
    # 120 turns, 40 expected for each of three; five standard errors.
    assert all(14 <= first[candidate] <= 66 for candidate in (VANILLA, *candidates))
    assert order == list(turns(blocks, candidates, 3, random.Random(seed)))
