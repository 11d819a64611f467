"""The parts of a run that can be seen without one: its plan, its jobs, its engine, its clock, its search of logs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos.faults import FAULTS
from tests.chaos.fleet import CHECKOUT
from tests.chaos.log_search import leaks
from tests.chaos.plan import draw_plan
from tests.chaos.size import LONG, SHORT, Size
from tests.chaos.size import OUTAGES as OUTAGE_SIZE


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


def test_a_skewed_clock_shows_another_hour_to_every_module_of_ours() -> None:
    program = """if True:
        import time
        from datetime import UTC, datetime, timedelta
        import worker.assembly
        from tests.chaos.worker_process import skew_clock
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
