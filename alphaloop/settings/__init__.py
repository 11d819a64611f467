"""Settings: typed, frozen, read once in the entry point and passed down."""

from __future__ import annotations

from alphaloop.settings.load import Settings, default_data_dir, find_configs, load_settings, read_tasks
from alphaloop.settings.model import (
    EmbeddedSettings,
    KafkaSettings,
    LogSettings,
    PolicySettings,
    PostgresSettings,
    SchedulerSettings,
    StartupSettings,
    TaskSettings,
    WorkerSettings,
)
from alphaloop.settings.models import (
    DrafterSettings,
    DraftModelDrafterSettings,
    LookupDrafterSettings,
    ModelSettings,
    TargetSettings,
)
from alphaloop.settings.override import overridden
from alphaloop.settings.tracing import TracingSettings

__all__ = [
    "DraftModelDrafterSettings",
    "DrafterSettings",
    "EmbeddedSettings",
    "KafkaSettings",
    "LogSettings",
    "LookupDrafterSettings",
    "ModelSettings",
    "PolicySettings",
    "PostgresSettings",
    "SchedulerSettings",
    "Settings",
    "StartupSettings",
    "TargetSettings",
    "TaskSettings",
    "TracingSettings",
    "WorkerSettings",
    "default_data_dir",
    "find_configs",
    "load_settings",
    "overridden",
    "read_tasks",
]
