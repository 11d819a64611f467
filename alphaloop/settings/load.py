"""Reading settings: configs/*.toml, a profile over them, then the environment, then `section.name=value` of a command.

An unknown key is refused with the nearest known one, because an ignored misspelling is hard to find.
"""

from __future__ import annotations

import difflib
import logging
import os
import threading
import tomllib
import typing
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import platformdirs
from pydantic import BaseModel, Field, TypeAdapter, ValidationError, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict, SettingsError

from alphaloop import shipped
from alphaloop.errors import ConfigError
from alphaloop.files import read_toml
from alphaloop.messages.job import Label, TaskName
from alphaloop.settings.models import ModelSettings
from alphaloop.settings.prices import PriceSettings
from alphaloop.settings.processes import (
    ClaimCheckSettings,
    ConsoleSettings,
    DraftsSettings,
    EmbeddedSettings,
    KafkaSettings,
    LogSettings,
    PolicySettings,
    PostgresSettings,
    RefreshSettings,
    SchedulerSettings,
    StartupSettings,
    TracingSettings,
    WorkerSettings,
)
from alphaloop.settings.task import Bindings, SegmentSettings, TaskSettings

log = logging.getLogger(__name__)

FILES: Final = ("models", "tasks", "worker", "scheduler")
ENV_PREFIX: Final = "ALPHALOOP_"
SHIPPED_CONFIGS: Final = shipped("configs")
# Names that other tools already use for the same thing.
PLAIN_ENV: Final = {
    "KAFKA_BOOTSTRAP_SERVERS": ("kafka", "bootstrap_servers"),
    "DATABASE_URL": ("postgres", "url"),
    "KAFKA_HOME": ("embedded", "kafka_home"),
}
#: Settings that say which section a table is.
_TAGS: Final = ("method", "kind")
_FORM: Final = "section.name=value: policy.explore_share=0.0, tasks.code.decoding=vanilla"


def default_data_dir() -> Path:
    """Where the embedded broker, the database and the reports live unless `data_dir` says otherwise."""
    return Path(platformdirs.user_data_dir("alphaloop", appauthor=False))


class Settings(BaseSettings):
    """All settings of both processes."""

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        env_prefix=ENV_PREFIX,
        env_nested_delimiter="__",
        env_ignore_empty=True,
        validate_default=True,
    )

    kafka: KafkaSettings = KafkaSettings()
    postgres: PostgresSettings = PostgresSettings()
    models: ModelSettings = ModelSettings()
    tasks: dict[TaskName, TaskSettings] = Field(default_factory=dict)
    default_model: str | None = Field(
        None, min_length=1, max_length=200
    )  #: the target of the tasks that name no model, and of unknown ones; unset: one target decodes all tasks
    segments: dict[Label, SegmentSettings] = Field(default_factory=dict)
    worker: WorkerSettings = WorkerSettings()
    policy: PolicySettings = PolicySettings()
    scheduler: SchedulerSettings = SchedulerSettings()
    prices: PriceSettings = PriceSettings()
    console: ConsoleSettings = ConsoleSettings()
    claim_check: ClaimCheckSettings = ClaimCheckSettings()
    refresh: RefreshSettings = RefreshSettings()
    drafts: DraftsSettings = DraftsSettings()
    startup: StartupSettings = StartupSettings()
    logs: LogSettings = LogSettings()
    tracing: TracingSettings = TracingSettings()
    embedded: EmbeddedSettings = EmbeddedSettings()
    data_dir: Path = Field(default_factory=default_data_dir)  #: embedded servers and reports keep their files here

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """The environment wins over files, which arrive as initial values."""
        return env_settings, init_settings

    @field_validator("default_model")
    @classmethod
    def _bound_tasks_need_a_default(cls, default: str | None, info: ValidationInfo) -> str | None:
        bound = next((name for name, task in info.data.get("tasks", {}).items() if task.model is not None), None)
        if default is None and bound is not None:
            raise PydanticCustomError(
                "default_model",
                "Expected the target of all other tasks, because [tasks.{task}] names a model",
                {"task": bound},
            )
        return default

    @property
    def bindings(self) -> Bindings:
        """Which target decodes which task."""
        return Bindings(self.tasks, self.default_model)

    @property
    def report_folder(self) -> Path:
        """Where reports are written."""
        return self.data_dir / "reports"

    @property
    def drafts_url(self) -> str:
        """Where trained drafts are kept."""
        return self.drafts.url or f"file://{(self.data_dir / 'drafts').absolute()}"

    @property
    def console_batches(self) -> Path:
        """Where the console keeps batch files."""
        return self.data_dir / "console" / "batches"

    @property
    def api_files(self) -> Path:
        """Where the API keeps files, without a claim-check store."""
        return self.data_dir / "console" / "api"


def load_settings(
    configs: Path | None = None, *, profile: str | None = None, overrides: Mapping[str, Any] | None = None
) -> Settings:
    """Read the settings.

    `configs` is a folder of TOML files: `./configs`, else the shipped ones (`alphaloop.shipped`). `profile` names
    one more file of it (`local`), laid over the others; `overrides` (nested mappings) are laid over both. The
    environment wins: `ALPHALOOP_WORKER__BATCH_SIZE=8`, and the plain names in PLAIN_ENV. An empty variable
    counts as unset.

    Raises ConfigError with the path of the setting, what was found, and a likely correction.
    """
    folder = find_configs(configs)
    merged: dict[str, Any] = {}
    if folder is not None:
        for name in (*FILES, *([profile] if profile else ())):
            _merge(merged, read_toml(folder / f"{name}.toml", required=name == profile))
    for variable, (section, key) in PLAIN_ENV.items():
        if os.environ.get(variable):
            _merge(merged, {section: {key: os.environ[variable]}})
    _merge(merged, overrides or {})
    _refuse_unknown_variables()
    try:
        return Settings(**merged)
    except SettingsError as error:
        raise ConfigError(
            f"{ENV_PREFIX}…: {error}", hint="lists and tables are JSON: ALPHALOOP_KAFKA__RETRY_DELAYS_S=[10,60]"
        ) from None
    except ValidationError as error:
        raise explained(error) from None


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


def find_configs(configs: Path | None) -> Path | None:
    """The folder of TOML files that `load_settings(configs)` reads; None when there is none."""
    if configs is not None:
        if not configs.is_dir():
            raise ConfigError(f"expected a folder of TOML files, found nothing at {configs}", hint="check --configs")
        return configs
    return next((folder for folder in (Path("configs"), SHIPPED_CONFIGS) if (folder / "tasks.toml").is_file()), None)


class TasksFile:
    """configs/tasks.toml under a running process, which reads it again when it changed. Threads share it.

    Make it before the settings are loaded, so that no change is missed. Whatever `load_settings` lays over the file
    holds for what is read again.
    """

    def __init__(self, configs: Path | None, profile: str | None = None) -> None:
        self._configs, self._profile = configs, profile
        self._seen = self._stamp()
        self._newest: Bindings | None = None
        self._lock = threading.Lock()

    def newest(self, known: Bindings) -> Bindings:
        """What the file says now; `known` is what it said when the settings were loaded.

        While it is gone or wrong, what it said last stays. So does a default target that it names no more, because
        without one the workers of every target would read every topic.
        """
        with self._lock:
            known = self._newest or known
            stamp = self._stamp()
            if stamp == self._seen:
                return known
            self._seen = stamp
            try:
                tables = self._read(stamp)
            except ConfigError as error:
                # Somebody is editing the file.
                log.warning("tasks not read again: %s", error.message, extra={"action": "tasks_unreadable"})
                return known
            if tables.default_model is None and known.default_model is not None:
                message = "default_model is gone from tasks.toml: until this process starts anew it stays %s"
                log.error(message, known.default_model, extra={"action": "default_model_gone"})
                tables = replace(tables, default_model=known.default_model)
            log.info("tasks.toml was read again: %d tasks", len(tables.tasks), extra={"action": "tasks_read"})
            self._newest = tables
            return tables

    def applied_to(self, settings: Settings) -> Settings:
        """The settings of the start with the tasks as they are now."""
        known = settings.bindings
        if (newest := self.newest(known)) == known:
            return settings
        return settings.model_copy(update={"tasks": newest.tasks, "default_model": newest.default_model})

    def _read(self, stamp: tuple[int, int, int] | None) -> Bindings:
        if stamp is None:
            raise ConfigError("expected tasks.toml, found no file")
        return load_settings(self._configs, profile=self._profile).bindings

    def _stamp(self) -> tuple[int, int, int] | None:
        """What differs between two versions of a file; None where there is none."""
        try:
            folder = find_configs(self._configs)
            if folder is None:
                return None
            status = (folder / "tasks.toml").stat()
        except (OSError, ConfigError):
            return None
        return status.st_mtime_ns, status.st_size, status.st_ino


def explained(error: ValidationError, within: tuple[str, ...] = ()) -> ConfigError:
    """A ConfigError for pydantic's error about settings: the path, what was found, and a likely correction."""
    errors = error.errors(include_url=False, include_context=False)
    # A misspelt key of a required setting is two errors; the one that names the misspelling helps.
    first = next((fault for fault in errors if fault["type"] == "extra_forbidden"), errors[0])
    parts, section = _located((*within, *first["loc"]))
    path = ".".join(parts)
    if first["type"] == "extra_forbidden":
        return ConfigError(f"{path}: no such setting", hint=nearest(parts[-1], set(section.model_fields)))
    hint = f"{SHIPPED_CONFIGS} explains every setting"
    if first["type"] == "default_model":
        hint = 'write default_model = "…" above the first task: the models.target.name of the workers that run now'
    return ConfigError(f"{path}: {first['msg']}; found {_shown(path, first['input'])}", hint=hint)


def nearest(name: str, known: set[str]) -> str:
    """A hint: the most similar known name, or all of them."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"did you mean {close[0]}?" if close else f"expected one of {', '.join(sorted(known))}"


def sections_of(annotation: Any) -> list[type[BaseModel]]:
    """The sections a setting may hold: one, several where a tag says which, none for a plain value."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [section for part in typing.get_args(annotation) for section in sections_of(part)]


def _merge(into: dict[str, Any], over: Mapping[str, Any]) -> None:
    for key, value in over.items():
        if isinstance(value, Mapping) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = dict(value) if isinstance(value, Mapping) else value


def _refuse_unknown_variables() -> None:
    # pydantic-settings passes over variables whose section it does not know; a typo there would be silent.
    sections = {name.upper() for name in Settings.model_fields}
    for variable in os.environ:
        if variable.startswith(ENV_PREFIX):
            section = variable.removeprefix(ENV_PREFIX).split("__")[0]
            if section not in sections and variable not in ("ALPHALOOP_CONFIGS", "ALPHALOOP_PROFILE"):
                raise ConfigError(f"{variable}: no such section", hint=nearest(section, sections))


def _shown(path: str, found: object) -> str:
    """What was found, without secrets: of a whole section only which one it is."""
    if any(word in path for word in ("password", "url", "api_key", "secret")):
        return "a secret"
    if isinstance(found, Mapping):
        return next((f"{tag} = {found[tag]!r}"[:80] for tag in _TAGS if tag in found), "a table")
    return repr(found)[:80]


def _located(place: Sequence[int | str]) -> tuple[list[str], type[BaseModel]]:
    """The path without the tags that pydantic adds, and the last section on it."""
    annotation: Any = Settings
    section: type[BaseModel] = Settings
    path = []
    for part in map(str, place):
        sections = sections_of(annotation)
        if part == "[key]":  # pydantic's mark after the name of a wrong key
            continue
        if typing.get_origin(annotation) is dict:
            annotation = typing.get_args(annotation)[1]
        elif len(sections) > 1:
            annotation = next(section for section in sections if _has_tag(section, part))
            continue
        elif sections:
            section = sections[0]
            annotation = section.model_fields[part].annotation if part in section.model_fields else None
        path.append(part)
    return path, section


def _has_tag(section: type[BaseModel], tag: str) -> bool:
    """Whether this is the section that the tag selects. The one without a default is for all other values."""
    field = next(section.model_fields[name] for name in _TAGS if name in section.model_fields)
    return tag == ("server" if field.is_required() else field.default)


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
