"""alphaloop: text-generation jobs from Kafka, decoded speculatively only where speculation pays.

A job arrives on `jobs.<task>`; the worker validates it, claims it in Postgres, batches it with others of its task,
decides between vanilla and speculative decoding from the acceptance history, decodes, records the outcome and its
counts in one transaction, publishes the result and moves the offset. The scheduler re-measures α on fixed probe sets,
tests for drift, flags stale drafts and reports.
"""

from __future__ import annotations

from pathlib import Path

__version__ = "0.1.0"


def shipped(name: str) -> Path:
    """The folder `configs`, `docs` or `migrations` that came with this code: in an installed package inside it, in a
    checkout beside it."""
    package = Path(__file__).resolve().parent
    inside = package / name
    return inside if inside.is_dir() else package.parent / name


def page(name: str) -> str:
    """Where a page of the documents lies on this machine: `page("guides/gpus.md")`, relative in its checkout."""
    path = shipped("docs") / name
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
