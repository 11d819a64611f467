"""A rolling upgrade over two revisions of this test: one adds, one takes away what only old code uses."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from alembic import command
from pydantic import SecretStr
from sqlalchemy import text

from alphaloop.errors import SchemaMismatch
from alphaloop.store import schema
from alphaloop.store.database import SUPPORTED_REVISIONS, Database
from alphaloop.store.outcomes import OutcomeStore
from tests.fixtures.runs import claim, outcome

pytestmark = pytest.mark.postgres

THIS = SUPPORTED_REVISIONS[-1]
#: As script.py.mako writes them: each adds its revision, and the one that takes away deletes those that need it.
NEXT = """
from alembic import op

revision, down_revision, branch_labels, depends_on = {revision!r}, {before!r}, None, None


def upgrade() -> None:
    {change}
    op.execute("INSERT INTO code_revisions VALUES ({revision!r})")


def downgrade() -> None:
    op.execute("DELETE FROM code_revisions WHERE revision = {revision!r}")
"""
EXPAND = 'op.execute("ALTER TABLE jobs ADD COLUMN colour TEXT")'
CONTRACT = f"op.execute(\"DELETE FROM code_revisions WHERE revision = '{THIS}'\")"


@pytest.fixture
def later(tmp_path: Path) -> Path:
    """The migrations of two releases later."""
    folder = tmp_path / "migrations"
    shutil.copytree(schema.MIGRATIONS, folder)
    for revision, before, change in (("expanded", THIS, EXPAND), ("contracted", "expanded", CONTRACT)):
        text_of_it = NEXT.format(revision=revision, before=before, change=change)
        (folder / "versions" / f"{revision}.py").write_text(text_of_it, encoding="utf-8")
    return folder


def test_an_old_worker_restarts_after_a_migration_that_adds(
    database: Database, database_url: SecretStr, later: Path
) -> None:
    claim(database, "before")
    schema.upgrade(database_url, "expanded", migrations=later)
    assert database.check_revision() == "expanded", "a process of this release starts on it"
    claim(database, "after")
    assert len(OutcomeStore(database).record([outcome("before"), outcome("after")], owner="w")) == 2


def test_an_old_process_is_refused_after_a_migration_that_takes_away(
    database: Database, database_url: SecretStr, later: Path
) -> None:
    schema.upgrade(database_url, migrations=later)
    with pytest.raises(SchemaMismatch, match="found contracted") as refusal:
        database.check_revision()
    assert "the release that migrated" in str(refusal.value.hint)
    with pytest.raises(SchemaMismatch, match="contracted"):
        schema.upgrade(database_url)
    command.downgrade(schema.alembic_config(database_url, later), "expanded")
    able = set(database.scalars(text("SELECT revision FROM code_revisions")))
    assert "expanded" in able
    assert not able & {THIS, "contracted"}


def test_the_old_release_may_migrate_again_and_changes_nothing(
    database: Database, database_url: SecretStr, later: Path
) -> None:
    """Its deployment starts `alphaloop migrate` before every worker."""
    schema.upgrade(database_url, "expanded", migrations=later)
    assert not schema.pending(database_url)
    schema.upgrade(database_url)
    assert schema.current(database_url) == "expanded"
    assert database.check_revision() == "expanded"


def test_the_template_of_migrations_says_what_runs_on_them() -> None:
    template = (schema.MIGRATIONS / "script.py.mako").read_text(encoding="utf-8")
    assert "INSERT INTO code_revisions" in template
    assert "DELETE FROM code_revisions" in template
