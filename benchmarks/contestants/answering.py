"""The loop of a contestant: a request a line on standard input, an answer a line on standard output.

A request is {"prompts": [[token id, …], …], "max_tokens": n, "mode": "…", "stop_at_end": bool}; the answer
{"seconds": s, "tokens": [[token id, …], …], …}. Nothing here is imported that one of the environments may lack.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

Run = Callable[[dict[str, Any]], dict[str, Any]]


def serve(load: Callable[[], Run]) -> None:
    """Load, say so, then answer until standard input ends. Whatever libraries print goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    run = load()
    _say(answers, {"ready": True})
    for line in sys.stdin:
        request = json.loads(line)
        began = time.perf_counter()
        answer = run(request)
        _say(answers, {"seconds": time.perf_counter() - began} | answer)


def _say(stream: Any, value: dict[str, Any]) -> None:
    stream.write(json.dumps(value) + "\n")
    stream.flush()
