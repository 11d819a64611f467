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
from alphaloop.cli.options import GlobalOptions

app: Final = typer.Typer(
    help="A Kafka-driven processor for text-generation jobs that speculates only where speculation pays.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    add_completion=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def epilog(example: str) -> str:
    """An example for the end of a command's help, with its line breaks."""
    return "Example:\n\n\b\n" + "\n".join(f"  {line}" for line in example.splitlines())


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


def _add(function: Callable[..., Any], example: str, group: typer.Typer = app, name: str | None = None) -> None:
    group.command(name or function.__name__, epilog=epilog(example))(function)


_add(demo.demo, demo.EXAMPLE)
_add(services.up, services.UP_EXAMPLE)
_add(services.down, services.DOWN_EXAMPLE)
_add(services.worker, services.WORKER_EXAMPLE)
_add(services.scheduler, services.SCHEDULER_EXAMPLE)
_add(enqueue.enqueue, enqueue.EXAMPLE)
_add(status.status, status.EXAMPLE)
_add(services.env, services.ENV_EXAMPLE)
_add(jobs.job, jobs.JOB_EXAMPLE)
_add(jobs.wait, jobs.WAIT_EXAMPLE)
_add(jobs.tail, jobs.TAIL_EXAMPLE)
_add(explain.explain, explain.EXAMPLE)
_add(replay.replay, replay.EXAMPLE)
_add(reports.report, reports.REPORT_EXAMPLE)
_add(jobs.cancel, jobs.CANCEL_EXAMPLE)
_add(models.calibrate, models.CALIBRATE_EXAMPLE)
_add(measure.measure, measure.EXAMPLE)
_add(models.check_pair, models.CHECK_PAIR_EXAMPLE, name="check-pair")
_add(models.check_server, models.CHECK_SERVER_EXAMPLE, name="check-server")
_add(services.migrate, services.MIGRATE_EXAMPLE)


def _group(name: str, help_text: str) -> typer.Typer:
    group = typer.Typer(help=help_text, no_args_is_help=True, rich_markup_mode=None)
    app.add_typer(group, name=name)
    return group


batch_group = _group("batch", "Submit batch files in OpenAI's form, and fetch their outputs.")
_add(batch.submit, batch.SUBMIT_EXAMPLE, batch_group)
_add(batch.status, batch.STATUS_EXAMPLE, batch_group)
_add(batch.cancel, batch.CANCEL_EXAMPLE, batch_group)
_add(batch.output, batch.OUTPUT_EXAMPLE, batch_group)
_add(batch.errors, batch.ERRORS_EXAMPLE, batch_group)
dlq_group = _group("dlq", "List, resend and delete dead letters: failed jobs, and messages that are no jobs.")
_add(dlq.list_letters, dlq.LIST_EXAMPLE, dlq_group, "list")
_add(dlq.show, dlq.SHOW_EXAMPLE, dlq_group)
_add(dlq.redrive, dlq.REDRIVE_EXAMPLE, dlq_group)
_add(dlq.purge, dlq.PURGE_EXAMPLE, dlq_group)
draft_group = _group("draft", "Train, register and list draft models.")
_add(models.train, models.TRAIN_EXAMPLE, draft_group)
_add(models.register, models.REGISTER_EXAMPLE, draft_group)
_add(models.list_drafts, models.DRAFTS_EXAMPLE, draft_group, "list")
drift_group = _group("drift", "List and acknowledge drift events.")
_add(reports.list_events, reports.EVENTS_EXAMPLE, drift_group, "list")
_add(reports.show, reports.SHOW_EXAMPLE, drift_group)
_add(reports.ack, reports.ACK_EXAMPLE, drift_group)
probes_group = _group("probes", "Manage probe sets: the fixed prompts with which acceptance is measured again.")
_add(probes.register, probes.REGISTER_EXAMPLE, probes_group)
_add(probes.draw, probes.DRAW_EXAMPLE, probes_group)
_add(probes.list_sets, probes.LIST_EXAMPLE, probes_group, "list")
_add(probes.show, probes.SHOW_EXAMPLE, probes_group)
_add(probes.plan, probes.PLAN_EXAMPLE, probes_group)
notify_group = _group("notify", "Test notification targets, and list deliveries.")
_add(reports.test, reports.TEST_EXAMPLE, notify_group)
_add(reports.list_attempts, reports.ATTEMPTS_EXAMPLE, notify_group, "list")
_add(services.install, services.INSTALL_EXAMPLE, _group("kafka", "Install the embedded broker."))
