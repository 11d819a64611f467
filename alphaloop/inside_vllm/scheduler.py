"""vLLM's schedulers with the draft length of each request: `--scheduler-cls alphaloop.inside_vllm.scheduler.NAME`.

`FollowingScheduler` for synchronous scheduling, `FollowingAsyncScheduler` for asynchronous. Needs vLLM to be imported.
The server has `PYTHONPATH` with the folder of our package, and a drafter of its own by --speculative-config.
"""

from __future__ import annotations

import logging
from itertools import chain
from typing import Any

import vllm
from vllm.platforms import current_platform
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from alphaloop.inside_vllm import interface
from alphaloop.inside_vllm.draft_lengths import Drafting, DraftLengths

_log = logging.getLogger(__name__)


class FollowingScheduler(Scheduler):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """Each request drafts as many tokens as it asks for, from 0 to the server's k."""

    dynamic_sd_lookup: list[int] | None  #: by number of requests in a step, how many tokens its drafter proposes

    def __init__(self, *args: Any, **options: Any) -> None:
        """Raises ConfigError where this vLLM is not the one that we know."""
        interface.check(vllm.__version__, Scheduler, Request, SchedulerOutput)
        if not interface.is_tested(vllm.__version__):
            _log.warning("vLLM %s is none of the tested versions %s", vllm.__version__, ", ".join(interface.TESTED))
        super().__init__(*args, **options)
        if self.dynamic_sd_lookup is None and self.num_spec_tokens:
            # Else vLLM pads a request whose prompt is in the prefix cache with k drafts of -1, which it counts as
            # drafted. The table says the server's k for every number of requests.
            self.dynamic_sd_lookup = [self.num_spec_tokens] * (self.max_num_running_reqs + 1)
        self._lengths = DraftLengths(
            Drafting.of(
                self.vllm_config,
                self.num_spec_tokens,
                is_v2=self.use_v2_model_runner,
                is_cpu=current_platform.is_cpu(),
            )
        )

    def add_request(self, request: Any) -> None:
        """A request that limits the drafts of all does so before any later step."""
        self._lengths.take(request)
        super().add_request(request)

    def schedule(self, throttle_prefills: bool = False) -> Any:
        """vLLM's, after the drafts that wait were cut to what their requests asked for."""
        has_room = len(self.running) < self.max_num_active_reqs
        self._lengths.trim(self.running, chain(self.kv_holding_waiting, self.waiting) if has_room else ())
        return super().schedule(throttle_prefills)

    def _update_after_schedule(self, scheduler_output: Any) -> None:
        """Before vLLM's: the asynchronous one already makes as many placeholders as this step will propose."""
        scheduler_output.num_spec_tokens_to_schedule = self._lengths.of_step(
            scheduler_output.num_spec_tokens_to_schedule, scheduler_output.num_scheduled_tokens, self.requests
        )
        super()._update_after_schedule(scheduler_output)


class FollowingAsyncScheduler(FollowingScheduler, AsyncScheduler):  # type: ignore[misc]  # as above
    """The same where vLLM plans a step before the last one has ended."""
