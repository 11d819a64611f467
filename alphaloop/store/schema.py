"""The schema's migrations, run through alembic."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from pydantic import SecretStr
from sqlalchemy import text

from alphaloop import shipped
from alphaloop.errors import ConfigError, SchemaMismatch
from alphaloop.settings.processes import UNLIMITED
from alphaloop.store.database import UNKNOWN_REVISION, Database

MIGRATIONS: Final = shipped("migrations")


def upgrade(url: SecretStr, revision: str = "head", *, migrations: Path = MIGRATIONS) -> None:
    """Bring the schema to `revision`. Safe to run from several processes at once: one migrates, the others wait.

    Does nothing where a later release has migrated and this one can still run, so that it can be started again.
    Raises StoreUnavailable, StoreError, SchemaMismatch when the database holds a revision that `migrations` lacks, or
    ConfigError for a database in another encoding than UTF8, which cannot hold every text.
    """
    config = alembic_config(url, migrations)
    with Database(url, pool_size=1, limits=UNLIMITED) as database:
        if (encoding := database.scalar(text("SHOW server_encoding"))) != "UTF8":
            raise ConfigError(
                f"expected a database in the encoding UTF8, found {encoding} in {database.redacted_url}",
                hint="CREATE DATABASE name TEMPLATE template0 ENCODING 'UTF8', and its name in postgres.url",
            )
    if revision == "head" and _is_later(url, migrations):
        return
    try:
        command.upgrade(config, revision)
    except CommandError as error:
        head = _scripts(url, migrations).get_current_head()
        raise SchemaMismatch(
            f"expected a schema revision up to {head}, found {current(url) or 'none'}: {error}", hint=UNKNOWN_REVISION
        ) from None


def grant_to_roles(url: SecretStr) -> list[str]:
    """Grant the group roles their rights, and make missing ones if this user may; returns those still missing."""
    with Database(url, pool_size=1) as database, database.begin() as connection:
        return list(connection.execute(text("SELECT grant_to_roles()")).scalar_one())


def current(url: SecretStr) -> str | None:
    """The database's revision; None before the first migration."""
    with Database(url, pool_size=1, limits=UNLIMITED) as database, database.begin() as connection:
        return MigrationContext.configure(connection).get_current_revision()


def pending(url: SecretStr, *, migrations: Path = MIGRATIONS) -> bool:
    """Whether `upgrade` would change anything."""
    return current(url) != _scripts(url, migrations).get_current_head() and not _is_later(url, migrations)


def alembic_config(url: SecretStr, migrations: Path = MIGRATIONS) -> Config:
    """What alembic's commands take. Raises ConfigError where `migrations` is not the folder it should be."""
    if not (migrations / "env.py").is_file():
        raise ConfigError(
            f"expected the migrations in {migrations.resolve()}, found no env.py there",
            hint="is alphaloop installed whole? `pip install --force-reinstall --no-deps alphaloop`",
        )
    config = Config()
    config.set_main_option("script_location", str(migrations).replace("%", "%%"))
    config.attributes["url"] = url
    return config


def _scripts(url: SecretStr, migrations: Path) -> ScriptDirectory:
    return ScriptDirectory.from_config(alembic_config(url, migrations))


def _is_later(url: SecretStr, migrations: Path) -> bool:
    """Whether the schema is at a revision that `migrations` lacks, and that its code can run on."""
    scripts, revision = _scripts(url, migrations), current(url)
    if revision is None or revision in {script.revision for script in scripts.walk_revisions()}:
        return False
    with Database(url, pool_size=1, limits=UNLIMITED) as database:
        return database.serves(str(scripts.get_current_head()))
