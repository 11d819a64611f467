"""The command line: every command with its example, by group."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import typer

import alphaloop
from alphaloop import logs
from alphaloop.cli import (
    batch,
    demo,
    dlq,
    enqueue,
    explain,
    jobs,
    measure,
    models,
    probes,
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
    for name, function in [*((one.__name__.replace("_", "-"), one) for one in functions), *named.items()]:
        lines = "\n".join(f"  {line}" for line in EXAMPLES[function].splitlines())
        group.command(name, epilog=f"Example:\n\n\b\n{lines}")(function)


def _group(name: str, help_text: str) -> typer.Typer:
    group = typer.Typer(help=help_text, no_args_is_help=True, rich_markup_mode=None)
    app.add_typer(group, name=name)
    return group


_add(app, demo.demo, services.up, services.down, services.worker, services.scheduler, enqueue.enqueue, status.status)
_add(app, services.env, jobs.job, jobs.wait, jobs.tail, explain.explain, replay.replay, reports.report, jobs.cancel)
_add(app, models.calibrate, measure.measure, models.check_pair, models.check_server, services.migrate)
_batches = _group("batch", "Submit batch files in OpenAI's form, and fetch their outputs.")
_add(_batches, batch.submit, batch.status, batch.cancel, batch.output, batch.errors)
_letters = _group("dlq", "List, resend and delete dead letters: failed jobs, and messages that are no jobs.")
_add(_letters, list=dlq.list_letters, show=dlq.show, redrive=dlq.redrive, purge=dlq.purge)
_drafts = _group("draft", "Train, register and list draft models.")
_add(_drafts, models.train, models.register, list=models.list_drafts)
_drift = _group("drift", "List and acknowledge drift events.")
_add(_drift, list=reports.list_events, show=reports.show, ack=reports.ack)
_probes = _group("probes", "Manage probe sets: the fixed prompts with which acceptance is measured again.")
_add(_probes, probes.register, probes.draw, list=probes.list_sets, show=probes.show, plan=probes.plan)
_notify = _group("notify", "Test notification targets, and list deliveries.")
_add(_notify, reports.test, list=reports.list_attempts)
_add(_group("kafka", "Install the embedded broker."), services.install)
