"""What probes and their controls generated: the texts whose equality is watched."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ProbeText:
    """The tokens that a probe or control generated greedily.

    `second_ids` and `gaps` are the target's second choice at each token and how far its logit lies behind; empty where
    the engine does not tell. Rounding may swap two choices whose gap is at most `near_tie`.
    """

    token_ids: tuple[int, ...]
    finish_reason: str
    max_tokens: int
    near_tie: float
    second_ids: tuple[int, ...] = ()
    gaps: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class DecodedText:
    """A text and what decoded it. `num_tokens` is what its counts say. Vanilla has an empty drafter and revision."""

    job_id: str
    task: str
    drafter: str
    draft_revision: str
    target_revision: str
    engine: str
    num_tokens: int
    text: ProbeText


@dataclass(frozen=True, slots=True)
class TextPair:
    """A prompt decoded vanilla and with a drafter."""

    control: DecodedText
    probe: DecodedText

    @property
    def is_comparable(self) -> bool:
        """Whether the same target and engine decoded both, so that they promise the same text."""
        return (self.control.target_revision, self.control.engine) == (self.probe.target_revision, self.probe.engine)

    @property
    def is_equal(self) -> bool:
        """Whether the tokens are the same."""
        return self.control.text.token_ids == self.probe.text.token_ids
