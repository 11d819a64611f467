"""Where the time of this process goes, by samples of all its threads' stacks; what is sampled is not changed."""

from __future__ import annotations

import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any, Final, TypeVar

from benchmarks.pipeline.stages import stage_of

Key = TypeVar("Key")

EVERY_S: Final = 0.002
#: Seconds after which a running thread makes room for the sampler. With Python's usual 5 ms nearly all samples would be
#: taken where a thread waits for a server.
SWITCH_S: Final = 0.0002
#: Share of the time between two samples above which a thread counts as running.
_RUNNING: Final = 0.2


@dataclass(slots=True)
class Sampled:
    """Seconds by (thread, stage), and processor seconds by function."""

    seconds: float = 0.0  #: that were sampled
    num_samples: int = 0
    process_cpu_s: float = 0.0  #: of all threads, native ones included
    wall_s: defaultdict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))
    cpu_s: defaultdict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))
    own_cpu_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))  #: by the function that ran
    cumulative_cpu_s: defaultdict[str, float] = field(
        default_factory=lambda: defaultdict(float)
    )  #: by every function of the stack

    def as_json(self, *, num_functions: int) -> dict[str, Any]:
        """Everything, of the functions only the first so many."""
        return {
            "seconds": self.seconds,
            "num_samples": self.num_samples,
            "process_cpu_s": self.process_cpu_s,
            "threads": [
                {"thread": thread, "stage": stage, "wall_s": wall_s, "cpu_s": self.cpu_s[thread, stage]}
                for (thread, stage), wall_s in _largest(self.wall_s)
            ],
            "own_cpu_s": dict(_largest(self.own_cpu_s)[:num_functions]),
            "cumulative_cpu_s": dict(_largest(self.cumulative_cpu_s)[:num_functions]),
        }


class Sampler:
    """A thread that looks at all others every few milliseconds while `is_wanted` says so.

    A thread's own processor clock tells how much it ran since the last sample; that time goes to the stack it is found
    in. Threads named in `left_out` are not looked at. Threads of native libraries have no stack here; only
    `process_cpu_s` counts them.
    """

    def __init__(
        self, is_wanted: Callable[[], bool], *, every_s: float = EVERY_S, left_out: Collection[str] = ()
    ) -> None:
        self.sampled = Sampled()
        self._is_wanted = is_wanted
        self._every_s = every_s
        self._closing = threading.Event()
        self._labels: dict[CodeType, str] = {}
        self._cpu_s: dict[int, float] = {}
        self._left_out = frozenset(left_out)
        self._switch_s = sys.getswitchinterval()
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)

    def start(self) -> None:
        """Begin to sample."""
        sys.setswitchinterval(SWITCH_S)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._closing.set()
        self._thread.join()
        sys.setswitchinterval(self._switch_s)

    def _run(self) -> None:
        last_s, last_process_s, was_wanted = time.perf_counter(), time.process_time(), False
        while not self._closing.wait(self._every_s):
            now_s, process_s, is_wanted = time.perf_counter(), time.process_time(), self._is_wanted()
            counts = is_wanted and was_wanted
            names = {thread.ident: thread.name for thread in threading.enumerate() if self._is_looked_at(thread)}
            for ident, frame in sys._current_frames().items():
                if ident in names:
                    self._look(ident, names[ident], frame, now_s - last_s, counts=counts)
            if counts:
                self.sampled.seconds += now_s - last_s
                self.sampled.process_cpu_s += process_s - last_process_s
                self.sampled.num_samples += 1
            last_s, last_process_s, was_wanted = now_s, process_s, is_wanted

    def _is_looked_at(self, thread: threading.Thread) -> bool:
        return thread is not self._thread and thread.name not in self._left_out

    def _look(self, ident: int, name: str, frame: FrameType, wall_s: float, *, counts: bool) -> None:
        try:
            now_cpu_s = time.clock_gettime(time.pthread_getcpuclockid(ident))
        except OSError:  # the thread has just ended
            return
        cpu_s = now_cpu_s - self._cpu_s.get(ident, now_cpu_s)
        self._cpu_s[ident] = now_cpu_s
        if not counts:
            return
        stack = self._stack(frame)
        stage = stage_of(stack, is_running=cpu_s > _RUNNING * wall_s)
        self.sampled.wall_s[name, stage] += wall_s
        self.sampled.cpu_s[name, stage] += cpu_s
        self.sampled.own_cpu_s[stack[0]] += cpu_s
        for label in set(stack):
            self.sampled.cumulative_cpu_s[label] += cpu_s

    def _stack(self, frame: FrameType | None) -> list[str]:
        stack = []
        while frame is not None:
            code = frame.f_code
            if code not in self._labels:
                self._labels[code] = f"{frame.f_globals.get('__name__', '?')}:{code.co_qualname}"
            stack.append(self._labels[code])
            frame = frame.f_back
        return stack


def _largest(seconds: Mapping[Key, float]) -> list[tuple[Key, float]]:
    return sorted(seconds.items(), key=lambda item: -item[1])
