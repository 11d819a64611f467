"""`alphaloop kafka install`: fetch and unpack Apache Kafka."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from alphaloop.cli.screen import err, out
from alphaloop.embedded.install import ARCHIVE, KAFKA_VERSION, MIRROR, install_kafka

EXAMPLE: Final = """\
alphaloop kafka install
alphaloop kafka install --mirror https://mirror.example.org/apache/kafka"""


def install(
    version: str | None = typer.Option(None, help="Release; the one that alphaloop is tested with, if not given."),
    mirror: str | None = typer.Option(None, help="Address of the releases; Apache's site, if not given."),
) -> None:
    """Fetch Apache Kafka, check its published SHA-512, and unpack it under the user's cache.

    Continues an interrupted download. Prints the folder.
    """
    out().print(str(fetch_kafka(version=version, mirror=mirror)), soft_wrap=True, markup=False)


def fetch_kafka(*, version: str | None = None, mirror: str | None = None, deadline_s: float | None = None) -> Path:
    """The installed folder, fetched with a progress bar if need be. Raises InstallFailed."""
    mirrors = [mirror] if mirror else [MIRROR, ARCHIVE]
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=40),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=(console := err()),
        transient=True,
        disable=not console.is_terminal,
    )
    wanted = version or KAFKA_VERSION
    with bar:
        shown = bar.add_task(f"Apache Kafka {wanted}", total=None)
        return install_kafka(
            wanted,
            mirrors=mirrors,
            deadline_s=deadline_s,
            on_progress=lambda done, total: bar.update(shown, completed=done, total=total),
        )
