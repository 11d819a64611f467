"""What our scheduler class needs of vLLM, checked when the server starts. vLLM calls none of it public.

A version that no test ran with is refused, and one with other members: a method that vLLM renames would leave ours
uncalled, and drafts would follow no request without any error.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from alphaloop.errors import ConfigError

#: The versions of vLLM that our tests ran with.
TESTED: Final = ("0.32.0",)
#: Each method of the scheduler that ours calls or overrides, with the names of its parameters.
METHODS: Final[Mapping[str, tuple[str, ...]]] = {
    "add_request": ("self", "request"),
    "_free_request": ("self", "request", "delay_free_blocks"),
    "schedule": ("self", "throttle_prefills"),
    "_update_after_schedule": ("self", "scheduler_output"),
    "update_from_output": ("self", "scheduler_output", "model_runner_output"),
    "has_unfinished_requests": ("self",),
}
#: What these constructors have to set.
OF_SCHEDULER: Final = (
    "block_size",
    "dynamic_sd_lookup",
    "kv_cache_manager",
    "kv_holding_waiting",
    "max_model_len",
    "max_num_running_reqs",
    "num_spec_tokens",
    "requests",
    "running",
    "structured_output_manager",
    "vllm_config",
    "waiting",
)
OF_REQUEST: Final = (
    "all_token_ids",
    "num_computed_tokens",
    "num_prompt_tokens",
    "request_id",
    "sampling_params",
    "spec_token_ids",
)
OF_OUTPUT: Final = (
    "num_scheduled_tokens",
    "num_spec_tokens_to_schedule",
    "scheduled_cached_reqs",
    "scheduled_new_reqs",
    "scheduled_spec_decode_tokens",
)
_HINT: Final = (
    f"install vllm {' or '.join(TESTED)}, or leave out --scheduler-cls: then every request drafts as the server"
)


def check(version: str, scheduler: type, request: type, output: type) -> None:
    """Compare vLLM's `Scheduler`, `Request` and `SchedulerOutput` with what ours needs.

    Raises ConfigError for a version that is not in `TESTED`, and with the first difference. A build's own suffix
    (0.32.0+cpu) says nothing about the interface.
    """
    if version.split("+")[0] not in TESTED:
        raise ConfigError(
            f"expected a vLLM that the scheduler class was tested with ({', '.join(TESTED)}), found {version}",
            hint=_HINT,
        )
    for name, expected in METHODS.items():
        found = _parameters(getattr(scheduler, name, None))
        if found != expected:
            raise _differs(version, f"{scheduler.__name__}.{name}", expected, found)
    for cls, names in ((scheduler, OF_SCHEDULER), (request, OF_REQUEST)):
        found = _set_by(cls)
        if missing := [name for name in names if name not in found]:
            raise _differs(version, f"{cls.__name__}.__init__", missing, ())
    fields = tuple(inspect.signature(output).parameters)
    if missing := [name for name in OF_OUTPUT if name not in fields]:
        raise _differs(version, output.__name__, missing, fields)


def _parameters(method: Callable[..., Any] | None) -> tuple[str, ...]:
    return tuple(inspect.signature(method).parameters) if method is not None else ()


def _set_by(cls: type) -> tuple[str, ...]:
    return tuple(cls.__init__.__code__.co_names)  # type: ignore[misc]  # names of all attributes that it sets


def _differs(version: str, place: str, expected: Sequence[str], found: Sequence[str]) -> ConfigError:
    return ConfigError(
        f"expected {', '.join(expected)} at {place} in vLLM {version}, found {', '.join(found) or 'nothing'}",
        hint=_HINT,
    )
