"""`alphaloop advise`: a vLLM server's draft length by batch size, what is not known, and that vLLM takes it."""

from __future__ import annotations

import json
import os
import random
import shlex
import subprocess
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import pytest

from alphaloop.costs import CostKind, CostPoint
from alphaloop.deciding.goodput import DrafterState
from alphaloop.deciding.snapshot import SessionFacts
from alphaloop.server_identity import SERVERS
from alphaloop.store.database import Database
from alphaloop.store.decision_inputs import CostStore, CostSubject, DraftRegistry
from benchmarks.engines.serve import ENVIRONMENT, VLLM_PYTHON
from tests.fixtures.cli import Cli
from tests.fixtures.runs import ENGINE, TARGET, DecodedJobs
from tests.integration.test_cli_explain import worker_says

pytestmark = pytest.mark.postgres

DEVICE: Final = f"{SERVERS}ab12"
MODELS: Final = """\
[models.target]
engine = "server"

[models.endpoints.main]
kind = "vllm"
url = "http://vllm:8000/v1"
drafter = "heads"
num_draft_tokens = 4
switches_drafts = true

[models.endpoints.plain]
kind = "vllm"
url = "http://other:8000/v1"

[models.endpoints.sgl]
kind = "sglang"
url = "http://sgl:8000/v1"
"""


@pytest.fixture
def server(cli_environment: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    configs = tmp_path / "configs"
    configs.mkdir()
    (configs / "models.toml").write_text(MODELS)
    monkeypatch.setenv("ALPHALOOP_CONFIGS", str(configs))
    monkeypatch.setenv("COLUMNS", "80")
    return configs


def worker_asks(database: Database, *, device: str = DEVICE, drafter: str = "heads") -> None:
    facts = SessionFacts("w", "a-host", device, ENGINE, TARGET, 0, timedelta(days=3), 0.02)
    worker_says(database, facts=facts, drafters=(DrafterState(drafter, "draft-1", 4),))
    DraftRegistry(database).register(drafter, "draft-1", TARGET)


def measured(database: Database, *, step_ms: float = 1.0, is_served: bool = False) -> None:
    """Passes of 1, 4 and 16 requests, which take `step_ms` longer for each token; or whole rounds at k = 4."""
    points = []
    for batch in (1, 4, 16):
        points += [CostPoint(None, batch, width, 20 + step_ms * batch * width, 5) for width in (1, 2, 5)]
        kind = CostKind.SERVED if is_served else CostKind.ROUND
        points += [CostPoint("heads", batch, width, 2.0 + 20 * is_served, 5, kind=kind) for width in (2, 5)]
    CostStore(database).save(CostSubject("a-host", DEVICE, ENGINE, TARGET, {"heads": "draft-1"}), points)


def accepted(database: Database, rng: random.Random, **alphas: float) -> None:
    jobs = DecodedJobs(database, rng)
    for task, alpha in alphas.items():
        jobs.decoded(task, [alpha, alpha], 8, drafter="heads")


def test_the_draft_length_by_batch_size(cli: Cli, server: Path, database: Database, rng: random.Random) -> None:
    worker_asks(database)
    measured(database)
    accepted(database, rng, code=0.9, sql=0.8)
    answer = cli("advise", "main", "--json").json
    assert (answer["endpoint"], answer["drafter"], answer["unknown_because"]) == ("main", "heads", None)
    assert [task["task"] for task in answer["tasks"]] == sorted(
        (task["task"] for task in answer["tasks"]),
        key=lambda name: -next(t["share"] for t in answer["tasks"] if t["task"] == name),
    )
    assert sum(task["share"] for task in answer["tasks"]) == pytest.approx(1)
    assert (answer["measured_batches"], answer["measured_widths"]) == ([1, 4, 16], [1, 2, 5])
    sizes = [size for each in answer["ranges"] for size in range(each["first"], each["last"] + 1)]
    assert sizes == [*range(1, 17)]
    lengths = [each["num_draft_tokens"] for each in answer["ranges"]]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] == 4
    config = answer["speculative_config"]
    assert config == {
        "num_speculative_tokens": 4,
        "num_speculative_tokens_per_batch_size": [
            [each["first"], each["last"], each["num_draft_tokens"]] for each in answer["ranges"]
        ],
    }
    assert "Add what else" in answer["notes"][-1]
    shown = cli("advise", "main").out
    *text, option = shown.splitlines()
    assert max(map(len, text)) <= 80
    assert shlex.split(option) == ["--speculative-config", json.dumps(config)]
    said = " ".join(shown.split())
    first = answer["ranges"][0]["at_first"]
    assert f"{first['mean']:.2f} [{first['low']:.2f} {first['high']:.2f}]" in said
    assert "Nothing was measured above a batch size of 16" in said


def test_drafts_that_do_not_pay_are_advised_against(
    cli: Cli, server: Path, database: Database, rng: random.Random
) -> None:
    worker_asks(database)
    measured(database, step_ms=20.0)
    accepted(database, rng, prose=0.05)
    answer = cli("advise", "main", "--json").json
    assert (answer["is_worth_it"], answer["speculative_config"], answer["option"]) == (False, None, None)
    said = " ".join(cli("advise", "main").out.split())
    assert "heads is not expected to pay at any batch size" in said
    assert "Start it without --speculative-config." in said


def test_costs_of_requests_hold_up_to_the_load_that_was_seen(
    cli: Cli, server: Path, database: Database, rng: random.Random
) -> None:
    worker_asks(database)
    measured(database, is_served=True)
    accepted(database, rng, code=0.9)
    answer = cli("advise", "main", "--json").json
    assert answer["ranges"][-1]["last"] == 2, "no more than two ran together"
    assert any("times of requests" in note for note in answer["notes"])


def test_what_is_not_known_is_said_with_its_reason(
    cli: Cli, server: Path, database: Database, rng: random.Random
) -> None:
    def why(endpoint: str = "main") -> str:
        answer = cli("advise", endpoint, "--json").json
        assert (answer["ranges"], answer["option"], answer["is_worth_it"]) == ([], None, None)
        because: str = answer["unknown_because"]
        assert " ".join(f"{endpoint}: not known, because {because}.".split()) in " ".join(
            cli("advise", endpoint).out.split()
        )
        return because

    assert "nothing drafts there" in why("plain")
    assert why() == "no worker has measured its device yet"
    worker_asks(database, device="a-gpu")
    assert "no worker that asks servers" in why()
    worker_asks(database, drafter="other")
    assert "says that it uses heads" in why()
    worker_asks(database)
    assert "was decoded in the last 7 days" in why()
    jobs = DecodedJobs(database, rng)
    jobs.decoded("code", None, 3)
    assert why() == "the acceptance of heads was not measured in code"
    jobs.decoded("code", [0.9], 3, drafter="heads")
    assert "no costs of vanilla and of heads" in why()


def test_other_endpoints_are_refused(cli: Cli, server: Path, database: Database) -> None:
    unknown = cli("advise", "nosuch")
    assert (unknown.code, "one of main, plain, sgl" in unknown.err) == (1, True)
    other = cli("advise", "sgl")
    assert (other.code, "expected \"vllm\", found 'sglang'" in other.err) == (1, True)


@pytest.mark.model
@pytest.mark.slow
def test_vllm_takes_the_config(cli: Cli, server: Path, database: Database, rng: random.Random) -> None:
    """Its own class, and the table that its scheduler makes of it."""
    if not VLLM_PYTHON.exists():
        pytest.skip("no environment with vLLM: make .venv-vllm/.installed")
    worker_asks(database)
    measured(database)
    accepted(database, rng, code=0.9, sql=0.8)
    answer = cli("advise", "main", "--json").json
    config: dict[str, Any] = {**answer["speculative_config"], "method": "ngram", "prompt_lookup_max": 4}
    done = subprocess.run(
        [VLLM_PYTHON, "-c", _ASK_VLLM],
        input=json.dumps(config),
        capture_output=True,
        text=True,
        env={**os.environ, **ENVIRONMENT, "VLLM_LOGGING_LEVEL": "ERROR"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    by_size = json.loads(done.stdout.splitlines()[-1])
    for each in answer["ranges"]:
        assert by_size[each["first"] : each["last"] + 1] == [each["num_draft_tokens"]] * (
            each["last"] - each["first"] + 1
        )
    assert by_size[17:] == [answer["ranges"][-1]["num_draft_tokens"]] * 16, "it goes on with the last k"


_ASK_VLLM: Final = """
import json, sys
from vllm.config import ModelConfig, ParallelConfig, SpeculativeConfig
from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup
made = SpeculativeConfig(**json.load(sys.stdin), target_model_config=None, target_parallel_config=ParallelConfig())
schedule, k = made.num_speculative_tokens_per_batch_size, made.num_speculative_tokens
print(json.dumps(build_dynamic_sd_schedule_lookup(schedule, 32, k)))
"""
