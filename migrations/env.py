"""Runs the migrations, in one transaction, one process at a time.

The URL comes from whoever called (alphaloop.store.schema), from `alembic -x url=…`, or from the settings.
"""

from __future__ import annotations

import re
from typing import Any, Final

from alembic import context
from pydantic import SecretStr
from sqlalchemy import text

from alphaloop.errors import ConfigError
from alphaloop.settings import load_settings
from alphaloop.settings.processes import UNLIMITED
from alphaloop.store.database import Database, parse_url
from alphaloop.tables import metadata

#: Any fixed number: whoever migrates this schema takes the same one.
MIGRATION_LOCK: Final = 0x616C706861
LOCK_TIMEOUT: Final = "5s"


def find_url() -> SecretStr:
    """Where to migrate."""
    given = context.config.attributes.get("url") or context.get_x_argument(as_dictionary=True).get("url")
    url = SecretStr(given) if isinstance(given, str) else given or load_settings().postgres.url
    if url is None:
        raise ConfigError("expected a database to migrate, found none", hint="set DATABASE_URL, or alembic -x url=…")
    return url


def include_name(name: str | None, kind: str, parents: Any) -> bool:
    """Autogenerate compares tables; partitions, which are named for their day, come and go."""
    return not (kind == "table" and re.search(r"_\d{8}$", name or ""))


def run_offline(url: SecretStr) -> None:
    """Print the SQL."""
    context.configure(
        url=parse_url(url), target_metadata=metadata, literal_binds=True, dialect_opts={"paramstyle": "named"}
    )
    with context.begin_transaction():
        context.run_migrations()


def run_online(url: SecretStr) -> None:
    """Migrate.

    The lock is taken inside the transaction: a lock taken before `configure` would begin a transaction of its own,
    and alembic's would then be nested in one that is never committed.
    """
    with Database(url, pool_size=1, limits=UNLIMITED) as database, database.begin() as connection:
        context.configure(
            connection=connection,
            target_metadata=metadata,
            include_name=include_name,
            # What columns mean is said in the migrations alone.
            autogenerate_plugins=["alembic.autogenerate.*", "~alembic.autogenerate.comments"],
        )
        with context.begin_transaction():
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": MIGRATION_LOCK})
            # After the advisory lock, so that waiting for another migration is not cut short.
            connection.execute(text("SELECT set_config('lock_timeout', :limit, true)"), {"limit": LOCK_TIMEOUT})
            context.run_migrations()


if context.is_offline_mode():
    run_offline(find_url())
else:
    run_online(find_url())
