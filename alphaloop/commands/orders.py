"""What the command line asks of `python -m worker.commands`.

An order's fields are named as the options of its command in `alphaloop.cli`, which alone declares defaults and bounds.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from alphaloop.server_identity import ServerKind
from alphaloop.settings.device import DeviceName
from alphaloop.settings.models import Dtype


class _Order(BaseModel):
    #: Options that say only how a report is shown are no part of an order.
    model_config = ConfigDict(frozen=True, extra="ignore")


class MeasureOrder(_Order):
    """`alphaloop measure`. Where `prompts` is -, the prompts follow the order on standard input."""

    command: Literal["measure"] = "measure"
    prompts: Path
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
    prompts: Path | None  #: JSONL to train on, - if it follows the order; None: the target writes prompts
    held_out: Path | None  #: JSONL to judge with; None: a part of those
    task: str | None  #: of lines that name none
    recipe: Path | None  #: None: the defaults
    name: str | None  #: None: the folder's
    seed: int | None  #: None: the recipe's


class RegisterOrder(_Order):
    """`alphaloop draft register`."""

    command: Literal["draft register"] = "draft register"
    folder: Path
    name: str | None


Order = MeasureOrder | CalibrateOrder | CheckPairOrder | CheckServerOrder | TrainOrder | RegisterOrder
ORDER: Final[TypeAdapter[Order]] = TypeAdapter(Annotated[Order, Field(discriminator="command")])
