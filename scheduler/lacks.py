"""What is foreseen while this process leads: lacks of workers before they hurt, devices needed, ends of batches.

`Foreseeing.look` counts the open batches, promises their ends, plays their future with other numbers of workers, and
keeps what is news. It needs no console: without one no other process counts batches.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Final

from alphaloop.as_decoded import percent
from alphaloop.batches.counting import BatchCounting
from alphaloop.batches.enough import MOST_WORKERS, Due, Enough
from alphaloop.batches.progress import Progress
from alphaloop.batches.promising import Promising
from alphaloop.settings import Settings, TasksFile
from alphaloop.store.database import Database
from alphaloop.store.lacks import EndedBatch, EndedBatchStore, Lack, LackStore
from alphaloop.wording import how_many, minute, one_line, sentence
from scheduler.metrics import SchedulerMetrics

log = logging.getLogger(__name__)

#: A lack opens at this late share and closes below that one, so that one at the border does not come and go.
OPENS_AT: Final = 0.02
CLOSES_BELOW: Final = 0.01
#: Each has to last so long: what an autoscaler mends by itself is no news, and a worker takes minutes to start.
LASTS: Final = timedelta(minutes=5)
#: A share that is so many times the one that was said is said anew.
_SAID_ANEW_AT: Final = 2.0
#: Ends of batches that a leader catches up.
_ENDED_WITHIN: Final = timedelta(days=1)


@dataclass(frozen=True, slots=True)
class LookAhead:
    """What one look found."""

    devices_needed: Mapping[str, int | None]  #: by target; None where that is not known
    open_lacks: Sequence[Lack]
    ended: Sequence[EndedBatch]  #: batches that were not known to have ended


class Foreseeing:
    """Looks ahead, again and again. One thread uses it."""

    def __init__(
        self,
        database: Database,
        settings: Settings,
        metrics: SchedulerMetrics,
        tasks_file: TasksFile | None = None,
    ) -> None:
        """`database` refuses a process that does not lead any more. Without a `tasks_file` the tasks stay."""
        self._database, self._settings, self._metrics, self._tasks_file = database, settings, metrics, tasks_file
        self._counting = BatchCounting(settings, database)
        self._lacks, self._ended = LackStore(database), EndedBatchStore(database)
        self._since: dict[tuple[str, str], datetime] = {}  #: since when what would open or close one lasts
        self._needed: dict[str, int] = {}  #: workers at the last look, by target: where the next search begins

    def look(self, now: datetime) -> LookAhead:
        """Look once. `now`: by the database. Raises StoreError, BrokerError: then nothing is shown as foreseen."""
        try:
            outcome = self._look(now)
        except Exception:
            self._metrics.forget_foreseen()
            raise
        self._metrics.show_foreseen(outcome.devices_needed, outcome.open_lacks)
        return outcome

    def _look(self, now: datetime) -> LookAhead:
        if self._tasks_file is not None:
            self._settings = self._tasks_file.applied_to(self._settings)
        promising = Promising(self._settings, self._database)
        batches, counts = self._counting.count(now)
        promising.promise(batches, counts, now)
        ended = self._note_ends(now)
        searches = {
            target: Enough(situation, self._settings.scheduler.drain_within_s)
            for target, situation in promising.by_target(batches, counts, now).items()
        }
        needed = {target: search.least(self._needed.get(target, 1)) for target, search in searches.items()}
        self._needed = {target: number for target, number in needed.items() if number}
        self.keep_lacks(searches, now)
        return LookAhead(needed, self._lacks.open(), ended)

    def _note_ends(self, now: datetime) -> list[EndedBatch]:
        ended = []
        for batch in self._ended.missing(now - _ENDED_WITHIN):
            progress = Progress(batch.by_status, batch.state or None)
            ended.append(replace(batch, state=progress.state, num_failed=progress.num_failed))
        self._ended.keep(ended)
        for batch in ended:
            facts = {"action": "batch_ended", "batch": batch.batch_id, "state": batch.state}
            log.info("batch %s: %s", batch.batch_id, batch.state, extra=facts)
        return ended

    def keep_lacks(self, searches: Mapping[str, Enough], now: datetime) -> None:
        """Open, change and close lacks, by target and segment."""
        opened = {lack.key: lack for lack in self._lacks.open()}
        seen = set[tuple[str, str]]()
        for target, search in searches.items():
            num_workers = search.situation.num_workers
            if num_workers and search.why_not_known:
                # What was foreseen stays with its age.
                seen |= {key for key in opened if key[0] == target}
                continue
            due = search.with_workers(num_workers).due
            late = {segment for segment, each in due.items() if each.late >= CLOSES_BELOW}
            num_enough = search.least_for_deadlines(self._needed.get(target, 1)) if late else None
            for segment in sorted(late):
                seen.add((target, segment))
                given = lack_of(target, segment, due[segment], num_workers, num_enough, search.why_not_known, now)
                self._late(opened.get((target, segment)), given, now)
            for key in sorted(key for key in opened.keys() - seen if key[0] == target):
                seen.add(key)
                self._over(opened[key], due.get(key[1]), num_workers, now)
        for key in sorted(opened.keys() - seen):
            self._over(opened[key], None, 0, now)
        self._since = {key: at for key, at in self._since.items() if key in seen}

    def _late(self, known: Lack | None, given: Lack, now: datetime) -> None:
        """A share of at least `CLOSES_BELOW` is late: open a lack once it lasts, or change the open one."""
        if known is not None:
            self._since.pop(given.key, None)
            is_said_anew = given.said_late >= _SAID_ANEW_AT * known.said_late
            kept = given if is_said_anew else replace(given, said_at=known.said_at, said_late=known.said_late)
            changed = replace(kept, opened_at=known.opened_at, id=known.id)
            self._lacks.change(changed, is_said_anew=is_said_anew)
        elif given.said_late < OPENS_AT:
            self._since.pop(given.key, None)
        elif now - self._since.setdefault(given.key, now) >= LASTS:
            del self._since[given.key]
            self._lacks.begin(given)
            log.warning("%s", given.sentence, extra={"action": "lack_opened", "target": given.target})

    def _over(self, known: Lack, due: Due | None, num_workers: int, now: datetime) -> None:
        """Fewer are late: close the lack once that lasts."""
        if now - self._since.setdefault(known.key, now) < LASTS:
            return
        del self._since[known.key]
        because = closing(known, due, num_workers)
        self._lacks.change(replace(known, closed_at=now, closed_because=because))
        log.info("%s", because, extra={"action": "lack_closed", "target": known.target})


def lack_of(
    target: str,
    segment: str,
    due: Due,
    num_workers: int,
    num_enough: int | None,
    why_not_known: str | None,
    now: datetime,
) -> Lack:
    """What is expected of a segment's deadlines, as a lack that opens now."""
    until_at = datetime.fromtimestamp(due.until_s, UTC)
    num_due = math.ceil(due.num_due)
    workers = f"{how_many(num_workers, 'worker')} of target {one_line(target)}"
    words = (
        f"{percent(due.late)} of {_deadlines(segment, until_at)} will be missed with {workers}; "
        f"{_enough(due, num_enough, why_not_known)}"
    )
    return Lack(
        target=target,
        segment=segment,
        opened_at=now,
        said_at=now,
        said_late=due.late,
        foreseen_at=now,
        num_due=num_due,
        num_late=min(num_due, round(due.num_late)),
        num_workers=num_workers,
        num_enough=num_enough,
        until_at=until_at,
        sentence=sentence(words),
    )


def closing(lack: Lack, due: Due | None, num_workers: int) -> str:
    """Why a lack is over."""
    if due is None:
        return sentence(f"no request of {_batches(lack.segment)} is due within a day any more")
    met = _deadlines(lack.segment, datetime.fromtimestamp(due.until_s, UTC))
    return sentence(f"{met} will be met with {how_many(num_workers, 'worker')} of target {one_line(lack.target)}")


def _deadlines(segment: str, until_at: datetime) -> str:
    return f"the deadlines of {_batches(segment)} until {minute(until_at)}"


def _batches(segment: str) -> str:
    return f"batches of segment {one_line(segment)}" if segment else "batches without a segment"


def _enough(due: Due, num_enough: int | None, why_not_known: str | None) -> str:
    """How many are enough. What no number meets is said."""
    if why_not_known:
        return f"how many are enough is not known: {why_not_known}"
    if num_enough is None:
        return f"even {MOST_WORKERS:,} are not enough"
    needed = f"{num_enough} {'is' if num_enough == 1 else 'are'} enough"
    if due.hopeless < CLOSES_BELOW:
        return needed
    if due.num_late - due.num_hopeless < CLOSES_BELOW * due.num_due:
        return "no number is enough, because a request alone takes longer than its deadline leaves"
    return f"{needed} for all but {percent(due.hopeless)}, for which a request alone takes too long"
