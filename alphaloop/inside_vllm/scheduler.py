"""vLLM's scheduler, with drafts as each request asks: `--scheduler-cls`. Needs vLLM to be imported.

    vllm serve … --no-async-scheduling --scheduler-cls alphaloop.inside_vllm.scheduler.FollowingScheduler
    vllm serve … --scheduler-cls alphaloop.inside_vllm.scheduler.FollowingAsyncScheduler

vLLM verifies what stands in `request.spec_token_ids` and counts it by request. Before each step the class cuts that
list to what the request wants, or writes look-up's draft there; before each step's end it lowers the number of tokens
that vLLM's drafter proposes to the most that any request of the step wants. With 0, a drafter with a cache of its own
still reads the step's tokens (`vllm/v1/spec_decode/llm_base_proposer.py`, propose), so every request may draft at any
time.

    … --worker-cls alphaloop.inside_vllm.worker.RestingWorker

With that worker it rests in steps that read no prompt, and a request drafts nothing where it begins with tokens that
the drafter has not read: what vLLM's prefix cache has from the output of requests without drafts.

With synchronous scheduling the class also measures what the drafts of its own rounds gain (`measuring.py`), where
requests ask for that.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import signal
import sys
from collections.abc import Callable
from itertools import chain
from typing import Any, Final

from vllm import __version__ as version
from vllm.platforms import current_platform
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from alphaloop.errors import ConfigError
from alphaloop.experiment.observe import Treatment
from alphaloop.experiment.rounds import FreeSequence, Yielded
from alphaloop.inside_vllm import DRAFTER_TIME, RESTING_WORKER, interface
from alphaloop.inside_vllm.drafting import KEY, LookupDrafts, LookupSettings, RequestDrafts, UnreadBlocks
from alphaloop.inside_vllm.measuring import DrafterTime, ServerExperiment, StepFacts

_PR_SET_PDEATHSIG: Final = 1
#: Methods whose drafters may be asked for fewer tokens than their k (`vllm/v1/spec_decode`). Medusa, suffix decoding
#: and n-grams on a GPU would end the server by an assertion; those that draft in parallel have tensors of their k.
_TAKE_FEWER: Final = ("ngram", "draft_model", "eagle", "eagle3", "mtp")


class _Following:
    """What both schedulers have in common, before vLLM's own class in the order of resolution."""

    def __init__(self, *args: Any, **options: Any) -> None:
        """Raises ConfigError for a vLLM of another interface, and for settings that cannot be followed."""
        interface.check(version, Scheduler, Request, SchedulerOutput)
        _end_with_parent()
        super().__init__(*args, **options)
        this: Any = self
        config = this.vllm_config
        if config.speculative_config is None:
            raise ConfigError("expected --speculative-config with this scheduler class, found none")
        speculative = config.speculative_config
        is_async = isinstance(self, AsyncScheduler)
        lookup = _lookup_of(config, is_async=is_async)
        self._experiment = ServerExperiment()
        self._drafting = RequestDrafts(
            this.num_spec_tokens,
            this.max_model_len,
            lookup,
            is_lookup_alone=lookup is not None and speculative.method == "ngram",
            spoils_beside_sampled=current_platform.is_cpu(),
            takes_fewer=_takes_fewer(config),
            drafter_max_tokens=None if config.use_v2_model_runner else _drafter_max_tokens(config),
            is_control=self._experiment.is_control,
        )
        self._has_cache = speculative.uses_draft_kv_cache()
        if this.dynamic_sd_lookup is None:
            # Else vLLM pads a request whose prompt is in the prefix cache with k drafts, which it counts as drafted.
            # This table of k by number of requests says what is so without it.
            this.dynamic_sd_lookup = [this.num_spec_tokens] * (this.max_num_running_reqs + 1)
        rests = config.parallel_config.worker_cls == RESTING_WORKER and not config.use_v2_model_runner
        if rests and config.parallel_config.data_parallel_size > 1:
            raise ConfigError(
                f"expected data_parallel_size 1 with --worker-cls {RESTING_WORKER}, found "
                f"{config.parallel_config.data_parallel_size}: ranks of experts wait for each other's drafters",
                hint="leave out --worker-cls: then the drafter reads on in every step",
            )
        self._unread = UnreadBlocks(this.block_size) if rests else None
        # Else nothing says which of several steps a result belongs to, or how long the drafter took.
        self._measures = (
            not is_async and config.parallel_config.pipeline_parallel_size == 1 and (rests or not self._has_cache)
        )
        self._is_ending_step = False

    def schedule(self, *args: Any, **options: Any) -> Any:
        """vLLM's step, with each request's own drafts."""
        this: Any = self
        if self._measures:
            self._experiment.begin(self._free())
        present = this.running
        if len(this.running) < this.max_num_running_reqs:
            present = chain(this.running, this.kv_holding_waiting, this.waiting)
        for request in self._drafting.choose(this.running, present=present):
            # Only a text that was read to its last token can be drafted for.
            if request.num_computed_tokens == len(request.all_token_ids) - 1:
                draft = self._drafting.look_up(request)
                request.spec_token_ids = this.structured_output_manager.validate_tokens(request, draft)
        return super().schedule(*args, **options)  # type: ignore[misc]

    def _update_after_schedule(self, scheduler_output: Any) -> None:
        this: Any = self
        num_scheduled = scheduler_output.num_scheduled_tokens
        step = [this.requests[name] for name in num_scheduled]
        reading = [request for request in step if request.num_computed_tokens < request.num_prompt_tokens]
        longest = max((request.num_computed_tokens + num_scheduled[request.request_id] for request in step), default=0)
        if self._unread is not None:
            self._find_unread(self._unread, scheduler_output)
        if self._drafting.leaves_out(longest):
            wanted = 0
            if self._has_cache:
                for request in step:
                    self._drafting.misses_cache(request)
        else:
            wanted = self._drafting.num_to_draft(step)
            if self._unread is not None and reading:
                # Prompts are always read: many requests share the beginnings of theirs.
                wanted = max(1, wanted)
        if self._unread is not None:
            for request in step:
                start, num_tokens = request.num_computed_tokens, num_scheduled[request.request_id]
                self._unread.written(self._blocks(request), start, num_tokens, rested=wanted == 0)
        if self._measures and step:
            self._experiment.scheduled(
                StepFacts(
                    num_running=len(step),
                    mean_context_tokens=sum(len(request.all_token_ids) for request in step) / len(step),
                    has_prompt=any(request.num_computed_tokens < len(request.all_token_ids) - 1 for request in step),
                    num_positions=sum(num_scheduled.values()),
                    num_drafted=wanted if self._has_cache else 0,
                    is_for_cache_only=self._drafting.runs_for_cache_only(step),
                )
            )
        scheduler_output.num_spec_tokens_to_schedule = min(scheduler_output.num_spec_tokens_to_schedule, wanted)
        super()._update_after_schedule(scheduler_output)  # type: ignore[misc]

    def _find_unread(self, unread: UnreadBlocks, scheduler_output: Any) -> None:
        """Let those requests draft nothing that begin with blocks which the drafter has not read."""
        this: Any = self
        begun = {new.req_id for new in scheduler_output.scheduled_new_reqs}
        for name in begun | scheduler_output.scheduled_cached_reqs.resumed_req_ids:
            request = this.requests[name]
            num_blocks = -(-request.num_computed_tokens // this.block_size)
            if unread.holds_any(map(self._blocks(request), range(num_blocks))):
                self._drafting.misses_cache(request)

    def _blocks(self, request: Any) -> Callable[[int], int]:
        """The number of each of the request's blocks, by its place in the text."""
        this: Any = self
        blocks = this.kv_cache_manager.coordinator.get_blocks(request.request_id)[0]
        return lambda place: int(blocks[place].block_id)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """vLLM's own, and what the step came to is counted."""
        this: Any = self
        step = [(name, this.requests.get(name)) for name in scheduler_output.num_scheduled_tokens]
        before = {name: (request, len(request.all_token_ids)) for name, request in step if request is not None}
        self._is_ending_step = True
        outputs = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        self._is_ending_step = False
        if self._measures:
            drafts = scheduler_output.scheduled_spec_decode_tokens
            self._experiment.ended(
                {
                    name: Yielded(len(request.all_token_ids) - num, len(drafts.get(name, ())))
                    for name, (request, num) in before.items()
                },
                drafter=_drafter_time(model_runner_output),
                goes_on=this.has_unfinished_requests(),
            )
        return outputs

    def _free(self) -> dict[str, FreeSequence]:
        """The requests on trial that decode, and how each would draft."""
        this: Any = self
        free: dict[str, FreeSequence] = {}
        for request in this.running:
            if (trial := self._drafting.wish(request).trial) is not None:
                treatment = Treatment(trial.drafter, self._drafting.treatment(request))
                free[request.request_id] = FreeSequence(trial.subject, treatment, trial.expected)
        return free

    def add_request(self, request: Any) -> None:
        """vLLM's own, and how much of the time the request wants for control."""
        if (share := self._drafting.wish(request).control_share) is not None and self._measures:
            self._experiment.share(share)
        super().add_request(request)  # type: ignore[misc]

    def _free_request(self, request: Any, *args: Any, **options: Any) -> Any:
        reports = self._drafting.wish(request).reports
        self._drafting.ended(request)
        transfer, *others = super()._free_request(request, *args, **options)  # type: ignore[misc]
        # An aborted request has no reply.
        if reports and self._is_ending_step and (measured := self._experiment.take()):
            transfer = {**(transfer or {}), **measured}
        return transfer, *others


def _end_with_parent() -> None:
    """Let the system end this process, vLLM's EngineCore, when the server that started it ends, even by kill -9.

    vLLM 0.32 has nothing for that: its EngineCore would go on, with the GPU's memory.
    """
    if sys.platform == "linux" and multiprocessing.parent_process() is not None:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


class FollowingScheduler(_Following, Scheduler):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """With synchronous scheduling: vLLM's drafters and alphaloop's look-up."""


class FollowingAsyncScheduler(_Following, AsyncScheduler):  # type: ignore[misc]
    """With asynchronous scheduling: vLLM's drafters alone, because a step is scheduled before its text is known."""


def _drafter_time(output: Any) -> DrafterTime | None:
    """What `RestingWorker` timed; None where the drafter never ran, or nothing times it."""
    last = getattr(output, DRAFTER_TIME, None)
    return None if last is None else DrafterTime(*last)


def _takes_fewer(config: Any) -> bool:
    """Whether the drafter may propose fewer tokens than its k in a step."""
    speculative = config.speculative_config
    return (
        speculative.method in _TAKE_FEWER
        and not speculative.parallel_drafting
        # Each of its layers has a cache, which its own token of a draft fills.
        and not speculative.use_step3p5_mtp()
        # Ranks with different numbers wait for each other for ever (`vllm/config/vllm.py`, where k is dynamic).
        and config.parallel_config.data_parallel_size == 1
    )


def _drafter_max_tokens(config: Any) -> int:
    """The longest text: that of the drafter's own context where it has one."""
    draft = config.speculative_config.draft_model_config
    own = draft.max_model_len if draft is not None else None
    return int(own if own is not None else config.model_config.max_model_len)


def _lookup_of(config: Any, *, is_async: bool) -> LookupDrafts | None:
    """Look-up as `additional_config` has it; None where it has no such section. Raises ConfigError."""
    if (settings := LookupSettings.read(config.additional_config)) is None:
        return None
    place = f"additional_config.{KEY}"
    if is_async:
        raise ConfigError(
            f"expected {place} with synchronous scheduling only",
            hint="start with --no-async-scheduling and FollowingScheduler",
        )
    if config.use_v2_model_runner:
        raise ConfigError(
            f"expected {place} with Model Runner V1 only: V2 keeps drafts on the device, out of a scheduler's reach",
            hint="set VLLM_USE_V2_MODEL_RUNNER=0, or use vLLM's own n-grams",
        )
    if getattr(config.speculative_config, "draft_sample_method", "greedy") != "greedy":
        raise ConfigError(
            f"expected draft_sample_method greedy beside {place}, found "
            f"{config.speculative_config.draft_sample_method}: its probabilities are not those of look-up's tokens"
        )
    return LookupDrafts(settings)
