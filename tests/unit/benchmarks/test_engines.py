"""The benchmark of routing: its blocks, its servers' commands and settings, and the ratio that it reports."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest

from alphaloop.inside_vllm.proposer import ProposerSettings
from benchmarks.engines.__main__ import (
    LOADS,
    POLICIES,
    Block,
    PlayedBlock,
    by_task,
    draw_blocks,
    over_better_static,
    summary,
)
from benchmarks.engines.lookup import Text
from benchmarks.engines.serve import NGRAM, draft_model, llama_cpp, vllm, vllm_lookup
from benchmarks.engines.totals import Sums, adds_up
from benchmarks.jobs import prompts_of
from benchmarks.servers import cpu_seconds
from benchmarks.workers import JobResult, Sent

PROMPTS = {"code": [f"code {n}" for n in range(5)], "math": [f"math {n}" for n in range(5)]}


def played(num_tokens: int, seconds: float, drafter: str | None = None) -> Sent:
    result = JobResult.model_validate(
        {
            "job_id": "a",
            "status": "succeeded",
            "usage": {"completion_tokens": num_tokens},
            "timings": {"queue_s": 0.1, "wall_s": seconds - 0.25},
            "decoding": {"drafter": drafter},
        }
    )
    return Sent(seconds, (result,), (seconds,))


def block(number: int, task: str, seconds: dict[str, float]) -> PlayedBlock:
    return PlayedBlock(
        Block(number, task, 1, ("x",)),
        {policy: played(100, seconds[policy], "ngram" if policy == "speculative" else None) for policy in POLICIES},
    )


#: Code is faster with drafts and math without; routing is as good as the better one each time.
BLOCKS = [
    block(n, "code", {"vanilla": 4, "speculative": 2, "routed": 2})
    if n % 2
    else block(n, "math", {"vanilla": 2, "speculative": 3, "routed": 2})
    for n in range(12)
]


def test_the_load_goes_up_and_down_and_every_task_has_its_turn() -> None:
    blocks = draw_blocks(PROMPTS, num_blocks=4, jobs_each={1: 2, 8: 3}, seed=0)
    assert [one.load for one in blocks] == [load for load in LOADS for _ in range(4)]
    assert [one.task for one in blocks[:4]] == ["code", "math", "code", "math"]
    assert {len(one.prompts) for one in blocks if one.load == 8} == {3}
    assert blocks == draw_blocks(PROMPTS, num_blocks=4, jobs_each={1: 2, 8: 3}, seed=0)
    names = [job.job_id for one in blocks for policy in POLICIES for job in one.jobs(policy, max_tokens=8)]
    assert len(names) == len(set(names))


def test_prompts_come_from_a_folder_or_from_this_pythons_sources(tmp_path: Path) -> None:
    (tmp_path / "code.jsonl").write_text(json.dumps({"prompt": "short"}) + "\n" + json.dumps({"prompt": "x" * 50}))
    assert prompts_of(tmp_path, seed=0, max_characters=20) == {"code": ["short"]}
    with pytest.raises(ValueError, match="of at most 3 characters"):
        prompts_of(tmp_path, seed=0, max_characters=3)
    harvested = prompts_of(None, seed=0, max_characters=3000)
    assert {"code", "docstring"} <= set(harvested)


def test_the_ratio_is_to_the_static_policy_that_is_better_on_the_whole() -> None:
    found = summary(BLOCKS)
    assert found["tokens_per_s"] == {"vanilla": 33.33, "speculative": 40.0, "routed": 50.0}
    assert found["routed_over_better_static"] == 1.25
    assert 1.0 < found["low"] < 1.25 < found["high"]
    assert by_task(BLOCKS)["code"] == {"vanilla": 25.0, "speculative": 50.0, "routed": 50.0, "routes": {"vanilla": 6}}


def test_routing_to_the_worse_server_shows() -> None:
    worse = [block(n, "code", {"vanilla": 4, "speculative": 2, "routed": 4}) for n in range(6)]
    assert over_better_static(worse) == 0.5


def test_the_time_beside_a_request_is_the_rest_of_its_latency() -> None:
    assert played(100, 2.0).beside_s == (0.25,)


def test_a_drafting_server_is_an_endpoint_with_its_k() -> None:
    server = vllm("drafting", "python", "/m", 8002, speculative=draft_model("/d", 3))
    assert server.settings(ahead=2) == {
        "ALPHALOOP_MODELS__ENDPOINTS__DRAFTING__KIND": "vllm",
        "ALPHALOOP_MODELS__ENDPOINTS__DRAFTING__URL": "http://127.0.0.1:8002/v1",
        "ALPHALOOP_MODELS__ENDPOINTS__DRAFTING__MAX_REQUESTS": "10",
        "ALPHALOOP_MODELS__ENDPOINTS__DRAFTING__DRAFTER": "draft_model",
        "ALPHALOOP_MODELS__ENDPOINTS__DRAFTING__NUM_DRAFT_TOKENS": "3",
    }
    given = server.command[server.command.index("--speculative-config") + 1]
    assert json.loads(given) == {"method": "draft_model", "model": "/d", "num_speculative_tokens": 3}


def test_a_plain_vllm_is_not_asked_for_metrics_that_it_refuses_to_start_with() -> None:
    plain, drafting = (vllm("a", "python", "/m", 1, speculative=given) for given in (None, NGRAM))
    assert "--per-request-spec-decode-metrics" not in plain.command
    assert "--per-request-spec-decode-metrics" in drafting.command
    assert llama_cpp("b", "python", "/m.gguf", 2, drafts=True).num_draft_tokens == 3
    assert llama_cpp("b", "python", "/m.gguf", 2, drafts=False).drafter is None


def test_our_look_up_inside_vllm_is_started_with_what_loads_it() -> None:
    server = vllm_lookup("a", "python", "/m", 1, k=6, remember_tasks=["sql"])
    assert (server.drafter, server.num_draft_tokens) == ("lookup_memory", 6)
    given = {name: server.command[server.command.index(name) + 1] for name in ("--speculative-config", "--worker-cls")}
    module, _, proposer = json.loads(given["--speculative-config"])["model"].rpartition(".")
    assert callable(getattr(import_module(module), proposer).propose)
    # vLLM's worker cannot be imported here: the file stands where the option says, and names the class.
    path, _, worker = given["--worker-cls"].rpartition(".")
    root = Path(server.environment["PYTHONPATH"])
    assert f"class {worker}(" in (root / path.replace(".", "/")).with_suffix(".py").read_text(encoding="utf-8")
    config = json.loads(server.command[server.command.index("--additional-config") + 1])
    assert ProposerSettings.read(config).remember_tasks == ("sql",)


def test_rounds_without_a_draft_count_and_texts_are_compared_by_token() -> None:
    one = Text("lookup", "sql", (1,), (5, 6, 7, 8, 9), drafted=(3,), accepted=(2,))
    assert one.num_rounds == 3  # the prompt's pass, one that drafted nothing, one of three tokens
    assert one.parts_from(replace(one, token_ids=(5, 6, 9))) == 2
    assert one.parts_from(one) is None


def test_processor_time_is_that_of_a_process_and_its_children() -> None:
    burn = "import subprocess, sys, time\nwhile time.process_time() < .5: pass\nprint(flush=True); sys.stdin.read()"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {burn!r}])"
    with subprocess.Popen([sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert cpu_seconds(process.pid) > 0.4, "the kernel counts in steps of 10 ms, for each process"
        process.communicate()
    assert cpu_seconds(process.pid) == 0


@pytest.mark.parametrize(
    ("recorded", "num_cut", "is_same"),
    [
        (Sums(100, 30, 90, (20, 10, 5)), 0, True),
        (Sums(100, 30, 86, (20, 9, 3)), 2, True),
        (Sums(100, 30, 86, (20, 9, 3)), 1, False),
        (Sums(99, 30, 90, (20, 10, 5)), 9, False),
        (Sums(100, 29, 90, (20, 10, 5)), 9, False),
        (Sums(100, 30, 90, (19, 10, 5)), 9, False),
        (Sums(100, 30, 90, (20, 11, 5)), 9, False),
    ],
)
def test_sums_are_the_servers_but_for_what_the_end_of_a_text_cut(recorded: Sums, num_cut: int, is_same: bool) -> None:
    assert adds_up(Sums(100, 30, 90, (20, 10, 5)), recorded, num_cut) is is_same
