"""What a replay covers, and what came out of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, time, timedelta
from typing import Final

from alphaloop.deciding.replay import Compared

_DAY: Final = timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Window:
    """What is replayed: decisions taken in [since, until), of one task or all."""

    since: datetime
    until: datetime
    task: str | None

    def days(self) -> Iterator[tuple[datetime, datetime]]:
        """Its parts by UTC day; each begins where the one before ended."""
        begin = self.since
        while begin < self.until:
            end = min(self.until, datetime.combine(begin.astimezone(UTC).date(), time(), UTC) + _DAY)
            yield begin, end
            begin = end


@dataclass(slots=True)
class Replayed:
    """The result of a replay."""

    window: Window
    tasks: dict[str, Compared] = field(default_factory=dict)
    reasons: Counter[str] = field(default_factory=Counter)  #: jobs by the reason that they would have had
    num_recorded: int = 0  #: decisions of the window
    num_reproduced: int = 0  #: of these, decisions that come out as they were recorded
    num_given: int = 0  #: probes, controls, and jobs whose mode the job or the engine fixed
    left_out: Counter[str] = field(default_factory=Counter)  #: jobs that were not compared, by the reason
    num_days: int = 0
