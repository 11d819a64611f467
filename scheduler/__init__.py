"""The measuring process: probes, drift, staleness, reports. It never decodes."""

from __future__ import annotations
