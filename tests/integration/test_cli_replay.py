"""`alphaloop replay` over jobs in a real database."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy import text

from alphaloop.store.database import Database
from tests.fixtures.cli import Cli
from tests.fixtures.deciding import keep_snapshots

pytestmark = pytest.mark.postgres


@pytest.fixture
def twelve_decided(twelve_jobs: Database) -> Database:
    """Twelve jobs of which each has the snapshot of its decision."""
    keep_snapshots(twelve_jobs)
    return twelve_jobs


def test_replay_decides_history_again_and_writes_nothing(
    cli: Cli, cli_environment: None, twelve_decided: Database
) -> None:
    def everything() -> list[object]:
        with twelve_decided.begin() as connection:
            tables = connection.execute(
                text("SELECT tablename FROM pg_tables WHERE schemaname = 'public' ORDER BY 1")
            ).scalars()
            rows = "SELECT count(*), sum(hashtextextended(t::text, 0)) FROM "
            return [connection.execute(text(f'{rows} "{name}" AS t')).one() for name in tables.all()]

    before = everything()
    ran = cli("replay", "--set", "tasks.code.decoding=vanilla", "--json")
    assert ran.code == 0
    assert everything() == before
    told = ran.json
    (code,) = told["tasks"].values()
    assert (code["num_jobs"], code["num_same_jobs"]) == (12, 4)
    assert told["reasons"] == {"forced": 12}
    assert 1 < code["ratio"]["low"] <= code["ratio"]["mean"] <= code["ratio"]["high"]
    assert {way["would"]["drafter"] for way in code["ways"]} == {None}
    assert sum(way["num_tokens"] for way in code["ways"]) == code["num_tokens"]
    assert code["measured_s"] == pytest.approx(12 * 0.5)
    assert told["total"] == code
    no_trials = cli("replay", "--set", "policy.explore_share=0.0", "--json").json
    assert {"exploring", "control", "faster"}.isdisjoint(no_trials["reasons"]), "faster is said of what was measured"
    assert {"expected_faster", "not_surely_faster"} & set(no_trials["reasons"])


def test_replay_with_another_folder_of_settings(
    cli: Cli, cli_environment: None, twelve_decided: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its only drafter everything is vanilla; what was drafted is compared all the same."""
    configs = tmp_path / "to-be"
    configs.mkdir()
    (configs / "models.toml").write_text("[models]\ndrafters = {}\n")
    for width in (80, 100):
        monkeypatch.setenv("COLUMNS", str(width))
        ran = cli("replay", "--configs", configs, "--task", "code", "--since", "2h")
        assert ran.code == 0
        assert max(map(len, ran.out.splitlines())) <= width
        assert "Jobs by reason: no drafter 12." in ran.out
        assert "It would have cost" in ran.out


WRONG_REPLAYS = [
    (("--task", "nonesuch"), "no task 'nonesuch'"),
    (("--task", "sql"), "found no job of sql in that time"),
    (("--since", "soon"), "--since: expected a time, found 'soon'"),
    (("--since", "1d", "--until", "2d"), "--since: expected a time before --until"),
    (("--until", "3d"), "found no job in that time; they are from "),
    (("--set", "policy.explor=1"), "did you mean explore_share?"),
    (("--set", "polcy.explore_share=1"), "did you mean policy?"),
    (("--set", "policy.explore_share=many"), "policy.explore_share: "),
    (("--set", "policy.explore_share"), "expected a setting and its value"),
    (("--set", "policy.explore_share.x=1"), "policy.explore_share.x: no such setting"),
    (("--set", "worker.batch_size=8"), "worker.batch_size: expected a setting that a snapshot is decided with"),
    (("--configs", "/nonesuch"), "expected a folder of TOML files"),
    (("--set", "policy.prior_alpha=0.9"), "policy.prior_alpha: no such setting"),
    (("--set", "tasks.code.max_tokens=5"), "tasks.code.max_tokens: expected a setting that a snapshot is decided with"),
    (("--set", "models.drafters.lookup.max_draft_tokens=31"), "max_draft_tokens: expected at most "),
]


def test_replay_refuses_what_cannot_be_asked(cli: Cli, cli_environment: None, twelve_decided: Database) -> None:
    for arguments, told in WRONG_REPLAYS:
        ran = cli("replay", *arguments)
        assert (ran.code, ran.out) == (1, ""), arguments
        assert told in ran.err


def test_jobs_without_a_snapshot_are_counted_apart(cli: Cli, cli_environment: None, twelve_decided: Database) -> None:
    """The first has one: what is replayed begins there."""
    twelve_decided.change(
        text(
            "DELETE FROM decision_snapshots WHERE decision_id ="
            " (SELECT decision_id FROM decision_snapshots ORDER BY decided_at LIMIT 1 OFFSET 1)"
        )
    )
    told = cli("replay", "--json").json
    (without,) = told["left_out"].values()
    assert without + told["total"]["num_jobs"] == 12
    assert told["num_reproduced"] == told["num_recorded"] > 0


def test_replay_without_history(cli: Cli, cli_environment: None) -> None:
    assert "found no job in that time" in cli("replay").err
