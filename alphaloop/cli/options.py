"""The options before a command, and the settings and the database that they select."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeVar

import typer

from alphaloop.errors import ConfigError, UnknownTask
from alphaloop.settings import Settings, load_settings
from alphaloop.store.database import Database


@dataclass(frozen=True, slots=True)
class GlobalOptions:
    """`--configs`, `--profile` and `--data-dir`."""

    configs: Path | None = None
    profile: str | None = None
    data_dir: Path | None = None

    def settings(self) -> Settings:
        """The settings. The command line wins over all else."""
        settings = load_settings(self.configs, profile=self.profile)
        return settings.model_copy(update={"data_dir": self.data_dir.absolute()}) if self.data_dir else settings

    def environment(self) -> dict[str, str]:
        """This process's environment with these options, so that a child reads the same settings."""
        given = {
            "ALPHALOOP_CONFIGS": self.configs and str(self.configs.absolute()),
            "ALPHALOOP_PROFILE": self.profile,
            "ALPHALOOP_DATA_DIR": self.data_dir and str(self.data_dir.absolute()),
        }
        return {**os.environ, **{name: value for name, value in given.items() if value}}

    def typed(self) -> list[str]:
        """The options as they were typed; those that come from the environment need not be typed again."""
        given = {"configs": self.configs, "profile": self.profile, "data-dir": self.data_dir}
        return [
            word
            for name, value in given.items()
            if value and os.environ.get(f"ALPHALOOP_{name.replace('-', '_').upper()}") != str(value)
            for word in (f"--{name}", str(value))
        ]


#: The option of the commands that print figures.
AS_JSON: Final = typer.Option(False, "--json", help="Print as JSON.")
#: Commands also take the option after their name: `alphaloop up --data-dir ./data`.
DATA_DIR: Final = typer.Option(None, help="The same option as before the command.")


#: By command, lines that can be typed; the end of its help.
EXAMPLES: Final[dict[Callable[..., Any], str]] = {}
Command = TypeVar("Command", bound=Callable[..., Any])


def example(lines: str) -> Callable[[Command], Command]:
    """Keep the example of a command."""

    def keep(command: Command) -> Command:
        EXAMPLES[command] = lines
        return command

    return keep


def global_options(context: typer.Context, data_dir: Path | None = None) -> GlobalOptions:
    """The options before the command; `data_dir` is the option after it."""
    options = context.find_object(GlobalOptions) or GlobalOptions()
    return options if data_dir is None else replace(options, data_dir=data_dir)


def connected_settings(context: typer.Context, *, broker: bool = True, database: bool = True) -> Settings:
    """Settings that name a broker and a database: those configured, else those of the running embedded stack.

    Raises ConfigError with a hint where a needed one is neither configured nor running.
    """
    from alphaloop.embedded.stack import with_running_stack

    settings = global_options(context).settings()
    if _lacks(settings, broker=broker, database=database):
        settings = with_running_stack(settings)
    if missing := _lacks(settings, broker=broker, database=database):
        raise ConfigError(
            f"no {' and no '.join(missing)} is configured, and nothing runs under {settings.data_dir}",
            hint="start everything with `alphaloop up`, or set KAFKA_BOOTSTRAP_SERVERS and DATABASE_URL",
        )
    return settings


def _lacks(settings: Settings, *, broker: bool, database: bool) -> list[str]:
    lacking = ["broker"] if broker and settings.kafka.bootstrap_servers is None else []
    return lacking + (["database"] if database and settings.postgres.url is None else [])


def require_tasks(settings: Settings, tasks: Iterable[str]) -> None:
    """Raises UnknownTask for the first of these that the settings do not name."""
    for task in tasks:
        if task not in settings.tasks:
            known = ", ".join(settings.tasks)
            raise UnknownTask(f"no task {task[:100]!r} in configs/tasks.toml", hint=f"expected one of {known}")


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


def open_both(settings: Settings) -> Database:
    """As `open_database`, for a command that writes there and in Kafka. Raises BrokerError too.

    Raises ConfigError where the database belongs to another Kafka.
    """
    from alphaloop.kafka.topics import cluster_id
    from alphaloop.store.coordination import InstallationStore

    database = open_database(settings)
    try:
        InstallationStore(database).expect(cluster_id(settings.kafka), settings.kafka.prefix)
    except BaseException:
        database.close()
        raise
    return database
