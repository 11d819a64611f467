"""Which jobs servers may be sent, and how long their prompts are taken to be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alphaloop.deciding.goodput import DrafterState
from alphaloop.errors import InvalidField
from alphaloop.server_identity import ServerKind
from tests.fixtures.models import make_job
from worker.engine import Sampling
from worker.servers.client import InferenceServer
from worker.servers.http import Endpoint
from worker.servers.sending import TokenEstimate, prepare

NGRAM = DrafterState("ngram", "vllm-0.32.0", 4, least_draft_tokens=4)


def server(kind: ServerKind, drafter: DrafterState | None = None) -> InferenceServer:
    return InferenceServer(kind, Endpoint("http://localhost:1/v1", kind, "m"), drafter, 4, 512)


def prepared(sampling: Sampling, *servers: InferenceServer) -> int:
    return prepare(make_job("x" * 400), sampling, servers, limit=512, tokens=TokenEstimate()).num_prompt_tokens


def test_a_job_is_refused_only_where_no_server_can_follow_its_settings() -> None:
    biased = Sampling(max_tokens=8, temperature=1.0, logit_bias=((5, 1.0),))
    with pytest.raises(InvalidField, match=r"body\.logit_bias"):
        prepared(biased, server("vllm", NGRAM))
    assert prepared(biased, server("vllm", NGRAM), server("vllm")) == 100
    cut = Sampling(max_tokens=8, temperature=1.0, top_k=5)
    with pytest.raises(InvalidField, match=r"body\.top_k"):
        prepared(cut, server("openai"))
    assert prepared(cut, server("openai"), server("llama_cpp")) == 100


def test_an_empty_prompt_is_refused_before_it_is_sent() -> None:
    job = make_job("x")
    empty = job.model_copy(update={"body": job.body.model_copy(update={"prompt": ""})})
    with pytest.raises(InvalidField, match=r"body\.prompt"):
        prepare(empty, Sampling(max_tokens=8, temperature=0.0), [server("vllm")], limit=512, tokens=TokenEstimate())


def test_no_more_tokens_are_asked_for_than_a_context_holds() -> None:
    job = prepare(
        make_job("x"), Sampling(max_tokens=9999, temperature=0.0), [server("vllm")], limit=512, tokens=TokenEstimate()
    )
    assert job.sampling.max_tokens == 511


@given(st.floats(1.0, 12.0), st.integers(20, 2000))
def test_the_estimate_comes_to_what_the_server_counts(bytes_per_token: float, num_bytes: int) -> None:
    tokens, job = TokenEstimate(), make_job("x" * num_bytes)
    truth = max(1, round(num_bytes / bytes_per_token))
    for _ in range(4000):
        tokens.learn(job, truth)
    assert tokens.of(job) == pytest.approx(truth, rel=0.1, abs=2)
