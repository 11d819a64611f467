"""The command line: every command with its example, by group; and all their help as one page."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import typer
import typer.main
from typer.core import TyperCommand, TyperGroup

import alphaloop
from alphaloop import logs
from alphaloop.cli import (
    advise,
    batch,
    capacity,
    cost,
    demo,
    dlq,
    enqueue,
    explain,
    jobs,
    measure,
    models,
    probes,
    refreshing,
    replay,
    reports,
    services,
    status,
)
from alphaloop.cli.options import EXAMPLES, GlobalOptions

app: Final = typer.Typer(
    help="A Kafka-driven processor for text-generation jobs that speculates only where speculation pays.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    add_completion=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(alphaloop.__version__)
        raise typer.Exit


@app.callback()
def root(
    context: typer.Context,
    configs: Path | None = typer.Option(
        None, envvar="ALPHALOOP_CONFIGS", help="Folder of TOML files; ./configs if it is there, else the shipped one."
    ),
    profile: str | None = typer.Option(
        None, envvar="ALPHALOOP_PROFILE", help="One more file of that folder, whose values override the others: local."
    ),
    data_dir: Path | None = typer.Option(
        None, envvar="ALPHALOOP_DATA_DIR", help="Folder of the embedded broker, the database and the reports."
    ),
    version: bool = typer.Option(False, "--version", callback=_show_version, is_eager=True, help="Print the version."),
) -> None:
    """Options before the command."""
    context.obj = GlobalOptions(configs, profile, data_dir)
    logs.configure("WARNING")
    # The Kafka client retries by itself; alphaloop.kafka logs a lost broker.
    logging.getLogger("alphaloop.kafka.librdkafka").setLevel(logging.ERROR)


def _add(group: typer.Typer, *functions: Callable[..., Any], **named: Callable[..., Any]) -> None:
    """Commands in the order of the help: by the names of their functions, then those with another name."""
    for name, function in [*((command.__name__.replace("_", "-"), command) for command in functions), *named.items()]:
        lines = "\n".join(f"  {line}" for line in EXAMPLES[function].splitlines())
        group.command(name, epilog=f"Example:\n\n\b\n{lines}")(function)


def _group(name: str, help_text: str) -> typer.Typer:
    group = typer.Typer(help=help_text, no_args_is_help=True, rich_markup_mode=None)
    app.add_typer(group, name=name)
    return group


_add(app, demo.demo, services.up, services.down, services.worker, services.scheduler, enqueue.enqueue, status.status)
_add(app, services.trainer, services.env, jobs.job, jobs.wait, jobs.tail, explain.explain, replay.replay)
_add(app, cost.cost, advise.advise, capacity=capacity.show_capacity)
_add(app, reports.report, jobs.cancel, jobs.erase, models.calibrate, measure.measure, models.check_pair)
_add(app, models.check_server, services.migrate)
_batches = _group("batch", "Submit batch files in OpenAI's form, and fetch their outputs.")
_add(_batches, batch.submit, batch.status, batch.cancel, batch.output, batch.errors, list=batch.list_batches)
_keys = _group("keys", "Make, list and revoke keys of the API for files and batches.")
_add(_keys, create=batch.create_key, list=batch.list_keys, revoke=batch.revoke)
_letters = _group("dlq", "List, resend and delete dead letters: failed jobs, and messages that are no jobs.")
_add(_letters, list=dlq.list_letters, show=dlq.show, redrive=dlq.redrive, purge=dlq.purge)
_topics = _group("topics", "Create and list the topics.")
_add(_topics, create=services.make_topics, list=services.list_topics)
_drafts = _group("draft", "Train, register, refresh, list and retire drafts.")
_add(_drafts, models.train, models.register, refreshing.refresh, models.retire, models.restore, list=models.list_drafts)
_drift = _group("drift", "List and acknowledge drift events.")
_add(_drift, list=reports.list_events, show=reports.show, ack=reports.ack)
_probes = _group("probes", "Manage probe sets: the fixed prompts with which acceptance is measured again.")
_add(_probes, probes.register, probes.draw, list=probes.list_sets, show=probes.show, plan=probes.plan)
_notify = _group("notify", "Test notification targets, and list deliveries.")
_add(_notify, reports.test, list=reports.list_attempts)
_add(_group("kafka", "Install the embedded broker."), services.install)

_WIDTH: Final = 96
_HELP_OPTION: Final = re.compile(r"\n  -h, --help +Show this message and exit\.")
_NO_OPTION: Final = re.compile(r"\n\nOptions:(?=\n\n|$)")
_HEAD: Final = """\
# The command line

Every command as its `--help` shows it, without `-h, --help` itself. Written by `make generated`; `make check` fails
when it is out of date.

Options of the first section stand before the command: `alphaloop --data-dir ./data status`. Data goes to standard
output; progress, notes and errors go to standard error. Exit codes: 0 done; 1 an error, or a job without a text; 2
wrong usage; 130 interrupted. Where neither the environment nor `configs/` names a broker or a database, a command uses
those of the `alphaloop up` that runs with the same data folder.
"""


def commands() -> Iterator[tuple[str, typer.Context]]:
    """Every command with its full name, the groups among them, in the order of the help."""
    yield from _below("alphaloop", None, typer.main.get_command(app))


def cli_reference() -> str:
    """The page of the commands, from their help. A group, such as `alphaloop dlq`, has no section: its commands do."""
    sections = [_HEAD]
    for name, context in commands():
        if isinstance(context.command, TyperGroup) and context.parent is not None:
            continue
        shown = "\n".join(line.rstrip() for line in context.get_help().splitlines())
        shown = _NO_OPTION.sub("", _HELP_OPTION.sub("", shown))
        sections.append(f"## {name}\n\n```text\n{shown}\n```\n")
    return "\n".join(sections)


def _below(name: str, parent: typer.Context | None, command: object) -> Iterator[tuple[str, typer.Context]]:
    assert isinstance(command, TyperCommand | TyperGroup)  # noqa: S101
    context = typer.Context(
        command, parent=parent, info_name=name.split()[-1], terminal_width=_WIDTH, **command.context_settings
    )
    yield name, context
    if isinstance(command, TyperGroup):
        for child in command.list_commands(context):
            yield from _below(f"{name} {child}", context, command.get_command(context, child))
