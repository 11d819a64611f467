"""Real vLLM servers: does a request have its k, and does a sampled neighbour spoil greedy texts? Test texts show it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from alphaloop.embedded.process import free_ports
from benchmarks.engines.serve import MODEL_NAME, NGRAM, VLLM_PYTHON, Server, following, running, vllm
from worker.servers.client import ServerClient
from worker.servers.http import endpoint_of
from worker.servers.obedience import Obedience, obedience_of

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(600)]


def shown_by(server: Server, folder: Path) -> Obedience:
    async def ask() -> Obedience:
        endpoint = endpoint_of(server.url, "vllm", MODEL_NAME, None, drafter="ngram", num_draft_tokens=4)
        async with ServerClient(endpoint) as client:
            return await obedience_of(client, may_switch=True, reads_counters=True)

    with running([server], folder):
        return asyncio.run(ask())


def test_vllm_s_cpu_build_spoils_greedy_texts_beside_a_sampled_one_unless_it_has_our_scheduler(
    smollm2_source: str, tmp_path: Path
) -> None:
    if not VLLM_PYTHON.exists():
        pytest.skip("no environment with vLLM: make .venv-vllm/.installed")
    from engine.device import find_device
    from engine.models import load_weights

    folder = str(load_weights(smollm2_source, None, "float32", find_device("cpu")).folder)
    (port,) = free_ports(1)
    plain = vllm("plain", str(VLLM_PYTHON), folder, port, speculative=NGRAM, dtype="float32")
    shown = shown_by(plain, tmp_path)
    assert shown.fault is not None
    assert shown.fault.startswith("it drafted for a request that asked for no drafts")
    assert shown.spoiled is not None

    shown = shown_by(following(plain), tmp_path)
    assert (shown.fault, shown.spoiled, shown.miscounted) == (None, None, None)
    assert (shown.asked, shown.differing) == ((0, 1, 2, 4), ())
    assert shown.num_drafted_beside == 0
