"""Passes that are recorded at the first pass of a shape, and repeated for every further pass of this shape."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final, Protocol

import torch
from torch import Tensor

from worker.decoding.network.groups import Read
from worker.decoding.network.kv_shape import KvShape
from worker.decoding.network.passes import reserve_for
from worker.decoding.network.recording import Recorder
from worker.decoding.network.slots import SlotCache
from worker.decoding.network.static_inputs import NUM_TOKENS, InputBlock, StaticInputs, StaticShape

log = logging.getLogger(__name__)

#: Recordings that are kept. Each takes some megabytes of the device beside the memory that all of them share.
MOST_RECORDED: Final = 48


class Recordable(Protocol):
    """A network that can compute from a block of inputs."""

    kv_shape: KvShape
    num_outputs: int  #: columns of its logits

    def compute_static(self, inputs: StaticInputs) -> Tensor:
        """Logits [tokens, vocabulary], by the same calls over the same memory whatever the inputs hold."""


class RecordedPasses:
    """Short passes of one network, recorded by shape. Other passes run elsewhere."""

    def __init__(self, network: Recordable, recorder: Recorder, device: torch.device) -> None:
        self._network = network
        self._recorder = recorder
        shape = network.kv_shape
        self._block = InputBlock(shape.num_layers, device)
        # Outside of the memory that recordings share, so that all of them write into one buffer.
        self._logits = torch.empty((NUM_TOKENS[-1], network.num_outputs), dtype=shape.dtype, device=device)
        self._recorded: OrderedDict[StaticShape, Callable[[], None]] = OrderedDict()
        self._refused: set[StaticShape] = set()

    def __len__(self) -> int:
        return len(self._recorded)

    def read(self, cache: SlotCache, reads: Sequence[Read]) -> Tensor | None:
        """Like `LanguageModel.read`; None if these reads need a plain pass."""
        shape = StaticShape.of(reads)
        if shape is None or shape in self._refused:
            return None
        reserve_for(cache, reads)
        num_wanted = self._block.fill(shape, reads, cache)
        repeat = self._recorded.get(shape) or self._record(shape)
        if repeat is None:
            return None
        self._recorded.move_to_end(shape)
        repeat()
        # A copy: the next pass writes into the same memory.
        return self._logits.index_select(0, self._block.views(shape).wanted[:num_wanted])

    def forget(self) -> None:
        """Give the memory of all recordings back."""
        self._recorded.clear()
        self._recorder.forget()

    def _record(self, shape: StaticShape) -> Callable[[], None] | None:
        inputs, logits = self._block.views(shape), self._logits[: shape.num_tokens]

        def run() -> None:
            logits.copy_(self._network.compute_static(inputs))

        try:
            repeat = self._recorder.record(run)
        except Exception as error:  # an error of CUDA or Triton, or a lack of memory: a plain pass may still work
            log.warning(
                "passes of %d tokens, %d wide, are not recorded: %s",
                shape.num_tokens,
                shape.width,
                error,
                extra={"action": "pass_not_recorded"},
            )
            self._refused.add(shape)
            self.forget()
            return None
        if len(self._recorded) >= MOST_RECORDED:
            self._recorded.popitem(last=False)
        self._recorded[shape] = repeat
        return repeat
