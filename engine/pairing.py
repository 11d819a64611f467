"""Whether a draft model fits a target: every check with its sentence.

`facts_of` reads a model's facts from its config and tokenizer. Weights are never read: their shapes follow from the
config. The checks are pure: facts in, findings out.

The text is the target's, whatever the draft proposes. So a bad pair gives correct texts, but may be slow. A pair is
refused if it cannot run, or cannot pay at any acceptance. A fact that costs acceptance or memory gives a warning.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from alphaloop.engine import CheckFinding, LoadedModels, ModelSize, Verdict
from alphaloop.errors import IncompatiblePair, UnsupportedModel
from alphaloop.settings.models import Dtype, ModelSettings
from engine.device import Placement, available_bytes, pass_bytes
from engine.drafters.draft_vocabulary import read_draft_vocabulary, restrict_head
from engine.drafters.translation import Translation
from engine.gguf_files import GgufFile
from engine.models import (
    as_unsupported,
    attention_of,
    end_tokens,
    find_description,
    load_tokenizer,
    refuse_form,
    refuse_tokenizer,
)
from engine.network.kv_layout import KvShape
from engine.text_facts import LONGEST_DEFAULT_CONTEXT, text_config, text_facts

#: The draft's bytes read for a token over the target's. At .35 and k = 5 a round costs 2.75 passes: more than half must
#: be accepted.
log = logging.getLogger(__name__)

_WARN_RATIO: Final = 0.35
_NUM_EXAMPLES: Final = 3


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A model's facts from its files, without its weights. `facts_of` reads them."""

    source: str
    family: str  #: `llama`, `qwen2`
    num_layers: int
    hidden_size: int  #: numbers of a hidden state
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
    num_head_rows: int = 0  #: tokens that it can propose
    is_tied: bool = False  #: its head are its embeddings
    tokenizer: Any = field(default=None, compare=False, repr=False)  #: None: texts cannot be compared

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

    def proposing(self, num_tokens: int) -> ModelFacts:
        """The same with a head that is cut to `num_tokens`; a head that is the embeddings is copied."""
        num_cut = max(0, self.num_head_rows - num_tokens) * self.hidden_size
        copied = num_tokens * self.hidden_size
        return replace(
            self,
            num_parameters=self.num_parameters + (copied if self.is_tied else -num_cut),
            num_parameters_read=self.num_parameters_read - num_cut,
        )


@dataclass(frozen=True, slots=True)
class DeviceRoom:
    """The memory of a device before either model is loaded."""

    device: str  #: `cuda:1`
    free: int  #: bytes


def facts_of(
    source: str, *, dtype: Dtype, revision: str | None = None, context_length: int | None = None
) -> ModelFacts:
    """Read the facts of the model at `source`, served in `dtype` with at most `context_length` tokens.

    If `context_length` is None, the context is the model's own, at most 8192, as for a target. Takes a second for a
    folder, and ten to twenty for a GGUF file that was never loaded here. Raises ModelNotFound, or UnsupportedModel if
    config or tokenizer cannot be read. For a model that can be read but not decoded, `refusal` says why.
    """
    # The library's progress bars would stand between our own lines.
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    path = find_description(source, revision)
    with as_unsupported(source):
        packed = GgufFile(path) if path.is_file() else None
        config: Any = packed.config() if packed else AutoConfig.from_pretrained(path, trust_remote_code=False)
        facts = text_facts(config)
        tokenizer = packed.tokenizer() if packed else load_tokenizer(path)
        model = _shapes(config, None if path.is_file() else path)
    served = min(facts.longest, context_length or LONGEST_DEFAULT_CONTEXT)
    width: torch.dtype = getattr(torch, dtype)
    rows = model.get_input_embeddings().weight
    head = rows if model.get_output_embeddings() is None else model.get_output_embeddings().weight
    num_rows = int(rows.shape[0])
    return ModelFacts(
        source=source,
        family=config.model_type,
        num_layers=int(text_config(config).num_hidden_layers),
        hidden_size=int(text_config(config).hidden_size),
        refusal=facts.refusal_at(served) or _refusal(model, tokenizer),
        tokens={index: token for token, index in tokenizer.get_vocab().items()},
        num_rows=num_rows,
        end_tokens=end_tokens(model, tokenizer),
        bos_token=tokenizer.bos_token_id,
        pad_token=tokenizer.pad_token_id,
        chat_template=tokenizer.chat_template,
        num_parameters=sum(weight.numel() for weight in model.parameters()),
        num_parameters_read=_num_read(model),
        dtype=dtype,
        itemsize=width.itemsize,
        kv_bytes_per_token=KvShape.of(config, width).bytes_per_token,
        pass_bytes_per_row=pass_bytes(num_rows, 1),
        context_length=served,
        num_head_rows=int(head.shape[0]),
        is_tied=head is rows,
        tokenizer=tokenizer,
    )


def _shapes(config: Any, folder: Path | None) -> Any:
    """The model without numbers: every parameter has its shape and no memory."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, attn_implementation=attention_of(config), trust_remote_code=False
        )
    if folder is not None:
        with contextlib.suppress(OSError):  # not every folder has one; then the config's own value counts
            model.generation_config = GenerationConfig.from_pretrained(folder)
        if (token_ids := read_draft_vocabulary(folder)) is not None:
            restrict_head(model, token_ids)
    return model


def _refusal(model: Any, tokenizer: Any) -> str | None:
    try:
        refuse_form(model)
        refuse_tokenizer(tokenizer, model)
    except UnsupportedModel as error:
        return error.message
    return None


def _num_read(model: Any) -> int:
    """Parameters that a pass of width 1 reads."""
    config = text_config(model.config)
    num_experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None) or 1
    share = (getattr(config, "num_experts_per_tok", None) or num_experts) / num_experts
    head = model.get_output_embeddings()
    rows = model.get_input_embeddings().weight
    num_read = 0.0
    for name, weight in model.named_parameters():
        if weight is rows and (head is None or head.weight is not rows):
            continue  # a pass reads only one row of it
        num_read += weight.numel() * (share if ".experts." in name else 1)
    return round(num_read)


#: What a check found: the verdict, and its sentence.
_Found = tuple[Verdict, str]


def check_pair(
    target: ModelFacts,
    draft: ModelFacts,
    *,
    num_slots: int,
    max_draft_tokens: int,
    room: DeviceRoom,
    draft_room: DeviceRoom | None = None,
    translation: Translation | None = None,
) -> tuple[CheckFinding, ...]:
    """Every finding, in a fixed order.

    `room` is that of the target's device, `draft_room` that of the draft's; None, or of the same device: they share it.
    `translation` is that of `translation_between`.
    """
    if translation is None:
        of_tokens = {"vocabulary": _vocabulary(target, draft), "special tokens": _special_tokens(target, draft)}
    else:
        draft = draft.proposing(len(translation))
        of_tokens = {
            "vocabulary": _intersection(target, draft, translation),
            "special tokens": _translated_ends(translation),
        }
        draft = replace(draft, kv_bytes_per_token=math.ceil(draft.kv_bytes_per_token * translation.length))
    checks = of_tokens | {
        "chat template": _chat_template(target, draft),
        "size": _size(target, draft),
        "architecture": _architecture(target, draft),
        "dtype": _dtype(target, draft),
        "context": _context(target, draft),
        "memory": _memory(target, draft, num_slots, max_draft_tokens, room, draft_room or room),
    }
    return tuple(CheckFinding(check, *result) for check, result in checks.items())


def loaded_models(models: ModelSettings, *, context_length: int, num_slots: int) -> LoadedModels:
    """Sizes and warnings of models that are loaded by now, each draft model checked in the room that both have."""
    served, placement = models.target, Placement.of(models)
    target = facts_of(served.source, dtype=served.dtype, revision=served.revision, context_length=context_length)
    sizes, warnings = [_size_of("target", target, context_length, placement.target)], {}
    for name, settings in models.drafters.items():
        if (drafter := settings.draft_model) is None:
            continue
        draft = facts_of(
            drafter.source,
            dtype=drafter.dtype or served.dtype,
            revision=drafter.revision,
            context_length=context_length,
        )
        device = placement.drafts[name]
        sizes.append(_size_of(name, draft, min(context_length, draft.context_length), device))
        room = DeviceRoom(str(placement.target), target.weight_bytes + available_bytes(placement.target))
        draft_room = DeviceRoom(str(device), draft.weight_bytes + available_bytes(device))
        if device == placement.target:
            room = draft_room = replace(room, free=room.free + draft.weight_bytes)
        findings = check_pair(
            target,
            draft,
            num_slots=num_slots,
            max_draft_tokens=drafter.max_draft_tokens,
            room=room,
            draft_room=draft_room,
            translation=translation_between(target, draft),
        )
        warnings[name] = tuple(finding for finding in findings if finding.verdict == "warning")
    return LoadedModels(tuple(sizes), warnings)


def _size_of(name: str, facts: ModelFacts, context_length: int, device: torch.device) -> ModelSize:
    per_token = facts.kv_bytes_per_token
    return ModelSize(name, facts.weight_bytes, per_token, per_token * context_length, str(device))


def refuse_or_warn(drafter: str, source: str, findings: Sequence[CheckFinding]) -> None:
    """Raise IncompatiblePair with the sentence of every refusal, or log each warning. `source`: of the draft."""
    refused = [f"{finding.check}: {finding.sentence}" for finding in findings if finding.verdict == "refused"]
    if refused:
        raise IncompatiblePair(
            f"{source} cannot draft: {' '.join(refused)}", hint="alphaloop check-pair shows every finding"
        )
    for finding in findings:
        if finding.verdict == "warning":
            log.warning(
                "%s: %s",
                finding.check,
                finding.sentence,
                extra={"action": "pair_warning", "drafter": drafter, "check": finding.check},
            )


def num_shared_tokens(target: ModelFacts, draft: ModelFacts) -> int:
    """Ids below this may be proposed. Higher ids are padding, or tokens that only one of the two models knows."""
    num_named = max(target.tokens.keys() & draft.tokens.keys(), default=-1) + 1
    return min(num_named, target.num_rows, draft.num_rows)


def translation_between(target: ModelFacts, draft: ModelFacts) -> Translation | None:
    """What a draft with another tokenizer needs; None where it reads the target's own ids, or can read nothing."""
    if _vocabulary(target, draft)[0] != "refused" or target.tokenizer is None or draft.tokenizer is None:
        return None
    return Translation.between(
        target.tokenizer,
        draft.tokenizer,
        num_target_rows=min(target.num_rows, target.num_head_rows),
        num_draft_rows=draft.num_rows,
    )


def _intersection(target: ModelFacts, draft: ModelFacts, translation: Translation) -> _Found:
    """With another tokenizer: whether enough of what the target writes can be proposed."""
    share, cost = translation.share, draft.bytes_read / target.bytes_read
    said = (
        f"Another tokenizer: {len(translation):,} of the target's {len(target.tokens):,} tokens are the draft's too, "
        f"{share:.0%} of those of a sample text."
    )
    if share <= cost:
        # k drafts cost k times `cost`, and even where the target agrees at most their number times `share` is accepted.
        return (
            "refused",
            f"{said} Expected more than {cost:.0%}, because that is what a draft step reads of a target pass: the "
            f"draft cannot pay even if all that it can say is accepted. What helps: a draft with a larger or more "
            f"similar vocabulary.",
        )
    return (
        "warning",
        f"{said} It works by intersection: only those are proposed, and the draft reads texts in its own tokens, "
        f"{translation.length:.2f} for one of the target's.",
    )


def _translated_ends(translation: Translation) -> _Found:
    ends = [tokenizer.eos_token for tokenizer in (translation.target, translation.draft)]
    if not translation.has_end:
        return (
            "warning",
            f"A text ends with {ends[0]!r} for the target, with {ends[1]!r} for the draft: it never proposes the end, "
            f"at the cost of one position a text.",
        )
    return ("ok", f"The end is {ends[0]!r} for the target and {ends[1]!r} for the draft: one is proposed as the other.")


def _vocabulary(target: ModelFacts, draft: ModelFacts) -> _Found:
    shared = target.tokens.keys() & draft.tokens.keys()
    differing = sorted(i for i in shared if target.tokens[i] != draft.tokens[i])
    if differing or not shared:
        examples = ", ".join(f"{i} is {target.tokens[i]!r} and {draft.tokens[i]!r}" for i in differing[:_NUM_EXAMPLES])
        said = (
            f"{len(differing):,} of {len(shared):,} ids name different tokens: {examples}."
            if shared
            else "They share no id."
        )
        unmatched = (
            " Nor can they be matched by their bytes: the tokens of one of the tokenizers have none of their own."
        )
        return ("refused", f"Expected the target's vocabulary, found another. {said}{unmatched}")
    only_target, only_draft = (sorted(facts.tokens.keys() - shared) for facts in (target, draft))
    # Whatever the draft's tokenizer says: a text holds every token that the target can read and write.
    if unreadable := sorted(i for i in target.tokens if draft.num_rows <= i < target.num_rows):
        return (
            "refused",
            f"{len(unreadable):,} of the target's tokens have no row in the draft's {draft.num_rows:,} embeddings, "
            f"the first of them {unreadable[0]} ({target.tokens[unreadable[0]]!r}): it could not read a text that "
            f"holds one.",
        )
    if only_target or only_draft:
        parts = [
            f"{len(ids):,} only the {who} knows (from {ids[0]}, {facts.tokens[ids[0]]!r})"
            for who, facts, ids in (("target", target, only_target), ("draft", draft, only_draft))
            if ids
        ]
        return ("warning", f"{len(shared):,} ids name the same tokens; {', '.join(parts)}: those are never proposed.")
    padding = f" Rows that pad the embeddings ({target.num_rows:,} and {draft.num_rows:,}) are never proposed."
    if target.num_rows > draft.num_rows:
        padding += " A text that holds one which the draft has no row for is decoded without it."
    is_padded = max(target.num_rows, draft.num_rows) > len(shared)
    return ("ok", f"All {len(shared):,} ids name the same tokens.{padding if is_padded else ''}")


def _special_tokens(target: ModelFacts, draft: ModelFacts) -> _Found:
    def shown(ids: frozenset[int]) -> str:
        return ", ".join(f"{i} {target.tokens.get(i, draft.tokens.get(i, '?'))!r}" for i in sorted(ids)) or "none"

    if target.end_tokens != draft.end_tokens:
        return (
            "warning",
            f"A text ends with {shown(target.end_tokens)} for the target, with {shown(draft.end_tokens)} for the "
            f"draft: it will rarely propose the end, at the cost of one position a text.",
        )
    if target.bos_token != draft.bos_token:
        return (
            "warning",
            f"Texts begin with {target.bos_token} for the target and {draft.bos_token} for the draft: it reads "
            f"beginnings that it was not trained on.",
        )
    pads = "" if target.pad_token == draft.pad_token else " The tokens for padding differ, but nothing is padded."
    return ("ok", f"Both end with {shown(target.end_tokens)}.{pads}")


def _chat_template(target: ModelFacts, draft: ModelFacts) -> _Found:
    if target.chat_template == draft.chat_template:
        return ("ok", "The same." if target.chat_template else "Neither has one.")
    has = "has another" if draft.chat_template else "has none"
    return (
        "warning",
        f"The draft {has}: it reads prompts in the target's form, and will guess worse where it was trained on its "
        f"own.",
    )


def _size(target: ModelFacts, draft: ModelFacts) -> _Found:
    ratio = draft.bytes_read / target.bytes_read
    said = (
        f"A draft step reads {shown_bytes(draft.bytes_read)} ({_count(draft.num_parameters_read)} parameters), a "
        f"target pass {shown_bytes(target.bytes_read)} ({_count(target.num_parameters_read)}): a ratio of {ratio:.2f}."
    )
    if ratio >= 1:
        return ("refused", f"{said} A draft that costs as much as its target cannot pay.")
    if ratio > _WARN_RATIO:
        return ("warning", f"{said} Above {_WARN_RATIO} a draft pays only where almost all is accepted.")
    return ("ok", said)


def _architecture(target: ModelFacts, draft: ModelFacts) -> _Found:
    for who, facts in (("target", target), ("draft", draft)):
        if facts.refusal is not None:
            return ("refused", f"The {who} cannot be decoded here: {facts.refusal}.")
    same = target.family == draft.family
    families = f"Both are {target.family}" if same else f"A {draft.family} drafts for a {target.family}"
    return ("ok", f"{families}; the slot cache holds both.")


def _dtype(target: ModelFacts, draft: ModelFacts) -> _Found:
    if target.dtype == draft.dtype:
        return ("ok", f"Both in {target.dtype}.")
    said = f"The draft is in {draft.dtype}, the target in {target.dtype}"
    if draft.itemsize > target.itemsize:
        more = draft.itemsize // target.itemsize
        return ("warning", f"{said}: {more} times the bytes a parameter, and no better text for it.")
    return ("ok", f"{said}: its rounding costs acceptance at most, the text stays the target's.")


def _context(target: ModelFacts, draft: ModelFacts) -> _Found:
    if draft.context_length < target.context_length:
        return (
            "warning",
            f"The draft reads {draft.context_length:,} tokens, the target serves {target.context_length:,}: it "
            f"proposes nothing beyond its {draft.context_length:,}.",
        )
    return ("ok", f"The draft reads all {target.context_length:,} tokens that the target serves.")


def _memory(
    target: ModelFacts,
    draft: ModelFacts,
    num_slots: int,
    max_draft_tokens: int,
    room: DeviceRoom,
    draft_room: DeviceRoom,
) -> _Found:
    """Whether the memory of their devices holds both; of one device where the two rooms name the same."""
    width = max_draft_tokens + 1
    own_slot = target.kv_bytes_per_slot
    draft_slot = draft.kv_bytes_per_token * min(draft.context_length, target.context_length)
    own_rows = width * target.pass_bytes_per_row
    # The draft reads one position a pass, but keeps the distribution of each of its drafts until they are verified.
    draft_rows = max_draft_tokens * draft.pass_bytes_per_row
    own = f"{shown_bytes(own_slot)} ({shown_bytes(target.kv_bytes_per_token)} a token)"
    drafted = f"{shown_bytes(draft_slot)} ({shown_bytes(draft.kv_bytes_per_token)} a token)"
    weights = shown_bytes(target.weight_bytes), shown_bytes(draft.weight_bytes)
    # What each device has to hold: the weights, what a slot takes, and how that is made up.
    if room.device == draft_room.device:
        rows = own_rows + draft_rows
        said = (
            f"Weights {weights[0]} + {weights[1]}; a full slot {own} + {drafted} + {shown_bytes(rows)} for passes of "
            f"width {width}"
        )
        needs = [(room, target.weight_bytes + draft.weight_bytes, own_slot + draft_slot + rows, said)]
    else:
        # The distributions cross to the target's device, to be compared there.
        own_rows += max_draft_tokens * target.pass_bytes_per_row
        of_target = (
            f"Target: weights {weights[0]}; a full slot {own} + {shown_bytes(own_rows)} for passes of width {width}"
        )
        of_draft = (
            f"Draft: weights {weights[1]}; a full slot {drafted} + {shown_bytes(draft_rows)} for its distributions"
        )
        needs = [
            (room, target.weight_bytes, own_slot + own_rows, of_target),
            (draft_room, draft.weight_bytes, draft_slot + draft_rows, of_draft),
        ]
    all_said = " ".join(
        f"{said}; with {num_slots} slots {shown_bytes(of_weights + num_slots * per_slot)}, "
        f"of {shown_bytes(place.free)} free on {place.device}."
        for place, of_weights, per_slot, said in needs
    )
    fitting = [((place.free - of_weights) // per_slot, place.device) for place, of_weights, per_slot, _ in needs]
    num_fitting = min(num for num, _ in fitting)
    if num_fitting >= num_slots:
        return ("ok", all_said)
    other = "another device for the draft (its `device`), or " if len(needs) == 1 else ""
    advice = f"What helps: {other}a lower worker.batch_size or models.target.context_length."
    if num_fitting < 1:
        full = next(device for num, device in fitting if num < 1)
        return ("refused", f"{all_said} Not one full slot fits on {full}. {advice}")
    return ("warning", f"{all_said} Full slots that fit: {num_fitting}. {advice}")


def shown_bytes(number: int) -> str:
    """A number of bytes for people, in powers of 1000: `270 MB`."""
    return _shown(number, (" bytes", " kB", " MB", " GB", " TB"))


def _count(number: int) -> str:
    return _shown(number, ("", "k", "M", "B"))


def _shown(number: int, units: Sequence[str]) -> str:
    """Three digits at most, of as large a unit as the number reaches, each a thousand of the one before."""
    power = min((len(str(number)) - 1) // 3, len(units) - 1)
    value = number / 1000**power
    return f"{value:.0f}{units[power]}" if value >= 100 or not power else f"{value:.3g}{units[power]}"
