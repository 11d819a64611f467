"""The settings of a vLLM that the worker starts for itself: `[models.target.vllm]`, by the names of `vllm serve`."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from pydantic import Field, field_validator

from alphaloop.messages.job import TaskName
from alphaloop.settings.section import Section

#: Options of vLLM's server that settings or the worker give. `extra_args` may not hold them.
_OURS: Final[Mapping[str, str]] = {
    "--model": "models.target.source",
    "--revision": "models.target.revision",
    "--served-model-name": "models.target.name",
    "--dtype": "models.target.dtype",
    "--max-model-len": "models.target.context_length",
    "--tensor-parallel-size": "models.target.vllm.tensor_parallel_size",
    "--gpu-memory-utilization": "models.target.vllm.gpu_memory_utilization",
    "--quantization": "models.target.vllm.quantization",
    "--max-num-seqs": "models.target.vllm.max_num_seqs",
    "--enable-lora": "models.target.vllm.lora_modules",
    "--lora-modules": "models.target.vllm.lora_modules",
    "--limit-mm-per-prompt": "models.target.vllm.limit_mm_per_prompt",
    "--speculative-config": "models.drafters",
    "--spec-method": "models.drafters",
    "--spec-model": "models.drafters",
    "--spec-tokens": "models.drafters",
    "--additional-config": "models.drafters",
    "--scheduler-cls": "models.drafters",
    "--worker-cls": "models.drafters",
    "--async-scheduling": "models.drafters",
    "--host": "",
    "--port": "",
    "--uds": "",
    "--root-path": "",
    "--ssl-keyfile": "",
    "--ssl-certfile": "",
    "--api-key": "",
    "--config": "",
    "--headless": "",
    "--enable-log-requests": "",
    "--enable-per-request-metrics": "",
    "--per-request-spec-decode-metrics": "",
    "--disable-log-stats": "",
}
_SHORT: Final[Mapping[str, str]] = {
    "-q": "--quantization",
    "-tp": "--tensor-parallel-size",
    "-sc": "--speculative-config",
}
_FINGERPRINT_CHARS: Final = 8
_OPTION: Final = re.compile(r"-{1,2}[A-Za-z]")


class VllmSettings(Section):
    """The vLLM that a worker starts where `models.target.engine` is "vllm"; what is unset is as vLLM has it."""

    python: str = Field("python", min_length=1)  #: of an environment in which vLLM is installed
    max_num_seqs: int = Field(16, ge=1, le=1024)  #: requests that it decodes at once
    tensor_parallel_size: int | None = Field(None, ge=1)
    gpu_memory_utilization: float | None = Field(None, gt=0, le=1)
    quantization: str | None = Field(None, min_length=1)
    lora_modules: dict[TaskName, str] = Field(default_factory=dict)  #: adapters that jobs name as their model: folders
    limit_mm_per_prompt: dict[TaskName, int] = Field(default_factory=dict)  #: images, audios … of one prompt
    extra_args: tuple[str, ...] = ()  #: further arguments of `vllm serve`, as typed there: ["--enforce-eager"]

    @field_validator("extra_args")
    @classmethod
    def _override_nothing(cls, arguments: tuple[str, ...]) -> tuple[str, ...]:
        for argument in arguments:
            if _OPTION.match(argument) and (option := option_of(argument)) in _OURS:
                place = _OURS[option]
                raise ValueError(
                    f"expected no {option}, which {f'{place} sets' if place else 'the worker sets'}; found {argument!r}"
                )
        return arguments


def option_of(argument: str) -> str:
    """The option that vLLM reads in an argument: `--max_model_len=5`, `--no-async-scheduling`, `-sc.method`."""
    name = re.split(r"[=.]", argument, maxsplit=1)[0].rstrip("+")
    name = _SHORT.get(name, name).replace("_", "-")
    return f"--{name.removeprefix('--no-')}" if name.startswith("--no-") else name


@dataclass(frozen=True, slots=True)
class VllmDrafter:
    """How vLLM is started with a drafter, or with two: look-up beside one of its own."""

    speculative_config: Mapping[str, Any]
    #: alphaloop's look-up takes the place of the server's own drafter, with these settings; None: it does not.
    lookup: Mapping[str, Any] | None = None
    searches_memory: bool = False  #: whether look-up also searches earlier results of tasks that share theirs
    has_cache: bool = False  #: whether it reads texts into a cache of its own; it may draft fewer tokens than its k

    @property
    def num_draft_tokens(self) -> int:
        """The k of the start."""
        return int(self.speculative_config["num_speculative_tokens"])

    @property
    def fingerprint(self) -> str:
        """Another one where it proposes other tokens: all that it is, without its k."""
        config = {name: value for name, value in self.speculative_config.items() if name != "num_speculative_tokens"}
        said = json.dumps([config, self.lookup and dict(self.lookup), self.searches_memory], sort_keys=True)
        return hashlib.sha256(said.encode()).hexdigest()[:_FINGERPRINT_CHARS]

    def beside(self, lookup: VllmDrafter) -> VllmDrafter:
        """Both in one server, whose k is the longer one's where its own drafter may draft fewer."""
        k = max(self.num_draft_tokens, lookup.num_draft_tokens) if self.has_cache else self.num_draft_tokens
        config = {**self.speculative_config, "num_speculative_tokens": k}
        return replace(lookup, speculative_config=config, has_cache=self.has_cache)
