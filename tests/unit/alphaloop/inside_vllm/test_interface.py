"""A vLLM whose scheduler has other members is refused. tests/integration/test_vllm_follows.py has the real vLLM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from alphaloop.errors import ConfigError
from alphaloop.inside_vllm import interface


class Scheduler:
    """vLLM's, as of 0.32: what ours calls and reads."""

    def __init__(self, config: Any) -> None:
        self.vllm_config, self.num_spec_tokens, self.dynamic_sd_lookup = config, 4, None
        self.requests: dict[str, Any] = {}
        self.running = self.waiting = self.kv_holding_waiting = ()
        self.max_num_running_reqs, self.max_model_len, self.block_size = 8, 64, 16
        self.kv_cache_manager = self.structured_output_manager = None

    def add_request(self, request: Any) -> None: ...

    def schedule(self, throttle_prefills: bool = False) -> Any: ...

    def _update_after_schedule(self, scheduler_output: Any) -> None: ...

    def _free_request(self, request: Any, delay_free_blocks: bool = False) -> Any: ...

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any: ...

    def has_unfinished_requests(self) -> bool: ...


class Request:
    """vLLM's."""

    def __init__(self) -> None:
        self.request_id, self.sampling_params, self.num_computed_tokens = "", None, 0
        self.num_prompt_tokens, self.all_token_ids = 0, ()
        self.spec_token_ids: list[int] = []


@dataclass
class SchedulerOutput:
    """vLLM's."""

    scheduled_new_reqs: list[Any]
    scheduled_cached_reqs: Any
    num_scheduled_tokens: dict[str, int]
    scheduled_spec_decode_tokens: dict[str, list[int]]
    num_spec_tokens_to_schedule: int = 0


class OtherParameters(Scheduler):
    """A method that takes other arguments."""

    def schedule(self, throttle_prefills: bool = False, budget: int = 0) -> Any: ...


class WithoutMethod(Scheduler):
    """A method that was renamed."""

    _update_after_schedule = None  # type: ignore[assignment]


class WithoutTokens:
    """Drafts that are kept elsewhere."""

    def __init__(self) -> None:
        self.request_id, self.sampling_params, self.num_computed_tokens = "", None, 0
        self.num_prompt_tokens, self.all_token_ids = 0, ()


@dataclass
class WithoutLength:
    """A step with a fixed number of draft tokens."""

    scheduled_new_reqs: list[Any]
    scheduled_cached_reqs: Any
    num_scheduled_tokens: dict[str, int]
    scheduled_spec_decode_tokens: dict[str, list[int]]


def test_a_version_that_no_test_ran_with_is_refused() -> None:
    for version in ("0.32.0", "0.32.0+cpu"):
        interface.check(version, Scheduler, Request, SchedulerOutput)
    with pytest.raises(ConfigError, match=r"tested with \(0\.32\.0\), found 0\.33\.0") as caught:
        interface.check("0.33.0", Scheduler, Request, SchedulerOutput)
    assert "install vllm 0.32.0" in str(caught.value)


@pytest.mark.parametrize(
    ("classes", "message"),
    [
        (
            (OtherParameters, Request, SchedulerOutput),
            "expected self, throttle_prefills at OtherParameters.schedule in vLLM 0.32.0, "
            "found self, throttle_prefills, budget",
        ),
        (
            (WithoutMethod, Request, SchedulerOutput),
            "expected self, scheduler_output at WithoutMethod._update_after_schedule in vLLM 0.32.0, found nothing",
        ),
        (
            (Scheduler, WithoutTokens, SchedulerOutput),
            "expected spec_token_ids at WithoutTokens.__init__ in vLLM 0.32.0, found nothing",
        ),
        (
            (Scheduler, Request, WithoutLength),
            "expected num_spec_tokens_to_schedule at WithoutLength in vLLM 0.32.0, "
            "found scheduled_new_reqs, scheduled_cached_reqs, num_scheduled_tokens, scheduled_spec_decode_tokens",
        ),
    ],
)
def test_another_interface_is_refused_with_its_difference(classes: tuple[type, type, type], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        interface.check("0.32.0", *classes)
    assert caught.value.message == message
