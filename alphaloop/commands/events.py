"""What `python -m worker.commands` answers, one event a line of JSON."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

#: The stage before a measurement, in which nothing is measured that an interruption could lose.
LOADING: Final = "loading the models"


class _Event(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")


class Stage(_Event):
    """A new stage of the work begins."""

    event: Literal["stage"] = "stage"
    name: str
    total: int | None = None  #: things to do; None where nobody knows
    done: int = 0  #: of them, by an earlier run


class Advance(_Event):
    """Some things of the stage are done."""

    event: Literal["advance"] = "advance"
    num: int = 1
    total: int | None = None  #: things to do, where this has changed
    note: str = ""  #: shown beside the bar


class Note(_Event):
    """A line for the person."""

    event: Literal["note"] = "note"
    text: str


class Report(_Event):
    """The data that were asked for. Which type they have follows from the order."""

    event: Literal["report"] = "report"
    data: Any


class Failed(_Event):
    """The work ended with an error in words."""

    event: Literal["failed"] = "failed"
    message: str
    hint: str | None = None


Event = Stage | Advance | Note | Report | Failed
EVENT: Final[TypeAdapter[Event]] = TypeAdapter(Annotated[Event, Field(discriminator="event")])
#: How work tells its events.
Tell = Callable[[Event], None]
