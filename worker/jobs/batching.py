"""Which jobs are decoded together: those of one task with alike settings, tasks served in turn. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from alphaloop.messages import Job, Purpose
from worker.engine import Sampling

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True, order=True)
class BatchKey:
    """Jobs under one key get one decision, so control and treatment never share a pass."""

    task: str
    sampling_bucket: str
    decoding: str
    purpose: str
    probe_drafter: str
    probe_num_draft_tokens: int
    switched_off: str = ""  #: the operator's pattern that the prompts are covered by; empty if by none

    @property
    def is_measured(self) -> bool:
        """Whether these are probes or controls, whose times are compared."""
        return self.purpose in (Purpose.PROBE.value, Purpose.CONTROL.value)


def batch_key(job: Job, sampling: Sampling, switched_off: str = "") -> BatchKey:
    """The key of a job with its sampling settings filled in, and the prompt pattern if one holds."""
    return BatchKey(
        job.task,
        sampling.bucket,
        job.decoding.value,
        job.purpose.value,
        job.probe_drafter or "",
        job.probe_num_draft_tokens or 0,
        switched_off,
    )


@dataclass(slots=True)
class _Waiting(Generic[Item]):
    item: Item
    priority: int
    since: float


class Batcher(Generic[Item]):
    """Jobs waiting for their batch. Time is whatever clock the caller counts seconds with.

    A task's probes and controls are decoded one batch behind the other, as far as both wait, and begin with the one and
    the other in turn: times that are compared meet the same machine.
    """

    def __init__(self, batch_size: int, wait_s: float) -> None:
        self._batch_size = batch_size
        self._wait_s = wait_s
        self._waiting: dict[BatchKey, list[_Waiting[Item]]] = {}
        self._served: dict[str, int] = {}
        self._turn = 0
        self._streak: list[BatchKey] = []  # probes and controls of one task that were served since another batch was
        self._num_streaks: Counter[str] = Counter()

    def __len__(self) -> int:
        return sum(len(group) for group in self._waiting.values())

    def add(self, key: BatchKey, item: Item, *, priority: int, now: float) -> None:
        """Let a job wait for its batch."""
        self._waiting.setdefault(key, []).append(_Waiting(item, priority, now))

    def next(self, now: float) -> tuple[BatchKey, list[Item]] | None:
        """The next batch: the oldest group of the task served longest ago; None while all may still grow.

        A group is ready when it fills a batch or its oldest job has waited long enough. Within a group, higher
        priority goes first, then order of arrival.
        """
        ready = [
            key
            for key, group in self._waiting.items()
            if len(group) >= self._batch_size or now - min(w.since for w in group) >= self._wait_s
        ]
        if not ready:
            return None
        key = self._compared_with_last(ready)
        if key is None:
            key, self._streak = self._in_turn(ready), []
        if key.is_measured:
            self._streak.append(key)
        group = sorted(self._waiting[key], key=lambda w: -w.priority)
        batch, rest = group[: self._batch_size], group[self._batch_size :]
        if rest:
            self._waiting[key] = sorted(rest, key=lambda w: w.since)
        else:
            del self._waiting[key]
        self._turn += 1
        self._served[key.task] = self._turn
        return key, [waiting.item for waiting in batch]

    def _compared_with_last(self, ready: list[BatchKey]) -> BatchKey | None:
        """Another group that is compared with the batch before, and was not served since."""
        task = self._streak[-1].task if self._streak else None
        others = (key for key in ready if key.task == task and key.is_measured and key not in self._streak)
        return min(others, default=None)

    def _in_turn(self, ready: list[BatchKey]) -> BatchKey:
        """The oldest group of the task served longest ago; of probes and controls, who is first changes every time."""
        key = min(ready, key=lambda k: (self._served.get(k.task, -1), min(w.since for w in self._waiting[k]), k))
        if not key.is_measured:
            return key
        self._num_streaks[key.task] += 1
        wanted = (Purpose.CONTROL if self._num_streaks[key.task] % 2 else Purpose.PROBE).value
        return min((k for k in ready if k.task == key.task and k.purpose == wanted), default=key)

    def discard(self, unwanted: Callable[[Item], bool]) -> list[Item]:
        """Take out and return the jobs for which `unwanted` holds (their partition went to another worker)."""
        out: list[Item] = []
        for key, group in list(self._waiting.items()):
            out += [waiting.item for waiting in group if unwanted(waiting.item)]
            kept = [waiting for waiting in group if not unwanted(waiting.item)]
            if kept:
                self._waiting[key] = kept
            else:
                del self._waiting[key]
        return out
