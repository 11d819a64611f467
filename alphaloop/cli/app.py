"""The commands, put together."""

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
    calibrate,
    cancel,
    check_pair,
    check_server,
    demo,
    dlq,
    draft,
    drift,
    enqueue,
    environment,
    explain,
    job,
    kafka_install,
    measure,
    migrate,
    notify,
    probes,
    processes,
    replay,
    report,
    status,
    tail,
    up,
    wait,
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
_add(up.up, up.UP_EXAMPLE)
_add(up.down, up.DOWN_EXAMPLE)
_add(processes.worker, processes.WORKER_EXAMPLE)
_add(processes.scheduler, processes.SCHEDULER_EXAMPLE)
_add(enqueue.enqueue, enqueue.EXAMPLE)
_add(status.status, status.EXAMPLE)
_add(environment.env, environment.EXAMPLE)
_add(job.job, job.EXAMPLE)
_add(wait.wait, wait.EXAMPLE)
_add(tail.tail, tail.EXAMPLE)
_add(explain.explain, explain.EXAMPLE)
_add(replay.replay, replay.EXAMPLE)
_add(report.report, report.EXAMPLE)
_add(cancel.cancel, cancel.EXAMPLE)
_add(calibrate.calibrate, calibrate.EXAMPLE)
_add(measure.measure, measure.EXAMPLE)
_add(check_pair.check_pair, check_pair.EXAMPLE, name="check-pair")
_add(check_server.check_server, check_server.EXAMPLE, name="check-server")
_add(migrate.migrate, migrate.EXAMPLE)


def _group(name: str, help_text: str) -> typer.Typer:
    group = typer.Typer(help=help_text, no_args_is_help=True, rich_markup_mode=None)
    app.add_typer(group, name=name)
    return group


batch_group = _group("batch", "Batch files in OpenAI's form.")
_add(batch.submit, batch.SUBMIT_EXAMPLE, batch_group)
_add(batch.status, batch.STATUS_EXAMPLE, batch_group)
_add(batch.cancel, batch.CANCEL_EXAMPLE, batch_group)
_add(batch.output, batch.OUTPUT_EXAMPLE, batch_group)
_add(batch.errors, batch.ERRORS_EXAMPLE, batch_group)
dlq_group = _group("dlq", "Messages that could not become jobs, and jobs that failed.")
_add(dlq.list_letters, dlq.LIST_EXAMPLE, dlq_group, "list")
_add(dlq.show, dlq.SHOW_EXAMPLE, dlq_group)
_add(dlq.redrive, dlq.REDRIVE_EXAMPLE, dlq_group)
_add(dlq.purge, dlq.PURGE_EXAMPLE, dlq_group)
draft_group = _group("draft", "Small models that draft for the target.")
_add(draft.train, draft.TRAIN_EXAMPLE, draft_group)
_add(draft.register, draft.REGISTER_EXAMPLE, draft_group)
_add(draft.list_drafts, draft.LIST_EXAMPLE, draft_group, "list")
drift_group = _group("drift", "Falls of acceptance, their causes, and who has taken note of them.")
_add(drift.list_events, drift.LIST_EXAMPLE, drift_group, "list")
_add(drift.show, drift.SHOW_EXAMPLE, drift_group)
_add(drift.ack, drift.ACK_EXAMPLE, drift_group)
probes_group = _group("probes", "The fixed prompts on which acceptance is measured again.")
_add(probes.register, probes.REGISTER_EXAMPLE, probes_group)
_add(probes.draw, probes.DRAW_EXAMPLE, probes_group)
_add(probes.list_sets, probes.LIST_EXAMPLE, probes_group, "list")
_add(probes.show, probes.SHOW_EXAMPLE, probes_group)
_add(probes.plan, probes.PLAN_EXAMPLE, probes_group)
notify_group = _group("notify", "Who is told of drift and incidents, and what they were sent.")
_add(notify.test, notify.TEST_EXAMPLE, notify_group)
_add(notify.list_attempts, notify.LIST_EXAMPLE, notify_group, "list")
_add(kafka_install.install, kafka_install.EXAMPLE, _group("kafka", "The embedded broker."))
