"""Servers have cores of their own where they are told to."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from benchmarks.servers import on_cores, split_cores

CHILD = "import os; print(sorted(os.sched_getaffinity(0)))"


def cores_of_a_child() -> set[int]:
    found = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, check=True, timeout=60).stdout
    return {int(core) for core in found.strip("[]\n").split(",")}


def test_what_begins_in_the_block_runs_on_its_cores() -> None:
    own = os.sched_getaffinity(0)
    one = {min(own)}
    with on_cores(one):
        assert cores_of_a_child() == one
    assert cores_of_a_child() == own
    with on_cores([]):
        assert cores_of_a_child() == own


def test_others_get_what_the_servers_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2, 3, 5})
    assert split_cores([3]) == ({3}, {2, 5})
    assert split_cores([]) == ({2, 3, 5}, {2, 3, 5})
    for wanted in ([4], [2, 3, 5], [2, 4]):
        with pytest.raises(ValueError, match=r"expected some of the cores \[2, 3, 5\] and not all, found"):
            split_cores(wanted)
