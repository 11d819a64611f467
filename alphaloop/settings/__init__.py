"""Settings: typed, frozen, read once in the entry point and passed down."""

# ruff: noqa: I001 - each name once, as itself: it is exported
from __future__ import annotations

from alphaloop.settings.endpoints import EndpointSettings as EndpointSettings
from alphaloop.settings.load import (
    Settings as Settings,
    TasksFile as TasksFile,
    find_configs as find_configs,
    load_settings as load_settings,
    overridden as overridden,
)
from alphaloop.settings.models import ModelSettings as ModelSettings
from alphaloop.settings.prices import PriceSettings as PriceSettings, RateSettings as RateSettings
from alphaloop.settings.processes import (
    ClaimCheckSettings as ClaimCheckSettings,
    ConsoleSettings as ConsoleSettings,
    DraftsSettings as DraftsSettings,
    EmbeddedSettings as EmbeddedSettings,
    KafkaSettings as KafkaSettings,
    PolicySettings as PolicySettings,
    PostgresSettings as PostgresSettings,
    RefreshSettings as RefreshSettings,
    SchedulerSettings as SchedulerSettings,
    TracingSettings as TracingSettings,
    WorkerSettings as WorkerSettings,
)
from alphaloop.settings.task import (
    Bindings as Bindings,
    SegmentSettings as SegmentSettings,
    TaskSettings as TaskSettings,
    settings_of_segment as settings_of_segment,
)
