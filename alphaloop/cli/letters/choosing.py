"""Which dead letters a command is about."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Final

import typer

from alphaloop.cli.letters.reading import Letter, dlq_topics, read_letters
from alphaloop.cli.moments import FORMS, moment
from alphaloop.settings import KafkaSettings

TASK: Final = typer.Option(None, help="Only this task's.")
CODE: Final = typer.Option([], help="Only letters with this code, such as decode_failed; may be repeated.")
JOB_ID: Final = typer.Option([], help="Only this job's; may be repeated.")
SINCE: Final = typer.Option(None, help=f"Only letters written since then: {FORMS}.")
UNTIL: Final = typer.Option(None, help="Only letters written before then.")
AT: Final = typer.Option([], help="Only the letter at this place, TOPIC:PARTITION:OFFSET, as list shows it.")


@dataclass(frozen=True, slots=True)
class Choice:
    """What the options ask for; everything where they ask for nothing."""

    task: str | None
    codes: frozenset[str]
    job_ids: frozenset[str]
    places: frozenset[str]
    since: datetime | None
    until: datetime | None

    @classmethod
    def of(
        cls,
        task: str | None,
        code: list[str],
        job_id: list[str],
        at: list[str],
        since: str | None,
        until: str | None,
        now: datetime,
    ) -> Choice:
        """Raises ConfigError for a time that is none."""
        return cls(
            task,
            frozenset(code),
            frozenset(job_id),
            frozenset(at),
            None if since is None else moment(since, now, "--since"),
            None if until is None else moment(until, now, "--until"),
        )

    @property
    def is_by_task_only(self) -> bool:
        """Whether every letter of the topics is chosen."""
        return not (self.codes or self.job_ids or self.places or self.since or self.until)

    def holds(self, letter: Letter) -> bool:
        """Whether this letter is chosen. One without a time is of no time."""
        written_at = letter.written_at
        return (
            (not self.codes or letter.code in self.codes)
            and (not self.job_ids or letter.job_id in self.job_ids)
            and (not self.places or letter.place in self.places)
            and (self.since is None or (written_at is not None and written_at >= self.since))
            and (self.until is None or (written_at is not None and written_at < self.until))
        )

    def letters(self, kafka: KafkaSettings, *, newest: int | None = None) -> Iterator[Letter]:
        """The chosen letters; at most the `newest` of each partition are read, if given. Raises BrokerError."""
        topics = dlq_topics(kafka, self.task)
        if self.places:
            topics = [topic for topic in topics if any(place.startswith(f"{topic}:") for place in self.places)]
        return filter(self.holds, read_letters(kafka, topics, newest=newest if self.is_by_task_only else None))
