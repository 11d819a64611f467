"""What passes between the command line and `python -m worker.commands`, which carries out what needs a model.

The command line writes one order as a line of JSON to that process's standard input. The process answers with one
event a line on its standard output. Only the command line shows anything. An order's fields are named as the options of
its command in `alphaloop.cli`, which alone declares defaults and bounds.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from alphaloop.costs import CostPoint
from alphaloop.draft_card import DraftMethod
from alphaloop.engine import CheckFinding
from alphaloop.server_identity import EngineIdentity, Granularity, ServerKind
from alphaloop.settings.models import DeviceName, Dtype


class _Order(BaseModel):
    #: Options that say only how a report is shown are no part of an order.
    model_config = ConfigDict(frozen=True, extra="ignore")


class MeasureOrder(_Order):
    """`alphaloop measure`. Where `prompts` is -, the prompts follow the order on standard input."""

    command: Literal["measure"] = "measure"
    prompts: Path
    target: tuple[str, ...]  #: two models to compare; the configured one with its drafters where empty
    task: str | None
    max_tokens: int | None
    temperature: float | None
    num: int  #: prompts at most
    drafter: tuple[str, ...]  #: all configured ones where empty
    k: tuple[int, ...]
    batch: int
    repeats: int
    bar: float
    seed: int


class CalibrateOrder(_Order):
    """`alphaloop calibrate`."""

    command: Literal["calibrate"] = "calibrate"
    budget: float  #: seconds
    no_store: bool


class CheckPairOrder(_Order):
    """`alphaloop check-pair`. None: what the settings or the target say."""

    command: Literal["check-pair"] = "check-pair"
    target: str
    draft: str
    dtype: Dtype | None
    draft_dtype: Dtype | None
    device: DeviceName | None
    draft_device: DeviceName | None
    context_length: int | None
    batch_size: int | None
    max_draft_tokens: int


class CheckServerOrder(_Order):
    """`alphaloop check-server`."""

    command: Literal["check-server"] = "check-server"
    server: str  #: the name of an endpoint of the settings, or an address
    kind: ServerKind | None  #: of an address alone
    model: str | None  #: None: the endpoint's, else the server's only one
    api_key_env: str | None  #: of an address alone: the name of a variable, since an order may be logged


class TrainOrder(_Order):
    """`alphaloop draft train`."""

    command: Literal["draft train"] = "draft train"
    folder: Path
    method: DraftMethod
    prompts: Path | None  #: JSONL to train on, - if it follows the order; None: the target writes prompts
    held_out: Path | None  #: JSONL to judge with; None: a part of those
    task: str | None  #: of lines that name none
    recipe: Path | None  #: None: the defaults
    name: str | None  #: None: the folder's
    seed: int | None  #: None: the recipe's
    begun_from: str | None = None  #: heads whose weights training begins with; None: anew


class RegisterOrder(_Order):
    """`alphaloop draft register`."""

    command: Literal["draft register"] = "draft register"
    folder: Path
    name: str | None


Order = MeasureOrder | CalibrateOrder | CheckPairOrder | CheckServerOrder | TrainOrder | RegisterOrder
ORDER: Final[TypeAdapter[Order]] = TypeAdapter(Annotated[Order, Field(discriminator="command")])


#: The stage before a measurement, in which nothing is measured that an interruption could lose.
LOADING: Final = "loading the models"


class _Event(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")


class StageEvent(_Event):
    """A new stage of the work begins."""

    event: Literal["stage"] = "stage"
    name: str
    total: int | None = None  #: things to do; None where that is unknown
    done: int = 0  #: of them, by an earlier run


class AdvanceEvent(_Event):
    """Some things of the stage are done."""

    event: Literal["advance"] = "advance"
    num: int = 1
    total: int | None = None  #: things to do, where this has changed
    note: str = ""  #: shown beside the bar


class NoteEvent(_Event):
    """A line for the person."""

    event: Literal["note"] = "note"
    text: str


class ReportEvent(_Event):
    """The data that were asked for. Which type they have follows from the order."""

    event: Literal["report"] = "report"
    data: Any


class FailedEvent(_Event):
    """The work ended with an error in words."""

    event: Literal["failed"] = "failed"
    message: str
    hint: str | None = None


CommandEvent = StageEvent | AdvanceEvent | NoteEvent | ReportEvent | FailedEvent
EVENT: Final[TypeAdapter[CommandEvent]] = TypeAdapter(Annotated[CommandEvent, Field(discriminator="event")])


def line_of(said: BaseModel) -> bytes:
    """An order or an event as a line, in ASCII, because names of files may be no UTF-8."""
    return json.dumps(said.model_dump(mode="json")).encode() + b"\n"


#: How work reports its events.
Tell = Callable[[CommandEvent], None]


@dataclass(frozen=True, slots=True)
class Calibration:
    """What rounds cost on this device."""

    identity: EngineIdentity
    points: tuple[CostPoint, ...]
    seconds: float  #: in all, the loading of the model included
    is_stored: bool


@dataclass(frozen=True, slots=True)
class PairCheck:
    """Every check of one pair."""

    target: str
    draft: str
    findings: tuple[CheckFinding, ...]

    @property
    def is_refused(self) -> bool:
        """Whether a worker would refuse the draft."""
        return any(finding.verdict == "refused" for finding in self.findings)


@dataclass(frozen=True, slots=True)
class ServerCheck:
    """What an inference server can tell."""

    url: str
    kind: ServerKind
    model: str
    granularity: Granularity  #: of the counts of a text that ended at its limit
    findings: tuple[CheckFinding, ...]
