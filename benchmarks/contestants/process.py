"""A contestant as its user sees it: started, asked, answered."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]


class Contestant:
    """One engine in a process of its own; it rests while another is asked."""

    def __init__(self, name: str, module: str, arguments: Sequence[str], *, python: str = sys.executable) -> None:
        self.name = name
        self._log = (REPOSITORY / ".alphaloop" / "benchmarks" / f"{name}.log").open("w")
        file = REPOSITORY / "benchmarks" / "contestants" / f"{module}.py"
        command = (
            [python, "-m", f"benchmarks.contestants.{module}"] if python == sys.executable else [python, str(file)]
        )
        self._process = subprocess.Popen(
            [*command, *arguments],
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )

    def wait_until_ready(self) -> None:
        """Until the model is loaded."""
        self._answer()

    def ask(
        self, prompts: Sequence[Sequence[int]], max_tokens: int | Sequence[int], mode: str, *, stop_at_end: bool
    ) -> dict[str, Any]:
        """Generate greedily; `seconds` and `tokens` of the answer. A list of `max_tokens` has one a prompt."""
        return self.request({"prompts": prompts, "max_tokens": max_tokens, "mode": mode, "stop_at_end": stop_at_end})

    def request(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Send any request that this contestant understands, and wait for its answer."""
        if self._process.stdin is None:
            raise RuntimeError(f"{self.name} has no standard input")
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        self._log.close()

    def _answer(self) -> dict[str, Any]:
        line = self._process.stdout.readline() if self._process.stdout else ""
        if not line:
            raise RuntimeError(f"{self.name} ended with {self._process.wait()}; its words are in {self._log.name}")
        answer: dict[str, Any] = json.loads(line)
        return answer
