"""The settings of a vLLM that the worker starts for itself: `[models.target.vllm]`, by the names of `vllm serve`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from pydantic import Field, field_validator

from alphaloop.messages.job import TaskName
from alphaloop.settings.section import Section

#: Arguments that the worker gives itself, because what it says of the server depends on them.
_OURS: Final = frozenset(
    {
        *("host", "port", "uds", "api-key", "root-path", "ssl-keyfile", "ssl-certfile"),
        *("model", "model-tag", "served-model-name", "revision", "dtype", "max-model-len", "config"),
        *("tensor-parallel-size", "tp", "gpu-memory-utilization", "quantization", "q", "max-num-seqs"),
        *("enable-lora", "lora-modules", "limit-mm-per-prompt"),
        *("speculative-config", "scheduler-cls", "worker-cls", "additional-config", "async-scheduling"),
        *("enable-per-request-metrics", "per-request-spec-decode-metrics", "disable-log-stats"),
        *("enable-log-requests", "disable-log-requests", "enable-log-outputs"),
    }
)


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
            name = argument.split("=")[0].split(".")[0]
            plain = name.removeprefix("--").removeprefix("-").replace("_", "-")
            if name.startswith("-") and (plain in _OURS or plain.removeprefix("no-") in _OURS):
                raise ValueError(
                    f"expected arguments that the worker does not give itself, found {name}: it is made from "
                    "[models.target], [models.target.vllm] and [models.drafters.NAME]"
                )
        return arguments


@dataclass(frozen=True, slots=True)
class VllmDrafter:
    """How vLLM is started with a drafter."""

    speculative_config: Mapping[str, Any]
    #: alphaloop's look-up takes the place of the server's own drafter, with these settings; None: it does not.
    lookup: Mapping[str, Any] | None = None
    searches_memory: bool = False  #: whether look-up also searches earlier results of tasks that share theirs
    has_cache: bool = False  #: whether it reads texts into a cache of its own
