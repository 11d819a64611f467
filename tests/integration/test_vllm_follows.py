"""A real vLLM with alphaloop's scheduler class: each request has the drafts that it asks for, and the greedy text."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pytest

from benchmarks.engines.serve import ENVIRONMENT
from tests.fixtures import heads

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(600)]

REPOSITORY: Final = Path(__file__).resolve().parents[2]
SCRIPT: Final = REPOSITORY / "tests" / "fixtures" / "decode_inside_vllm.py"
PYTHON: Final = REPOSITORY / ".venv-vllm" / "bin" / "python"
K: Final = 4
NUM_TOKENS: Final = 24
INSIDE: Final = {
    **ENVIRONMENT,
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "PYTHONPATH": str(REPOSITORY),
}
PROMPTS: Final = (
    "A list of words: apple pear plum apple pear plum apple pear plum",
    "The capital of France is",
    "def fib(n):\n    if n < 2:\n        return n\n    return",
)
#: A beginning of more than one block of the key-value cache.
LONG: Final = " ".join(f"item {i} costs {i * 7 % 13} coins and weighs {i * 3 % 11} grams," for i in range(12))
BLOCK: Final = 32  #: tokens, the least that vLLM's CPU build takes
NGRAM: Final = {"method": "ngram", "num_speculative_tokens": K, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
LOOKUP: Final = {"additional_config": {"alphaloop_lookup": {"remember_tasks": ["sql"]}}}


def asks(k: int | None, prompt: str = PROMPTS[0], *, temperature: float = 0.0, **said: object) -> dict[str, Any]:
    """A request for `k` draft tokens; None: it says nothing of them."""
    extra = {f"alphaloop_{name}": value for name, value in said.items()}
    if k is not None:
        extra["alphaloop_num_draft_tokens"] = k
    return {"prompt": prompt, "said": extra, "temperature": temperature}


def decode(
    source: Path,
    speculative: Mapping[str, object] | None,
    batches: Sequence[Sequence[Any]],
    *,
    max_tokens: int = NUM_TOKENS,
    **options: object,
) -> list[dict[str, Any]]:
    """What a vLLM with these options gives for the batches."""
    if not PYTHON.exists():
        pytest.skip("no environment with vLLM: make .venv-vllm/.installed")
    if speculative is not None:
        options = {
            "speculative_config": speculative,
            "scheduler_cls": "alphaloop.inside_vllm.scheduler.FollowingScheduler",
            "async_scheduling": False,
            "per_request_spec_decode_metrics": "detailed",
            **options,
        }
    order = {
        "options": {"model": str(source), "dtype": "float32", "max_model_len": 512, **options},
        "batches": batches,
        "max_tokens": max_tokens,
    }
    done = subprocess.run(
        [PYTHON, SCRIPT], input=json.dumps(order), capture_output=True, text=True, env={**os.environ, **INSIDE}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    batches_decoded: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return batches_decoded


@pytest.fixture(scope="module")
def source(smollm2_source: str) -> Path:
    """SmolLM2's weights in a form that vLLM loads."""
    from engine.device import find_device
    from engine.models import load_weights

    return Path(load_weights(smollm2_source, None, "float32", find_device("cpu")).folder)


@pytest.fixture(scope="module")
def vanilla(source: Path) -> dict[str, list[int]]:
    """The greedy tokens after each prompt, of a vLLM without drafts and without the class."""
    prompts = [*PROMPTS, LONG]
    (batch,) = decode(source, None, [[{"prompt": prompt} for prompt in prompts]])
    return dict(zip(prompts, batch["token_ids"], strict=True))


def eagle3(folder: Path) -> dict[str, object]:
    """Random heads: nearly all that they draft is rejected."""
    model = heads.eagle3(folder / "heads", 49_152, hidden=576, taps=(2, 15, 27), head_dim=64)
    return {"method": "eagle3", "model": str(model), "num_speculative_tokens": K}


def check(decoded: Sequence[Mapping[str, Any]], batches: Sequence[Sequence[Any]], vanilla: Mapping[str, Any]) -> None:
    """All texts are the vanilla ones, all drafts as asked, and vLLM's counters are the sums of the requests' counts."""
    for batch, got in zip(batches, decoded, strict=True):
        for request, token_ids, drafts in zip(batch, got["token_ids"], got["drafts"], strict=True):
            if not request["temperature"]:
                assert token_ids == vanilla[request["prompt"]], request
            most = request["said"].get("alphaloop_num_draft_tokens", K)
            assert all(drafted <= most for drafted, _ in drafts), (request, drafts)
        rounds = [each for drafts in got["drafts"] for each in drafts]
        assert got["counted"] == [len(rounds), sum(num for num, _ in rounds), sum(num for _, num in rounds)]


MIXED: Final = [asks(k, prompt) for prompt in PROMPTS for k in (None, 0, 1, 2, K)]


@pytest.mark.parametrize("is_async", [False, True], ids=["synchronous", "asynchronous"])
@pytest.mark.parametrize("drafter", ["ngram", "draft_model", "eagle3"])
def test_drafts_follow_each_request_and_texts_are_the_vanilla_ones(
    drafter: str, is_async: bool, source: Path, vanilla: dict[str, Any], tmp_path: Path
) -> None:
    if drafter == "ngram" and is_async:
        pytest.skip("vLLM's n-grams need synchronous scheduling")
    speculative = {
        "ngram": lambda: NGRAM,
        "draft_model": lambda: {"method": "draft_model", "model": str(source), "num_speculative_tokens": K},
        "eagle3": lambda: eagle3(tmp_path),
    }[drafter]()
    kind = "FollowingAsyncScheduler" if is_async else "FollowingScheduler"
    batches = [*([request] for request in MIXED), MIXED]
    decoded = decode(
        source,
        speculative,
        batches,
        async_scheduling=is_async,
        scheduler_cls=f"alphaloop.inside_vllm.scheduler.{kind}",
        worker_cls="alphaloop.inside_vllm.worker.RestingWorker",
    )
    check(decoded, batches, vanilla)
    alone = {
        request["said"].get("alphaloop_num_draft_tokens"): got for request, got in zip(MIXED, decoded, strict=False)
    }
    assert alone[0]["counted"] == [0, 0, 0]
    assert alone[1]["counted"][1] > 0
    if drafter == "draft_model":  # the target itself: all that it drafts is accepted, so its cache was whole
        assert all(got["counted"][1] == got["counted"][2] for got in decoded)


def test_one_server_has_our_look_up_and_a_draft_model_by_request(source: Path, vanilla: dict[str, Any]) -> None:
    model = {"method": "draft_model", "model": str(source), "num_speculative_tokens": K}
    looked_up = [asks(k, prompt, drafter="lookup") for prompt in PROMPTS for k in (0, 1, 3, K)]
    batches = [[looked_up[-1]], [asks(K, PROMPTS[2])], [*looked_up, *MIXED]]
    decoded = decode(source, model, batches, worker_cls="alphaloop.inside_vllm.worker.RestingWorker", **LOOKUP)
    check(decoded, batches, vanilla)
    by_lookup, by_model, _ = (got["counted"] for got in decoded)
    assert by_model[1] == by_model[2] > 0
    assert by_lookup[1] > by_lookup[2]


def test_our_look_up_remembers_the_results_of_its_tasks(source: Path, vanilla: dict[str, Any]) -> None:
    batches = [[asks(K, PROMPTS[1], task=task)] for task in ("sql", "code", "sql")]
    decoded = decode(source, NGRAM, batches, **LOOKUP)
    check(decoded, batches, vanilla)
    first, other, again = (got["counted"][2] for got in decoded)
    assert first == other < again


def test_a_request_that_begins_with_what_the_drafter_has_not_read_drafts_nothing(source: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source)
    model = {"method": "draft_model", "model": str(source), "num_speculative_tokens": K}
    options = {"worker_cls": "alphaloop.inside_vllm.worker.RestingWorker", "block_size": BLOCK}
    (before,) = decode(source, model, [[asks(0, LONG)]], max_tokens=2 * BLOCK, **options)
    conversation = f"{LONG}{tokenizer.decode(before['token_ids'][0])} and so on"
    batches = [[asks(0, LONG)], [asks(K, LONG)], [asks(3, conversation)]]
    vanilla, same_prompt, longer = decode(source, model, batches, max_tokens=2 * BLOCK, **options)
    assert vanilla["token_ids"] == same_prompt["token_ids"] == before["token_ids"]
    assert same_prompt["counted"][1] == same_prompt["counted"][2] > 0  # the drafter reads every prompt
    assert longer["counted"] == [0, 0, 0]  # and rested while the output was decoded


def test_a_prompt_that_the_prefix_cache_has_whole_is_drafted_as_its_request_asks(source: Path) -> None:
    whole_blocks_and_one = {"prompt_token_ids": [5 + i % 90 for i in range(257)]}
    requests = [{"prompt": whole_blocks_and_one, "said": asks(k)["said"]} for k in (0, 0, 2)]
    first, again, drafted = decode(source, NGRAM, [[request] for request in requests], block_size=BLOCK)
    assert first["counted"] == again["counted"] == [0, 0, 0]
    assert max(num for num, _ in drafted["drafts"][0]) == 2
    assert first["token_ids"] == again["token_ids"] == drafted["token_ids"]


@pytest.mark.parametrize("drafter", ["ngram", "draft_model"])
def test_a_text_at_the_end_of_its_context_costs_its_neighbours_no_rejected_drafts(
    drafter: str, source: Path, vanilla: dict[str, Any]
) -> None:
    model = {"method": "draft_model", "model": str(source), "num_speculative_tokens": K}
    at_the_end = {"prompt": {"prompt_token_ids": [5 + i % 90 for i in range(114)]}, "said": {}}
    speculative = NGRAM if drafter == "ngram" else model
    batches = [[asks(K)], [at_the_end, asks(K)], [asks(K)]]
    alone, beside, after = decode(source, speculative, batches, max_model_len=128, enable_prefix_caching=False)
    assert alone["token_ids"][0] == beside["token_ids"][1] == vanilla[PROMPTS[0]]
    if drafter == "ngram":
        assert beside["drafts"][1] == alone["drafts"][0]
    else:  # what the drafter has not read it does not read later: it drafts for this text no more
        assert 0 < len(beside["drafts"][1]) < len(alone["drafts"][0])
        assert beside["drafts"][1] == alone["drafts"][0][: len(beside["drafts"][1])]
    assert after["drafts"] == alone["drafts"]


def test_greedy_texts_beside_sampled_ones_are_right(source: Path, vanilla: dict[str, Any]) -> None:
    sampled = asks(K, "Once upon a time", temperature=1.0)
    batches = [[*MIXED, sampled], [asks(K)]]
    decoded = decode(source, NGRAM, batches)
    check(decoded, batches, vanilla)
    assert decoded[1]["counted"][1] > 0


@pytest.fixture(scope="module")
def long_vanilla(source: Path) -> dict[str, list[int]]:
    """The same for long texts."""
    (batch,) = decode(source, None, [[{"prompt": prompt} for prompt in PROMPTS]], max_tokens=320)
    return dict(zip(PROMPTS, batch["token_ids"], strict=True))


@pytest.mark.parametrize("drafter", ["lookup", "ngram", "draft_model"])
def test_the_server_measures_its_own_rounds(drafter: str, source: Path, long_vanilla: dict[str, Any]) -> None:
    """Texts stay the target's through control slices, and the slices say what those rounds were."""
    on_trial = {"control_share": 0.4, "subject": "sql greedy", "treatment": drafter, "reports": 1}
    asked = [asks(k, prompt, **on_trial) for prompt in PROMPTS for k in (1, K)]
    batches = [[*asked, asks(0, reports=1)] for _ in range(3)]
    if drafter == "draft_model":
        model = {"method": "draft_model", "model": str(source), "num_speculative_tokens": K}
        resting = {"worker_cls": "alphaloop.inside_vllm.worker.RestingWorker"}
        decoded = decode(source, model, batches, max_tokens=320, **resting)
    else:
        decoded = decode(source, NGRAM, batches, max_tokens=320, **(LOOKUP if drafter == "lookup" else {}))
    check(decoded, batches, long_vanilla)
    slices = [part for got in decoded for part in got["slices"]]
    control = [part for part in slices if part["phase"] == "control"]
    assert control, "no control slice"
    for part in control:
        assert part["num_proposed"] == 0
        assert part["num_tokens"] == part["num_sequence_rounds"] > 0
        assert part["subject"] == "sql greedy"
        assert part["drafter"] == drafter
    treated = [part for part in slices if part["phase"] != "control"]
    proposed, rounds = (sum(part[name] for part in treated) for name in ("num_proposed", "num_sequence_rounds"))
    assert proposed > 0
    if drafter == "draft_model":
        # Each of its tokens is accepted, with a cache that missed no control round.
        tokens = sum(part["num_tokens"] for part in treated)
        assert tokens == pytest.approx(proposed + rounds, rel=0.02)  # less what was cut at a text's end
        per_round = {
            name: sum(part["sequence_s"] for part in parts) / sum(part["num_sequence_rounds"] for part in parts)
            for name, parts in (("control", control), ("treated", treated))
        }
        assert per_round["control"] < per_round["treated"], per_round  # it is its own draft: k passes more


def test_requests_that_ask_for_no_slices_get_none(source: Path) -> None:
    on_trial = {"control_share": 0.4, "subject": "sql greedy", "treatment": "ngram"}
    (got,) = decode(source, NGRAM, [[asks(K, **on_trial), asks(K), asks(0)]])
    assert got["slices"] == []  # its one stretch has not ended


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"async_scheduling": True, "scheduler_cls": "alphaloop.inside_vllm.scheduler.FollowingAsyncScheduler"},
            "synchronous",
        ),
        ({"speculative_config": None, "per_request_spec_decode_metrics": "none"}, "expected --speculative-config"),
        ({"additional_config": {"alphaloop_lookup": {"remember": []}}}, "remember_tasks"),
    ],
)
def test_what_cannot_be_followed_is_refused_at_the_start(
    options: dict[str, object], message: str, source: Path
) -> None:
    model = {"method": "draft_model", "model": str(source), "num_speculative_tokens": K}
    with pytest.raises(AssertionError, match=message):
        decode(source, model, [[asks(0)]], **{**LOOKUP, **options})
