"""Checkpoints of heads that draft from a target's hidden states: what their files say, and whether they fit a target.

Three kinds. `medusa`: the files of FasterDecoding's Medusa and of vLLM's `MedusaConfig`. `sequential`: those that
`alphaloop draft train --method heads` writes. `eagle3`: the files of vLLM's `LlamaForCausalLMEagle3`, and those of
`speculators`, whose config is nested and has another default for `norm_before_residual`. Only safetensors are read.

Heads that read other layers than those they were trained on still run, and nearly nothing of theirs is accepted. So
everything that can be known without a text is checked before they serve, and a config that leaves the layers open gets
a warning.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import torch
from safetensors import safe_open
from torch import Tensor

from alphaloop.engine import CheckFinding, Verdict
from alphaloop.errors import UnsupportedModel
from engine.models import as_unsupported, find_description
from engine.states import FINAL

HeadKind = Literal["medusa", "sequential", "eagle3"]
#: `model_type` of the heads that are trained here.
SEQUENTIAL: Final = "alphaloop_heads"
_EAGLE3: Final = frozenset({"LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator"})
#: Fields of newer EAGLE-3 configs that would change the arithmetic if they were true.
_NOT_COMPUTED: Final = ("norm_before_fc", "fc_norm", "norm_output", "parallel_drafting")


@dataclass(frozen=True, slots=True)
class HeadFacts:
    """What the config of heads says. None: it does not say."""

    source: str
    kind: HeadKind
    config: Mapping[str, Any]  #: the fields of the file; of `speculators` those of its layers in `layers`
    layers: Mapping[str, Any]  #: fields of the layers' config; empty for `medusa` and `sequential`
    hidden_size: int | None  #: of the target's states
    vocabulary: int | None  #: of the target
    num_heads: int | None  #: tokens that can be drafted; None: any number
    taps: tuple[int, ...] | None
    norm_before_residual: bool = False

    @property
    def trained_for(self) -> str:
        """The revision of the target that they were trained for; empty where the config does not say."""
        return str(self.config.get("target_revision") or "")

    def taps_in(self, num_layers: int) -> tuple[int, ...]:
        """The taps, for a target of that many layers; vLLM's own where the config names none."""
        return self.taps or (2, num_layers // 2, num_layers - 3)


def find_heads(source: str, hub_revision: str | None = None) -> HeadFacts | None:
    """The facts of the heads at `source`, whose weights are not fetched; None for a model of its own.

    Raises ModelNotFound, or UnsupportedModel for heads that are not read.
    """
    file = find_description(source, hub_revision) / "config.json"
    if not file.is_file():
        return None  # reading the model says what is wrong
    with as_unsupported(source):
        config = json.loads(file.read_bytes())
        if (kind := _kind_of(config)) is None:
            return None
        if kind == "eagle3":
            return _eagle3_facts(source, config)
        return HeadFacts(
            source,
            kind,
            config,
            layers={},
            hidden_size=_whole(config, "hidden_size"),
            vocabulary=_whole(config, "vocab_size"),
            num_heads=_whole(config, "num_heads", "medusa_num_heads") if kind == "medusa" else None,
            taps=(FINAL,),
        )


def _kind_of(config: dict[str, Any]) -> HeadKind | None:
    architectures = set(config.get("architectures") or ())
    if config.get("speculators_model_type") == "eagle3" or architectures & _EAGLE3:
        return "eagle3"
    if config.get("model_type") == SEQUENTIAL:
        return "sequential"
    is_medusa = config.get("model_type") == "medusa" or "medusa_num_heads" in config or "MedusaModel" in architectures
    return "medusa" if is_medusa else None


def _eagle3_facts(source: str, config: dict[str, Any]) -> HeadFacts:
    nested = config.get("transformer_layer_config")
    layers: dict[str, Any] = dict(nested) if isinstance(nested, dict) else dict(config)
    own = config.get("eagle_config") or {}
    taps = config.get("eagle_aux_hidden_state_layer_ids") or own.get("eagle_aux_hidden_state_layer_ids")
    if own.get("use_aux_hidden_state") is False:
        raise UnsupportedModel(f"{source}: expected heads that read states of several layers, found the last one's")
    wrong = [name for name in _NOT_COMPUTED if config.get(name) or own.get(name)]
    if wrong or _whole(layers, "num_hidden_layers") not in (None, 1):
        wrong = wrong or [f"{layers['num_hidden_layers']} layers"]
        raise UnsupportedModel(f"{source}: expected EAGLE-3 heads of one layer, found {', '.join(wrong)}")
    return HeadFacts(
        source,
        "eagle3",
        config,
        layers,
        hidden_size=_whole(config, "target_hidden_size") or _whole(layers, "hidden_size"),
        vocabulary=_whole(layers, "vocab_size"),
        num_heads=None,
        # As vLLM reads them: each once, in the order of the layers, whatever the config's order is.
        taps=tuple(sorted({int(tap) for tap in taps})) if taps else None,
        # The libraries differ: a config of `speculators` that says nothing means true, any other means false.
        norm_before_residual=bool(config.get("norm_before_residual", nested is not None)),
    )


def _whole(fields: Mapping[str, Any], *names: str) -> int | None:
    """The first of these fields that is set. Raises UnsupportedModel where it is no whole number above 0."""
    for name in names:
        if (value := fields.get(name)) is not None:
            if type(value) is not int or value < 1:
                raise UnsupportedModel(f"expected a whole number as {name} in config.json, found {value!r}")
            return value
    return None


def check_heads(
    facts: HeadFacts, *, hidden_size: int, num_layers: int, vocabulary: int, target_revision: str | None
) -> tuple[CheckFinding, ...]:
    """Every finding on heads for a target of these sizes, in a fixed order. None: the revision is not known."""
    findings = {
        "states": _states(facts, hidden_size),
        "layers": _layers(facts, num_layers),
        "vocabulary": _vocabulary(facts, vocabulary),
        "target": _made_for(facts, num_layers, target_revision),
    }
    return tuple(CheckFinding(check, *finding) for check, finding in findings.items())


_Finding = tuple[Verdict, str]


def _states(facts: HeadFacts, hidden_size: int) -> _Finding:
    if facts.hidden_size is None:
        return ("ok", f"The config does not name a size of states; the target's have {hidden_size} numbers.")
    if facts.hidden_size != hidden_size:
        return ("refused", f"The heads read states of {facts.hidden_size} numbers, the target's have {hidden_size}.")
    return ("ok", f"Both have states of {hidden_size} numbers.")


def _layers(facts: HeadFacts, num_layers: int) -> _Finding:
    if facts.kind != "eagle3":
        return ("ok", "The heads read the state after the target's last norm.")
    taps = facts.taps_in(num_layers)
    if wrong := [tap for tap in taps if not 0 <= tap < num_layers]:
        return ("refused", f"The heads read what goes into layers {wrong}, the target has {num_layers} layers from 0.")
    named = ", ".join(map(str, taps))
    if facts.taps is None:
        return (
            "warning",
            f"The config does not say which layers the heads read: {named} are taken, as in vLLM. If they were trained "
            f"on others, nearly nothing is accepted: write eagle_aux_hidden_state_layer_ids into their config.json.",
        )
    return ("ok", f"The heads read what goes into layers {named} of {num_layers}.")


def _vocabulary(facts: HeadFacts, vocabulary: int) -> _Finding:
    if facts.vocabulary is not None and facts.vocabulary > vocabulary:
        return ("refused", f"The heads know {facts.vocabulary:,} tokens, the target {vocabulary:,}.")
    if facts.vocabulary is not None and facts.vocabulary < vocabulary:
        return ("warning", f"The heads know {facts.vocabulary:,} of {vocabulary:,} tokens, and never propose others.")
    return ("ok", f"Both have {vocabulary:,} tokens.")


def _made_for(facts: HeadFacts, num_layers: int, target_revision: str | None) -> _Finding:
    made_for = facts.config.get("num_target_layers")
    if made_for is not None and made_for != num_layers:
        return ("refused", f"The heads were made for a target of {made_for} layers, this one has {num_layers}.")
    if not facts.trained_for:
        return ("ok", "The config does not say which target the heads were trained for.")
    made_for = f"{facts.config.get('target')} {facts.trained_for}"
    if target_revision is None:
        return ("ok", f"The heads were trained for {made_for}; the revision of this target is known with its weights.")
    if target_revision != facts.trained_for:
        return (
            "warning",
            f"The heads were trained for {made_for}, this target is {target_revision}: texts stay the target's, and "
            "less is accepted. alphaloop draft refresh trains them for this one.",
        )
    return ("ok", f"The heads were trained for this target, {made_for}.")


def read_heads(path: Path, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """Every tensor in the safetensors files of a folder; floating ones in `dtype`. Raises UnsupportedModel."""
    tensors: dict[str, Tensor] = {}
    try:
        for file in sorted(path.glob("*.safetensors")):
            with safe_open(file, framework="pt") as content:
                for name in content.keys():  # noqa: SIM118
                    tensor = content.get_tensor(name)
                    tensors[name] = tensor.to(device, dtype if tensor.is_floating_point() else None)
    except Exception as error:  # safetensors promises no types
        raise UnsupportedModel(f"{path}: {error}", hint="is the download complete?") from error
    return tensors


def take(tensors: dict[str, Tensor], name: str, shape: tuple[int, ...] | None = None) -> Tensor:
    """Take a tensor out. Raises UnsupportedModel where it is missing, or has another shape."""
    if name not in tensors:
        raise UnsupportedModel(f"expected the tensor {name}, found {', '.join(sorted(tensors)[:5]) or 'no other'}")
    tensor = tensors.pop(name)
    if shape is not None and tuple(tensor.shape) != shape:
        raise UnsupportedModel(f"expected {name} of {list(shape)}, found {list(tensor.shape)}")
    return tensor


def refuse_left(tensors: Mapping[str, Tensor]) -> None:
    """Raise UnsupportedModel for tensors that nothing reads: what they would change is not computed."""
    if tensors:
        raise UnsupportedModel(f"expected no further tensors, found {', '.join(sorted(tensors)[:5])}")
