"""`alphaloop check-server`: what an inference server can tell of the texts that it decodes."""

from __future__ import annotations

from dataclasses import asdict
from typing import Final

import typer

from alphaloop.cli.carrying_out import carry_out
from alphaloop.cli.check_pair import show_findings
from alphaloop.cli.screen import print_json
from alphaloop.commands import CheckServerOrder, ServerCheck
from alphaloop.server_identity import ServerKind

EXAMPLE: Final = """\
alphaloop check-server http://gpu-1:8000/v1 --kind vllm
alphaloop check-server plain
alphaloop check-server https://gate/v1 --kind openai --model big --api-key-env GATE_KEY --json"""


def check_server(
    context: typer.Context,
    server: str = typer.Argument(help="A name under models.endpoints, or an address: http://host:8000/v1."),
    kind: ServerKind | None = typer.Option(None, help="What the server at an address is; openai for any other."),
    model: str | None = typer.Option(None, help="The model to ask for; the server's only one if not given."),
    api_key_env: str | None = typer.Option(None, help="The environment variable with the key for an address."),
    as_json: bool = typer.Option(False, "--json", help="Print as JSON."),
) -> None:
    """Say what an inference server can tell of the texts that it decodes.

    Asks for three short texts, as a worker would: whole, streamed, and ended by a stop string. Says how finely the
    server tells what was drafted and accepted, and which option makes it tell more. Exit code 1 where the server does
    not answer as its kind does.
    """

    def shown(found: ServerCheck) -> None:
        print_json(asdict(found)) if as_json else show_findings(found.findings)

    carry_out(context, CheckServerOrder(**context.params), ServerCheck, shown)
