"""A real llama.cpp that drafts by looking texts up: what it reports is what is recorded of a text."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import pytest

from alphaloop.embedded.process import free_ports
from alphaloop.engine import Generation, Sampling
from alphaloop.settings.models import ModelSettings
from benchmarks.engines.serve import LLAMA_PYTHON, Server, llama_cpp, packaged_gguf, running
from tests.fixtures.models import decision, finish, make_job
from worker.servers.engine import open_server_engine

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]

K: Final = 3
REPEATING: Final = "The quick brown fox. " * 4
GREEDY: Final = Sampling(max_tokens=48, temperature=0.0)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, smollm2_source: str) -> Iterator[Server]:
    """On one thread, with two slots."""
    if not LLAMA_PYTHON.exists():
        pytest.skip("no environment with llama.cpp: make .venv-llama/.installed")
    (port,) = free_ports(1)
    drafting = llama_cpp("llama", str(LLAMA_PYTHON), str(packaged_gguf()), port, drafts=True)
    folder: Path = tmp_path_factory.mktemp("llama")
    with running([drafting], folder):
        yield drafting


def texts(server: Server, num: int, **more: Any) -> list[Generation]:
    """The texts of `num` jobs, one after the other."""
    endpoint = {"kind": "llama_cpp", "url": server.url, "drafter": "ngram", "num_draft_tokens": K, **more}
    models = ModelSettings.model_validate(
        {"target": {"engine": "server", "name": "smollm2"}, "endpoints": {"llama": endpoint}}
    )
    with closing(open_server_engine(models)) as engine:
        jobs = [make_job(f"{number}. {REPEATING}", number) for number in range(num)]
        return [one for job in jobs for one in finish(engine, [(job, GREEDY, decision("ngram", K))]).values()]


def test_the_sums_of_a_text_are_in_its_counts(server: Server) -> None:
    (found,) = texts(server, 1)
    served = found.served
    assert served is not None
    assert (served.granularity, served.draft_revision.rpartition("-")[2]) == ("sums", "sums")
    assert 0 < served.num_accepted <= served.num_proposed
    assert (found.is_counted, sum(found.counts.proposed), found.counts.num_accepted) == (
        True,
        served.num_proposed,
        served.num_accepted,
    )
    assert found.counts.num_empty_rounds < found.counts.rounds


def test_its_counters_say_what_each_position_accepted(server: Server) -> None:
    """From the second text on, because the first reading begins a slice."""
    first, *others = texts(server, 3, metrics_url=f"{server.url.removesuffix('/v1')}/metrics")
    assert not first.is_counted
    for text in others:
        served = text.served
        assert served is not None
        assert served.slice_counts is not None
        counts = served.slice_counts.counts
        assert (sum(counts.proposed), counts.num_accepted) == (served.num_proposed, served.num_accepted)
        assert (counts.num_tokens, len(counts.accepts)) == (text.counts.num_tokens, K)
        assert not text.is_counted, "the slice is the evidence"
