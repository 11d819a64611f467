"""Which drafter holds which running sequence: opened at the first round that asks it, closed when it is given up.

A drafter is optional: every text can be decoded without one. So whatever a drafter raises, in any of its methods, costs
no text. The sequences of the call that failed go on vanilla, and never ask that drafter again. After MOST_IN_A_ROW
failures without a text that it drafted to its end, the worker asks it no more, until it is started again. A fault of
the device is no failure of a drafter: it is raised, because the target's pass would meet it too.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from dataclasses import replace
from typing import Final

import torch

from alphaloop.deciding.goodput import DrafterState
from alphaloop.engine import CacheMemory
from alphaloop.errors import DecodeFailed, reason_of
from engine.device import is_device_fault, is_out_of_memory
from engine.models import Target
from engine.proposal import Ask, DraftDistributions, Drafter, Proposal, check_answers
from engine.sequence import Sequence

log = logging.getLogger(__name__)

#: Failures of a drafter, with no text between them that it drafted to its end, after which the worker asks it no more.
MOST_IN_A_ROW: Final = 3


class OpenDrafters:
    """Opens, asks and closes drafters for sequences.

    `drafters` is the engine's own mapping, by name; `admitted` gives every sequence that the engine holds. `give_back`
    is called where a drafter ran out of memory: the engine gives back what no text needs.
    """

    def __init__(
        self,
        drafters: Mapping[str, Drafter],
        admitted: Callable[[], Iterable[Sequence]],
        *,
        give_back: Callable[[], object],
    ) -> None:
        self._drafters = drafters
        self._admitted = admitted
        self._give_back = give_back
        #: Drafters that the worker asks no more, each with what it cannot serve and why, in words.
        self.ended: dict[str, str] = {}
        self._num_in_a_row = Counter[str]()
        self._num_failures = Counter[str]()  # since `take_failures`

    def taps_of(self, sequence: Sequence) -> tuple[int, ...]:
        """Which states of the target the drafter of a sequence wants, also while it is paused."""
        name = sequence.drafting.name
        return () if name is None else self._drafters[name].taps

    @property
    def keeping(self) -> dict[str, Drafter]:
        """Those for whose sequences keys and values are kept, their own or those of a source, by name."""
        return {name: drafter for name, drafter in self._drafters.items() if drafter.bytes_per_token}

    def state(self, drafter: str | None) -> DrafterState | None:
        """The state of a drafter that is named, None where it has ended; raises DecodeFailed if it is not loaded."""
        if drafter is None or drafter in self.ended:
            return None
        if drafter not in self._drafters:
            raise DecodeFailed(f"expected a drafter of {sorted(self._drafters)}, found {drafter!r}")
        return self._drafters[drafter].state

    def open_due(self, running: SequenceOf[Sequence], memory: Callable[[], CacheMemory]) -> None:
        """Open the drafters that the coming round asks and that do not hold their sequences yet.

        A sequence whose draft model has no memory left for it decodes vanilla from now on. `memory` is called if a
        draft model is to be opened.
        """
        due = [
            sequence
            for sequence in running
            if sequence.drafting.of_next_round is not None and not sequence.drafting.is_open
        ]
        if not due:
            return
        models = self.keeping
        takes_memory = any(sequence.drafting.name in models for sequence in due)
        short = _without_room(due, running, memory()) if takes_memory else []
        for sequence in due:
            if sequence in short:
                sequence.drafting.change(None, 0)
            else:
                self._open(sequence)
        if short:
            log.info("no memory for the drafts of %d sequences", len(short), extra={"action": "draft_memory_short"})

    def propose(self, drafter: str, asks: SequenceOf[Ask], target: Target) -> list[Proposal] | None:
        """One proposal an ask, in order, on the target's device; None where the drafter failed.

        Then the sequences that asked have lost it. Raises a fault of the device.
        """
        answers = None
        asking = (sequence for sequence in self._admitted() if sequence.job_id in {ask.job_id for ask in asks})
        with self._guarding(drafter, "propose", asking):
            proposals = arrived(self._drafters[drafter].propose(asks), target.device)
            check_answers(asks, proposals, target.model.vocabulary_size)
            answers = proposals
        return answers

    def redraft(self, sequence: Sequence, drafter: DrafterState | None, num_draft_tokens: int) -> None:
        """Let a sequence draft with `drafter` from its next round on, and close the drafter before if it is another."""
        if sequence.drafting.drafter != drafter:
            self.close(sequence)
        sequence.drafting.change(drafter, num_draft_tokens)

    def close(self, sequence: Sequence) -> None:
        """Close the drafter of a sequence: the next round that asks opens it again, and it reads the text anew."""
        name, is_open = sequence.drafting.name, sequence.drafting.is_open
        sequence.drafting.is_open = False
        if is_open and name is not None:
            with self._guarding(name, "close", [sequence]):
                self._drafters[name].close(sequence.job_id)

    @contextmanager
    def _guarding(self, drafter: str, doing: str, sequences: Iterable[Sequence] = ()) -> Iterator[None]:
        """Whatever a drafter raises inside, from its method `doing`, is its failure."""
        try:
            yield
        except Exception as error:
            self.failed(drafter, doing, error, sequences)

    def failed(self, drafter: str, doing: str, error: Exception, sequences: Iterable[Sequence] = ()) -> None:
        """A drafter raised `error` from its method `doing`: `sequences` go on without it.

        One that ran out of memory is closed in every sequence instead, because its state is unknown, and may be asked
        again. Raises a fault of the device.
        """
        if is_device_fault(error):
            raise error
        if is_out_of_memory(error):
            self._give_back()
            self._close_everywhere(drafter)
            log.warning(
                "%s ran out of memory: its sequences go on vanilla", drafter, extra={"action": "draft_memory_short"}
            )
            return
        self._num_failures[drafter] += 1
        self._num_in_a_row[drafter] += 1
        log.error(
            "the drafter %s failed: what it drafted goes on vanilla",
            drafter,
            exc_info=error,
            extra={"action": "drafter_failed", "drafter": drafter, "method": doing},
        )
        for sequence in sequences:
            self._give_up(sequence, drafter)
        if self._num_in_a_row[drafter] >= MOST_IN_A_ROW and drafter not in self.ended:
            self._end(drafter, doing, error)

    def _close_everywhere(self, drafter: str) -> None:
        """In every sequence, and with it whatever shares slots with it."""
        lost = {name for name in self._drafters if self._parts_of(name) & self._parts_of(drafter)}
        for sequence in self._admitted():
            if sequence.drafting.name in lost:
                self.redraft(sequence, None, 0)

    def _parts_of(self, name: str) -> set[str]:
        """A drafter and, of a hybrid, its sources."""
        return {name, *self._drafters[name].source_names}

    def take_failures(self) -> Counter[str]:
        """How often each drafter failed since the last call."""
        taken, self._num_failures = self._num_failures, Counter()
        return taken

    def finished(self, sequence: Sequence) -> None:
        """A sequence has ended, or was cancelled: drafters that it drafted with, and that never failed it, worked."""
        for counts in sequence.drafting.counts.drafted:
            if counts.drafter not in sequence.drafting.lost_drafters:
                self._num_in_a_row[counts.drafter] = 0

    def clear(self) -> None:
        """Forget every sequence, and the memory of draft models with them."""
        for name, drafter in self._drafters.items():
            with self._guarding(name, "clear"):
                drafter.clear()

    def _open(self, sequence: Sequence) -> None:
        spec, drafting = sequence.spec, sequence.drafting
        if (name := drafting.name) is None:
            return
        drafter = self._drafters[name]
        # What another drafter would have proposed under a constraint does not follow from this one's drafts: forced
        # tokens take places in them.
        if spec.task and sequence.constrained is None:
            drafting.counts.sharing[name] = drafter.sharing()
        drafting.is_open = True  # also where it fails: whatever it holds of the sequence by then is closed
        with self._guarding(name, "open", [sequence]):
            drafter.open(sequence.job_id, sequence.text, spec.sampling, spec.task, spec.segment)

    def _give_up(self, sequence: Sequence, drafter: str) -> None:
        sequence.drafting.lost_drafters.add(drafter)
        if sequence.drafting.name == drafter:
            self.redraft(sequence, None, 0)

    def _end(self, drafter: str, doing: str, error: Exception) -> None:
        """Ask a drafter no more, for any sequence."""
        self.ended[drafter] = (
            f"any job: it failed {MOST_IN_A_ROW} times in a row, the last time in {doing}() with {reason_of(error)}; "
            f"a restart of the worker tries it again"
        )
        log.error(
            "%s is asked no more by this worker: %d failures in a row",
            drafter,
            MOST_IN_A_ROW,
            extra={"action": "drafter_ended", "drafter": drafter},
        )
        for sequence in self._admitted():
            self._give_up(sequence, drafter)
        self._close_everywhere(drafter)
        with self._guarding(drafter, "clear"):
            self._drafters[drafter].clear()


def _without_room(due: SequenceOf[Sequence], running: SequenceOf[Sequence], memory: CacheMemory) -> list[Sequence]:
    """Those of `due` for whose keys and values their drafters have no memory left, in the order of `due`.

    Each sequence is taken to be as long as the longest. The same arithmetic as in a decision
    (`CacheMemory.left_for_drafts`), for the sequences that run now.
    """
    longest = max((sequence.num_positions for sequence in running), default=0)
    width = 1 + max((sequence.drafting.num_draft_tokens for sequence in running), default=0)
    devices = (None, *memory.elsewhere)
    left = {device: memory.left_for_drafts(len(running), longest, width, device=device) for device in devices}

    def taken(sequence: Sequence) -> tuple[str | None, int]:
        name = sequence.drafting.name or ""
        return memory.device_of.get(name), memory.of_draft(name, 1, longest) if name else 0

    for sequence in running:
        if sequence.drafting.is_open:
            device, needed = taken(sequence)
            left[device] -= needed
    short = []
    for sequence in due:
        device, needed = taken(sequence)
        if needed > max(left[device], 0):
            short.append(sequence)
        else:
            left[device] -= needed
    return short


def arrived(proposals: SequenceOf[Proposal], device: torch.device) -> list[Proposal]:
    """The proposals of one drafter with their distributions on `device`, the target's.

    Here alone do a round's tensors go from a drafter's device to the target's. What goes between the two otherwise is
    numbers of the host: a drafter is given the text as token ids and answers with token ids. Only the distributions of
    drawn tokens are tensors, which verification compares with the target's own; greedy jobs and jobs with a seed send
    none. They cross once a round for each drafter, because every copy between devices costs a start of its own and,
    where the two have no direct way, a stay in main memory.

    Those that are there already stay as they are. Others have arrived when this returns: the wait belongs to the time
    of proposing, because another placement of the draft would not have it.
    """
    far = {index: q for index, proposal in enumerate(proposals) if (q := proposal.q) is not None and q.device != device}
    on_device = list(proposals)
    if far:
        # One copy: token by token and job by job there would be dozens. A float64 holds any token id exactly.
        parts = [part for q in far.values() for part in q.parts]
        crossed = torch.cat([part.flatten().double() for part in parts]).to(device)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        pieces = iter(torch.split(crossed, [part.numel() for part in parts]))
        for index, q in far.items():
            p, *ids = (next(pieces).view(part.shape) for part in q.parts)
            on_device[index] = replace(proposals[index], q=DraftDistributions(p, ids[0].long() if ids else None))
    return on_device
