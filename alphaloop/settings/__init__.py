"""Settings: typed, frozen, read once in the entry point and passed down."""

from __future__ import annotations

from alphaloop.settings.load import Settings, default_data_dir, find_configs, load_settings, overridden, read_tasks
from alphaloop.settings.models import (
    DrafterSettings,
    DraftModelDrafterSettings,
    EndpointSettings,
    LookupDrafterSettings,
    ModelSettings,
    TargetSettings,
)
from alphaloop.settings.processes import (
    ClaimCheckSettings,
    ConsoleSettings,
    EmbeddedSettings,
    KafkaSettings,
    LogSettings,
    PolicySettings,
    PostgresSettings,
    ReportSettings,
    SchedulerSettings,
    StartupSettings,
    TracingSettings,
    WorkerSettings,
)
from alphaloop.settings.task import TaskSettings

__all__ = [
    "ClaimCheckSettings",
    "ConsoleSettings",
    "DraftModelDrafterSettings",
    "DrafterSettings",
    "EmbeddedSettings",
    "EndpointSettings",
    "KafkaSettings",
    "LogSettings",
    "LookupDrafterSettings",
    "ModelSettings",
    "PolicySettings",
    "PostgresSettings",
    "ReportSettings",
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
