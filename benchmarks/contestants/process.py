"""A contestant: a process that rests while another is asked. A request a line on standard input, an answer a line.

A request to generate is {"prompts": [[token id, …], …], "max_tokens": n, "mode": "…", "stop_at_end": bool}; the answer
{"seconds": s, "tokens": [[token id, …], …], …}. Nothing here is imported that one of the environments may lack.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

_REPOSITORY = Path(__file__).resolve().parents[2]
Run = Callable[[dict[str, Any]], dict[str, Any]]


class Contestant:
    """A module of this repository in a process of its own, as its user sees it: started, asked, answered.

    Another `python` runs the module as a file, because its environment does not have alphaloop.
    """

    def __init__(
        self,
        name: str,
        module: str,
        arguments: Sequence[str] = (),
        *,
        python: str = sys.executable,
        log: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self._log = log or _REPOSITORY / ".alphaloop" / "benchmarks" / f"{name}.log"
        self._log.parent.mkdir(parents=True, exist_ok=True)
        file = _REPOSITORY / f"{module.replace('.', '/')}.py"
        with self._log.open("a" if log else "w") as words:
            self._process = subprocess.Popen(
                [python, *(["-m", module] if python == sys.executable else [str(file)]), *arguments],
                cwd=_REPOSITORY,
                env=None if environment is None else dict(environment),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=words,
                text=True,
            )

    def wait_until_ready(self) -> None:
        """Until it says that it is loaded."""
        self._answer()

    def ask(
        self, prompts: Sequence[Sequence[int]], max_tokens: int | Sequence[int], mode: str, *, stop_at_end: bool
    ) -> dict[str, Any]:
        """Generate greedily; `seconds` and `tokens` of the answer. A list of `max_tokens` has one a prompt."""
        return self.request({"prompts": prompts, "max_tokens": max_tokens, "mode": mode, "stop_at_end": stop_at_end})

    def request(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Send any request that this contestant understands, and wait for its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def check(self) -> None:
        """Raises RuntimeError when the process has ended by itself."""
        if self._process.poll() is not None:
            raise self._ended()

    def finish(self) -> dict[str, Any]:
        """End its input, and wait for its last words."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        return self._answer()

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        line = self._process.stdout.readline() if self._process.stdout else ""
        if not line:
            self._process.wait()
            raise self._ended()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _ended(self) -> RuntimeError:
        return RuntimeError(f"{self.name} ended with {self._process.returncode}; its words are in {self._log}")


def open_answers() -> Callable[[dict[str, Any]], None]:
    """In the contestant: what sends an answer. Whatever libraries print goes to standard error from now on."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return lambda value: print(json.dumps(value), file=answers, flush=True)


def serve(load: Callable[[], Run]) -> None:
    """In the contestant: load, say so, then answer until standard input ends."""
    say = open_answers()
    run = load()
    say({"ready": True})
    for line in sys.stdin:
        request = json.loads(line)
        began = time.perf_counter()
        answer = run(request)
        say({"seconds": time.perf_counter() - began} | answer)
