"""The engine that the settings name: one that owns a device, or one that sends jobs to servers.

Either is imported only when it is opened, because torch takes four seconds to load, and aiohttp may not be installed.
"""

from __future__ import annotations

from alphaloop.errors import ConfigError
from alphaloop.settings import ModelSettings
from alphaloop.store.database import Database
from alphaloop.store.workers import ServerIdentityStore
from worker.engine import Engine


def open_engine(models: ModelSettings, *, num_slots: int, database: Database | None = None) -> Engine:
    """Open it; `num_slots` are those of an engine that owns a device. `database` has what servers were earlier.

    Raises AlphaloopError; ServerUnavailable where no server answers.
    """
    if models.target.engine == "server":
        try:
            from worker.servers.engine import open_server_engine
        except ModuleNotFoundError as error:
            raise ConfigError(f"{error.name} is not installed", hint="pip install 'alphaloop[servers]'") from None
        identities = ServerIdentityStore(database) if database is not None else None
        return open_server_engine(models, identities=identities)
    from worker.decoding.engine import load_engine

    return load_engine(models, num_slots=num_slots)
