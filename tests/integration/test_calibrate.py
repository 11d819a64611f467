"""`alphaloop calibrate` on a tiny model: measured in a process of its own, shown, stored."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import SecretStr, TypeAdapter
from sqlalchemy import text

from alphaloop.cli.models import _show_costs
from alphaloop.commands import CalibrateOrder, Calibration
from alphaloop.costs import CostKind, CostPoint
from alphaloop.server_identity import EngineIdentity
from alphaloop.store.database import Database
from alphaloop.store.decision_inputs import CostStore, CostSubject
from tests.fixtures.cli import CarriedOut


@pytest.fixture
def configs(tmp_path: Path, tiny_models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny target and look-up, for batches of two, as the environment names them."""
    folder = tmp_path / "configs"
    folder.mkdir()
    (folder / "models.toml").write_text(
        f'[models.target]\nname = "tiny"\nsource = "{tiny_models["llama"]}"\ndtype = "float64"\ndevice = "cpu"\n'
        "num_threads = 1\n[models.drafters.lookup]\n"
    )
    (folder / "worker.toml").write_text("[worker]\nbatch_size = 2\n")
    monkeypatch.setenv("ALPHALOOP_CONFIGS", str(folder))
    monkeypatch.setenv("ALPHALOOP_DATA_DIR", str(tmp_path))


@pytest.mark.postgres
@pytest.mark.timeout(300)
def test_calibrate_measures_and_stores(
    configs: None, database: Database, database_url: SecretStr, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATABASE_URL", database_url.get_secret_value())
    # More time than a slow machine takes: what refines is measured only while the time lasts.
    done = CarriedOut(CalibrateOrder(budget=150, no_store=False))
    assert done.code == 0, done.error
    (data,) = done.reports
    found = TypeAdapter(Calibration).validate_python(data)
    identity, points = found.identity, set(found.points)
    assert (identity.target, found.is_stored) == ("tiny", True)
    assert {(p.batch, p.drafter) for p in points if p.kind is CostKind.ROUND} >= {
        (batch, drafter) for batch in (1, 2) for drafter in (None, "lookup")
    }
    assert {p.context for p in points if p.kind is CostKind.ROUND} == {256, 1024}
    assert any(p.kind is CostKind.PREFILL for p in points)
    drafts = text("SELECT DISTINCT drafter, draft_revision FROM cost_profiles WHERE drafter <> ''")
    revisions = {row.drafter: row.draft_revision for row in database.rows(drafts)}
    where = CostSubject(identity.host, identity.device, identity.engine, identity.target_revision, revisions)
    stored = CostStore(database).load(where)
    # The doubt of a correction is not measured: it grows from the time of storing.
    without_doubt = {replace(point, correction_variance=0.0) for point in points}
    assert {replace(point, correction_variance=0.0) for point in stored.points} == without_doubt


def test_without_a_database_it_says_how_to_go_on(configs: None) -> None:
    done = CarriedOut(CalibrateOrder(budget=20, no_store=False))
    assert done.code == 1
    assert done.error.message == "no database is configured"
    assert "--no-store" in (done.error.hint or "")


def test_the_table_fits_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    identity = EngineIdentity("transformers-5.23.0-bfloat16", "tiny", "0" * 12, "bfloat16", "cpu", 8192, "a-host")
    widths = (1, 2, 3, 5, 9, 13)
    points = [
        CostPoint(name, batch, width, 1234.5 if name is None else 0.123, 9, context)
        for name in (None, "lookup", "smollm2-first-8")
        for batch in (1, 16, 256)
        for context in (256, 2048)
        for width in widths
        if name is None or width > 1
    ]
    points += [CostPoint(None, 1, n, 33.3 * n, 3, 0, CostKind.PREFILL) for n in (64, 512)]
    _show_costs(Calibration(identity, tuple(points), 41.6, is_stored=True))
    told = capsys.readouterr()
    lines = told.out.splitlines()
    assert told.err.startswith(f"{len(points)} shapes in 42 s, ")
    assert max(map(len, lines)) <= 80
    rows = [line.split() for line in lines]
    assert ["what", "batch", "context", *(f"w={width}" for width in widths)] in rows
    assert ["target", "1", "256", *["1234.5"] * 6] in rows
    assert ["256", "2048", *["0.12"] * 5] in rows
    assert ["target", "512", "17049.6", "33.300"] in rows
    assert sum(row[:1] == ["smollm2-first-8"] for row in rows) == 1
