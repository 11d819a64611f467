"""Hidden states of the target, recorded while it writes a text: heads learn from them, and they cost no pass.

The recorder is a drafter that proposes nothing: the engine hands it states with each ask, as it will hand them to the
heads that are being trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from alphaloop.deciding.decision import Decision, Reason
from alphaloop.deciding.goodput import DrafterState
from alphaloop.engine import Sampling
from alphaloop.messages import Mode
from engine.proposal import NOTHING, Ask, Drafter, Proposal
from engine.states import FINAL
from engine.training.data import WrittenText, read_tensors, write_tensors

RECORDER: Final = "recorder"
RECORDED: Final = Decision(Mode.SPECULATIVE, RECORDER, "1", 1, Reason.FORCED, "training texts of a draft")


@dataclass(frozen=True, slots=True, eq=False)
class RecordedText:
    """A text and states of the target at consecutive positions, of layers and final ones.

    The final state at a position is what the next token was chosen from.
    """

    text: WrittenText
    first: int  #: position of the first row of `layers`
    layers: Tensor | None  #: [positions, taps * hidden], bfloat16
    final_first: int  #: position of the first row of `final`
    final: Tensor  #: [positions, hidden], bfloat16


class StateRecorder(Drafter):
    """Drafts nothing; a file in `folder` for each text. FINAL is always recorded."""

    def __init__(self, layers: Sequence[int], folder: Path) -> None:
        self.taps = (*layers, FINAL)
        self.state = DrafterState(RECORDER, "1", 1)
        self._layers = tuple(layers)
        self._folder = folder
        self._held: dict[str, _Recording] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def open(self, job_id: str, text: Sequence[int], sampling: Sampling, task: str, segment: str = "") -> None:
        """A text begins."""
        self._held[job_id] = _Recording()

    def propose(self, asks: Sequence[Ask]) -> list[Proposal]:
        """Nothing; the states that came with the asks are kept."""
        for ask in asks:
            states, held = ask.states, self._held[ask.job_id]
            if states is None or FINAL not in states.by_tap:
                continue
            if not held.final:
                held.first, held.final_first = states.first, states.end - 1
            held.final.append(states.by_tap[FINAL].to("cpu", torch.bfloat16))
            if self._layers:
                held.layers.append(states.of(self._layers).to("cpu", torch.bfloat16))
        return [NOTHING] * len(asks)

    def close(self, job_id: str) -> None:
        """The text has ended; `keep` follows where it is to be kept."""

    def clear(self) -> None:
        """Forget every text."""
        self._held.clear()

    def keep(self, job_id: str, text: WrittenText) -> None:
        """Write down what was recorded of a text that has ended; no file where that is nothing."""
        held = self._held.pop(job_id, None)
        if held is None or not held.final:
            return
        tensors = {"final": torch.cat(held.final), "places": torch.tensor([held.first, held.final_first])}
        if held.layers:
            tensors["layers"] = torch.cat(held.layers)
        write_tensors(self._file(text.number), tensors)

    def read(self, text: WrittenText) -> RecordedText | None:
        """What was recorded of a text; None where nothing was."""
        file = self._file(text.number)
        if not file.exists():
            return None
        tensors, _ = read_tensors(file)
        first, final_first = tensors["places"].tolist()
        return RecordedText(text, first, tensors.get("layers"), final_first, tensors["final"])

    def _file(self, number: int) -> Path:
        return self._folder / f"states-{number:05d}.safetensors"


class _Recording:
    """States of a text that is being written."""

    def __init__(self) -> None:
        self.first = self.final_first = 0
        self.layers: list[Tensor] = []
        self.final: list[Tensor] = []
