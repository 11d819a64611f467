"""Drafts in vLLM as each request asks, loaded by vLLM itself (docs/guides/engines.md, docs/decisions/0053).

    a request's `vllm_xargs` → drafting.Wish: how many draft tokens a round, from which drafter, for which task
    vLLM's drafter → scheduler.FollowingScheduler → its tokens cut to what the request wants
    alphaloop's look-up → drafting.LookupDrafts → tokens in their place
    the steps → measuring.ServerExperiment → times and slices of the experiment, which go to the worker with a reply

It runs in vLLM's environment: beside vLLM it needs alphaloop's folder on PYTHONPATH, and nothing installed.
"""

from __future__ import annotations

from typing import Final

#: What vLLM is started with, as `--scheduler-cls` and `--worker-cls`.
SCHEDULER: Final = "alphaloop.inside_vllm.scheduler.FollowingScheduler"
ASYNC_SCHEDULER: Final = "alphaloop.inside_vllm.scheduler.FollowingAsyncScheduler"
RESTING_WORKER: Final = "alphaloop.inside_vllm.worker.RestingWorker"
#: What the worker's output has under this name: tokens and seconds of the drafter's last call.
DRAFTER_TIME: Final = "alphaloop_drafter_time"
