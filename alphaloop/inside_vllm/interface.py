"""What our scheduler class needs of vLLM, checked when the server starts. vLLM calls none of it public.

Every member that we call, override or set is listed here with its parameters. A version with other members is refused:
a method that vLLM renames would leave ours uncalled, and drafts would follow no request without any error.
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
    "schedule": ("self", "throttle_prefills"),
    "_update_after_schedule": ("self", "scheduler_output"),
}
#: What these constructors have to set.
OF_SCHEDULER: Final = (
    "dynamic_sd_lookup",
    "kv_holding_waiting",
    "max_num_active_reqs",
    "max_num_running_reqs",
    "num_spec_tokens",
    "requests",
    "running",
    "use_v2_model_runner",
    "vllm_config",
    "waiting",
)
OF_REQUEST: Final = (
    "num_computed_tokens",
    "request_id",
    "sampling_params",
    "spec_token_ids",
)
OF_OUTPUT: Final = ("num_scheduled_tokens", "num_spec_tokens_to_schedule")


def check(version: str, scheduler: type, request: type, output: type) -> None:
    """Compare vLLM's `Scheduler`, `Request` and `SchedulerOutput` with what ours needs.

    Raises ConfigError with the first difference. A version that is not in `TESTED` may start where nothing differs.
    """
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


def is_tested(version: str) -> bool:
    """Whether our tests ran with this version; a build's own suffix (0.32.0+cpu) says nothing about the interface."""
    return version.split("+")[0] in TESTED


def _parameters(method: Callable[..., Any] | None) -> tuple[str, ...]:
    return tuple(inspect.signature(method).parameters) if method is not None else ()


def _set_by(cls: type) -> tuple[str, ...]:
    return tuple(cls.__init__.__code__.co_names)  # type: ignore[misc]  # names of all attributes that it sets


def _differs(version: str, place: str, expected: Sequence[str], found: Sequence[str]) -> ConfigError:
    return ConfigError(
        f"vLLM {version} differs from the versions that alphaloop follows requests in: "
        f"at {place} expected {', '.join(expected)}, found {', '.join(found) or 'nothing'}",
        hint=f"install one of vllm {', '.join(TESTED)}, or start the server without --scheduler-cls",
    )
