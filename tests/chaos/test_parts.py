"""The parts of a run that can be seen without one: its plan, its jobs, its engine, its clock, its search of logs."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from alphaloop.deciding.policy import Decision, Reason
from alphaloop.messages import Job, Mode
from tests.chaos.echo_engine import EchoEngine
from tests.chaos.faults import FAULTS
from tests.chaos.fleet import CHECKOUT
from tests.chaos.log_search import leaks
from tests.chaos.page import BEGIN, END, write
from tests.chaos.phases import PhaseReport
from tests.chaos.plan import draw_plan
from tests.chaos.report import RunReport
from tests.chaos.size import LONG, SHORT
from tests.chaos.work import Fate, null_jobs, text_of
from worker.engine import Sampling


def test_a_plan_is_its_seed() -> None:
    assert draw_plan(7, LONG) == draw_plan(7, LONG)
    assert draw_plan(7, LONG) != draw_plan(8, LONG)


@pytest.mark.parametrize("seed", range(5))
def test_the_long_plan_has_every_fault_and_pairs_that_hit_different_things(seed: int) -> None:
    phases = draw_plan(seed, LONG).null
    assert {phase.faults[0] for phase in phases if len(phase.faults) == 1} == set(FAULTS)
    pairs = [[FAULTS[name].target for name in phase.faults] for phase in phases if len(phase.faults) == 2]
    assert len(pairs) == LONG.num_pairs
    assert all(one is not other for one, other in pairs)


def test_jobs_are_planted_as_asked_and_repeat_with_their_seed() -> None:
    jobs = list(null_jobs(500, num_refused=20, num_killers=3, rng=random.Random(1)))
    fates = [job.fate for job in jobs]
    assert (fates.count(Fate.REFUSED), fates.count(Fate.KILLS), len({job.job_id for job in jobs})) == (20, 3, 500)
    assert any(job.is_streamed for job in jobs)
    again = list(null_jobs(500, num_refused=20, num_killers=3, rng=random.Random(1)))
    assert [(job.job_id, job.fate, job.text) for job in again] == [(job.job_id, job.fate, job.text) for job in jobs]


def test_the_engine_writes_the_text_of_the_prompt_word_by_word() -> None:
    engine = EchoEngine(2, round_s=0.0)
    job = next(job for job in null_jobs(1, num_refused=0, num_killers=0, rng=random.Random(1)))
    vanilla = Decision(Mode.VANILLA, None, None, 0, Reason.FORCED, "a test")
    sent = json.loads(job.value)
    sampling = Sampling(max_tokens=4, temperature=0.0)
    for job_id in ("one", "other"):
        engine.admit(engine.prepare(Job.model_validate({**sent, "job_id": job_id, "task": "chat"}), sampling), vanilla)
    texts, steps = {"one": "", "other": ""}, []
    while engine.load().num_running:
        steps.append(engine.step())
        for delta in steps[-1].deltas:
            texts[delta.job_id] += delta.text
    assert texts == dict.fromkeys(texts, text_of(sent["prompt"])) == dict.fromkeys(texts, job.text)
    assert {generation.text for generation in steps[-1].finished} == {job.text}
    assert len(steps) == 4


def test_a_skewed_clock_shows_another_hour_to_every_module_of_ours() -> None:
    program = """if True:
        import time
        from datetime import UTC, datetime, timedelta
        import worker.assembly
        from tests.chaos.skewed_clock import skew_clock
        monotonic = time.monotonic()
        skew_clock(timedelta(hours=1))
        for found in (worker.components.datetime.now(UTC), datetime.fromtimestamp(time.time(), UTC)):
            assert abs(found - datetime.now(UTC) - timedelta(hours=1)) < timedelta(minutes=1), found
        assert isinstance(datetime.now(UTC), worker.components.datetime)
        assert time.monotonic() - monotonic < 60
    """
    done = subprocess.run([sys.executable, "-c", program], cwd=CHECKOUT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_leak_in_any_log_is_found_and_not_repeated(tmp_path: Path) -> None:
    (tmp_path / "kafka").mkdir()
    (tmp_path / "kafka" / "kafka.log").write_bytes(b"\xff connecting with hunter2\n")
    (tmp_path / "worker.log").write_text("nothing to see\n")
    assert leaks(tmp_path, {"a password": "hunter2", "a prompt": "tell me"}) == ["kafka.log holds a password"]


def test_the_short_run_is_a_part_of_the_long_one() -> None:
    assert set(SHORT.faults) < set(LONG.faults)


def test_the_figures_replace_those_of_the_run_before(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"above\n{BEGIN}\nold figures\n{END}\nbelow\n")
    phase = PhaseReport(("disk full",), 40.0, 100, 7, 2, {1: 2}, 0, 0.5, None, 12)
    report = RunReport(7, 61.0, (phase,), (), (3.0,), 100, 99, 101, 2, 0, 1, 9, 50, 8, 3, {"null-0": 100 << 20}, 1000)
    for _ in range(2):
        write(page, report, SHORT)
    text = page.read_text()
    assert text.startswith("above\n")
    assert text.endswith(f"{END}\nbelow\n")
    assert "old figures" not in text
    assert text.count("| disk full | 40 | 100 | 7 | 2 | 2 with 1 | 0 | 0.5 | not seen |") == 1
    assert "**Promises broken: 0.**" in text


def test_a_page_without_marks_is_refused(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("no marks")
    report = RunReport(7, 61.0, (), (), (), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, {}, 0)
    with pytest.raises(ValueError, match="expected <!-- last run -->"):
        write(page, report, SHORT)
