"""Settings: typed, frozen, read once in the entry point and passed down."""

# ruff: noqa: I001 - each name once, as itself: it is exported
from __future__ import annotations

from alphaloop.settings.bindings import Bindings as Bindings
from alphaloop.settings.load import (
    Settings as Settings,
    TasksFile as TasksFile,
    default_data_dir as default_data_dir,
    find_configs as find_configs,
    load_settings as load_settings,
    overridden as overridden,
)
from alphaloop.settings.models import (
    DrafterSettings as DrafterSettings,
    DraftModelDrafterSettings as DraftModelDrafterSettings,
    EndpointSettings as EndpointSettings,
    HeadsDrafterSettings as HeadsDrafterSettings,
    HybridDrafterSettings as HybridDrafterSettings,
    LayerSkipDrafterSettings as LayerSkipDrafterSettings,
    LookupDrafterSettings as LookupDrafterSettings,
    ModelSettings as ModelSettings,
    RecyclingDrafterSettings as RecyclingDrafterSettings,
    TargetSettings as TargetSettings,
)
from alphaloop.settings.processes import (
    ClaimCheckSettings as ClaimCheckSettings,
    ConsoleSettings as ConsoleSettings,
    EmbeddedSettings as EmbeddedSettings,
    KafkaSettings as KafkaSettings,
    LogSettings as LogSettings,
    PolicySettings as PolicySettings,
    PostgresSettings as PostgresSettings,
    ReportSettings as ReportSettings,
    SchedulerSettings as SchedulerSettings,
    StartupSettings as StartupSettings,
    TracingSettings as TracingSettings,
    WorkerSettings as WorkerSettings,
)
from alphaloop.settings.segment import (
    SegmentSettings as SegmentSettings,
    settings_of_segment as settings_of_segment,
)
from alphaloop.settings.task import TaskSettings as TaskSettings
