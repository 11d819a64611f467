"""The newest dead letters, and which of them were sent again."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from alphaloop.letters.choosing import Choice
from alphaloop.letters.sending import key_of
from alphaloop.settings import KafkaSettings
from alphaloop.store.redrives import LetterKey


@dataclass(frozen=True, slots=True)
class ListedLetter:
    """A letter without its message: its name in the table of redrives, and what `Letter.as_json` tells of it."""

    key: LetterKey
    told: Mapping[str, Any]

    def with_redrive(self, redriven: Mapping[LetterKey, str] | None) -> dict[str, Any]:
        """What is told, and whether it was sent again; None where that is not known."""
        return {**self.told, "redriven": None if redriven is None else self.key in redriven}


def newest_letters(
    kafka: KafkaSettings, choice: Choice, limit: int, *, show_value: bool = False, depth: int | None = None
) -> Sequence[ListedLetter]:
    """The newest `limit` of the chosen letters, oldest first. No more are ever held, and none of their values.

    With `show_value` the start of each message is told, too, which may hold a prompt. Where not all letters are chosen,
    the newest `depth` of each partition are looked through, without it all. Raises BrokerError.
    """
    newest: list[tuple[tuple[int, LetterKey], Mapping[str, Any]]] = []  # a heap, its oldest letter first
    for letter in choice.letters(kafka, newest=limit, depth=depth):
        key = key_of(letter)
        keep = heapq.heappush if len(newest) < limit else heapq.heappushpop
        keep(newest, ((letter.record.timestamp_ms or 0, key), letter.as_json(show_value=show_value)))
    return [ListedLetter(key, told) for (_, key), told in sorted(newest, key=itemgetter(0))]
