"""The parts of a run that can be seen without one: its plan, its jobs, its engine, its clock, its search of logs."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from alphaloop.deciding.policy import Decision, Reason
from alphaloop.errors import DecodeFailed
from alphaloop.messages import Job, Mode
from tests.chaos.echo_engine import EchoEngine
from tests.chaos.faults import FAULTS
from tests.chaos.fleet import CHECKOUT
from tests.chaos.log_search import leaks
from tests.chaos.page import OUTAGES, PHASES, write
from tests.chaos.phases import PhaseReport
from tests.chaos.plan import draw_plan
from tests.chaos.report import RunReport
from tests.chaos.size import LONG, SHORT, Size
from tests.chaos.size import OUTAGES as OUTAGE_SIZE
from tests.chaos.watcher import Progress, first_growth_s, longest_silence_s
from tests.chaos.work import Fate, PlannedJob, null_jobs, text_of
from worker.engine import Sampling

REPORT = RunReport(
    seed=7,
    seconds=61.0,
    phases=(),
    violations=(),
    has_small_disk=True,
    settled_s=(3.0,),
    num_jobs=100,
    num_rows=99,
    num_results=101,
    num_repeated_results=2,
    num_asked_again=0,
    num_letters=1,
    num_by_status={"succeeded": 98, "failed": 1},
    num_failures=4,
    num_chunks=9,
    num_ended_streams=3,
    num_commits=50,
    num_starts=8,
    num_measured=5,
    num_cut_connections=3,
    peak_bytes={"null-0": 100 << 20},
    num_log_bytes=1000,
    load=(0.5, 1.5),
)


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


PLANTED: dict[Fate, int] = {fate: 10 for fate in Fate if fate is not Fate.SUCCEEDS}


def jobs(num_jobs: int, planted: Mapping[Fate, int], *, seed: int = 1) -> list[PlannedJob]:
    return list(null_jobs(num_jobs, planted, rng=random.Random(seed), sending_s=60.0))


def test_jobs_are_planted_as_asked_and_repeat_with_their_seed() -> None:
    found = jobs(500, PLANTED)
    assert Counter(job.fate for job in found) == {**PLANTED, Fate.SUCCEEDS: 500 - sum(PLANTED.values())}
    assert len({job.job_id for job in found}) == 500
    assert {job.topic for job in found} == {"jobs.chat", "jobs.chat.high"}
    assert {job.fate for job in found if job.is_streamed} == set(Fate) - {Fate.REFUSED}
    assert [(job.job_id, job.fate, job.text, job.is_high) for job in jobs(500, PLANTED)] == [
        (job.job_id, job.fate, job.text, job.is_high) for job in found
    ]


def admit(engine: EchoEngine, job: PlannedJob, job_id: str) -> None:
    sent = Job.model_validate({**json.loads(job.value), "job_id": job_id, "task": "chat"})
    vanilla = Decision(Mode.VANILLA, None, None, 0, Reason.FORCED, "a test")
    engine.admit(engine.prepare(sent, Sampling(max_tokens=4, temperature=0.0)), vanilla)


def test_the_engine_writes_the_text_of_the_prompt_word_by_word(tmp_path: Path) -> None:
    engine, (job,) = EchoEngine(2, round_s=0.0, failures=tmp_path), jobs(1, {})
    for job_id in ("one", "other"):
        admit(engine, job, job_id)
    texts, steps = {"one": "", "other": ""}, []
    while engine.load().num_running:
        steps.append(engine.step())
        for delta in steps[-1].deltas:
            texts[delta.job_id] += delta.text
    assert texts == dict.fromkeys(texts, text_of(json.loads(job.value)["prompt"])) == dict.fromkeys(texts, job.text)
    assert {generation.text for generation in steps[-1].finished} == {job.text}
    assert len(steps) == 4


def test_a_planted_job_fails_as_often_as_it_is_to_in_all_processes_together(tmp_path: Path) -> None:
    job = next(job for job in jobs(20, {Fate.FAILS_FIRST: 20}) if job.num_failures == 2)
    for is_alone in (False, True, False, True, False):
        engine = EchoEngine(2, round_s=0.0, failures=tmp_path)
        admit(engine, job, job.job_id)
        if not is_alone:
            admit(engine, jobs(1, {})[0], "other")
        if len(list(tmp_path.iterdir())) and (tmp_path / job.job_id).stat().st_size == job.num_failures:
            assert engine.step().deltas
        else:
            with pytest.raises(DecodeFailed):
                engine.step()
    assert (tmp_path / job.job_id).stat().st_size == job.num_failures


def test_a_skewed_clock_shows_another_hour_to_every_module_of_ours() -> None:
    program = """if True:
        import time
        from datetime import UTC, datetime, timedelta
        import worker.assembly
        from tests.chaos.skewed_clock import skew_clock
        monotonic = time.monotonic()
        skew_clock(timedelta(hours=1))
        for found in (worker.loop.datetime.now(UTC), datetime.fromtimestamp(time.time(), UTC)):
            assert abs(found - datetime.now(UTC) - timedelta(hours=1)) < timedelta(minutes=1), found
        assert isinstance(datetime.now(UTC), worker.loop.datetime)
        assert time.monotonic() - monotonic < 60
    """
    done = subprocess.run([sys.executable, "-c", program], cwd=CHECKOUT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_leak_in_any_log_is_found_and_not_repeated(tmp_path: Path) -> None:
    (tmp_path / "kafka").mkdir()
    (tmp_path / "kafka" / "kafka.log").write_bytes(b"\xff connecting with hunter2\n")
    (tmp_path / "worker.log").write_text("nothing to see\n")
    assert leaks(tmp_path, {"a password": "hunter2", "a prompt": "tell me"}) == ["kafka.log holds a password"]


def names_of(size: Size) -> set[str]:
    return {name for names in size.phases for name in names}


def test_the_short_run_is_a_part_of_the_long_one() -> None:
    assert names_of(SHORT) < names_of(LONG) == set(FAULTS)
    assert names_of(OUTAGE_SIZE) < names_of(SHORT)


def test_the_figures_replace_those_of_the_run_before(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "above\n<!-- last run -->\nold figures\n<!-- end of last run -->\nbetween\n"
        "<!-- last outages -->\nold outages\n<!-- end of last outages -->\nbelow\n"
    )
    phase = PhaseReport(
        faults=("disk full",),
        fault_s=40.0,
        num_sent=100,
        num_ended=7,
        num_started=2,
        ended_themselves={1: 2},
        num_sick=0,
        said={"ready": 3, "not up": 1},
        num_held=64,
        num_waiting=9,
        first_outcome_s=0.5,
        first_result_s=0.7,
        silence_s=41.0,
        caught_up_s=None,
        backlog=12,
    )
    report = replace(REPORT, phases=(phase,))
    for _ in range(2):
        write(page, report, SHORT, where=PHASES)
        write(page, report, SHORT, where=OUTAGES)
    text = page.read_text()
    assert text.startswith("above\n<!-- last run -->\nSeed 7, 1 brokers")
    assert "<!-- end of last run -->\nbetween\n<!-- last outages -->\nSeed 7" in text
    assert text.endswith("|\n<!-- end of last outages -->\nbelow\n")
    assert "old figures" not in text
    assert "old outages" not in text
    assert text.count("| disk full | 40 | 100 | 7 | 2 | 2 with 1 | 0 | 0.5 | not seen |") == 1
    assert (
        text.count(
            "| disk full | 40 | ready 75%; not up 25% | 64 | 2 with 1 | 100 | 7 | 41.0 | 0.7 | not seen | 0 | 0 |"
        )
        == 1
    )
    assert text.count("**Promises broken: 0.**") == 2


def test_a_topic_that_begins_again_grows_and_its_silence_is_told() -> None:
    seen = [Progress(float(at_s), number) for at_s, number in enumerate([10, 20, 20, 0, 0, 5, 9])]
    assert first_growth_s(seen, 1.5) == 3.5
    assert first_growth_s(seen, 6.0) is None
    assert longest_silence_s(seen, 0.5, 6.5) == 4.0


def test_a_page_without_marks_is_refused(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("no marks")
    with pytest.raises(ValueError, match="expected <!-- last run -->"):
        write(page, REPORT, SHORT)
