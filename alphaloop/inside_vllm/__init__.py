"""Look-up as vLLM's drafter, loaded by vLLM itself (docs/guides/engines.md, docs/decisions/0024-look-up-in-vllm.md).

    vLLM → proposer.LookupProposer.propose → FollowedTexts.follow → one draft a row
    a request's `vllm_xargs` → worker.LookupWorker → proposer.Asked: its task, its longest draft

It runs in vLLM's environment: beside vLLM's own numpy it needs alphaloop's folder on PYTHONPATH, and nothing installed.
"""

from __future__ import annotations
