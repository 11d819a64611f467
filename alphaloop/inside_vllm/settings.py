"""How look-up drafts inside vLLM: `--additional-config '{"alphaloop_lookup": {"remember_tasks": ["sql"]}}'`.

The names, meanings and defaults are those of `[models.drafters.<name>]` with `method = "lookup"`. They are read without
pydantic, because vLLM's environment has the version that vLLM wants.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

from alphaloop.errors import ConfigError

KEY: Final = "alphaloop_lookup"
_RANGES: Final = {
    "max_ngram": (1, 32),
    "min_ngram": (1, 16),
    "min_probability": (0, 0.999999),
    "max_remembered_bytes": (1 << 16, 1 << 40),
}


@dataclass(frozen=True, slots=True)
class ProposerSettings:
    """Look-up's settings; the longest draft is vLLM's `num_speculative_tokens`."""

    max_ngram: int = 16  #: tokens of the longest match; a longer one counts no more
    min_ngram: int = 1  #: a shorter match is ignored
    min_probability: float = 0.1  #: the draft ends before a token that is less likely to be accepted
    remember_tasks: tuple[str, ...] = ()  #: tasks whose requests also draft from earlier results of that task
    max_remembered_bytes: int = 16 << 20  #: of such results, for each task

    @classmethod
    def read(cls, additional_config: Any) -> ProposerSettings:
        """From vLLM's `additional_config`. Raises ConfigError."""
        given = additional_config.get(KEY, {}) if isinstance(additional_config, Mapping) else {}
        if not isinstance(given, Mapping):
            raise ConfigError(f"expected an object at additional_config.{KEY}, found {type(given).__name__}")
        known = {field.name: field.default for field in fields(cls)}
        if unknown := sorted(set(given) - set(known)):
            raise ConfigError(f"expected settings of {sorted(known)} at additional_config.{KEY}, found {unknown}")
        return cls(**{name: _checked(name, value, known[name]) for name, value in given.items()})


def _checked(name: str, value: Any, default: object) -> Any:
    place = f"additional_config.{KEY}.{name}"
    if isinstance(default, tuple):
        if not isinstance(value, list) or not all(isinstance(one, str) and one for one in value):
            raise ConfigError(f"expected a list of task names at {place}, found {value!r}")
        return tuple(value)
    numbers = (int, float) if isinstance(default, float) else (int,)
    low, high = _RANGES[name]
    if isinstance(value, bool) or not isinstance(value, numbers) or not low <= value <= high:
        raise ConfigError(f"expected a number from {low} to {high} at {place}, found {value!r}")
    return value
