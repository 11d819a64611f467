"""Settings with overrides from the command line: `policy.explore_share=0.0`."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from typing import Any, Final

from pydantic import BaseModel, TypeAdapter, ValidationError

from alphaloop.errors import ConfigError
from alphaloop.settings.load import Settings, explained, nearest

_FORM: Final = "section.name=value: policy.explore_share=0.0, tasks.code.decoding=vanilla"


def overridden(settings: Settings, assignments: Sequence[str]) -> Settings:
    """The settings with `section.name=value` laid over them, also over the environment; values are TOML or bare text.

    Raises ConfigError for an unknown setting and for a wrong value.
    """
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        parts = [part.strip() for part in path.split(".")]
        if not equals or len(parts) < 2 or not all(parts):
            raise ConfigError(f"expected a setting and its value, found {assignment[:80]!r}", hint=_FORM)
        section, *rest = parts
        if section not in Settings.model_fields:
            raise ConfigError(f"{section}: no such section", hint=nearest(section, set(Settings.model_fields)))
        current = _plain(getattr(settings, section))
        changed = _with(current, rest, _value(text.strip()), parts)
        annotation: Any = Settings.model_fields[section].annotation
        try:
            settings = settings.model_copy(update={section: TypeAdapter(annotation).validate_python(changed)})
        except ValidationError as error:
            raise explained(error, within=(section,)) from None
    return settings


def _plain(section: Any) -> Any:
    """The values that were set, as mappings; defaults are left out."""
    if isinstance(section, BaseModel):
        return {name: _plain(getattr(section, name)) for name in type(section).model_fields}
    return {name: _plain(value) for name, value in section.items()} if isinstance(section, dict) else section


def _with(current: Any, rest: Sequence[str], value: Any, path: Sequence[str]) -> dict[str, Any]:
    if not isinstance(current, dict):
        raise ConfigError(f"{'.'.join(path)}: no such setting", hint=_FORM)
    name, *further = rest
    return {**current, name: _with(current.get(name, {}), further, value, path) if further else value}


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
