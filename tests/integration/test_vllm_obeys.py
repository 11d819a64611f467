"""Real vLLM servers: does a request have its k, and does a sampled neighbour spoil greedy texts? Test texts show it."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from alphaloop.embedded.process import free_ports
from alphaloop.inside_vllm.drafting import KEY
from benchmarks.engines.serve import MODEL_NAME, NGRAM, VLLM_PYTHON, Server, following, running, vllm
from worker.servers.client import ServerClient
from worker.servers.http import endpoint_of
from worker.servers.obedience import Obedience, obedience_of

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(600)]


def shown_by(server: Server, folder: Path, **more: Any) -> Obedience:
    async def ask() -> Obedience:
        endpoint = endpoint_of(server.url, "vllm", MODEL_NAME, None, drafter=server.drafter, num_draft_tokens=4, **more)
        async with ServerClient(endpoint) as client:
            return await obedience_of(client, may_switch=True, reads_counters=True)

    with running([server], folder):
        return asyncio.run(ask())


@pytest.fixture(scope="module")
def folder(smollm2_source: str) -> str:
    """SmolLM2's weights in a form that vLLM loads."""
    if not VLLM_PYTHON.exists():
        pytest.skip("no environment with vLLM: make .venv-vllm/.installed")
    from engine.device import find_device
    from engine.models import load_weights

    return str(load_weights(smollm2_source, None, "float32", find_device("cpu")).folder)


def test_vllm_s_cpu_build_spoils_greedy_texts_beside_a_sampled_one_unless_it_has_our_scheduler(
    folder: str, tmp_path: Path
) -> None:
    (port,) = free_ports(1)
    plain = vllm("plain", str(VLLM_PYTHON), folder, port, speculative=NGRAM, dtype="float32")
    shown = shown_by(plain, tmp_path)
    assert shown.fault is not None
    assert shown.fault.startswith("it drafted for a request that asked for no drafts")
    assert shown.spoiled is not None

    shown = shown_by(following(plain), tmp_path)
    assert (shown.fault, shown.spoiled, shown.miscounted) == (None, None, None)
    assert ([str(asked) for asked in shown.asked], shown.differing) == (["0", "1", "2", "4"], ())
    assert shown.num_drafted_beside == 0


@pytest.mark.parametrize("has_lookup", [True, False])
def test_one_vllm_drafts_with_a_model_or_with_look_up_as_each_request_asks(
    has_lookup: bool, folder: str, tmp_path: Path
) -> None:
    (port,) = free_ports(1)
    model = {"method": "draft_model", "model": folder, "num_speculative_tokens": 4}
    server = following(vllm("small", str(VLLM_PYTHON), folder, port, speculative=model, dtype="float32"))
    if has_lookup:
        server = replace(server, command=(*server.command, "--additional-config", json.dumps({KEY: {}})))
    shown = shown_by(server, tmp_path, switches_drafts=True, lookup_drafter="lookup")
    if not has_lookup:
        assert shown.fault is not None
        assert shown.fault.startswith("it drafted nothing for a text that repeats itself and asked for look-up")
        return
    assert (shown.fault, shown.spoiled, shown.miscounted, shown.differing) == (None, None, None, ())
    assert [str(asked) for asked in shown.asked] == ["0", "1", "2", "4", "1 (look-up)", "4 (look-up)"]
    assert shown.by_lookup is not None
    assert shown.by_lookup.num_proposed > 0
