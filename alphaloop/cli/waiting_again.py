"""What a person reads who ends a wait: the jobs go on, and this command waits for them again."""

from __future__ import annotations

import json
import shlex
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from alphaloop.cli.environment import program
from alphaloop.cli.options import GlobalOptions
from alphaloop.cli.screen import note

#: Job_ids in one command. A line of thousands of them cannot be typed again.
_MAX_TYPED: Final = 20


def wait_again(
    options: GlobalOptions, job_ids: Sequence[str], *, batch_id: str | None = None, file: Path | None = None
) -> str:
    """The command that waits for these jobs, as it is typed here; `file` has a job_id a line.

    The ids of many jobs that have neither a batch nor a file are written into a file of the temporary folder.
    """
    typed = f"{program()} {shlex.join([*options.typed(), 'wait'])}"
    if batch_id is not None:
        return f"{typed} {shlex.join(['--batch-id', batch_id])}"
    if file is None and len(job_ids) > _MAX_TYPED:
        file = _listed(job_ids)
    if file is not None:
        return f"{typed} {shlex.join(['--file', str(file)])}"
    return f"{typed} {shlex.join(job_ids)}"


def say_they_go_on(num_jobs: int, again: str) -> None:
    """A note that the wait has ended and the jobs have not."""
    note(f"stopped waiting; {'1 job goes' if num_jobs == 1 else f'{num_jobs} jobs go'} on. Wait again: {again}")


def _listed(job_ids: Sequence[str]) -> Path:
    lines = "".join(json.dumps({"job_id": job_id}) + "\n" for job_id in job_ids)
    with tempfile.NamedTemporaryFile(
        "w", prefix="alphaloop-jobs-", suffix=".jsonl", delete=False, encoding="utf-8"
    ) as listed:
        listed.write(lines)
    return Path(listed.name)
