"""`alphaloop explain` over jobs in a real database: now, of an earlier time, and what it refuses."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from sqlalchemy import text

from alphaloop.store.database import Database
from alphaloop.store.drafts import DraftRegistry
from tests.fixtures.cli import Cli
from tests.fixtures.decoded_jobs import choose
from tests.fixtures.history import record_runs
from tests.fixtures.runs import (
    TARGET,
    decode_run,
    simulated_counts,
)
from tests.fixtures.slices import shown_speedup

pytestmark = pytest.mark.postgres


def test_explain_decides_as_a_worker_would(cli: Cli, cli_environment: None, twelve_jobs: Database) -> None:
    ran = cli("explain", "code", "--json")
    assert ran.code == 0
    told = ran.json
    assert told["posteriors"]["lookup"]["jobs"] == pytest.approx(8, abs=0.1)
    decision = told["decision"]
    assert (decision["mode"], decision["drafter"], decision["reason"]) == ("speculative", "lookup", "faster")
    best = decision["alternatives"][0]
    assert best["speedup"] > 2
    assert best["speedup_low"] <= best["speedup"] <= best["speedup_high"]
    shown = cli("explain", "code").out
    assert shown.startswith(
        f"code, next job: lookup k={decision['num_draft_tokens']} at 2 running (expected faster)"
    ), "nothing was measured"
    assert "vanilla" in shown
    # Counts and figures stand beside each other: what is believed lies within its bounds, what was seen adds up.
    inferred = told["posteriors"]["lookup"]
    assert sum(inferred["borrowed"].values()) == pytest.approx(1)
    assert inferred["borrowed"]["same_jobs"] > 0.5
    assert all(
        low <= mean <= high
        for low, mean, high in zip(
            inferred["acceptance_low"], inferred["acceptance"], inferred["acceptance_high"], strict=True
        )
    )
    assert (told["measured"]["all"]["num_jobs"], told["measured"]["speedup"]) == (12, None)
    cold = cli("explain", "sql", "--json").json
    assert cold["decision"]["reason"] == "no_history"
    assert cold["posteriors"]["lookup"]["jobs"] == 0
    unknown = cli("explain", "nonesuch")
    assert (unknown.code, "code" in unknown.err.splitlines()[1]) == (1, True)


def test_explain_as_of_an_earlier_time(
    cli: Cli, cli_environment: None, twelve_jobs: Database, rng: random.Random
) -> None:
    """Vanilla before the drafter's good days, speculative after them; what came later is not seen."""
    now = datetime.now(UTC)
    with twelve_jobs.begin() as connection:
        connection.execute(text("UPDATE draft_revisions SET registered_at = now() - interval '9 days'"))
    runs = [
        decode_run(simulated_counts(rng, [alpha] * 3, 20), task="math", at=now - timedelta(days=days, minutes=i))
        for days, alpha in ((6, 0.0), (2, 0.97))
        for i in range(20)
    ]
    for number, run in enumerate(sorted(runs, key=lambda run: run.decoded_at)):
        record_runs(twelve_jobs, {f"m{number}": run})
    bad, good, none = (cli("explain", "math", "--at", ago, "--json").json for ago in ("5d", "1d", "8d"))
    assert (bad["decision"]["mode"], good["decision"]["mode"]) == ("vanilla", "speculative")
    # A day old each; what the good days contradict is forgotten.
    assert all(10 < then["posteriors"]["lookup"]["seen"]["jobs"] < 25 for then in (bad, good))
    assert bad["posteriors"]["lookup"]["acceptance"][0] < 0.2
    assert good["posteriors"]["lookup"]["acceptance"][0] > 0.6
    assert none["posteriors"]["lookup"]["jobs"] == 0
    assert (bad["measured"]["all"]["num_jobs"], good["measured"]["all"]["num_jobs"]) == (20, 40)
    assert "The evidence is rebuilt" in cli("explain", "math", "--at", "1d").out
    assert "no job of this task yet" in cli("explain", "sql", "--at", "1d").out


def test_explain_says_what_was_measured_and_why_the_choice_changed(
    cli: Cli, cli_environment: None, twelve_jobs: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three tokens for one and a half vanilla rounds."""
    shown_speedup(twelve_jobs, 12)
    choose(twelve_jobs)
    measured = cli("explain", "code", "--json").json["measured"]
    assert measured["speedup"]["speedup"]["mean"] == pytest.approx(2.0, rel=0.01)
    assert (measured["speedup"]["verdict"], measured["all"]["num_jobs"]) == ("faster", 12)
    for width in (80, 100):
        monkeypatch.setenv("COLUMNS", str(width))
        shown = cli("explain", "code").out
        assert max(map(len, shown.splitlines())) <= width
        told = " ".join(shown.split())
        assert "(lookup, k 4, 4.0 running; 12 blocks of control rounds, 5.3% of the time): faster." in told
        assert "nothing → lookup k=3 (expected faster; batch 4, greedy)" in told
        assert "lookup k=3 2.10x (1.90 to 2.40), vanilla 1; from 8 jobs" in told


def test_explain_says_whose_rounds_count_for_a_drafter(
    cli: Cli, cli_environment: None, twelve_jobs: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configs = tmp_path / "pair"
    configs.mkdir()
    dials = {"plain": "", "gated": "min_probability = 0.6", "branching": "num_branches = 2"}
    (configs / "models.toml").write_text(
        "".join(
            f'[models.drafters.{name}]\nmethod = "draft_model"\nsource = "small"\n{dial}\n'
            for name, dial in dials.items()
        )
    )
    monkeypatch.setenv("ALPHALOOP_CONFIGS", str(configs))
    for name in dials:
        DraftRegistry(twelve_jobs).register(name, f"{name}-1", TARGET)
    told = " ".join(cli("explain", "code").out.split())
    assert "Rounds of gated count for plain too, because the weights are the same. " in told
    assert told.count("because the weights are the same") == 2


WRONG_EXPLAINS = [
    (("--at", "soon"), "--at: expected a time, found 'soon'"),
    (("--at", "2999-01-01"), "--at: expected a time in the past"),
    (("--at", "1e400d"), "--at: expected a time, found"),
    (("--sampling", "hot"), "--sampling: expected a sampling bucket, found 'hot'"),
]


def test_explain_refuses_what_cannot_be_asked(cli: Cli, cli_environment: None) -> None:
    for arguments, told in WRONG_EXPLAINS:
        ran = cli("explain", "code", *arguments)
        assert (ran.code, ran.out) == (1, ""), arguments
        assert told in ran.err


def test_explain_before_any_calibration(cli: Cli, cli_environment: None) -> None:
    ran = cli("explain", "code")
    assert (ran.code, ran.err.splitlines()[0]) == (1, "error: no worker has measured its device yet")
