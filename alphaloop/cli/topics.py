"""`alphaloop topics`: create topics before they are needed, and list those that are there."""

from __future__ import annotations

import dataclasses
import shlex

import typer

from alphaloop.cli.options import AS_JSON, connected_settings, example, require_tasks
from alphaloop.cli.screen import note, print_json, show_rows
from alphaloop.kafka.topics import (
    CONTROL,
    Topic,
    create_topics,
    existing_topics,
    failure_topics,
    first_topics,
    missing_topics,
    properties,
)
from alphaloop.messages.topics import dlq_topic
from alphaloop.settings import Settings
from alphaloop.wording import span


@example("""\
alphaloop topics create code --high
alphaloop topics create --all
alphaloop topics create --all --dry-run > make-topics.sh""")
def create(
    context: typer.Context,
    task: list[str] = typer.Argument(None, help="Of these tasks; without any, of all in configs/tasks.toml."),
    high: bool = typer.Option(False, "--high", help="Also jobs.TASK.high of each task, for jobs that go first."),
    everything: bool = typer.Option(
        False, "--all", help="Also what workers create later: retry topics and dead-letter topics."
    ),
    dry_run: bool = typer.Option(
        False, "--dry-run", help="Create nothing; print a line of Kafka's kafka-topics.sh for each missing topic."
    ),
    as_json: bool = AS_JSON,
) -> None:
    """Create the topics that are missing; those that are there stay as they are.

    Workers create jobs.TASK when they start, and the retry and dead-letter topics of a task at its first failure. Where
    they may not, create them all beforehand with --all. jobs.TASK.high is created here with --high, and where the
    task's settings say high_topic = true.
    """
    settings = connected_settings(context, database=False)
    kafka = settings.kafka
    missing = missing_topics(kafka, _names(settings, task or list(settings.tasks), high=high, everything=everything))
    if not dry_run:
        created = create_topics(kafka, missing)
        missing = [one for one in missing if one.name in created]
    if as_json:
        print_json([dataclasses.asdict(one) for one in missing])
    elif not missing:
        note("no topic is missing")
    for one in [] if as_json else missing:
        typer.echo(_command(one, kafka.bootstrap_servers or "") if dry_run else one.name)


@example("alphaloop topics list --json")
def list_topics(context: typer.Context, as_json: bool = AS_JSON) -> None:
    """List the topics that are there, with partitions, replicas and limits."""

    def cells(one: Topic) -> tuple[str, ...]:
        kept, size = one.retention_ms, one.max_message_bytes
        kept_for = "-" if kept is None else "ever" if kept < 0 else span(kept / 1000)
        largest = "-" if size is None else f"{size:,}"
        return one.name, str(one.num_partitions), str(one.replication_factor), kept_for, largest

    figures = "partitions", "replicas", "kept for", "message bytes"
    show_rows(
        existing_topics(connected_settings(context, database=False).kafka),
        "topic",
        *figures,
        cells=cells,
        right=figures,
        nothing="no topics: a worker creates them when it starts, or `alphaloop topics create`",
        as_json=as_json,
        row_as_json=dataclasses.asdict,
    )


def _names(settings: Settings, tasks: list[str], *, high: bool, everything: bool) -> list[str]:
    """The topics of these tasks and those that all tasks share. Raises UnknownTask."""
    require_tasks(settings, tasks)
    names = first_topics(tasks, high=[task for task in tasks if high or settings.tasks[task].high_topic])
    if everything:
        names += [topic for task in tasks for topic in failure_topics(settings.kafka, task)]
        names.append(dlq_topic(CONTROL))
    return names


def _command(topic: Topic, bootstrap_servers: str) -> str:
    words = ["kafka-topics.sh", "--bootstrap-server", bootstrap_servers, "--create", "--if-not-exists"]
    words += ["--topic", topic.name, "--partitions", str(topic.num_partitions)]
    words += ["--replication-factor", str(topic.replication_factor)]
    words += [word for name, value in properties(topic).items() for word in ("--config", f"{name}={value}")]
    return shlex.join(words)
