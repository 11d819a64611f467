"""`alphaloop explain` over jobs in a real database: now, of an earlier time, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import UUID

import pytest

from alphaloop.cli.status import told_of
from alphaloop.costs import CostPoint
from alphaloop.deciding.goodput import DrafterState
from alphaloop.deciding.snapshot import SessionFacts, SnapshotEncoder
from alphaloop.explaining.explanation import what_runs
from alphaloop.settings import load_settings
from alphaloop.store.database import Database
from alphaloop.store.decision_inputs import CostStore, CostSubject, DraftRegistry, DraftStatus
from alphaloop.store.decisions import SnapshotRow, SnapshotStore
from alphaloop.store.workers import WorkerLoad, WorkerSetup, WorkerStore
from tests.fixtures.cli import Cli
from tests.fixtures.deciding import some_snapshot
from tests.fixtures.runs import DEVICE, ENGINE, TARGET, choose, shown_speedup

pytestmark = pytest.mark.postgres


def test_explain_decides_as_a_worker_would(cli: Cli, cli_environment: None, twelve_jobs: Database) -> None:
    ran = cli("explain", "code", "--json")
    assert ran.code == 0
    told = ran.json
    assert told["posteriors"]["lookup"]["jobs"] == pytest.approx(8, abs=0.1)
    decision = told["decision"]
    assert (decision["mode"], decision["drafter"], decision["reason"]) == ("speculative", "lookup", "expected_faster")
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
    names = ("acceptance_low", "acceptance", "acceptance_high", "tested")
    for low, mean, high, tested in zip(*(inferred[name] for name in names), strict=True):
        assert (low < mean < high) if tested else (low, mean, high) == (None, None, None)
    assert (told["measured"]["all"]["num_jobs"], told["measured"]["speedup"]) == (12, None)
    cold = cli("explain", "sql", "--json").json
    assert cold["decision"]["reason"] == "no_history"
    assert cold["posteriors"]["lookup"]["jobs"] == 0
    unknown = cli("explain", "nonesuch")
    assert (unknown.code, "code" in unknown.err.splitlines()[1]) == (1, True)


def worker_says(database: Database, **changes: object) -> WorkerLoad:
    """A worker on the engine of the twelve jobs, whose settings are not those of this machine."""
    facts = SessionFacts("w", "a-host", DEVICE, ENGINE, TARGET, 3, timedelta(days=3), 0.07)
    drafters = (DrafterState("lookup", "draft-1", 5), DrafterState("of the worker", "draft-9", 4))
    setup = replace(WorkerSetup(facts, drafters), **changes)  # type: ignore[arg-type]
    load = WorkerLoad("w", DEVICE, "served", 3, 0, 0, {}, setup=setup)
    WorkerStore(database).say(load)
    return load


def test_explain_says_what_the_workers_run(
    cli: Cli, cli_environment: None, twelve_jobs: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not what the settings beside the command say: they may be those of another machine.

    They have other drafters and another batch here, and there is a newer calibration of an engine that runs no more.
    """
    configs = tmp_path / "other"
    configs.mkdir()
    (configs / "models.toml").write_text('[models.drafters.of_this_machine]\nmethod = "lookup"\n')
    (configs / "worker.toml").write_text("[worker]\nbatch_size = 61\n")
    monkeypatch.setenv("ALPHALOOP_CONFIGS", str(configs))
    DraftRegistry(twelve_jobs).register("of_this_machine", "draft-2", "old-target")
    old = CostSubject("b-host", "old device", "old engine", "old-target", {})
    CostStore(twelve_jobs).save(old, [CostPoint(None, 1, 1, 9.0, 5)])
    elsewhere = load_settings(configs)
    told = cli("explain", "code", "--json").json
    assert told["engine"]["device"] == "old device", "no worker runs: the last engine and the settings here"
    assert (told["batch"], told["workers"]["num_alike"]) == (2, 0), "the usual load of the day"
    assert what_runs(twelve_jobs, elsewhere, datetime.now(UTC)).batch == 61, "where a task had no traffic"
    assert "No worker says what it runs" in " ".join(cli("explain", "code").out.split())
    worker_says(twelve_jobs)
    told = cli("explain", "code", "--json").json
    assert (told["engine"]["host"], told["engine"]["device"], told["batch"]) == ("a-host", DEVICE, 2)
    assert what_runs(twelve_jobs, elsewhere, datetime.now(UTC)).batch == 3
    assert [one["name"] for one in told["drafters"]] == ["lookup", "of the worker"]
    assert (told["decision"]["drafter"], told["decision"]["reason"]) == ("lookup", "expected_faster")
    assert told["workers"] == {"num_alike": 1, "num_others": 0, "drafters_ended": {}}
    shown = " ".join(cli("explain", "code").out.split())
    assert "A batch of 2, greedy" in shown
    assert "1 worker runs this." in shown
    assert "The budget for exploration is 7.0%." in shown
    assert cli("explain", "code", "--batch", "5", "--json").json["batch"] == 5
    DraftRegistry(twelve_jobs).set_status("lookup", "draft-1", TARGET, DraftStatus.STALE, "its probes fell")
    assert cli("explain", "code", "--json").json["decision"]["drafter"] != "lookup", "it is stale by now"


def test_explain_and_status_name_a_drafter_that_the_workers_ask_no_more(
    cli: Cli, cli_environment: None, twelve_jobs: Database
) -> None:
    why = "any job: it failed 3 times in a row, the last time in propose() with IndexError"
    only = (DrafterState("lookup", "draft-1", 5),)
    worker_says(twelve_jobs, drafters=only, ended={"lookup": why})
    told = cli("explain", "code", "--json").json
    assert (told["decision"]["mode"], told["decision"]["reason"]) == ("vanilla", "cannot_serve")
    assert told["workers"]["drafters_ended"] == {"lookup": why}
    shown = " ".join(cli("explain", "code").out.split())
    assert f"They do not ask lookup for {why}." in shown
    (worker,) = WorkerStore(twelve_jobs).seen()
    assert told_of([worker]) == [f"worker w does not ask lookup for {why}"]
    assert worker.as_json()["drafters"] == [{"name": "lookup", "revision": "draft-1", "ended": why}]


def test_status_names_the_revisions_of_a_target_where_there_are_several(twelve_jobs: Database) -> None:
    load = worker_says(twelve_jobs)
    assert told_of(WorkerStore(twelve_jobs).seen()) == []
    facts = replace(load.setup.facts, target_revision="target-2")
    WorkerStore(twelve_jobs).say(replace(load, owner="w2", setup=replace(load.setup, facts=facts)))
    told = told_of(WorkerStore(twelve_jobs).seen())
    assert told == ["workers serve 2 revisions of the target: target-1 (1), target-2 (1)"]


def test_explain_as_of_an_earlier_time(cli: Cli, cli_environment: None, twelve_jobs: Database) -> None:
    """Vanilla before the drafter's good days, speculative after them; what came later is not seen."""
    now, store = datetime.now(UTC), SnapshotStore(twelve_jobs)
    encoder = SnapshotEncoder(SessionFacts("w", "a-host", DEVICE, ENGINE, TARGET, 4, timedelta(days=3), 0.02))
    for days, alpha in ((6, 0.01), (2, 0.97)):
        at = now - timedelta(days=days)
        snapshot = replace(some_snapshot(alpha=alpha), decided_at=at)
        store.add([SnapshotRow(at, UUID(int=days), "code", "greedy", 4, encoder.encode(snapshot))])
    bad, good = (cli("explain", "code", "--sampling", "greedy", "--at", ago, "--json").json for ago in ("5d", "1d"))
    assert (bad["decision"]["mode"], good["decision"]["mode"]) == ("vanilla", "speculative")
    for then in (bad, good):
        assert then["recorded"]["is_reproduced"]
        assert then["posteriors"]["lookup"]["seen"]["jobs"] == 20
        assert then["posteriors"]["lookup"]["borrowed"] is None
    assert bad["posteriors"]["lookup"]["acceptance"][0] < 0.2
    assert good["posteriors"]["lookup"]["acceptance"][0] > 0.6
    shown = " ".join(cli("explain", "code", "--sampling", "greedy", "--at", "1d").out.split())
    assert "Taken again from its snapshot, it is the same decision." in shown
    beside = cli("explain", "code", "--sampling", "greedy", "--at", "1d", "--batch", "3", "--json").json
    assert beside["recorded"]["decision_id"] == good["recorded"]["decision_id"]
    for arguments in (("--at", "8d"), ("--at", "1d", "--batch", "16")):
        none = cli("explain", "code", "--sampling", "greedy", *arguments)
        assert none.code == 1
        assert "expected a decision of code, greedy" in none.err
        assert "found those from " in none.err
    assert "found none of the task" in cli("explain", "sql", "--at", "1d").err


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
        assert "(lookup, k up to 4, 4.0 running; 12 blocks of control rounds, 5.3% of the time): faster." in told
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
