"""How a benchmark over servers ends: a line of JSON, or its error."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console

from alphaloop.errors import AlphaloopError


def print_found(
    measure: Callable[[], Mapping[str, Any]], is_wrong: Callable[[Mapping[str, Any]], bool], console: Console
) -> int:
    """Print what was found as the last line. The exit code: 0, 1 where it is wrong, 2 where measuring failed."""
    try:
        found = measure()
    except (AlphaloopError, OSError, RuntimeError, ValueError) as error:
        console.print(f"error: {error}", markup=False, soft_wrap=True)
        return 2
    print(json.dumps(found))
    return int(is_wrong(found))
