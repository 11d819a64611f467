"""Settings: typed, frozen, read once in the entry point and passed down."""

from __future__ import annotations

from alphaloop.settings.claim_check import ClaimCheckSettings
from alphaloop.settings.console import ConsoleSettings
from alphaloop.settings.endpoint import EndpointSettings
from alphaloop.settings.load import Settings, default_data_dir, find_configs, load_settings, read_tasks
from alphaloop.settings.model import (
    EmbeddedSettings,
    KafkaSettings,
    LogSettings,
    PolicySettings,
    PostgresSettings,
    SchedulerSettings,
    StartupSettings,
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
from alphaloop.settings.report import ReportSettings
from alphaloop.settings.task import TaskSettings
from alphaloop.settings.tracing import TracingSettings

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
