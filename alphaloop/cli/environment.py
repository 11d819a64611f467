"""`alphaloop env`: the addresses of the servers as variables of a shell, for programs that are not alphaloop's."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path
from typing import Final

import typer

from alphaloop.cli.options import connected_settings
from alphaloop.cli.screen import print_json

EXAMPLE: Final = "alphaloop env"


def env(
    context: typer.Context,
    as_json: bool = typer.Option(False, "--json", help="Print as JSON."),
) -> None:
    """Print KAFKA_BOOTSTRAP_SERVERS and DATABASE_URL of the running servers, to be evaluated by a shell.

    In a shell: eval "$(alphaloop env)", and then psql "$DATABASE_URL" or kcat -b $KAFKA_BOOTSTRAP_SERVERS -L.
    Debian's kcat cannot talk to the fallback broker, which runs where no Apache Kafka is; `alphaloop enqueue` can.
    DATABASE_URL holds the password, so keep the output out of logs.
    """
    settings = connected_settings(context)
    assert settings.kafka.bootstrap_servers and settings.postgres.url  # noqa: S101, PT018 - connected
    found = {
        "KAFKA_BOOTSTRAP_SERVERS": settings.kafka.bootstrap_servers,
        "DATABASE_URL": settings.postgres.url.get_secret_value(),
    }
    if as_json:
        print_json(found)
        return
    for name, value in found.items():
        sys.stdout.write(f"export {name}={shlex.quote(value)}\n")


def command_for(data_dir: Path) -> str:
    """What a person types, in any folder, to have the addresses in a shell."""
    beside = _beside_python()
    program = shlex.join([str(beside) if beside else "alphaloop", "--data-dir", str(data_dir), "env"])
    return f'eval "$({program})"'


def program() -> str:
    """What a person types here for `alphaloop`: with its folder where the shell does not find it."""
    beside, found = _beside_python(), shutil.which("alphaloop")
    if beside is None or (found is not None and beside.samefile(found)):
        return "alphaloop"
    here = Path.cwd()
    return shlex.quote(str(beside.relative_to(here) if beside.is_relative_to(here) else beside))


def _beside_python() -> Path | None:
    beside = Path(sys.executable).with_name("alphaloop")
    return beside if beside.exists() else None
