"""`[report]`: what the report needs to know beside what was measured."""

from __future__ import annotations

from pydantic import Field

from alphaloop.settings.section import Section


class ReportSettings(Section):
    """What a device costs. The same price holds for every device."""

    device_cost_per_hour: float | None = Field(
        None, gt=0, allow_inf_nan=False
    )  #: of one device; unset: the report shows device time and no cost
    currency: str = Field("", max_length=12)  #: written behind amounts: EUR
