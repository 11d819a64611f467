"""Whether a draft model fits a target: every check with its sentence. Pure: facts in, findings out.

The text is the target's, whatever the draft proposes. So a bad pair gives correct texts, but may be slow. A pair is
refused if it cannot run, or cannot pay at any acceptance. A fact that costs acceptance or memory gives a warning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from alphaloop.commands import CheckFinding
from alphaloop.errors import IncompatiblePair
from worker.decoding.pairing.room import DeviceRoom, memory, shown_bytes

#: The draft's bytes read for a token over the target's. At .35 and k = 5 a round costs 2.75 passes: more than half must
#: be accepted.
LARGE_RATIO: Final = 0.35
NUM_EXAMPLES: Final = 3


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A model's facts from its files, without its weights. `worker.decoding.pairing.facts.facts_of` reads them."""

    source: str
    family: str  #: `llama`, `qwen2`
    refusal: str | None  #: why it cannot be decoded over slots; None when it can
    tokens: Mapping[int, str]  #: the whole vocabulary, added tokens included
    num_rows: int  #: rows of its embeddings: as many as tokens, or more if they are padded
    end_tokens: frozenset[int]  #: every id that ends a text
    bos_token: int | None
    pad_token: int | None
    chat_template: str | None
    num_parameters: int
    num_parameters_read: int  #: weights read for one token: all but the rows of an input embedding and idle experts
    dtype: str  #: dtype in which it is served
    itemsize: int  #: bytes a number of that dtype
    kv_bytes_per_token: int
    pass_bytes_per_row: int  #: logits and probabilities of one position
    context_length: int

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights in memory."""
        return self.num_parameters * self.itemsize

    @property
    def bytes_read(self) -> int:
        """Bytes of the weights that a pass of width 1 reads."""
        return self.num_parameters_read * self.itemsize

    @property
    def kv_bytes_per_slot(self) -> int:
        """Bytes of keys and values of one sequence that fills the context."""
        return self.kv_bytes_per_token * self.context_length


def check_pair(
    target: ModelFacts,
    draft: ModelFacts,
    *,
    num_slots: int,
    max_draft_tokens: int,
    room: DeviceRoom,
    draft_room: DeviceRoom | None = None,
) -> tuple[CheckFinding, ...]:
    """Every finding, in a fixed order.

    `room` is that of the target's device, `draft_room` that of the draft's; None, or of the same device: they share it.
    """
    return (
        _vocabulary(target, draft),
        _special_tokens(target, draft),
        _chat_template(target, draft),
        _size(target, draft),
        _architecture(target, draft),
        _dtype(target, draft),
        _context(target, draft),
        memory(target, draft, num_slots, max_draft_tokens, room, draft_room or room),
    )


def refuse_incompatible(draft: ModelFacts, findings: Sequence[CheckFinding]) -> None:
    """Raise IncompatiblePair with the sentence of every refusal, if there is one."""
    refused = [f"{finding.check}: {finding.sentence}" for finding in findings if finding.verdict == "refused"]
    if refused:
        raise IncompatiblePair(
            f"{draft.source} cannot draft: {' '.join(refused)}", hint="alphaloop check-pair shows every finding"
        )


def num_shared_tokens(target: ModelFacts, draft: ModelFacts) -> int:
    """Ids below this may be proposed. Higher ids are padding, or tokens that only one of the two models knows."""
    num_named = max(target.tokens.keys() & draft.tokens.keys(), default=-1) + 1
    return min(num_named, target.num_rows, draft.num_rows)


def _vocabulary(target: ModelFacts, draft: ModelFacts) -> CheckFinding:
    name = "vocabulary"
    shared = target.tokens.keys() & draft.tokens.keys()
    differing = sorted(i for i in shared if target.tokens[i] != draft.tokens[i])
    if differing or not shared:
        examples = ", ".join(f"{i} is {target.tokens[i]!r} and {draft.tokens[i]!r}" for i in differing[:NUM_EXAMPLES])
        said = (
            f"{len(differing):,} of {len(shared):,} ids name different tokens: {examples}."
            if shared
            else "They share no id."
        )
        return CheckFinding(name, "refused", f"Expected the target's vocabulary, found another. {said}")
    only_target, only_draft = (sorted(one.tokens.keys() - shared) for one in (target, draft))
    # Whatever the draft's tokenizer says: a text holds every token that the target can read and write.
    unreadable = sorted(i for i in target.tokens if draft.num_rows <= i < target.num_rows)
    if unreadable:
        return CheckFinding(
            name,
            "refused",
            f"{len(unreadable):,} of the target's tokens have no row in the draft's {draft.num_rows:,} embeddings, "
            f"the first of them {unreadable[0]} ({target.tokens[unreadable[0]]!r}): it could not read a text that "
            f"holds one.",
        )
    if only_target or only_draft:
        parts = [
            f"{len(ids):,} only the {who} knows (from {ids[0]}, {one.tokens[ids[0]]!r})"
            for who, one, ids in (("target", target, only_target), ("draft", draft, only_draft))
            if ids
        ]
        return CheckFinding(
            name, "warning", f"{len(shared):,} ids name the same tokens; {', '.join(parts)}: those are never proposed."
        )
    padding = f" Rows that pad the embeddings ({target.num_rows:,} and {draft.num_rows:,}) are never proposed."
    if target.num_rows > draft.num_rows:
        padding += " A text that holds one which the draft has no row for is decoded without it."
    is_padded = max(target.num_rows, draft.num_rows) > len(shared)
    return CheckFinding(name, "ok", f"All {len(shared):,} ids name the same tokens.{padding if is_padded else ''}")


def _special_tokens(target: ModelFacts, draft: ModelFacts) -> CheckFinding:
    name = "special tokens"

    def shown(ids: frozenset[int]) -> str:
        return ", ".join(f"{i} {target.tokens.get(i, draft.tokens.get(i, '?'))!r}" for i in sorted(ids)) or "none"

    if target.end_tokens != draft.end_tokens:
        return CheckFinding(
            name,
            "warning",
            f"A text ends with {shown(target.end_tokens)} for the target, with {shown(draft.end_tokens)} for the "
            f"draft: it will rarely propose the end, at the cost of one position a text.",
        )
    if target.bos_token != draft.bos_token:
        return CheckFinding(
            name,
            "warning",
            f"Texts begin with {target.bos_token} for the target and {draft.bos_token} for the draft: it reads "
            f"beginnings that it was not trained on.",
        )
    pads = "" if target.pad_token == draft.pad_token else " The tokens for padding differ, but nothing is padded."
    return CheckFinding(name, "ok", f"Both end with {shown(target.end_tokens)}.{pads}")


def _chat_template(target: ModelFacts, draft: ModelFacts) -> CheckFinding:
    name = "chat template"
    if target.chat_template == draft.chat_template:
        return CheckFinding(name, "ok", "The same." if target.chat_template else "Neither has one.")
    found = "has another" if draft.chat_template else "has none"
    return CheckFinding(
        name,
        "warning",
        f"The draft {found}: it reads prompts in the target's form, and will guess worse where it was trained on its "
        f"own.",
    )


def _size(target: ModelFacts, draft: ModelFacts) -> CheckFinding:
    ratio = draft.bytes_read / target.bytes_read
    said = (
        f"A draft step reads {shown_bytes(draft.bytes_read)} ({_count(draft.num_parameters_read)} parameters), a "
        f"target pass {shown_bytes(target.bytes_read)} ({_count(target.num_parameters_read)}): a ratio of {ratio:.2f}."
    )
    if ratio >= 1:
        return CheckFinding("size", "refused", f"{said} A draft that costs as much as its target cannot pay.")
    if ratio > LARGE_RATIO:
        return CheckFinding(
            "size", "warning", f"{said} Above {LARGE_RATIO} a draft pays only where almost all is accepted."
        )
    return CheckFinding("size", "ok", said)


def _architecture(target: ModelFacts, draft: ModelFacts) -> CheckFinding:
    for who, facts in (("target", target), ("draft", draft)):
        if facts.refusal is not None:
            return CheckFinding("architecture", "refused", f"The {who} cannot be decoded here: {facts.refusal}.")
    same = target.family == draft.family
    families = f"Both are {target.family}" if same else f"A {draft.family} drafts for a {target.family}"
    return CheckFinding("architecture", "ok", f"{families}; the slot cache holds both.")


def _dtype(target: ModelFacts, draft: ModelFacts) -> CheckFinding:
    if target.dtype == draft.dtype:
        return CheckFinding("dtype", "ok", f"Both in {target.dtype}.")
    said = f"The draft is in {draft.dtype}, the target in {target.dtype}"
    if draft.itemsize > target.itemsize:
        more = draft.itemsize // target.itemsize
        return CheckFinding(
            "dtype", "warning", f"{said}: {more} times the bytes a parameter, and no better text for it."
        )
    return CheckFinding("dtype", "ok", f"{said}: its rounding costs acceptance at most, the text stays the target's.")


def _context(target: ModelFacts, draft: ModelFacts) -> CheckFinding:
    if draft.context_length < target.context_length:
        return CheckFinding(
            "context",
            "warning",
            f"The draft reads {draft.context_length:,} tokens, the target serves {target.context_length:,}: it "
            f"proposes nothing beyond its {draft.context_length:,}.",
        )
    return CheckFinding(
        "context", "ok", f"The draft reads all {target.context_length:,} tokens that the target serves."
    )


def _count(number: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            value = number / size
            return f"{value:.0f}{unit}" if value >= 100 else f"{value:.3g}{unit}"
    return str(number)
