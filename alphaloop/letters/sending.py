"""Sending dead letters again, in portions: sent, acknowledged, marked."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final

from alphaloop.errors import MessageError
from alphaloop.kafka.producer import Producer
from alphaloop.letters.choosing import Choice
from alphaloop.letters.reading import Letter
from alphaloop.letters.redriving import Redriven, redriven
from alphaloop.settings import KafkaSettings
from alphaloop.store.redrives import LetterKey, RedriveStore

_PORTION: Final = 100
_FLUSH_S: Final = 120.0
_MOST_PROBLEMS: Final = 20


class Redrive:
    """One run of the command.

    A run that dies between acknowledgement and mark leaves letters that are sent twice. Their job_ids are the same both
    times, so the jobs are decoded once.
    """

    def __init__(
        self,
        kafka: KafkaSettings,
        store: RedriveStore,
        corrections: Mapping[str, Any],
        *,
        again: bool,
        dry_run: bool,
    ) -> None:
        self._kafka = kafka
        self._store = store
        self._corrections = corrections
        self._again = again
        self._dry_run = dry_run
        self.num_sent = 0
        self.num_before = 0  #: letters left out, because they were sent before
        self.num_wrong = 0
        self.problems: list[dict[str, Any]] = []  #: the first of the wrong ones

    def run(self, choice: Choice, limit: int | None) -> None:
        """Send the chosen letters, at most `limit`. Raises BrokerError, StoreError."""
        with contextlib.closing(Producer(self._kafka, client_id="alphaloop-dlq")) as producer:
            letters = choice.letters(self._kafka)
            while portion := list(islice(letters, _PORTION)):
                room = None if limit is None else limit - self.num_sent
                if room is not None and room <= 0:
                    return
                messages = list(self._messages(self._wanted(portion)))[:room]
                self.num_sent += len(messages)
                if self._dry_run:
                    continue
                for letter, message in messages:
                    producer.send(message.topic, key=letter.record.key, value=message.value, headers=message.headers)
                producer.flush(_FLUSH_S)
                self._store.mark({key_of(letter): message.job_id for letter, message in messages})

    def as_json(self) -> dict[str, Any]:
        """For machines."""
        return {
            "dry_run": self._dry_run,
            "sent": self.num_sent,
            "sent_before": self.num_before,
            "wrong": self.num_wrong,
            "problems": self.problems,
        }

    def _wanted(self, letters: Sequence[Letter]) -> Sequence[Letter]:
        if self._again:
            return letters
        before = self._store.of([key_of(letter) for letter in letters])
        self.num_before += len(before)
        return [letter for letter in letters if key_of(letter) not in before]

    def _messages(self, letters: Iterable[Letter]) -> Iterator[tuple[Letter, Redriven]]:
        for letter in letters:
            try:
                yield letter, redriven(letter, self._corrections)
            except MessageError as error:
                self.num_wrong += 1
                if len(self.problems) < _MOST_PROBLEMS:
                    self.problems.append({"at": letter.place, "code": error.code, "message": str(error)})


def key_of(letter: Letter) -> LetterKey:
    """The name of a letter in the table of redrives."""
    record = letter.record
    return LetterKey(record.topic, record.partition, record.offset, record.timestamp_ms or 0)
