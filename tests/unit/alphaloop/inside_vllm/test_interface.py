"""A vLLM whose scheduler has other members is refused. tests/integration/test_inside_vllm.py checks the real vLLM."""

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
        self.max_num_active_reqs = self.max_num_running_reqs = 8
        self.use_v2_model_runner = False

    def add_request(self, request: Any) -> None: ...

    def schedule(self, throttle_prefills: bool = False) -> Any: ...

    def _update_after_schedule(self, scheduler_output: Any) -> None: ...


class Request:
    """vLLM's."""

    def __init__(self) -> None:
        self.request_id, self.sampling_params, self.num_computed_tokens = "", None, 0
        self.spec_token_ids: list[int] = []


@dataclass
class SchedulerOutput:
    """vLLM's."""

    num_scheduled_tokens: dict[str, int]
    num_spec_tokens_to_schedule: int = 0


class OtherParameters(Scheduler):
    """A method that takes other arguments."""

    def schedule(self, throttle_prefills: bool = False, budget: int = 0) -> Any: ...


class WithoutMethod(Scheduler):
    """A method that was renamed."""

    _update_after_schedule = None  # type: ignore[assignment]


class WithoutTokens(Request):
    """Drafts that are kept elsewhere."""

    def __init__(self) -> None:
        self.request_id, self.sampling_params, self.num_computed_tokens = "", None, 0


@dataclass
class WithoutLength:
    """A step with a fixed number of draft tokens."""

    num_scheduled_tokens: dict[str, int]


def test_the_interface_that_was_tested_is_taken_whatever_its_version() -> None:
    interface.check("0.32.0", Scheduler, Request, SchedulerOutput)
    interface.check("0.33.0", Scheduler, Request, SchedulerOutput)
    assert [interface.is_tested(version) for version in ("0.32.0", "0.32.0+cpu", "0.33.0")] == [True, True, False]


@pytest.mark.parametrize(
    ("classes", "expected"),
    [
        (
            (OtherParameters, Request, SchedulerOutput),
            "OtherParameters.schedule expected self, throttle_prefills, found self, throttle_prefills, budget",
        ),
        (
            (WithoutMethod, Request, SchedulerOutput),
            "WithoutMethod._update_after_schedule expected self, scheduler_output, found nothing",
        ),
        ((Scheduler, WithoutTokens, SchedulerOutput), "WithoutTokens.__init__ expected spec_token_ids, found nothing"),
        (
            (Scheduler, Request, WithoutLength),
            "WithoutLength expected num_spec_tokens_to_schedule, found num_scheduled_tokens",
        ),
    ],
)
def test_another_interface_is_refused_with_its_difference(classes: tuple[type, type, type], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        interface.check("0.40.0", *classes)
    message = str(caught.value)
    assert f"vLLM 0.40.0 differs from the versions that alphaloop follows requests in: at {expected}" in message
    assert "install one of vllm 0.32.0" in message
