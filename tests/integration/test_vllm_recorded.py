"""vLLM's own scheduler with our class over recorded texts: MTP and Medusa too, whose weights no test has."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

import pytest

from tests.integration.test_vllm_follows import INSIDE, PYTHON, REPOSITORY, K

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SCRIPT = REPOSITORY / "tests" / "fixtures" / "schedule_inside_vllm.py"
NUM_SEEDS = 80


@pytest.fixture(scope="module")
def played() -> list[dict[str, Any]]:
    if not PYTHON.exists():
        pytest.skip("no environment with vLLM: make .venv-vllm/.installed")
    done = subprocess.run(
        [PYTHON, SCRIPT],
        input=json.dumps({"seeds": list(range(NUM_SEEDS))}),
        capture_output=True,
        text=True,
        env={**os.environ, **INSIDE},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_the_seeds_draw_every_method_both_ways_of_scheduling_and_preemptions(played: list[dict[str, Any]]) -> None:
    ways = {(each["server"]["method"], each["server"]["is_async"]) for each in played}
    both = {(method, is_async) for method in ("draft_model", "eagle3", "mtp") for is_async in (False, True)}
    assert ways == both | {("ngram", False), ("medusa", False)}
    assert sum(each["preempted"] for each in played) > 20
    assert sum(request["is_aborted"] for each in played for request in each["requests"]) > 20


def test_texts_are_the_recorded_ones_and_drafts_are_as_long_as_each_request_asks(played: list[dict[str, Any]]) -> None:
    for each in played:
        for request in each["requests"]:
            place, put_out, whole = (each["seed"], each["server"], request), request["token_ids"], request["recorded"]
            assert put_out == (whole[: len(put_out)] if request["is_aborted"] else whole), place
            most = request["said"].get("alphaloop_num_draft_tokens", K)
            assert all(drafted <= most for drafted, _ in request["drafts"]), place


def test_vllm_counts_the_drafts_that_were_verified(played: list[dict[str, Any]]) -> None:
    for each in played:
        for request in each["requests"]:
            counted, drafts = request["counted"], request["drafts"]
            if counted is not None and not request["is_aborted"]:
                # A step that was planned before the end of the text was known is computed and not counted.
                assert len(drafts) - len(counted) in ((0, 1) if each["server"]["is_async"] else (0,))
                assert counted == drafts[: len(counted)], (each["seed"], request)
