"""Which drafter holds which running sequence: opened at the first round that asks it, closed when it is given up."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as SequenceOf

from alphaloop.deciding.goodput import DrafterState
from alphaloop.errors import DecodeFailed
from worker.cache_memory import CacheMemory
from worker.decoding.drafters.draft_model import DraftModelDrafter
from worker.decoding.drafters.draft_room import DraftRoom
from worker.decoding.drafters.lookup import LookupDrafter
from worker.decoding.proposal import Drafter
from worker.decoding.sequence import Sequence
from worker.decoding.shared_weights import SharedWeightCounts

log = logging.getLogger(__name__)


class OpenDrafters:
    """Opens and closes drafters for sequences. `drafters` is the engine's own mapping, by name."""

    def __init__(self, drafters: Mapping[str, Drafter]) -> None:
        self._drafters = drafters

    @property
    def draft_models(self) -> dict[str, DraftModelDrafter]:
        """Those that keep keys and values, by name."""
        return {name: one for name, one in self._drafters.items() if isinstance(one, DraftModelDrafter)}

    def state(self, drafter: str | None) -> DrafterState | None:
        """The state of a drafter that is named; raises DecodeFailed if it is not loaded."""
        if drafter is None:
            return None
        if drafter not in self._drafters:
            raise DecodeFailed(f"expected a drafter of {sorted(self._drafters)}, found {drafter!r}")
        return self._drafters[drafter].state

    def open_due(self, running: SequenceOf[Sequence], memory: Callable[[], CacheMemory]) -> None:
        """Open the drafters that the coming round asks and that do not hold their sequences yet.

        A sequence whose draft model has no memory left for it decodes vanilla from now on. `memory` is called if a
        draft model is to be opened.
        """
        due = [sequence for sequence in running if sequence.drafting is not None and not sequence.is_open]
        if not due:
            return
        models = self.draft_models
        takes_memory = any(sequence.drafter is not None and sequence.drafter.name in models for sequence in due)
        room = DraftRoom(memory(), running) if takes_memory else None
        num_short = 0
        for sequence in due:
            if room is None or room.take(sequence):
                self._open(sequence)
            else:
                sequence.redraft(None, 0)
                num_short += 1
        if num_short:
            log.info("no memory for the drafts of %d sequences", num_short, extra={"action": "draft_memory_short"})

    def redraft(self, sequence: Sequence, drafter: DrafterState | None, num_draft_tokens: int) -> None:
        """Let a sequence draft with `drafter` from its next round on, and close the drafter before if it is another."""
        if sequence.drafter != drafter:
            self.close(sequence)
        sequence.redraft(drafter, num_draft_tokens)

    def close(self, sequence: Sequence) -> None:
        """Close the drafter of a sequence: the next round that asks opens it again, and it reads the text anew."""
        if sequence.is_open and sequence.drafter is not None:
            self._drafters[sequence.drafter.name].close(sequence.job_id)
        sequence.is_open = False

    def do_without(self, drafter: str, sequences: Iterable[Sequence]) -> None:
        """Close a drafter that ran out of memory in all sequences, because its state is unknown."""
        for sequence in sequences:
            if sequence.drafter is not None and sequence.drafter.name == drafter:
                self.redraft(sequence, None, 0)
        if (draft := self.draft_models.get(drafter)) is not None:
            draft.model.give_back()
        log.warning(
            "%s ran out of memory: its sequences go on vanilla", drafter, extra={"action": "draft_memory_short"}
        )

    def remember(self, sequence: Sequence) -> None:
        """Give the output of a sequence that has ended to the drafters that look things up in its task's results."""
        for drafter in self._drafters.values():
            if isinstance(drafter, LookupDrafter):
                drafter.remember(sequence.task, sequence.output)

    def clear(self) -> None:
        """Forget every sequence, and the memory of draft models with them."""
        for drafter in self._drafters.values():
            drafter.clear()

    def _open(self, sequence: Sequence) -> None:
        if sequence.drafter is None:
            return
        drafter = self._drafters[sequence.drafter.name]
        drafter.open(sequence.job_id, sequence.text, sequence.sampling, sequence.task)
        sequence.is_open = True
        if sequence.task and isinstance(drafter, DraftModelDrafter) and drafter.shared_weights:
            counts = SharedWeightCounts(drafter.shared_weights, drafter.min_probability)
            sequence.shared_weights.setdefault(sequence.drafter.name, counts)
