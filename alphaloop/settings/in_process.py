"""The settings of vLLM inside the worker, `[models.endpoints.<name>]` with `kind = "vllm_in_process"`."""

from __future__ import annotations

from typing import Any, Final, Literal, Self

from pydantic import Field, model_validator

from alphaloop.messages.job import TaskName
from alphaloop.settings.endpoint import refuse_half_a_drafter
from alphaloop.settings.section import Section

KIND: Final = "vllm_in_process"
#: The name of k in vLLM's own table.
NUM_SPECULATIVE_TOKENS: Final = "num_speculative_tokens"
#: Options that follow from the settings, or that alphaloop needs as they are.
_NOT_AN_OPTION: Final = frozenset(
    {
        "disable_log_stats",
        "dtype",
        "enable_log_requests",
        "gpu_memory_utilization",
        "max_model_len",
        "max_num_seqs",
        "model",
        "per_request_spec_decode_metrics",
        "revision",
        "served_model_name",
        "speculative_config",
        "tensor_parallel_size",
        "trust_remote_code",
    }
)


class InProcessSettings(Section):
    """vLLM inside the worker: its engine runs in child processes of the worker, and no server is needed."""

    kind: Literal["vllm_in_process"] = KIND
    model: str = Field(min_length=1)  #: what vLLM loads: a folder, or a hub name
    revision: str | None = None  #: of a hub name
    served_model_name: str | None = Field(None, min_length=1)  #: in evidence, as a server has one; unset: model
    drafter: TaskName | None = None  #: a name for what speculative_config drafts with; unset: nothing drafts
    num_draft_tokens: int | None = Field(None, ge=1, le=64)  #: its k, vLLM's num_speculative_tokens
    speculative_config: dict[str, Any] | None = None  #: vLLM's table, without num_speculative_tokens
    max_requests: int = Field(16, ge=1, le=1024)  #: most requests at once, vLLM's max_num_seqs
    tensor_parallel_size: int = Field(1, ge=1, le=1024)  #: GPUs that share the model
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"  #: auto: the one of the model's files
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1)  #: share of each GPU's memory
    max_model_len: int | None = Field(None, ge=16)  #: tokens of prompt and text together; unset: the model's own
    options: dict[str, Any] = Field(default_factory=dict)  #: further options of vLLM, by their names in Python
    answer_s: float = Field(600.0, gt=0)  #: from a request to its first token; to the whole text if it is not streamed
    silence_s: float = Field(60.0, gt=0)  #: between two pieces of a streamed text

    @model_validator(mode="after")
    def _drafts_as_it_says(self) -> Self:
        refuse_half_a_drafter(self.drafter, self.num_draft_tokens)
        if (self.drafter is None) != (self.speculative_config is None):
            raise ValueError("expected drafter and speculative_config together: the one names what the other starts")
        found = (self.speculative_config or {}).get(NUM_SPECULATIVE_TOKENS, self.num_draft_tokens)
        if found != self.num_draft_tokens:
            raise ValueError(
                f"expected speculative_config.{NUM_SPECULATIVE_TOKENS} to be num_draft_tokens or left out, "
                f"found {found!r} and {self.num_draft_tokens}"
            )
        return self

    @model_validator(mode="after")
    def _options_are_others(self) -> Self:
        if taken := sorted(_NOT_AN_OPTION & self.options.keys()):
            raise ValueError(f"expected other options of vLLM, found {', '.join(taken)}: settings or fixed here")
        return self

    @property
    def switches_drafts(self) -> bool:
        """An engine here drafts for every request."""
        return False

    @property
    def metrics_url(self) -> None:
        """An engine here tells of each request."""

    def engine_args(self) -> dict[str, Any]:
        """The arguments of vLLM's AsyncEngineArgs."""
        drafting: dict[str, Any] = {}
        if self.speculative_config is not None:
            config = {**self.speculative_config, NUM_SPECULATIVE_TOKENS: self.num_draft_tokens}
            # vLLM refuses these metrics where nothing drafts.
            drafting = {"speculative_config": config, "per_request_spec_decode_metrics": "detailed"}
        return {
            **self.options,
            "model": self.model,
            "revision": self.revision,
            "served_model_name": self.served_model_name,
            "max_num_seqs": self.max_requests,
            "tensor_parallel_size": self.tensor_parallel_size,
            "dtype": self.dtype,
            "gpu_memory_utilization": self.gpu_memory_utilization,
            "max_model_len": self.max_model_len,
            "enable_log_requests": False,  # they hold prompts
            "disable_log_stats": False,  # without them a request has no times
            **drafting,
        }
