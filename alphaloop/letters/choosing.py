"""Which dead letters somebody asks for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

from alphaloop.letters.reading import Letter, dlq_topics, read_letters, read_places
from alphaloop.settings import KafkaSettings


@dataclass(frozen=True, slots=True)
class Choice:
    """What is asked for; everything where nothing is."""

    task: str | None = None
    codes: frozenset[str] = frozenset()
    job_ids: frozenset[str] = frozenset()
    places: frozenset[str] = frozenset()
    since: datetime | None = None
    until: datetime | None = None

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

    def letters(self, kafka: KafkaSettings, *, newest: int | None = None, depth: int | None = None) -> Iterator[Letter]:
        """The chosen letters. Raises BrokerError.

        Of each partition at most the `newest` are read where all of them are chosen, and at most `depth` otherwise.
        """
        topics = dlq_topics(kafka, self.task)
        if self.places:
            found = read_places(kafka, topics, self.places)
        else:
            found = read_letters(kafka, topics, newest=newest if self.is_by_task_only else depth)
        return filter(self.holds, found)
