"""A database for one command."""

from __future__ import annotations

from alphaloop.errors import ConfigError
from alphaloop.settings import Settings
from alphaloop.store.database import Database


def open_database(settings: Settings) -> Database:
    """The database that the settings name, its schema checked. Raises ConfigError, StoreError, SchemaMismatch."""
    if settings.postgres.url is None:
        raise ConfigError("no database is configured", hint="set DATABASE_URL, or start everything with `alphaloop up`")
    database = Database(settings.postgres.url, pool_size=2, limits=settings.postgres.long_limits())
    try:
        database.check_revision()
    except BaseException:
        database.close()
        raise
    return database
