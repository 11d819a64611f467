"""The memory of a worker's tasks: loaded from Postgres before the first job, and kept as the table is.

Two threads keep it, and no round waits for either: `follow` reads what any worker remembered or anyone forgot, and
`merge` sorts. What is forgotten is overwritten as soon as it is read.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Final

from alphaloop.errors import StoreError
from alphaloop.settings import TaskSettings
from alphaloop.store.task_memory import FORGOTTEN_KEPT_FOR, RememberedResult, ResultMemoryStore
from worker.background import BackgroundThread
from worker.task_memory.index import BYTES_PER_TOKEN, DEPTH, MemoryIndex, MemoryView, RememberedText, ResultWriter, Run

log = logging.getLogger(__name__)

#: Between two looks at the table, unless this worker has recorded a result.
POLL_S: Final = 1.0
#: Between two looks at least.
_PAUSE_S: Final = 0.1
#: A task's results are forgotten when they take this much more than its bound.
_SLACK: Final = 1.1
#: Without a look for so long the memory is loaded anew, because rows of forgotten results may be gone.
_STALE_S: Final = FORGOTTEN_KEPT_FOR.total_seconds() / 2


@dataclass(eq=False)
class RememberedTasks:
    """Earlier results of tasks whose `memory` is on, by scope: a task's segment, or a task where it is shared.

    `tasks` gives the settings of all tasks as they are now. Drafters ask for views from any thread.
    """

    store: ResultMemoryStore
    target_revision: str
    tasks: Callable[[], Mapping[str, TaskSettings]]
    _: KW_ONLY
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._indexes: dict[tuple[str, str | None], MemoryIndex] = {}
        self._modes: dict[str, str] = {}  # of the tasks that are here
        self._known: dict[int, MemoryIndex] = {}  # which index a result is in
        self._since = 0
        self._looked_at = 0.0
        self._has_news = threading.Event()
        self._has_work = threading.Event()
        self.threads = (
            BackgroundThread("memory", self._follow_in_turn, every_s=_PAUSE_S),
            BackgroundThread("memory-merge", self._merge_in_turn),
        )

    def view(self, task: str, segment: str, least: int, most: int) -> MemoryView | None:
        """What a job may search, by matches of `least` to `most` tokens; None where its task has no memory."""
        mode = self._modes.get(task)
        if mode is None:
            return None
        key, own = (task, None if mode == "shared" else segment), segment if mode == "shared" else None
        return MemoryView(lambda: self._runs(key), least, min(most, DEPTH), own)

    def _runs(self, key: tuple[str, str | None]) -> tuple[Run, ...]:
        index = self._indexes.get(key)
        return () if index is None else index.runs

    def num_tokens(self, task: str) -> int:
        """Tokens that are held of a task's results."""
        return sum(index.num_tokens for (name, _), index in list(self._indexes.items()) if name == task)

    def load(self) -> None:
        """Read everything; `merge` sorts it, in a microsecond or two a token. Raises StoreError."""
        began = self.clock()
        self._indexes, self._modes, self._known = {}, {}, {}
        self._since, self._looked_at = self.store.oldest_running(), began
        self._open_tasks()
        if self._modes:
            log.info(
                "task memory: %d tokens of %d results, read in %.1f s",
                sum(map(self.num_tokens, self._modes)),
                len(self._known),
                self.clock() - began,
                extra={"action": "memory_loaded"},
            )

    def remembered(self) -> None:
        """This worker has recorded a result: look soon."""
        self._has_news.set()

    def follow(self) -> None:
        """Take in what was remembered and let go of what was forgotten since the last look. Raises StoreError."""
        now = self.clock()
        if not self._modes and all(task.memory == "off" for task in self.tasks().values()):
            return
        if now - self._looked_at > _STALE_S:
            self.load()
            return
        since = self.store.oldest_running()  # before the rows: what commits in between is read twice, never missed
        if since < self._since:  # the database was restored
            self.load()
            return
        self._open_tasks()
        changes = self.store.changes(self.target_revision, list(self._modes), self._since)
        gone = {change.id for change in changes if change.is_forgotten and change.id in self._known}
        for index in {self._known[text_id] for text_id in gone}:
            index.forget(gone)
        for text_id in gone:
            del self._known[text_id]
        new = [change.id for change in changes if not change.is_forgotten and change.id not in self._known]
        self._take(self.store.texts(new))
        self._since, self._looked_at = since, now
        tasks = self.tasks()
        for task in self._modes.keys() & tasks.keys():
            most_tokens = tasks[task].max_memory_bytes // BYTES_PER_TOKEN
            if self.num_tokens(task) > _SLACK * most_tokens:
                self.store.make_room(self.target_revision, task, most_tokens)
                self._has_news.set()

    def merge(self) -> None:
        """Let what was taken in be found."""
        for index in list(self._indexes.values()):
            if not index.is_merged:
                index.merge()

    def _open_tasks(self) -> None:
        """Load the tasks whose memory was turned on, and drop those whose memory was turned off or is another now."""
        tasks = self.tasks()
        wanted = {name: task.memory for name, task in tasks.items() if task.memory != "off"}
        for task in [task for task, mode in self._modes.items() if wanted.get(task) != mode]:
            del self._modes[task]
            for key in [key for key in self._indexes if key[0] == task]:
                index = self._indexes.pop(key)
                self._known = {text_id: known for text_id, known in self._known.items() if known is not index}
        for task in wanted.keys() - self._modes.keys():
            self._modes[task] = wanted[task]
            most_tokens = tasks[task].max_memory_bytes // BYTES_PER_TOKEN
            self._take(reversed(list(self.store.read(self.target_revision, [task], most_tokens))))

    def _take(self, results: Iterable[RememberedResult]) -> None:
        by_index: dict[MemoryIndex, list[RememberedText]] = {}
        for result in results:
            if (mode := self._modes.get(result.task)) is not None and result.id not in self._known:
                key = result.task, None if mode == "shared" else result.segment
                index = self._known[result.id] = self._indexes.setdefault(key, MemoryIndex())
                by_index.setdefault(index, []).append(
                    RememberedText(result.id, ResultWriter(result.segment, result.batch_id), result.tokens)
                )
        for index, texts in by_index.items():
            index.add(texts)
        self._has_work.set()

    def _follow_in_turn(self) -> None:
        self._has_news.wait(POLL_S)
        self._has_news.clear()
        try:
            self.follow()
        except StoreError as error:
            log.warning("task memory not read: %s", error.message, extra={"action": "memory_not_read"})

    def _merge_in_turn(self) -> None:
        if self._has_work.wait(POLL_S):
            self._has_work.clear()
            self.merge()
