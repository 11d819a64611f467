"""Heads of every kind over tiny targets in float64: their drafts by plain arithmetic, and the target's text.

Weights are random, so little is accepted in greedy texts; sampled ones at a high temperature accept more.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional
from transformers.models.llama.modeling_llama import LlamaConfig, LlamaRotaryEmbedding, apply_rotary_pos_emb

from alphaloop.engine import Sampling
from alphaloop.errors import IncompatiblePair, UnsupportedModel
from alphaloop.settings.models import HeadsDrafterSettings
from engine.drafters.head_files import find_heads
from engine.drafters.head_loading import load_heads
from engine.models import Target
from engine.proposal import Ask, Proposal
from tests.fixtures import heads
from tests.fixtures.models import NUM_TOKENS, drafted_alike, make_job, with_config

GREEDY: Final = Sampling(max_tokens=24, temperature=0.0)
KNOWN: Final = torch.arange(0, NUM_TOKENS, 3)
#: Offsets of the tokens that a cut EAGLE-3 drafts.
D2T: Final = KNOWN - torch.arange(len(KNOWN))
K: Final = 3
Text = Sequence[int]


class Plain:
    """What the heads in a folder draft greedily behind a text, by whole passes without any cache."""

    def __init__(self, target: Path, folder: Path, taps: tuple[int, ...] = heads.TAPS) -> None:
        self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.float64).eval()
        self.embeddings: Tensor = self.model.get_input_embeddings().weight.detach()
        self.head: Tensor = self.model.get_output_embeddings().weight.detach()
        self.config = json.loads((folder / "config.json").read_text())
        self.tensors = load_file(folder / "model.safetensors")
        self.taps = taps

    @torch.inference_mode()
    def states(self, text: Text) -> Any:
        return self.model(input_ids=torch.tensor([list(text)]), output_hidden_states=True).hidden_states

    def sequential(self, text: Text, num: int) -> list[int]:
        x, drafts = self.states(text[:-1])[-1][0, -1], [text[-1]]
        while len(drafts) <= num:
            e = self.embeddings[drafts[-1]]
            both = torch.cat((_unit(x), _unit(e)))
            x = x + self.tensors["outer.weight"] @ functional.silu(self.tensors["inner.weight"] @ both)
            best = int((self.tensors["lm_head.weight"] @ x).argmax())
            drafts.append(int(self.tensors["token_ids"][best]) if "token_ids" in self.tensors else best)
        return drafts[1:]

    def medusa(self, text: Text, num: int) -> list[int]:
        x, t, drafts = self.states(text[:-1])[-1][0, -1], self.tensors, []
        for place in range(num):
            if "blocks.0.layers.0.weight" in t:
                y = x + functional.silu(t[f"blocks.{place}.layers.0.weight"] @ x)
                drafts.append(int((t[f"lm_heads.{place}.weight"] @ y).argmax()))
            else:
                inner = t[f"{place}.0.linear.weight"] @ x + t[f"{place}.0.linear.bias"]
                drafts.append(int((t[f"{place}.1.weight"] @ (x + functional.silu(inner))).argmax()))
        return drafts

    @torch.inference_mode()
    def eagle3(self, text: Text, num: int) -> list[int]:
        fields = self.config.get("transformer_layer_config", self.config)
        is_nested = "transformer_layer_config" in self.config
        is_first = self.config.get("norm_before_residual", is_nested)
        names = ("model_type", "architectures")
        config = LlamaConfig(**{name: value for name, value in fields.items() if name not in names})
        t = {name.removeprefix("midlayer.").removeprefix("layers.0."): x for name, x in self.tensors.items()}
        states = self.states(text[:-1])
        x = torch.cat([states[tap][0] for tap in self.taps], dim=-1) @ t["fc.weight"].T
        embeddings = t.get("embed_tokens.weight", self.embeddings)
        tokens = list(text[1:])
        rotary = LlamaRotaryEmbedding(config)
        while True:
            h = _norm(x, t["hidden_norm.weight"], config)
            residual = h if is_first else x
            both = torch.cat((_norm(embeddings[tokens], t["input_layernorm.weight"], config), h), dim=-1)
            q, k, v = (
                (both @ t[f"self_attn.{name}_proj.weight"].T).view(1, len(tokens), -1, config.head_dim).transpose(1, 2)
                for name in "qkv"
            )
            cos, sin = rotary(x, torch.arange(len(tokens))[None])
            q, k = apply_rotary_pos_emb(q, k, cos, sin)
            shared = config.num_attention_heads // config.num_key_value_heads
            k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
            seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            y = residual + seen.transpose(1, 2).reshape(len(tokens), -1) @ t["self_attn.o_proj.weight"].T
            inner = _norm(y, t["post_attention_layernorm.weight"], config)
            gated = functional.silu(inner @ t["mlp.gate_proj.weight"].T) * (inner @ t["mlp.up_proj.weight"].T)
            y = y + gated @ t["mlp.down_proj.weight"].T
            best = int((_norm(y[-1], t["norm.weight"], config) @ t["lm_head.weight"].T).argmax())
            tokens.append(best + int(t["d2t"][best]) if "d2t" in t else best)
            if len(tokens) - len(text) + 1 == num:
                return tokens[len(text) - 1 :]
            x = torch.cat((x, y[-1:]))


def _unit(x: Tensor) -> Tensor:
    return x / (x.square().mean() + torch.finfo(x.dtype).eps).sqrt()


def _norm(x: Tensor, weight: Tensor, config: Any) -> Tensor:
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + config.rms_norm_eps) * weight


#: How each kind of folder is made, and by which method it is served.
MADE: Final[dict[str, tuple[str, str, Callable[[Path, Tensor], Path]]]] = {
    "sequential": ("heads", "sequential", heads.sequential),
    "sequential, cut": ("heads", "sequential", lambda folder, head: heads.sequential(folder, head, token_ids=KNOWN)),
    "medusa of vLLM": ("heads", "medusa", heads.medusa),
    "medusa with biases": ("heads", "medusa", lambda folder, head: heads.medusa(folder, head, is_vllm=False)),
    "eagle3 of vLLM": ("eagle3", "eagle3", lambda folder, head: heads.eagle3(folder, len(head))),
    "eagle3 of vLLM, cut": ("eagle3", "eagle3", lambda folder, head: heads.eagle3(folder, len(head), d2t=D2T)),
    "eagle3 of vLLM, normed first": (
        "eagle3",
        "eagle3",
        lambda folder, head: heads.eagle3(folder, len(head), norm_before_residual=True),
    ),
    "eagle3 of speculators": (
        "eagle3",
        "eagle3",
        lambda folder, head: heads.eagle3(
            folder, len(head), is_speculators=True, d2t=D2T, embeddings=heads.noise(*head.shape, seed=99)
        ),
    ),
    "eagle3 of speculators, normed later": (
        "eagle3",
        "eagle3",
        lambda folder, head: heads.eagle3(folder, len(head), is_speculators=True, norm_before_residual=False),
    ),
}


@pytest.fixture(scope="module")
def folders(tiny_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_models["llama"], dtype=torch.float64)
    head = model.get_output_embeddings().weight.detach()
    where = tmp_path_factory.mktemp("heads")
    return {name: make(where / str(number), head) for number, (name, (_, _, make)) in enumerate(MADE.items())}


def load(target: Target, folder: Path, name: str, **more: Any) -> Any:
    settings = HeadsDrafterSettings(method=MADE[name][0], source=str(folder), max_draft_tokens=6, **more)
    return load_heads("made", settings, target, num_slots=4)


class Watched:
    """Compares every greedy chain with `right`."""

    def __init__(self, inner: Any, right: Callable[[Text, int], list[int]]) -> None:
        self.inner, self.right, self.num = inner, right, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def propose(self, asks: Sequence[Ask]) -> list[Proposal]:
        found: list[Proposal] = self.inner.propose(asks)
        for ask, one in zip(asks, found, strict=True):
            assert one.tokens == tuple(self.right(ask.text, ask.num_tokens))[: len(one.tokens)]
            self.num += len(one.tokens)
        return found


@pytest.mark.parametrize("name", MADE)
def test_drafts_are_those_of_plain_arithmetic_and_the_text_is_the_targets(
    tiny_engine: Callable[..., Any], tiny_models: dict[str, Path], folders: dict[str, Path], name: str
) -> None:
    engine = tiny_engine(num_slots=4)
    plain = Plain(tiny_models["llama"], folders[name])
    watched = Watched(load(engine._target, folders[name], name), getattr(plain, MADE[name][1]))
    engine._drafters["made"] = watched
    # No two begin alike, so that nothing is copied.
    jobs = [make_job(f"{'abcde'[number] * 5} = {number}" * (1 + 9 * number), number) for number in range(5)]
    drafted_alike(engine, jobs, GREEDY, "made", K)
    assert watched.num > 5 * K


@pytest.mark.parametrize(
    ("name", "fields", "error", "said"),
    [
        ("eagle3 of vLLM", {"eagle_aux_hidden_state_layer_ids": [1, 7]}, IncompatiblePair, "layers \\[7\\]"),
        ("eagle3 of vLLM", {"eagle_aux_hidden_state_layer_ids": [1]}, UnsupportedModel, "fc.weight"),
        ("eagle3 of vLLM", {"eagle_aux_hidden_state_layer_ids": None}, IncompatiblePair, "layers \\["),
        ("eagle3 of vLLM", {"target_hidden_size": 128}, IncompatiblePair, "128"),
        ("eagle3 of vLLM", {"norm_before_fc": True}, UnsupportedModel, "norm_before_fc"),
        ("eagle3 of vLLM", {"num_hidden_layers": 2}, UnsupportedModel, "2 layers"),
        ("sequential", {"num_target_layers": 9}, IncompatiblePair, "9 layers"),
        ("sequential", {"hidden_size": 32}, IncompatiblePair, "32"),
        ("medusa of vLLM", {"num_heads": 2}, UnsupportedModel, "blocks.2"),
        ("medusa of vLLM", {"num_heads": 5}, UnsupportedModel, "lm_heads.3"),
    ],
)
def test_heads_of_another_target_or_of_other_layers_are_refused(
    tiny_engine: Callable[..., Any],
    folders: dict[str, Path],
    tmp_path: Path,
    name: str,
    fields: dict[str, Any],
    error: type[Exception],
    said: str,
) -> None:
    target = tiny_engine(num_slots=1)._target
    with pytest.raises(error, match=said):
        load(target, with_config(folders[name], tmp_path / "changed", **fields), name)


NONSENSE: Final[tuple[tuple[str, Any], ...]] = (
    *(
        (name, one)
        for name in ("sequential", "medusa of vLLM", "eagle3 of vLLM")
        for one in (b"{", b"[]", b"\xff\xfe{")
    ),
    *((name, {"hidden_size": "64"}) for name in ("sequential", "medusa of vLLM", "eagle3 of vLLM")),
    ("sequential", {"architectures": 5}),
    ("medusa of vLLM", {"num_heads": -1}),
    ("medusa of vLLM", {"num_hidden_layers": 2}),
    ("eagle3 of vLLM", {"eagle_config": "x"}),
    ("eagle3 of vLLM", {"eagle_aux_hidden_state_layer_ids": 5}),
    ("eagle3 of vLLM", {"vocab_size": []}),
    ("eagle3 of vLLM", {"num_attention_heads": 0}),
)


@pytest.mark.parametrize(("name", "written"), NONSENSE, ids=str)
def test_a_config_of_nonsense_is_refused_by_its_folder(
    tiny_engine: Callable[..., Any], folders: dict[str, Path], tmp_path: Path, name: str, written: Any
) -> None:
    folder = with_config(folders[name], tmp_path / "changed", **(written if isinstance(written, dict) else {}))
    if isinstance(written, bytes):
        (folder / "config.json").write_bytes(written)
    with pytest.raises(UnsupportedModel, match=str(folder)):
        load(tiny_engine(num_slots=1)._target, folder, name)
    with contextlib.suppress(UnsupportedModel):
        find_heads(str(folder))  # as check-pair does, which raises nothing else


def test_a_head_of_medusa_without_its_block_is_refused(
    tiny_engine: Callable[..., Any], folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = with_config(folders["medusa of vLLM"], tmp_path / "changed")
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {one: its for one, its in tensors.items() if one != "blocks.1.layers.0.weight"}, folder / "model.safetensors"
    )
    with pytest.raises(UnsupportedModel, match="expected 1 blocks in head 1, found 0"):
        load(tiny_engine(num_slots=1)._target, folder, "medusa of vLLM")


def test_the_method_has_to_be_that_of_the_folder(tiny_engine: Callable[..., Any], folders: dict[str, Path]) -> None:
    target = tiny_engine(num_slots=1)._target
    settings = HeadsDrafterSettings(method="heads", source=str(folders["eagle3 of vLLM"]))
    with pytest.raises(UnsupportedModel, match="method"):
        load_heads("made", settings, target, num_slots=1)


def test_heads_know_which_target_they_were_trained_for(
    tiny_engine: Callable[..., Any], folders: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target, name = tiny_engine(num_slots=1)._target, "eagle3 of vLLM"
    assert load(target, folders[name], name).state.trained_for == ""
    own = with_config(folders[name], tmp_path / "own", target_revision=target.identity.target_revision)
    assert load(target, own, name).state.trained_for == target.identity.target_revision
    assert "trained for" not in caplog.text
    other = with_config(folders[name], tmp_path / "other", target_revision="earlier")
    assert load(target, other, name).state.trained_for == "earlier"
    assert "this target is" in caplog.text


def test_the_layers_are_part_of_the_revision(
    tiny_engine: Callable[..., Any], folders: dict[str, Path], tmp_path: Path
) -> None:
    """In their order, whatever the config's is, as vLLM takes them."""
    target, name = tiny_engine(num_slots=1)._target, "eagle3 of vLLM"
    folder = with_config(folders[name], tmp_path / "changed", eagle_aux_hidden_state_layer_ids=[1, 0])
    for one in (folders[name], folder):
        assert load(target, one, name).state.revision.endswith("-l0.1")
